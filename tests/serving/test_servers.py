"""Parameter servers: the bits of ranks without them, whatever their number; checkpoints, bytes, refusals and kills."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostd
from support.compare import assert_bitwise
from support.models import MODELS
from support.processes import RankPool, environment
from support.side_by_side import data, seeded
from zerostd import CommunicationError, MisuseError, NotSupportedError, Placement, PrepareError
from zerostd.communication.link import Message, ServerLink
from zerostd.errors import ZerostdError

GPT = MODELS["gpt"]
NUM_WORKERS = 2
LIMIT_S = 16.0  # of a worker that waits for a server which has given up, but whose process is still there
State = dict[str, torch.Tensor]


def prepared(servers: int, **options: Any) -> tuple[Any, Any]:
    """A GPT on servers; or without any at stage 1, which shards the same states over the workers."""
    model = GPT.make(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if not servers:
        options = {"stage": 1, "placement": Placement(), **options}
        options.pop("accumulate", None)
        return zerostd.prepare(model, optimizer, groups=["blocks.*"], **options)
    return zerostd.prepare(model, optimizer, groups=["blocks.*"], servers=servers, **options)


def step(model: Any, optimizer: Any, number: int, rank: int, passes: int = 1, *, has_servers: bool = True) -> None:
    for micro in range(passes):
        batch = GPT.batch(passes * number + micro, rank, NUM_WORKERS, torch.float32)
        if micro < passes - 1 and not has_servers:
            with zerostd.no_sync(model):
                GPT.loss(model, batch).backward()
        else:
            GPT.loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def train(rank: int, servers: int, passes: int, steps: int, options: dict[str, Any]) -> tuple[State, dict[str, int]]:
    """The model and the bytes sent by a worker; of a server its exit code."""
    try:
        model, optimizer = prepared(servers, accumulate=passes, **options)
    except SystemExit as end:
        return {"exit code": torch.tensor(end.code)}, {}
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for number in range(steps):
        step(model, optimizer, number, rank, passes, has_servers=servers > 0)
        schedule.step()
    sent = dict(zerostd.memory(model).sent)
    released = zerostd.release(model)
    return {name: value.detach() for name, value in released.state_dict().items()}, sent


JOBS: dict[str, tuple[int, dict[str, Any]]] = {
    "bf16": (1, {"precision": "bf16"}),
    "accumulated, summed": (2, {"reduce": "sum"}),
    "states on disk": (1, {"placement": Placement(optimizer_states="disk"), "precision": "bf16"}),
}


@pytest.mark.parametrize(
    ("job", "servers"), [("bf16", 1), ("bf16", 3), ("accumulated, summed", 2), ("states on disk", 2)]
)
def test_servers_give_the_bits_of_stage_1_without_them(ranks, job, servers):
    passes, options = JOBS[job]
    without = {name: value for name, value in options.items() if name != "placement"}
    (expected, _), *_ = ranks(NUM_WORKERS, train, 0, passes, 3, without)
    found = ranks(NUM_WORKERS + servers, train, servers, passes, 3, options)
    for state, _ in found[:NUM_WORKERS]:
        assert_bitwise(state, expected)
    assert [int(state["exit code"]) for state, _ in found[NUM_WORKERS:]] == [0] * servers


def test_clipping_is_that_of_all_gradients(ranks):
    options = {"max_grad_norm": 0.1}
    (expected, _), *_ = ranks(NUM_WORKERS, train, 0, 1, 3, options)
    found = ranks(NUM_WORKERS + 2, train, 2, 1, 3, options)[0][0]
    assert_bitwise(found, expected)  # as many servers as there were ranks: norms are summed in the same order


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def count_bytes(rank: int) -> float:
    """Bytes that this worker pushed for each parameter."""
    model = seeded(Wide)
    numel = sum(parameter.numel() for parameter in model.parameters())
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = zerostd.prepare(model, optimizer, servers=1, accumulate=4, precision="bf16")
    except SystemExit:
        return 0.0
    for number in range(4):
        model(data(2, 256, number=number, rank=rank)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model(data(2, 256))
    return zerostd.memory(model).sent["reduce"] / numel


def test_one_push_of_two_bytes_a_parameter_makes_a_step_of_four_passes(ranks):
    pushed = ranks(2, count_bytes)
    assert 2.0 <= pushed[0] <= 2.02


def save_and_go_on(rank: int, servers: int, folder: str, resumes: bool) -> State:
    try:
        model, optimizer = prepared(servers, precision="bf16")
        if resumes:
            assert zerostd.load(folder, model, optimizer) == {"epoch": 3}
            assert optimizer.param_groups[0]["lr"] == 0.02
        else:
            step(model, optimizer, 0, rank)
            optimizer.param_groups[0]["lr"] = 0.02
            step(model, optimizer, 1, rank)
            zerostd.save(folder, model, optimizer, {"epoch": 3})
        assert servers or resumes
        step(model, optimizer, 2, rank)
    except SystemExit:
        return {}
    return zerostd.full_state_dict(model)


def test_training_resumes_from_a_checkpoint_with_servers_fewer_servers_and_none(ranks, tmp_path):
    folder = str(tmp_path / "step-2")
    expected = ranks(NUM_WORKERS + 2, save_and_go_on, 2, folder, False)[0]
    for servers in (2, 1, 0):
        assert_bitwise(ranks(NUM_WORKERS + servers, save_and_go_on, servers, folder, True)[0], expected)


def killed(rank: int, victim: int) -> str:
    """What this rank says when another one was killed between two steps."""
    with environment(ZEROSTD_TIMEOUT_S=str(LIMIT_S)):
        try:
            if rank == victim and rank >= NUM_WORKERS:  # a server: it dies inside prepare
                signal.setitimer(signal.ITIMER_REAL, 3.0)
                signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            model, optimizer = prepared(1)
            step(model, optimizer, 0, rank)
            if rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            for number in range(1, 10_000):
                step(model, optimizer, number, rank)
        except CommunicationError as error:
            return str(error)
        except SystemExit:
            return "ended"
    return ""


@pytest.mark.parametrize("victim", [1, 2], ids=["a worker", "a server"])
def test_a_killed_rank_is_named(victim, tmp_path):
    with RankPool(NUM_WORKERS + 1) as pool, pytest.raises(AssertionError) as caught:
        pool.run(noted, victim, str(tmp_path), timeout=110, grace=60)  # more than three times the limit of the others
    assert f"rank {victim}" in str(caught.value)
    said = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert said and all(f"rank {victim} " in text for text in said.values()), said


def noted(rank: int, victim: int, folder: str) -> None:
    Path(folder, str(rank)).write_text(killed(rank, victim))


def goodbyes(rank: int) -> int:
    """How often a worker that releases its model tells the server so."""
    told: list[Message] = []
    announce = ServerLink.announce

    def noting(self: ServerLink, message: Message, *rest: Any) -> Any:
        told.append(message)
        return announce(self, message, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerLink, "announce", noting)
        try:
            model, optimizer = prepared(1)
        except SystemExit:
            return 1
        step(model, optimizer, 0, rank)
        zerostd.release(model)
        del model, optimizer
        gc.collect()
    return told.count(Message.END)


def test_a_worker_says_goodbye_once(ranks):
    """A server that has ended does not take a second one, and the worker would wait for it."""
    assert ranks(NUM_WORKERS + 1, goodbyes) == [1] * (NUM_WORKERS + 1)


def refusals(rank: int) -> list[str]:
    """What is refused before anything changes, and what a worker cannot do."""
    said = []
    model = GPT.make(0)
    optimizer = torch.optim.AdamW(model.parameters())
    for error, options in [
        (PrepareError, {"servers": 2}),
        (PrepareError, {"servers": 0}),
        (PrepareError, {"servers": 1, "stage": 3}),
        (NotSupportedError, {"servers": 1, "precision": "fp16"}),
        (NotSupportedError, {"servers": 1, "placement": Placement(parameters="host")}),
        (NotSupportedError, {"servers": 1, "placement": Placement(gradients="disk")}),
        (PrepareError, {"reduce": "average"}),
    ]:
        with pytest.raises(error) as caught:
            zerostd.prepare(model, optimizer, **options)
        said.append(str(caught.value))
    try:
        model, optimizer = prepared(1)
    except SystemExit:
        return said
    GPT.loss(model, GPT.batch(0, 0, 1, torch.float32)).backward()
    parameter = next(model.parameters())
    for call in (optimizer.state_dict, lambda: optimizer.clip_grad_norm_(1.0), lambda: parameter.grad + 1):
        with pytest.raises(MisuseError, match="on a worker"):
            call()
    with torch.no_grad():
        parameter.add_(1.0)
    with pytest.raises(MisuseError, match="parameters were changed on a worker"):
        optimizer.step()
    zerostd.release(model)
    return said


def test_what_does_not_go_with_servers_is_refused(ranks):
    none_left, none, stage, precision, parameters, gradients, reduce = ranks(2, refusals)[0]
    assert "servers=2 of 2 rank(s) leaves none to train" in none_left
    assert "servers=0 must be a whole number" in none and "leave it out" in stage
    assert "'bf16'" in precision and "place only optimizer_states and activations" in parameters
    assert "Placement(gradients='disk') with servers=1: workers keep it on the device" in gradients
    assert "reduce='average' must be 'mean' or 'sum'" in reduce


def summed(rank: int, stage: int, reduce: str) -> State:
    model = seeded(Wide)
    lr = 0.1 if reduce == "mean" else 0.05
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    model, optimizer = zerostd.prepare(model, optimizer, stage=stage, reduce=reduce, placement=Placement())
    for number in range(2):
        model(data(2, 256, number=number, rank=rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return zerostd.full_state_dict(model)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_sum_of_two_ranks_is_twice_their_mean(ranks, stage):
    mean = ranks(2, summed, stage, "mean")[0]
    assert_bitwise(ranks(2, summed, stage, "sum")[0], mean)  # half the rate: powers of two are exact


def test_errors_of_servers_are_the_workers(ranks, tmp_path):
    assert "not a checkpoint" in ranks(2, load_nothing, str(tmp_path / "nothing"))[0].lower()


def load_nothing(rank: int, folder: str) -> str:
    try:
        model, optimizer = prepared(1)
    except SystemExit:
        return ""
    with pytest.raises(ZerostdError) as caught:
        zerostd.load(folder, model, optimizer)
    step(model, optimizer, 0, rank)  # training goes on
    zerostd.release(model)  # the error above holds the model, and the server would wait for its end
    return str(caught.value)
