"""The Horovod script and the experiment on five nodes run as their docstrings say, and show what they promise."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support import warm
from support.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *words: str) -> str:
    done = warm.run_file(script, *words, folder=ROOT, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def read(said: str) -> tuple[int, int]:
    """Ranks and bytes of optimizer states, of a run that has learnt and left its model."""
    ((accuracy, size, states),) = re.findall(r"accuracy ([0-9.]+)% on (\d) rank\(s\); ([0-9,]+) bytes", said)
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", said)]
    assert float(accuracy) > 94 and losses[-1] < 0.5 * losses[0]
    (path,) = re.findall(r"saved (\S+)", said)
    assert all(torch.isfinite(value).all() for value in torch.load(path).values())
    return int(size), int(states.replace(",", ""))


@pytest.mark.slow
def test_horovod_script_learns_on_two_ranks_and_alone(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr(sys, "argv", ["horovod_digits.py"])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    runpy.run_path(str(ROOT / "examples" / "horovod_digits.py"), run_name="__main__")
    size, whole = read(capsys.readouterr().out)
    assert size == 1
    size, half = read(run_script("examples/horovod_digits.py", ranks=2)[0])
    assert size == 2 and half == pytest.approx(whole / 2, rel=0.01)  # they share the momenta


@pytest.mark.slow
def test_five_nodes_hold_a_fifth_each_and_learn_alike(tmp_path: Path):
    said = run("examples/five_nodes.py", "--quick", "--json", str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["nodes"] == 5 and all(found["verdicts"].values())
    assert said.count("yes: ") == 3 and "NO: " not in said
    plain, *others = found["rows"]
    assert all(row["way"] in said for row in found["rows"])
    shares = [row["state_bytes"] / plain["state_bytes"] for row in others]
    assert shares == pytest.approx([0.6, 0.4, 0.2, 0.1], abs=0.01)  # 16 bytes a parameter: 8, 4, 0 and 0 not shared
    assert plain["buffer_bytes"] == pytest.approx(plain["state_bytes"] / 4, rel=0.01)  # the buckets of DDP
    assert all(0 < row["buffer_bytes"] < row["state_bytes"] for row in others[:3])
    assert all(row["resident_bytes"] > row["state_bytes"] for row in found["rows"])
    assert others[-1]["disk_bytes"] > 0 and not any(row["disk_bytes"] for row in others[:-1])
    assert all(row["accuracy"] > 0.92 and row["step_ms"] > 0 for row in found["rows"])


def test_what_is_not_as_claimed_is_said():
    example = runpy.run_path(str(ROOT / "examples" / "five_nodes.py"))
    row, verdicts = example["Row"], example["verdicts"]

    def judge(memory: int, accuracy: float) -> list[bool]:
        plain = row("data parallel (DDP)", 800, 200, 0, 0, 1.0, 0.95)
        return list(verdicts([plain, row("zerostd, stage 3", memory - 100, 100, 0, 0, 1.0, accuracy)]).values())

    assert judge(250, 0.955) == [True, True, True]
    assert judge(251, 0.95) == [False, True, True]
    assert judge(250, 0.956) == [True, False, True]
    assert judge(250, 0.92) == [True, False, False]


def test_inference_gives_plain_torchs_tokens_from_three_tiers():
    said = run("examples/inference.py")
    assert said.count("True") == 2 and "False" not in said
    assert re.search(r"^disk +parameters +11\.", said, re.MULTILINE) and re.search(r"^host +parameters", said, re.M)
