"""Checkpoints below a URL: whole or not at all, without making training wait for the network."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zerostd
from checkpoints.runs import Job, Run, compared, unlike
from support import warm
from support.agreement import agree
from support.compare import assert_bitwise
from support.objects import ObjectServer
from zerostd import CheckpointError

STEPS = 3
JOBS = [Job(), Job(precision="bf16", placement="all tiers")]


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    with ObjectServer() as running:
        yield running


@pytest.fixture(autouse=True)
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where files wait for their upload; nothing is left there."""
    folder = tmp_path / "spool"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert not [path for path in folder.glob("zerostd-*/**/*") if path.is_file()]


def names_in(server: ObjectServer) -> list[str]:
    return sorted(name.removeprefix("bucket/") for name in server.objects)


def goes_on(job: Job, url: str, folder: Path | str, rank: int = 0) -> list[str]:
    """What differs between a training that was saved below a URL, beside its next steps, and one that was not."""
    run = Run(job, folder, rank=rank)
    run.train(STEPS)
    saving = zerostd.save(f"{url}/saved", run.model, run.optimizer, run.extra(), wait=False)
    losses, tensors, facts = run.train(STEPS), run.tensors(), run.facts()
    saving.wait()
    run.release()
    other = Run(job, folder, rank=rank, seed=7)
    other.load(f"{url}/saved")
    again = other.train(STEPS)
    wrong = compared(other.tensors(), tensors) + unlike(other.facts(), facts)
    other.release()
    return wrong if again == losses else [f"losses {again}, not {losses}", *wrong]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_memory_goes_on_bit_by_bit(job: Job, tmp_path: Path) -> None:
    assert not goes_on(job, f"memory://{tmp_path.name}/{job.placement}", tmp_path)


def ranks_go_on(rank: int, url: str, folder: str) -> list[str]:
    import support.objects  # noqa: F401  # fsspec does not know it in this process

    return goes_on(JOBS[1], url, folder, rank)


def test_ranks_save_to_an_object_store_and_any_number_loads(ranks: Any, server: ObjectServer, tmp_path: Path) -> None:
    agree(ranks(2, ranks_go_on, server.url, str(tmp_path)))
    files = [f"saved/rank-0000{rank}-of-00002.safetensors" for rank in (0, 1)]
    assert names_in(server) == ["saved/manifest.json", *files]
    alone = Run(JOBS[1], tmp_path)
    alone.load(f"{server.url}/saved")
    assert alone.step == STEPS and zerostd.latest(server.url) == f"{server.url}/saved"
    zerostd.merge(f"{server.url}/saved", tmp_path / "merged")
    from safetensors.torch import load_file

    merged = load_file(tmp_path / "merged" / "model.safetensors")
    whole = zerostd.full_state_dict(alone.model)
    assert_bitwise(merged, {name: whole[name] for name in merged})


@pytest.fixture
def run(server: ObjectServer, tmp_path: Path) -> Run:
    """A training with a checkpoint, step-1."""
    trained = Run(Job(), tmp_path)
    trained.train(1)
    trained.save(f"{server.url}/step-1")
    return trained


def test_training_does_not_wait_for_the_network(run: Run, server: ObjectServer) -> None:
    before = run.tensors()
    server.opened.clear()
    saving = zerostd.save(f"{server.url}/step-2", run.model, run.optimizer, run.extra(), wait=False)
    try:
        assert server.waiting.wait(60)
        run.train(3)  # while nothing arrives
        assert not saving.is_finished and zerostd.latest(server.url) == f"{server.url}/step-1"
    finally:
        server.opened.set()
    saving.wait()
    assert zerostd.latest(server.url) == f"{server.url}/step-2"
    run.load(f"{server.url}/step-2")
    assert not compared(run.tensors(), before)


def test_an_upload_that_fails_once_is_made_again(run: Run, server: ObjectServer) -> None:
    server.num_failing = 1
    run.save(f"{server.url}/step-2")
    assert zerostd.memory(run.model).retries == {"uploading: EIO": 1}
    assert zerostd.latest(server.url) == f"{server.url}/step-2"


@pytest.mark.parametrize("end", [".safetensors", "manifest.json"])
def test_a_store_that_fails_leaves_the_last_checkpoint(end: str, run: Run, server: ObjectServer) -> None:
    before = names_in(server)
    server.failing_end = end
    with pytest.raises(CheckpointError, match=r"step-2.*cannot be.*EIO: RuntimeError: the store answers 503"):
        run.save(f"{server.url}/step-2")
    assert names_in(server) == before and zerostd.latest(server.url) == f"{server.url}/step-1"
    run.train(1)
    run.load(f"{server.url}/step-1")


KILLED = """
import sys, torch, zerostd
import support.objects
from torch import nn
model = nn.Linear(24, 24)
model, optimizer = zerostd.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
zerostd.save(sys.argv[1], model, optimizer)
"""


def test_a_killed_save_is_no_checkpoint_and_the_next_one_replaces_it(
    run: Run, server: ObjectServer, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = f"{server.url}/step-2"
    server.opened.clear()
    monkeypatch.setenv("TMPDIR", str(spool))
    with warm.Script(KILLED, target) as script:
        assert server.waiting.wait(60)
        script.send_signal(signal.SIGKILL)
        assert script.wait() == -signal.SIGKILL
    server.opened.set()
    assert f"{Path(target).name}/manifest.json" not in names_in(server)
    assert zerostd.latest(server.url) == f"{server.url}/step-1"
    with pytest.raises(CheckpointError, match=r"has no manifest.json: it is not a checkpoint, or was never completed"):
        run.load(target)
    server.objects["bucket/step-2/rank-00003-of-00004.safetensors"] = b"left by more ranks"
    (leftover,) = spool.glob("zerostd-*/step-2.incomplete-*")
    os.utime(leftover, (0, 0))  # one that was made just now may not be locked yet
    run.save(target)
    assert zerostd.latest(server.url) == target
    assert [name for name in names_in(server) if name.startswith("step-2/")] == [
        "step-2/manifest.json",
        "step-2/rank-00000-of-00001.safetensors",
    ]


def test_keep_removes_older_ones(run: Run, server: ObjectServer) -> None:
    server.objects["bucket/notes.txt"] = b"of the user"
    for step in (2, 3):
        run.train(1)
        run.save(f"{server.url}/step-{step}", keep=2)
    assert {name.partition("/")[0] for name in names_in(server)} == {"notes.txt", "step-2", "step-3"}


def test_a_damaged_object_is_refused_and_changes_nothing(run: Run, server: ObjectServer) -> None:
    before = run.tensors()
    name = "bucket/step-1/rank-00000-of-00001.safetensors"
    content = bytearray(server.objects[name])
    content[-5] ^= 1
    server.objects[name] = bytes(content)
    with pytest.raises(CheckpointError, match=r"step-1/rank-00000-of-00001.safetensors is damaged"):
        run.load(f"{server.url}/step-1")
    assert not compared(run.tensors(), before)


# -- bad input: refused before anything is written --


def test_what_lies_there_is_not_overwritten(run: Run, server: ObjectServer) -> None:
    server.objects["bucket/mine/notes.txt"] = b"of the user"
    before = dict(server.objects)
    for name in ("step-1", "mine"):
        with pytest.raises(CheckpointError, match=f"{name} already exists and is not overwritten"):
            run.save(f"{server.url}/{name}")
    assert server.objects == before


def test_a_store_that_cannot_be_written_is_refused(run: Run, server: ObjectServer, spool: Path) -> None:
    before = dict(server.objects)
    server.may_write = False
    with pytest.raises(CheckpointError, match=r"step-2 cannot be written: EACCES"):
        zerostd.save(f"{server.url}/step-2", run.model, run.optimizer, wait=False)
    assert server.objects == before


def test_urls_that_cannot_be_used_are_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with ObjectServer() as gone:
        url = gone.url
    with pytest.raises(CheckpointError, match=r"bucket/x cannot be written: EIO: ConnectionRefusedError"):
        run.save(f"{url}/x")
    with pytest.raises(CheckpointError, match=r"manifest.json cannot be read: EIO: ConnectionRefusedError"):
        run.load(f"{url}/x")
    with pytest.raises(CheckpointError, match=r"no-such://x/y cannot be used: Protocol not known: no-such"):
        run.save("no-such://x/y")
    with pytest.raises(CheckpointError, match=r"'memory://' cannot be the name of a checkpoint"):
        run.save("memory://")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    for call in (run.save, run.load, zerostd.latest):
        with pytest.raises(CheckpointError, match=r"pip install 'zerostd\[url\]'"):
            call("s3://mine/x")
