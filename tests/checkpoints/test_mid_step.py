"""A save between the backward passes of one step: the passes so far count, bit by bit, and on other ranks too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zerostd
from checkpoints.runs import Job, Run, compared, unlike
from support.agreement import agree
from support.processes import doing
from support.side_by_side import seeded
from zerostd import CheckpointError, MisuseError
from zerostd.checkpointing.storage.manifest import seal

PASSES = 3
JOBS = [
    *(Job(stage=stage, passes=PASSES, accumulate=PASSES) for stage in range(4)),
    *(Job(stage=stage, placement="host", passes=PASSES, accumulate=PASSES) for stage in (1, 2, 3)),
    Job(precision="bf16", placement="host", passes=PASSES),
    Job(precision="bf16", stage=2, passes=PASSES),
    Job(precision="fp16", placement="parameters on host", passes=PASSES, accumulate=PASSES, max_grad_norm=0.1),
    Job(precision="bf16", placement="all tiers", passes=PASSES, accumulate=PASSES),
    Job(rules="own", stage=0, precision="bf16", passes=PASSES),
]


def goes_on(job: Job, done: int, folder: str, rank: int) -> list[str]:
    """Two steps and a part of the third, saved; the rest of it and a fourth, by this run and by one that loads."""
    saved = Path(folder, f"{job} after {done}")
    run = Run(job, folder, rank=rank)
    run.train(2)
    for part in range(done):
        run.one_pass(2, part)
    run.save(saved)

    def rest(one: Run) -> tuple[list[float], dict[str, torch.Tensor], dict[str, str]]:
        losses = [one.one_pass(2, part) for part in range(done, PASSES)]
        one.end_step()
        losses += one.train(1)
        found = losses, one.tensors(), one.facts()
        one.release()
        return found

    losses, tensors, facts = rest(run)
    other = Run(job, folder, rank=rank, seed=7)
    other.train(1)
    other.load(saved)
    others, more, said = rest(other)
    wrong = compared(more, tensors) + unlike(said, facts) + ([] if losses == others else ["losses differ"])
    return [f"rank {rank}, {job}, after {done}: {text}" for text in wrong]


def all_go_on(rank: int, jobs: list[Job], folder: str) -> list[str]:
    wrong = []
    for number, job in enumerate(jobs):
        done = 1 + number % 2  # on one rank both
        doing(f"{job}, after {done}")
        wrong += goes_on(job, done, folder, rank)
    return wrong


@pytest.mark.timeout(300)
def test_two_ranks_go_on_bit_by_bit(ranks: Any, tmp_path: Path) -> None:
    agree(ranks(2, all_go_on, JOBS, str(tmp_path), timeout=280))


@pytest.mark.parametrize(
    ("job", "done"),  # all passes only where the update has not begun by then
    [*((JOBS[place], done) for place in (3, 6, 7, 10) for done in (1, 2)), (JOBS[3], PASSES), (JOBS[7], PASSES)],
    ids=str,
)
def test_one_rank_goes_on_bit_by_bit(job: Job, done: int, tmp_path: Path) -> None:
    assert not goes_on(job, done, str(tmp_path), 0)


# -- another number of ranks --

BATCH = 12


class Chain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(9, 9) for _ in range(3))
        self.last = torch.nn.Linear(9, 1)
        self.spare = torch.nn.Linear(5, 5)  # never has a gradient

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.last(x)


def make(stage: int, placement: zerostd.Placement, seed: int) -> tuple[Any, Any]:
    model = seeded(Chain, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return zerostd.prepare(model, optimizer, stage=stage, placement=placement, groups=["layers.0", "layers.2"])


def passes(model: torch.nn.Module, numbers: range, rank: int = 0, size: int = 1) -> None:
    for number in numbers:
        x = torch.randn(BATCH, 9, generator=torch.Generator().manual_seed(number))
        model(x[rank::size]).square().mean().backward()


def begin(rank: int, size: int, folder: str) -> None:
    model, optimizer = make(3, zerostd.Placement(), 0)
    passes(model, range(2), rank, size)
    zerostd.save(Path(folder, "saved"), model, optimizer)
    zerostd.release(model)


def end(rank: int, size: int, folder: str, stage: int, placement: zerostd.Placement) -> dict[str, torch.Tensor]:
    model, optimizer = make(stage, placement, 5)
    zerostd.load(Path(folder, "saved"), model, optimizer)
    passes(model, range(2, 3), rank, size)
    optimizer.step()
    assert model.spare.weight.grad is None
    found = zerostd.full_state_dict(model)
    zerostd.release(model)
    return found


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 4)])
def test_any_ranks_go_on(before: int, after: int, ranks: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)
    ranks(before, begin, before, folder)
    model = seeded(Chain, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    passes(model, range(3))
    optimizer.step()
    for stage, placement in ((3, zerostd.Placement(optimizer_states="host")), (1, zerostd.Placement())):
        for found in ranks(after, end, after, folder, stage, placement):
            for name, value in model.state_dict().items():
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


# -- what is refused, and what is not asked for --


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    run = Run(Job(placement="host", passes=PASSES, accumulate=PASSES), tmp_path)
    for number in range(2):  # the first step shows how many passes it has
        if number:
            run.end_step()
        for part in range(PASSES):
            run.one_pass(number, part)
    with pytest.raises(MisuseError, match=r"zerostd.save\(\) between backward and optimizer.step\(\), but the update"):
        run.save(tmp_path / "saved")
    run.end_step()
    run = Run(Job(passes=PASSES), tmp_path)
    run.one_pass(0, 0)
    run.optimizer.clip_grad_norm_(0.01)
    with pytest.raises(MisuseError, match=r"between clip_grad_norm_\(\) and optimizer.step\(\)"):
        run.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def unsynced(rank: int, folder: str) -> str:
    run = Run(Job(passes=2), folder, rank=rank)
    with zerostd.no_sync(run.model):
        run.one_pass(0, 0)
    with pytest.raises(MisuseError) as caught:
        run.save(Path(folder, "saved"))
    run.one_pass(0, 1)
    run.save(Path(folder, "saved"))  # now all are reduced
    return str(caught.value)


def test_passes_that_are_not_reduced_yet(ranks: Any, tmp_path: Path) -> None:
    for said in ranks(2, unsynced, str(tmp_path)):
        assert "under zerostd.no_sync, whose gradients are not reduced yet" in said


def test_a_run_that_was_told_of_fewer_passes(tmp_path: Path) -> None:
    run = Run(Job(passes=PASSES), tmp_path)
    for part in range(2):
        run.one_pass(0, part)
    run.save(tmp_path / "saved")
    other = Run(Job(accumulate=1), tmp_path)
    with pytest.raises(CheckpointError, match="saved after 2 backward passes of a step, but accumulate=1 is less"):
        other.load(tmp_path / "saved")


def test_a_gradient_of_a_parameter_that_does_not_train(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
        model[name].requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        found.append(zerostd.prepare(model, optimizer))
    (model, optimizer), (other, another) = found
    model["b"](torch.ones(1, 2)).sum().backward()
    zerostd.save(tmp_path / "saved", model, optimizer)
    manifest = tmp_path / "saved" / "manifest.json"
    text = manifest.read_text().replace('"parameters":["b.', '"parameters":["a.').replace(',"b.bias"]', ',"a.bias"]')
    manifest.write_text(seal({name: value for name, value in json.loads(text).items() if name != "crc32"}))
    with pytest.raises(CheckpointError, match=r"gradient 'b\.weight' cannot be loaded: the parameter is frozen"):
        zerostd.load(tmp_path / "saved", other, another)


def test_without_the_optimizer_there_are_no_gradients(tmp_path: Path) -> None:
    run = Run(Job(passes=PASSES), tmp_path)
    run.one_pass(0, 0)
    zerostd.save(tmp_path / "with", run.model, run.optimizer)
    zerostd.save(tmp_path / "without", run.model)
    found = {name: json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("with", "without")}
    kinds = {name: {one["kind"] for one in data["tensors"]} for name, data in found.items()}
    assert kinds["with"] - kinds["without"] == {"gradient"}
    assert found["with"]["passes"] == 1 and "passes" not in found["without"]
    other = Run(Job(passes=PASSES), tmp_path)
    zerostd.load(tmp_path / "with", other.model)
    assert all(p.grad is None for p in other.model.parameters())


def test_it_is_written_before_the_next_pass(tmp_path: Path) -> None:
    run = Run(Job(placement="host", passes=PASSES), tmp_path)
    run.one_pass(0, 0)
    saving = zerostd.save(tmp_path / "saved", run.model, run.optimizer, wait=False)
    assert saving.is_finished and (tmp_path / "saved").exists()
    run.one_pass(0, 1)
    saving.wait()
