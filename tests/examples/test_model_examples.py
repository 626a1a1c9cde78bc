"""The examples of a graph network, a mixture of experts and two nodes run as their docstrings say."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def held(output: str) -> int:
    return int(re.findall(r"model state on one rank ([0-9,]+) bytes", output)[0].replace(",", ""))


def test_a_graph_network_on_one_rank_and_on_two_nodes() -> None:
    (one,) = run_script("examples/graph.py", "--quick")
    command = [sys.executable, "examples/two_nodes.py", "examples/graph.py", "--quick"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    for output, size in ((one, 1), (done.stdout, 2)):
        assert f"{size} rank(s)" in output
        assert float(re.findall(r"without a label ([0-9.]+)%", output)[0]) > 90
    assert 0.5 <= held(done.stdout) / held(one) < 0.52
    assert "node 0 ended with 0\nnode 1 ended with 0\n" in done.stdout


def test_a_mixture_of_experts_on_one_rank_and_on_two() -> None:
    (one,), (two, silent) = (run_script("examples/experts.py", "--quick", ranks=ranks) for ranks in (0, 2))
    assert silent == ""
    for output, size in ((one, 1), (two, 2)):
        assert f"{size} rank(s)" in output
        first, last = map(float, re.findall(r"loss ([0-9.]+) at first, ([0-9.]+) after", output)[0])
        assert last < first - 1.0
        used, experts = map(int, re.findall(r"only ([0-9]+) of ([0-9]+) experts", output)[0])
        assert used < experts  # some have no gradient on a rank
    assert 0.5 <= held(two) / held(one) < 0.52


def test_a_node_that_fails_ends_the_other(capsys: Any) -> None:
    wait_for_all = runpy.run_path(str(EXAMPLES / "two_nodes.py"))["wait_for_all"]
    ends = ("import time; time.sleep(600)", "import sys; sys.exit('lost')")
    agents = [subprocess.Popen([sys.executable, "-c", end], stderr=subprocess.PIPE, text=True) for end in ends]
    assert not wait_for_all(agents)
    assert [agent.returncode for agent in agents] == [-15, 1]
    assert "node 1 ended with 1" in capsys.readouterr().out
