"""Checkpoints that are on their way when the model changes or the process ends: complete, with the values of the moment
of save, or an error and exit code 1."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import textwrap
from pathlib import Path

import pytest

import zerostd
from faults import io_shim
from faults.io_shim import EIO
from support import warm

HERE = Path(__file__).parent
SCRIPT = """
import os, sys, time, torch, zerostd
import torch.distributed as dist
from torch import nn
torch.manual_seed(3)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(24, 96), nn.Tanh(), nn.Linear(96, 24))
model, optimizer = zerostd.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
rank = int(os.environ.get("RANK", "0"))
target = sys.argv[1]

def step():
    model(torch.ones(2, 24)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

step()
"""
ENDS = {
    "the last line": "zerostd.save(target, model, optimizer, wait=False)",
    "a rank goes on": """
        saving = zerostd.save(target, model, optimizer, wait=False)
        if rank == 1:
            saving.wait()
    """,
    "the process group has gone": """
        zerostd.save(target, model, optimizer, wait=False)
        if dist.is_initialized():
            dist.destroy_process_group()
    """,
    "dcp": "zerostd.save_dcp(target, model, optimizer, wait=False)",
}
LOST = {
    "the model has gone": (
        "zerostd.save(target, model, optimizer, wait=False); del model, optimizer",
        "was not saved: the process has ended",
    ),
    "an exception on one rank": (
        """
        zerostd.save(target, model, optimizer, wait=False)
        if rank == 1:
            raise SystemError("planted")
        time.sleep(1)
        step()
        """,
        "planted",
    ),
}


def run(code: str, target: Path, num_ranks: int, rule: str) -> list[tuple[int, str]]:
    """Run a script on so many ranks; return the exit code and the messages of each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    text = io_shim.START + SCRIPT + textwrap.dedent(code)
    scripts = []
    for rank in range(num_ranks):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_PORT": port}
        environment = io_shim.environment(rule) | ranks | {"MASTER_ADDR": "localhost", "ZEROSTD_TIMEOUT_S": "20"}
        scripts.append(warm.Script(text, target, env=environment))
    with contextlib.ExitStack() as stack:
        for script in scripts:
            stack.enter_context(script)
        said = [script.communicate(timeout=200)[1] for script in scripts]
        return [(script.wait(), text) for script, text in zip(scripts, said, strict=True)]


def slow(target: Path) -> str:
    return f"under={target},verb=write,action=delay,errno=40"


@pytest.mark.parametrize(("end", "num_ranks"), [("the last line", 1), ("dcp", 1), *((end, 2) for end in ENDS)], ids=str)
def test_the_end_of_the_process_completes_it(end: str, num_ranks: int, tmp_path: Path) -> None:
    target = tmp_path / "saved"
    for code, said in run(ENDS[end], target, num_ranks, slow(target)):
        assert code == 0, said
    if end == "dcp":
        assert (target / ".metadata").exists()
        return
    assert os.listdir(tmp_path) == ["saved"] and zerostd.latest(tmp_path) == str(target)
    assert len(list(target.glob("*.safetensors"))) == num_ranks


@pytest.mark.parametrize(("end", "num_ranks"), [("the last line", 1), ("the last line", 2), ("dcp", 1)])
def test_a_failure_is_told_by_the_exit_code(end: str, num_ranks: int, tmp_path: Path) -> None:
    target = tmp_path / "saved"
    verb = "open" if end == "dcp" else "write"
    rule = f"under={target},verb={verb},action=fail,errno={EIO}"
    for code, said in run(ENDS[end], target, num_ranks, rule):
        assert code == 1 and f"the checkpoint {target} was not saved" in said, said
    assert zerostd.latest(tmp_path) is None and not (target / ".metadata").exists()


@pytest.mark.parametrize("end", LOST)
def test_ranks_that_cannot_complete_it_say_so(end: str, tmp_path: Path) -> None:
    code, words = LOST[end]
    results = run(code, tmp_path / "saved", 2, slow(tmp_path / "saved"))
    assert [code for code, _ in results] == [1, 1]
    assert any(words in said for _, said in results)
    assert zerostd.latest(tmp_path) is None


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bool | str]:
    folder = tmp_path_factory.mktemp("checkpoints")
    done = warm.run_file(HERE / "checkpoint_scenarios.py", folder, env=io_shim.environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    results: dict[str, bool | str] = json.loads(done.stdout)
    return results


def test_it_has_the_values_of_the_moment_of_save(changes: dict[str, bool | str]) -> None:
    assert len(changes) == 30
    assert {name: result for name, result in changes.items() if result is not True} == {}
