"""torchrun's elastic restart, end to end: two ranks train, one is killed, the other goes on alone."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from support import warm
from support.processes import free_port

ROOT = Path(__file__).resolve().parents[2]


LAUNCHER = """
import os, runpy, sys
log = os.open(sys.argv.pop(1), os.O_WRONLY)
os.dup2(log, 1)
os.dup2(log, 2)
runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
"""


def start(port: int, folder: Path, log: Path, *, is_host: bool) -> warm.Script:
    """Start a launcher. Both have torch loaded and start at once, so they meet early. The last call is for a late one:
    a launcher that is alone waits until it ends."""
    launcher = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"]
    patience = ["--rdzv-conf", f"join_timeout=120,last_call_timeout=12,is_host={int(is_host)}"]
    script = ["examples/elastic.py", "--folder", str(folder), "--steps", "200", "--pause", "0.02"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return warm.Script(LAUNCHER, log, *launcher, *meeting, *patience, *script, env=environment, folder=ROOT)


def wait_for(text: str, logs: list[Path], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not any(text in log.read_text(errors="replace") for log in logs):
        if time.monotonic() > end:
            said = "\n".join(log.read_text(errors="replace")[-3000:] for log in logs)
            pytest.fail(f"nobody said {text!r} in {seconds:g} s:\n{said}")
        time.sleep(0.1)


def kill(process: warm.Script) -> None:
    """A launcher with its workers, which have sessions of their own."""
    for one in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        one.send_signal(signal.SIGKILL)


@pytest.mark.slow
def test_one_of_two_ranks_is_killed_and_the_other_goes_on(tmp_path: Path) -> None:
    port = free_port()
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    for log in logs:
        log.touch()
    folder = tmp_path / "checkpoints"
    processes = [start(port, folder, log, is_host=not number) for number, log in enumerate(logs)]
    first, second = processes
    try:
        wait_for("step 40: loss", logs, 120)
        kill(second)
        assert first.wait(180) == 0, logs[0].read_text(errors="replace")[-5000:]
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                kill(process)
    said = logs[0].read_text(errors="replace") + logs[1].read_text(errors="replace")
    assert "step 0: 2 rank(s), from the beginning" in said
    (again,) = [line for line in said.splitlines() if "1 rank(s), from" in line]
    assert 40 <= int(again.split()[1].rstrip(":")) < 200 and "step-0" in again
    assert float(said.split("accuracy ")[1].split()[0]) > 95
    assert sorted(one.name for one in folder.iterdir()) == ["step-000190", "step-000200"]
