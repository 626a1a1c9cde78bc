"""TensorBoard reads back what a run said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from zerostd.errors import NotSupportedError
from zerostd.reporting import read_run, write_scalars

LINES = [
    {"kind": "step", "step": 1, "start": 0.0, "end": 0.5, "loss": 2.0, "samples": 8, "tokens": 64, "lr": 0.1},
    {"kind": "step", "step": 2, "start": 0.5, "end": 0.75, "loss": 1.5, "samples": 8, "tokens": 64, "lr": 0.05},
    {"kind": "memory", "step": 2, "time": 0.7, "bytes": {"host": {"optimizer_states": 300}}, "peak": {}, "reserved": 7},
    {"kind": "quality", "step": 2, "name": "accuracy", "value": 0.25},
    {"kind": "waiting", "step": 2, "seconds": {"updates": 0.125}},
    {"kind": "end", "time": 0.75},
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"format": 1, "world_size": 2}))
    for rank in range(2):
        (folder / f"rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return folder


def test_tensorboard_reads_every_number(run: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folders = write_scalars(read_run(run), tmp_path / "board")
    assert folders == [tmp_path / "board" / "run" / "rank-0", tmp_path / "board" / "run" / "rank-1"]
    for folder in folders:
        found = accumulator.EventAccumulator(str(folder))
        found.Reload()
        values = {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
        assert values == {
            "time/step_s": [(1, 0.5), (2, 0.25)],
            "training/loss": [(1, 2.0), (2, 1.5)],
            "training/lr": [(1, pytest.approx(0.1)), (2, pytest.approx(0.05))],
            "speed/samples_per_s": [(1, 16.0), (2, 32.0)],
            "speed/tokens_per_s": [(1, 128.0), (2, 256.0)],
            "quality/accuracy": [(2, 0.25)],
            "memory/host/optimizer_states": [(2, 300.0)],
            "memory/device/reserved": [(2, 7.0)],
            "waiting/updates_s": [(2, 0.125)],
        }


def test_without_tensorboard_it_is_refused_with_the_remedy(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(NotSupportedError, match=r"zerostd\[tensorboard\]"):
        write_scalars(read_run(run), tmp_path / "board")
    assert not (tmp_path / "board").exists()


def test_from_the_command_line(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    command = [sys.executable, "-m", "zerostd", "report", str(run), "-o", "page.html", "--tensorboard", "board"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "Written: page.html, board"
    assert len(list((tmp_path / "board" / "run").glob("rank-*/events.out.tfevents.*"))) == 2
