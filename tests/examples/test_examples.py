"""The examples run as their docstrings say, and show what they promise."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support import warm
from support.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
MEMORY = re.compile(r"^(device|host|disk) +(\w+) +[0-9.]+ MiB +([0-9.]+) MiB", re.MULTILINE)


class Row(NamedTuple):
    """One line of the table, as it is printed."""

    stage: int
    accuracy: float
    parameters: int
    gradients: int
    optimizer_states: int
    total: int
    of_stage_0: float
    seconds: float


def run_digits(epochs: int, ranks: int = 0) -> list[Row]:
    said, *silent = run_script("examples/digits.py", "--epochs", str(epochs), ranks=ranks)
    assert not any(silent)
    lines = said.splitlines()
    (header,) = (number for number, line in enumerate(lines) if line.split()[:2] == ["stage", "accuracy"])
    return [read(line) for line in lines[header + 1 :] if line.strip()]


def read(line: str) -> Row:
    stage, accuracy, *sizes, of_stage_0, seconds = line.replace(",", "").replace("%", "").split()
    return Row(int(stage), float(accuracy), *map(int, sizes), float(of_stage_0), float(seconds))


@pytest.mark.slow
def test_digits_learns_alike_at_every_stage_and_shows_smaller_shards():
    rows = run_digits(4, ranks=2)
    assert [row.stage for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert row.accuracy > 95
        assert row.total == row.parameters + row.gradients + row.optimizer_states
    data_parallel, states, gradients, parameters = rows
    assert states.optimizer_states < data_parallel.optimizer_states
    assert gradients.gradients < states.gradients
    assert parameters.parameters < gradients.parameters
    assert parameters.total < gradients.total < states.total < data_parallel.total
    assert parameters.of_stage_0 == pytest.approx(50, abs=0.1)  # two ranks share everything


@pytest.mark.slow
def test_digits_runs_without_a_launcher():
    rows = run_digits(1)
    assert [row.stage for row in rows] == [0, 1, 2, 3]
    assert len({row.total for row in rows}) == 1  # a world of one has nothing to shard


@pytest.mark.slow
def test_offload_gives_one_loss_and_moves_the_bytes():
    (said,) = run_script("examples/offload.py", "--steps", "12")
    rows = {line[:34].strip(): line[34:].replace(",", "").split() for line in said.splitlines()[1:]}
    assert len({loss for loss, *_ in rows.values()}) == 1
    sizes = {name: [int(size) for size in row[1:]] for name, row in rows.items()}
    total = sum(sizes["all on the device"])
    assert sizes["all on the device"] == [total, 0, 0]
    device, host, disk = sizes["states on the host"]  # fp32: 4 + 4 bytes stay, master and moments are 12
    assert device == pytest.approx(total / 2, rel=0.01) and host == pytest.approx(0.75 * total, rel=0.02) and disk == 0
    assert sizes["everything on the host"][0] == 0
    assert sizes["states on disk"][2] == pytest.approx(0.75 * total, rel=0.02)


def test_state_that_does_not_fit_is_trained_and_shown(tmp_path: Path, tmp_path_factory: Any) -> None:
    """What is over the device's and the host's budget is on the disk, the loss falls, and there is a page."""
    cache = tmp_path_factory.getbasetemp() / "cache"  # the machine is measured once for several tests
    environment = {**os.environ, "ZEROSTD_CACHE": str(cache)}
    words = ("--steps", 12, "--out", tmp_path / "run")
    done = warm.run_file("examples/spill.py", *words, env=environment, folder=ROOT, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = map(float, re.findall(r"loss of the first 1 steps ([0-9.]+), of the last ([0-9.]+)", done.stdout)[0])
    assert last < first - 0.5
    peaks = {(tier, kind): float(peak) for tier, kind, peak in MEMORY.findall(done.stdout)}
    assert peaks["disk", "optimizer_states"] > 0 and peaks["device", "parameters"] > 0
    assert sum(peak for (tier, _), peak in peaks.items() if tier == "host") <= 48.5
    assert "training 12/12" in done.stderr
    page = (tmp_path / "run" / "report.html").read_text()
    (held,) = re.findall(r'<script[^>]*id="report"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert json.loads(held)["runs"][0]["speed"]["steps"] == 12
