"""Errors say who is to blame, and only errors of communication do."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostd
from support.processes import environment
from support.side_by_side import data, seeded
from zerostd import CommunicationError
from zerostd.communication.places import Place
from zerostd.engine.runtime import Runtime
from zerostd.tiers import Transfer, debug

LIMIT_S = 3.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(8, 16)
        self.outlet = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outlet(self.inlet(x).tanh())


def prepared(stage: int = 3, lr: float = 0.1, **options: Any) -> tuple[Any, Any]:
    model = seeded(Net)
    with environment(ZEROSTD_TIMEOUT_S=str(LIMIT_S)):
        return zerostd.prepare(model, torch.optim.AdamW(model.parameters(), lr=lr), stage=stage, **options)


def step(model: Any, optimizer: Any, rank: int, number: int = 0) -> None:
    model(data(3, 8, number=number, rank=rank)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def runtime_of(model: nn.Module) -> Runtime:
    runtime = model.__dict__["_zerostd"]
    assert isinstance(runtime, Runtime)
    return runtime


def alone_in_prepare(rank: int, folder: str) -> str:
    sign = Path(folder, "noticed")
    if rank == 1:
        while not sign.exists():
            time.sleep(0.02)
        return ""
    with pytest.raises(CommunicationError) as caught:
        prepared()
    sign.touch()
    return str(caught.value)


def test_a_rank_that_does_not_prepare_is_named(ranks: Any, tmp_path: Path) -> None:
    text = ranks(2, alone_in_prepare, str(tmp_path))[0]
    assert "rank 0 gave up waiting in zerostd.prepare() (time limit 3 s): rank 1 did not call it" in text


NOT_ALL_PREPARE = """
import os, sys, time
from pathlib import Path
import torch, zerostd
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])

def wait_for(names):
    while len(list(folder.glob(names))) < 2:
        time.sleep(0.05)

if rank in (1, 2):
    wait_for("said-*")
    sys.exit()
model = torch.nn.Linear(4, 4)
(folder / f"here-{rank}").touch()
wait_for("here-*")
try:
    zerostd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
except zerostd.CommunicationError as error:
    (folder / f"said-{rank}").write_text(str(error))
"""


def test_ranks_that_do_not_prepare_are_named_where_nobody_made_a_process_group(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(NOT_ALL_PREPARE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", script, tmp_path]
    variables = {**os.environ, "ZEROSTD_TIMEOUT_S": str(LIMIT_S), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), env=variables, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    for rank in (0, 3):
        said = (tmp_path / f"said-{rank}").read_text()
        assert f"rank {rank} of 4 did not meet the others in zerostd.prepare()" in said
        assert "rank 1, 2 is missing" in said


def other_errors(rank: int) -> str:
    model, optimizer = prepared()
    step(model, optimizer, rank)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(3, 7))  # a wrong shape, inside forward
    assert not isinstance(caught.value, CommunicationError)
    zerostd.release(model)
    return str(caught.value)


def test_an_error_of_the_users_code_keeps_its_own_words(ranks: Any) -> None:
    for text in ranks(2, other_errors):
        assert "gave up" not in text and "shapes" in text


def strangers(rank: int) -> int:
    """Whoever else connects to a rank's port is not answered, and does no harm."""
    model, optimizer = prepared()
    channels = runtime_of(model).world.channels
    assert channels is not None
    answers = 0
    for noise in (b"", b"\n", b"GET / HTTP/1.0\r\n\r\n", b"{}\n", b'{"key": "zerostd/0", "place": {}}\n', b"[" * 70000):
        with (
            contextlib.suppress(OSError),  # it hangs up
            socket.create_connection(channels.peers._addresses[rank], 5.0) as connection,
        ):
            connection.sendall(noise)
            connection.shutdown(socket.SHUT_WR)
            answers += len(connection.recv(100))
    step(model, optimizer, rank)
    place = channels.peers._ask(1 - rank)
    assert not isinstance(place, str) and place.rank == 1 - rank
    zerostd.release(model)
    return answers


def test_strangers_at_the_port_of_a_rank_are_not_answered(ranks: Any) -> None:
    assert ranks(2, strangers) == [0, 0]


def forked(rank: int) -> tuple[bool, bool]:
    """A forked child does not keep the rank's port open, and leaves the rank reachable."""
    model, optimizer = prepared()
    step(model, optimizer, rank)
    channels = runtime_of(model).world.channels
    assert channels is not None
    child = os.fork()
    if child == 0:
        os._exit(0 if channels.peers._socket.fileno() == -1 else 1)
    is_closed = os.waitpid(child, 0)[1] == 0
    answer = channels.peers._ask(1 - rank)
    step(model, optimizer, rank)
    zerostd.release(model)
    return is_closed, not isinstance(answer, str)


def test_a_forked_child_drops_the_port(ranks: Any) -> None:
    assert ranks(2, forked) == [(True, True)] * 2


def with_overflow(rank: int, placement: str, stage: int) -> tuple[float, int, bool]:
    model = seeded(Net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    homes = zerostd.Placement(optimizer_states=placement, cpu_share=1.0 if placement == "host" else None)
    model, optimizer = zerostd.prepare(model, optimizer, stage=stage, precision="fp16", placement=homes)
    optimizer.loss_scale.value = 256.0
    before = zerostd.full_state_dict(model)
    (model(data(3, 8, rank=rank)).square().mean() * (1e30 if rank else 1.0)).backward()
    optimizer.step()
    after = zerostd.full_state_dict(model)
    is_same = all(torch.equal(after[name], before[name]) for name in before)
    scale = optimizer.loss_scale
    zerostd.release(model)
    return scale.value, scale.num_skipped, is_same


@pytest.mark.parametrize("placement", ["device", "host", "disk"])
def test_an_overflow_on_one_rank_skips_the_step_on_all_by_every_route(ranks: Any, placement: str) -> None:
    for stage in (0, 2):
        assert ranks(2, with_overflow, placement, stage) == [(128.0, 1, True)] * 2


KEPT: dict[str, dict[str, Any]] = {  # gradients, in the ways in which they arrive
    "device": {},
    "host": {"placement": {"gradients": "host", "optimizer_states": "host"}},
    "disk": {"placement": {"gradients": "disk", "optimizer_states": "disk", "parameters": "disk"}},
    "freed": {"placement": {"keep_gradients": False}, "accumulate": 1},
    "fp16": {"precision": "fp16"},
    "coded": {"placement": {"codec": {"reduce": "int8"}}, "exact": False},
}


def with_nan(rank: int, stage: int, options: dict[str, Any]) -> list[str]:
    model, optimizer = prepared(stage, **options)
    if optimizer.loss_scale is not None:
        optimizer.loss_scale.value = 128.0  # nothing overflows by itself
    step(model, optimizer, rank)
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    log = logging.getLogger("zerostd")
    handler = Keep()
    log.addHandler(handler)
    debug.DEBUG.add("nan")
    try:
        if rank == 1:
            model.outlet.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * float("nan"),))
        model(data(3, 8, rank=rank)).square().mean().backward()
    finally:
        debug.DEBUG.discard("nan")
        log.removeHandler(handler)
    zerostd.release(model)
    return lines


@pytest.mark.parametrize(
    ("stage", "kept"),
    [
        *((0, "device"), (1, "device"), (2, "host"), (3, "device"), (3, "host"), (3, "disk"), (2, "disk")),
        *((0, "fp16"), (3, "fp16"), (0, "freed"), (3, "freed"), (2, "coded")),
    ],
)
def test_a_nan_is_traced_to_parameter_rank_and_step(ranks: Any, stage: int, kept: str) -> None:
    options = KEPT[kept]
    if stage == 2 and kept == "disk":  # parameters are sharded at stage 3 only
        options = {"placement": {**options["placement"], "parameters": "device"}}
    lines = ranks(2, with_nan, stage, options)
    assert lines[0] == []
    assert any(line.startswith("rank 1, step 2: the gradient of 'inlet.weight': 128 NaN") for line in lines[1]), lines
    assert not any("'outlet." in line for line in lines[1])  # it came in behind it


def skips_a_step(rank: int, stage: int) -> tuple[str, float]:
    """Rank 1 skips a step: rank 0 waits for new parameters in forward, and rank 1 in backward, with hours to go."""
    model = seeded(Net)
    with environment(ZEROSTD_TIMEOUT_S="3600"):
        model, optimizer = zerostd.prepare(model, torch.optim.AdamW(model.parameters()), stage=stage)
    step(model, optimizer, rank)
    model(data(3, 8, number=1, rank=rank)).square().mean().backward()
    if rank == 0:
        optimizer.step()
    optimizer.zero_grad()
    begun = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        step(model, optimizer, rank, number=2)
    return str(caught.value), time.monotonic() - begun


@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_that_skips_a_step_is_named_long_before_the_limit(ranks: Any, stage: int) -> None:
    for rank, (text, seconds) in enumerate(ranks(2, skips_a_step, stage)):
        assert f"rank {rank} failed in " in text and f"rank {1 - rank} " in text and seconds < 60, text
        assert "with 2 backward passes and 2 steps begun" in text and "with 3 backward passes and 1 steps begun" in text


@pytest.mark.parametrize(
    ("mine", "theirs", "are_apart"),
    [
        *(((2, 2), (3, 1), True), ((3, 1), (2, 2), True)),
        *(((3, 2), (2, 2), False), ((4, 3), (2, 1), False), ((2, 2), (2, 2), False), ((0, 3), (2, 1), False)),
    ],
)
def test_ranks_are_apart_when_neither_is_behind(
    mine: tuple[int, int], theirs: tuple[int, int], are_apart: bool
) -> None:
    here, there = (Place(0, num_backwards=backwards, num_steps=steps) for backwards, steps in (mine, theirs))
    assert here.is_apart_from(there) is are_apart


class Never(Transfer):
    """A collective on a device whose other ranks do not come."""

    def wait(self) -> None:
        raise AssertionError("the loop does not wait for it")

    def is_done(self) -> bool:
        return False


def held_by_device(rank: int, folder: str, is_gone: bool) -> tuple[str, float]:
    """Rank 0 waits on its device, in a call of the user's, and rank 1 does not come or leaves."""
    model, optimizer = prepared()
    step(model, optimizer, rank)
    channels = runtime_of(model).world.channels
    assert channels is not None
    sign = Path(folder, "noticed")
    if rank == 1:
        if is_gone:
            channels.peers.close()
        while not sign.exists():
            time.sleep(0.02)
        return "", 0.0
    begun = time.monotonic()
    with channels.peers.at("the gather of group 'inlet'"):
        channels.peers.expect(Never(), channels.gather)
    place = json.loads(channels.peers._message())["place"]
    assert not place["is_waiting"]  # not yet
    assert channels.peers._watcher is not None
    channels.peers._watcher.join(30)
    text = ""
    for call in (lambda: model(data(3, 8, rank=rank)), lambda: step(model, optimizer, rank)):
        with pytest.raises(CommunicationError) as caught:
            call()
        assert text in ("", str(caught.value))
        text = str(caught.value)
    seconds = time.monotonic() - begun
    assert json.loads(channels.peers._message())["place"]["is_waiting"]
    sign.touch()
    return text, seconds


def test_a_device_that_waits_beyond_the_limit_ends_the_next_call(ranks: Any, tmp_path: Path) -> None:
    text, seconds = ranks(2, held_by_device, str(tmp_path), False)[0]
    assert "rank 0 gave up waiting in the gather of group 'inlet', in " in text and "(time limit 3 s)" in text
    assert "rank 1 made its last call, " in text and "queued on the device 3" in text
    assert seconds < LIMIT_S + 10


def test_a_device_that_waits_for_a_rank_that_has_left_is_noticed_before_the_limit(ranks: Any, tmp_path: Path) -> None:
    text, _ = ranks(2, held_by_device, str(tmp_path), True)[0]
    assert "rank 0 failed in the gather of group 'inlet'" in text and "rank 1 is gone: " in text
    assert float(re.search(r"queued on the device ([\d.]+) s ago", text)[1]) < LIMIT_S  # type: ignore[index]


class Arrived(Never):
    def is_done(self) -> bool:
        return True


def ended_on_device(rank: int) -> int:
    model, optimizer = prepared()
    channels = runtime_of(model).world.channels
    assert channels is not None
    for number in range(3):
        channels.peers.expect(Arrived(), channels.gather)
        step(model, optimizer, rank, number)
    assert channels.peers.pending.oldest() is None
    watcher = channels.peers._watcher
    zerostd.release(model)
    assert watcher is not None
    return watcher.is_alive()


def test_collectives_that_have_ended_are_forgotten_and_their_thread_with_the_model(ranks: Any) -> None:
    assert ranks(2, ended_on_device) == [False, False]
