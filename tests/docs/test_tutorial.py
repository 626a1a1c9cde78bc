"""The tutorial, pasted in order into an empty directory."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from docs.pages import ROOT
from support.scripts import run_script
from zerostd.cli.main import app
from zerostd.measuring import load_or_measure
from zerostd.measuring.rates import TrialSizes

BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
QUICK = TrialSizes(parameters=2**18, cpu_side=128, turns=1, seconds=0.05)  # the machine is measured elsewhere


@contextmanager
def as_program(words: list[str], folder: Path) -> Iterator[None]:
    """Arguments and imports as a script in a directory has them."""
    argv, path = sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = words, [str(folder)]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        sys.modules.pop("model", None)


def run(command: str, folder: Path, capsys: Any) -> str:
    """What a command says. Only ranks are processes of their own."""
    program, *words = shlex.split(command)
    if program == "torchrun":
        *options, number, file = words
        assert options == ["--standalone", "--nproc-per-node"], command
        return "".join(run_script(file, ranks=int(number), folder=folder))
    with as_program(words, folder):
        if program == "zerostd":
            told = CliRunner().invoke(app, words)
            assert told.exit_code == 0, f"{command}: {told.output}"
            return told.output
        assert program == "python", command
        runpy.run_path(str(folder / words[0]), run_name="__main__")
    return str(capsys.readouterr().out)


def loss(said: str) -> str:
    (found,) = re.findall(r"^loss ([0-9.]+)$", said, re.MULTILINE)
    return str(found)


def megabytes(said: str, tier: str, kind: str) -> float:
    (found,) = re.findall(rf"^{tier} +{kind} +([0-9.]+) MiB", said, re.MULTILINE)
    return float(found)


def test_tutorial_works_as_it_is_written(tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZEROSTD_CACHE", str(tmp_path / "cache"))
    load_or_measure("cpu", sizes=QUICK)
    said: dict[str, str] = {}
    for language, block in BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text()):
        if language == "python":
            (file,) = re.findall(r"\A# (\w+\.py)\n", block)
            (tmp_path / file).write_text(block)
            continue
        for command in block.splitlines():
            said[command] = run(command, tmp_path, capsys)
    plain, alone, ranks, plan, first, report, last, merge, after = said.values()
    assert loss(alone) == loss(plain) == loss(last) != loss(first)
    whole, half = (megabytes(one, "device", "optimizer_states") for one in (alone, ranks))
    assert half == pytest.approx(whole / 2, abs=0.1)
    assert "Stage 3 on 1 rank." in plan and (tmp_path / "plan.json").is_file()
    assert "from step 0" in first and "from step 10" in last and megabytes(first, "host", "optimizer_states") > 0
    assert "10 steps" in report and (tmp_path / "report.html").is_file()
    assert "merged/model.safetensors" in merge and float(loss(after)) < 2
