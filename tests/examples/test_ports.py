"""The ported scripts: those that can run do, and the port of a script gives its losses."""

from __future__ import annotations

import importlib
import py_compile
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zerostd

ROOT = Path(__file__).resolve().parents[2]
PORTS = ROOT / "examples" / "ports"
STEPS = 14


def losses_of(rank: int, script: str, *arguments: str) -> list[float]:
    """Of every step of a script, in the process group that is there."""
    sys.path.insert(0, str(PORTS))
    try:
        return list(importlib.import_module(script).train(*arguments, steps=STEPS))
    finally:
        sys.path.remove(str(PORTS))


def has_learnt(losses: list[float]) -> bool:
    return len(losses) == STEPS and losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("script", sorted(PORTS.glob("*.py")), ids=lambda path: path.name)
def test_script_compiles(script: Path, tmp_path: Path) -> None:
    assert py_compile.compile(str(script), str(tmp_path / "compiled"), doraise=True)


def test_port_of_fsdp2_gives_its_losses_on_two_ranks(ranks) -> None:
    before, after = (ranks(2, losses_of, f"fsdp2_{when}") for when in ("before", "after"))
    for one, other in zip(before, after, strict=True):
        assert has_learnt(one) and other == pytest.approx(one, abs=1e-4)
    assert before[0] != before[1]  # each rank has data of its own


def test_port_of_deepspeed_runs_on_two_ranks(ranks, tmp_path: Path) -> None:
    first, second = ranks(2, losses_of, "deepspeed_after", str(tmp_path))
    assert has_learnt(first) and has_learnt(second) and first != second
    newest = zerostd.latest(tmp_path)
    assert newest is not None and newest.endswith(f"step-{STEPS}")
    assert len(list(Path(newest).glob("*.safetensors"))) == 2  # one of each rank


@pytest.mark.parametrize("script", ["deepspeed_after.py", "fsdp2_after.py"])
def test_port_runs_alone_as_a_program(script: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    told = ["--checkpoints", str(tmp_path)] if script.startswith("deepspeed") else []
    monkeypatch.setattr(sys, "argv", [script, *told])
    monkeypatch.syspath_prepend(PORTS)
    runpy.run_path(str(PORTS / script), run_name="__main__")
    ((first, last),) = re.findall(r"loss of the first step ([0-9.]+), of the last ([0-9.]+)", capsys.readouterr().out)
    assert float(last) < 0.7 * float(first)
    if told:
        assert loss_of_merged(tmp_path) < 3.0


def loss_of_merged(folder: Path) -> float:
    """Of the model that the script left, as plain torch loads it."""
    load_file = pytest.importorskip("safetensors.torch").load_file
    (file,) = zerostd.merge(folder / "step-20", folder / "model", "bf16")
    shared = importlib.import_module("small_gpt")
    model = shared.GPT().to(torch.bfloat16)
    model.load_state_dict(load_file(file))
    (tokens,) = shared.batches(1, size=8)
    with torch.no_grad():
        return float(shared.next_token_loss(model(tokens), tokens))
