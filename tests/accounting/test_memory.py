"""Model-state bytes per rank, by closed form, in the ledger and in the process.

Mixed-precision AdamW holds 2 bytes of parameter, 2 of gradient and 10 of optimizer states (the lower half of an fp32
master, whose upper half is the parameter, and two moments) for each element: 14P, 4P + 10P/N, 2P + 12P/N and 14P/N for
stages 0 to 3, where the paper has 2P/N more. P is padded as the layout states; the padding, less than 64 elements for
each rank and group, has no moments.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerostd
from support.agreement import agree
from support.models import MODELS
from support.processes import doing
from support.side_by_side import data, seeded
from zerostd import Placement
from zerostd.monitoring.texts import size_text
from zerostd.parameters.host_gradient import NUM_STAGING
from zerostd.scheduling.gathering import largest_neighbours

MIB = 2**20
EXPECTED = {
    0: lambda padded, size: 14 * padded,
    1: lambda padded, size: 4 * padded + 10 * padded // size,
    2: lambda padded, size: 2 * padded + 12 * padded // size,
    3: lambda padded, size: 14 * padded // size,
}


def groups_of(model: nn.Module) -> tuple:
    return model.__dict__["_zerostd"].groups


def padded_numel(model: nn.Module) -> int:
    flats = [flat for group in groups_of(model) for flat in group.flats]
    for flat in flats:  # padded at the end only, and by less than one unit
        numel = sum(parameter.numel() for parameter in flat.parameters)
        assert numel <= flat.layout.numel < numel + 64 * flat.layout.num_shards
    return sum(flat.layout.numel for flat in flats)


def my_padding(model: nn.Module) -> int:
    flats = [flat for group in groups_of(model) for flat in group.flats]
    real = sum(piece.numel for flat in flats for piece in flat.layout.pieces(flat.region))
    return sum(flat.region.stop - flat.region.start for flat in flats) - real


def model_state(rank: int, size: int) -> list[str]:
    case, failures = MODELS["gpt"], []
    for stage, expected in EXPECTED.items():
        doing(f"stage {stage} on {size}")
        model = case.make(0)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = zerostd.prepare(
            model, optimizer, stage=stage, precision="bf16", accumulate=1, groups=list(case.groups)
        )
        for step in range(2):
            case.loss(model, case.batch(step, rank, size, torch.float32)).backward()
            optimizer.step()
            optimizer.zero_grad()
        memory, wanted = zerostd.memory(model), expected(padded_numel(model), size) - 8 * my_padding(model)
        if memory.total() != wanted:
            failures.append(
                f"stage {stage}, rank {rank} of {size}: {memory.total()} bytes, expected {wanted}\n{memory}"
            )
        if "bfloat16" not in memory.gradients:
            failures.append(f"stage {stage}: gradients are kept in {memory.gradients}")
        zerostd.release(model)
    return failures


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_model_state_has_the_papers_size_less_half_a_master(ranks, size):
    agree(ranks(size, model_state, size))


class Tower(nn.Module):
    """Equal layers of `width` squared elements."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.1 * layer(x)
        return x


def several_passes(rank: int) -> list[str]:
    """With several passes in a step gradients rest in fp32: two bytes more for each element a rank updates."""
    failures = []
    for stage, declared in ((0, 2), (2, 2), (3, None)):
        model = seeded(lambda: Tower(32, 4))
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = zerostd.prepare(
            model, optimizer, stage=stage, precision="bf16", accumulate=declared, groups=["layers.*"]
        )
        for _ in range(2):
            model(data(2, 32, rank=rank)).square().mean().backward()
        optimizer.step()
        memory, padded = zerostd.memory(model), padded_numel(model)
        held = memory.now["device"]["gradients"]
        wanted = {0: 2 * padded + 4 * padded, 2: 4 * padded // 2, 3: 4 * padded // 2}[stage]
        if held != wanted or "float32" not in memory.gradients:
            failures.append(f"stage {stage}: {held} bytes of gradients as {memory.gradients}, expected {wanted}")
        zerostd.release(model)
    return failures


def test_gradients_of_several_passes_rest_in_fp32(ranks):
    agree(ranks(2, several_passes))


def test_a_forward_frees_the_memory_of_dropped_gradients():
    model = Tower(32, 2)
    model, optimizer = zerostd.prepare(model, torch.optim.AdamW(model.parameters()), groups=["layers.*"])
    assert zerostd.memory(model).now["device"].get("gradients", 0) == 0
    model(data(2, 32)).sum().backward()
    held = zerostd.memory(model).now["device"]["gradients"]
    kept = model.layers[0].weight.grad
    optimizer.step()
    optimizer.zero_grad()
    before = kept.clone()
    loss = model(data(2, 32)).sum()
    assert before.any()
    assert zerostd.memory(model).now["device"]["gradients"] == 0
    with pytest.raises(zerostd.MisuseError, match=r"'layers\.0\.weight' was dropped .* p\.grad\.clone"):
        kept.clone()
    loss.backward()
    assert zerostd.memory(model).now["device"]["gradients"] == held == 4 * padded_numel(model)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({name: nn.Linear(32, 32) for name in "abcd"})
        self.used = "abcd"

    def forward(self, x: Tensor) -> Tensor:
        return sum(self.experts[name](x).square().mean() for name in self.used)


def cut_runs(rank: int) -> list[str]:
    failures = []
    for stage in (0, 3):
        model = seeded(Experts)
        model, optimizer = zerostd.prepare(model, torch.optim.AdamW(model.parameters()), stage=stage)
        for model.used in ("abcd", "ac", "abcd", "bd"):
            model(data(2, 32, rank=rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        states = zerostd.memory(model).now["device"]["optimizer_states"]
        flats = [flat for group in groups_of(model) for flat in group.flats]
        wanted = 8 * sum(piece.numel for flat in flats for piece in flat.layout.pieces(flat.region))
        if states != wanted:
            failures.append(f"stage {stage}, rank {rank}: {states} bytes of states, expected {wanted}")
        zerostd.release(model)
    return failures


def test_states_are_counted_once_where_parameters_rest(ranks):
    agree(ranks(2, cut_runs))


def gathered_at_once(rank: int) -> list[str]:
    """Stage 3: working memory is a few groups', however deep the model."""
    peaks = {}
    for depth in (4, 12):
        model = seeded(lambda depth=depth: Tower(64, depth))
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = zerostd.prepare(model, optimizer, stage=3, precision="bf16", groups=["layers.*"])
        for num_kept in (0, 1, 1):  # forward ends and backward begins with one, once their order is known
            loss = model(data(2, 64, rank=rank)).square().mean()
            held = [f.full.untyped_storage().nbytes() for g in groups_of(model) for f in g.flats]
            assert sum(size > 0 for size in held) == num_kept, f"between forward and backward groups hold {held}"
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks[depth] = zerostd.memory(model).peak["device"]["buffers"]
        now = zerostd.memory(model).now["device"]["buffers"]
        largest = max(flat.full.nbytes for group in groups_of(model) for flat in group.flats)
        gathered = (peaks[depth] - now) / largest - NUM_STAGING  # what gradients passed through is given back, too
        if not 1 <= gathered <= 3:
            return [f"rank {rank}, {depth} groups: {gathered:.1f} groups were gathered at once"]
        zerostd.release(model)
    return [] if peaks[4] == peaks[12] else [f"rank {rank}: working memory grows with depth: {peaks}"]


def test_gathered_groups_are_few_at_any_depth(ranks):
    agree(ranks(2, gathered_at_once))


class Uneven(nn.Module):
    """Small layers, large ones, and small ones again."""

    def __init__(self) -> None:
        super().__init__()
        widths = (8, 8, 8, 8, 64, 64, 8, 8, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, width), nn.Linear(width, 64)) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def gathered_ahead(rank: int, is_frozen: bool) -> list[str]:
    """Stage 3: groups of unequal sizes are gathered as far ahead as the buffers that were predicted."""
    model = seeded(Uneven)
    if is_frozen:
        model.layers[5].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model, optimizer = zerostd.prepare(model, optimizer, stage=3, groups=["layers.*"], accumulate=1)
    gatherer = model.__dict__["_zerostd"].gatherer
    most = 0
    for step in range(4):
        with step_hooks(model, gatherer) as counts:
            loss = model(data(2, 64, rank=rank, number=step)).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        most = max([most, *counts])
    room = largest_neighbours([group.gathered_bytes for group in gatherer.groups[1:]], repeats=False)
    zerostd.release(model)
    return [] if room // 2 < most <= room else [f"rank {rank}: {most} bytes were gathered at once, {room} are planned"]


@contextlib.contextmanager
def step_hooks(model: nn.Module, gatherer: Any) -> Iterator[list[int]]:
    """Bytes of the buffers of all groups whenever a layer begins its forward, or has the gradient of its output."""
    counts: list[int] = []

    def count(*_: Any) -> None:
        flats = [flat for group in gatherer.groups for flat in group.flats]
        counts.append(sum(flat.full.untyped_storage().nbytes() for flat in flats))

    hooks = [layer.register_forward_pre_hook(count) for layer in model.layers]
    hooks += [layer.register_full_backward_pre_hook(count) for layer in model.layers]
    yield counts
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("is_frozen", [False, True], ids=["all train", "one is frozen"])
def test_groups_gathered_ahead_fit_into_the_buffers_that_are_planned(ranks, is_frozen):
    agree(ranks(2, gathered_ahead, is_frozen))


def small_model(rank: int, precision: str) -> list[str]:
    """A model of 1 MiB at stage 3, without a word about groups."""
    model = seeded(lambda: Tower(128, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = zerostd.prepare(model, optimizer, stage=3, precision=precision, accumulate=1)
    for step in range(2):
        model(data(2, 128, rank=rank, number=step)).square().mean().backward()
        optimizer.step()
    memory = zerostd.memory(model)
    zerostd.release(model)
    buffers = memory.peak["device"]["buffers"]
    return [] if buffers <= memory.total() else [f"rank {rank}: {buffers} bytes of buffers serve {memory.total()}"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_buffers_of_a_small_model_take_less_than_the_state_they_serve(ranks, precision):
    agree(ranks(4, small_model, precision))


def advised(rank: int, make: Callable[[], nn.Module], stage: int) -> tuple[str, int]:
    """The last line that prepare says, and the bytes of the device that two steps take at most."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    log = logging.getLogger("zerostd")
    handler = Keep(logging.INFO)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        model = seeded(make)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = zerostd.prepare(model, optimizer, stage=stage, placement=Placement(), accumulate=1)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    for step in range(2):
        model(data(2, 64, rank=rank, number=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    taken = sum(zerostd.memory(model).peak["device"].values())
    zerostd.release(model)
    return next((line for line in lines if "are buffers" in line), ""), taken


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8))


def deep() -> nn.Module:
    return Tower(64, 32)


def test_a_stage_whose_buffers_take_more_than_it_saves_is_told_with_the_one_that_takes_least(ranks):
    taken = {stage: ranks(2, advised, wide, stage)[0] for stage in (0, 1, 2, 3)}
    line, bytes_of_3 = taken[3]
    best = min(taken, key=lambda stage: taken[stage][1])
    assert best == 1 and f"stage={best} would take {size_text(taken[best][1])}" in line, (line, taken)
    assert line.startswith(f"stage 3 takes {size_text(bytes_of_3)} of the device on each rank, of which ")
    assert not taken[1][0] and not ranks(2, advised, deep, 3)[0][0]


def test_scratch_of_the_update_has_memory_in_a_step_alone():
    model = seeded(lambda: Tower(64, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = zerostd.prepare(model, optimizer, precision="bf16", groups=["layers.*"])
    before = zerostd.memory(model).now["device"]["buffers"]
    largest = max(flat.layout.numel for group in groups_of(model) for flat in group.flats)
    for step in range(2):
        model(data(2, 64, number=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert zerostd.memory(model).now["device"]["buffers"] == before
    assert zerostd.memory(model).peak["device"]["buffers"] == before + 8 * largest  # gradients and joined masters
    zerostd.release(model)


def private_bytes() -> int:
    """Memory that is this process's alone, without what malloc keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(fields[name].split()[0]) * 1024 for name in ("Private_Clean", "Private_Dirty"))


def real_growth(rank: int, size: int, stage: int) -> list[str]:
    """What the process holds after a step against what the ledger says; the model's state is 14 x 6.3M = 88 MB."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(data(2, model.layers[0].in_features, rank=rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def run(width: int) -> nn.Module:
        model = seeded(lambda: Tower(width, 6))
        model, optimizer = zerostd.prepare(
            model, torch.optim.AdamW(model.parameters()), stage=stage, precision="bf16", groups=["layers.*"]
        )
        for _ in range(2):
            step(model, optimizer)
        return model

    zerostd.release(run(8))  # what torch loads on first use is not ours
    before = private_bytes()
    model = run(1024)
    grown, memory = private_bytes() - before, zerostd.memory(model)
    booked = sum(memory.now["device"].values())
    zerostd.release(model)
    if abs(grown - booked) <= 0.05 * booked + 6 * MIB:
        return []
    return [f"rank {rank} of {size}, stage {stage}: grew by {grown / MIB:.1f} MiB, booked {booked / MIB:.1f}\n{memory}"]


@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists() or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc"
)
@pytest.mark.parametrize(("size", "stage"), [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)])
def test_the_process_grows_by_what_the_ledger_says(ranks, size, stage):
    agree(ranks(size, real_growth, size, stage))
