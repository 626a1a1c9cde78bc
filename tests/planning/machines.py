"""Machines and models written by hand or drawn at random, for all tests of planning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from zerostd.planning import DiskRates, GroupProfile, Link, MachineProfile, ModelProfile, Plan, PlanRequest, Processor
from zerostd.planning.planner import Bytes, fitting
from zerostd.planning.pricing import plan_from
from zerostd.planning.solution import Solution, model_state
from zerostd.policy import Tier

GIB = 2**30
VOCABULARY, CONTEXT = 32000, 1024

H200 = MachineProfile(
    "h200 by hand",
    "NVIDIA H200",
    {"bfloat16": 813e12},
    0.008,
    {"device": 140 * GIB, "host": 120 * GIB, "disk": 60 * GIB},
    Processor(16, {1: 2.9, 14: 0.21, 16: 0.205}, 157e9),
    Link(55e9, 55e9, 99.8e9),
    DiskRates("/", 2.9e9, 1.85e9, 1.75e9),
)

LAPTOP = MachineProfile(  # the device is the processor
    "laptop by hand",
    "cpu",
    {"float32": 4e11},
    1.2,
    {"device": 12 * GIB, "host": 12 * GIB, "disk": 100 * GIB},
    Processor(4, {1: 2.4, 2: 1.3, 4: 1.2}, 25e9),
    None,
    DiskRates("/", 2e9, 1.2e9, 0.9e9),
)

EVERYTHING: Mapping[Tier, int] = {Tier.DEVICE: 10**15, Tier.HOST: 10**15, Tier.DISK: 10**15}


def gpt(width: int, layers: int, compute_s: float | None = None, **options: Any) -> ModelProfile:
    """Embedding, blocks of twelve matrices of width by width, and a head; a third of `compute_s` is forward."""
    groups = (
        GroupProfile("embedding", width * (VOCABULARY + CONTEXT)),
        *(GroupProfile(f"block{i}", 12 * width * width) for i in range(layers)),
        GroupProfile("head", width * VOCABULARY),
    )
    times = {} if compute_s is None else {"forward_s": compute_s / 3, "backward_s": compute_s * 2 / 3}
    return ModelProfile(f"gpt {width}x{layers}", groups, **{**times, **options})


def plain(sizes: Sequence[int], forward_s: float = 0.0, **options: Any) -> ModelProfile:
    """Groups of so many parameters; backward takes twice as long as forward."""
    groups = tuple(GroupProfile(f"g{i}", size) for i, size in enumerate(sizes))
    return ModelProfile("plain", groups, **{"forward_s": forward_s, "backward_s": 2 * forward_s, **options})


def request_of(model: ModelProfile, limits: Mapping[Tier, int] = EVERYTHING, **options: Any) -> PlanRequest:
    """On the H200 with 14 threads, if nothing else is said."""
    return replace(PlanRequest(model, H200, limits, num_threads=14), **options)


def make_plan(request: PlanRequest, notes: Sequence[str] = ()) -> Plan:
    """The fastest plan that fits, its bytes by the closed form."""
    return plan_from(fitting(request, closed_form)[0], notes)


def closed_form(solution: Solution) -> Bytes:
    """Count what the program knows, without what it was told to leave free."""
    return model_state(replace(solution, request=replace(solution.request, fixed={})))


def fitted(request: PlanRequest) -> Solution:
    """The best that fits by the closed form. Raises PrepareError as prepare does."""
    return fitting(request, closed_form)[0].solution


def rates(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers over several orders of magnitude, in a few steps each."""
    return st.integers(0, 12).map(lambda place: low * (high / low) ** (place / 12))


@st.composite
def machines(draw: st.DrawFn) -> MachineProfile:
    """With a link and a disk, neither of which is faster both ways than the two ways together."""
    up, down = draw(rates(5e9, 100e9)), draw(rates(5e9, 100e9))
    both = draw(st.floats(0.6, 1.0)) * (up + down)
    read, write = draw(rates(5e8, 2e10)), draw(rates(5e8, 2e10))
    return MachineProfile(
        name="drawn",
        device="drawn",
        matrix={"bfloat16": 1e14},
        resident_ns=draw(rates(0.004, 0.1)),
        free={},
        processor=Processor(8, {1: draw(rates(0.1, 3.0))}, draw(rates(2e10, 4e11))),
        link=Link(up, down, both),
        disk=DiskRates("/", read, write, draw(st.floats(0.4, 1.0)) * min(read, write)),
    )


@st.composite
def models(draw: st.DrawFn, most: int = 4) -> ModelProfile:
    """A few groups of different sizes and times."""
    sizes = draw(st.lists(st.integers(10**7, 10**9), min_size=1, max_size=most))
    flops = [draw(st.integers(1, 10)) for _ in sizes]
    forward_s = sum(sizes) * draw(rates(1e-12, 1e-9))
    groups = tuple(
        GroupProfile(f"g{i}", size, forward_flops=one) for i, (size, one) in enumerate(zip(sizes, flops, strict=True))
    )
    widths = draw(st.sampled_from([(2, 2, 12, 0), (4, 4, 8, 4)]))  # bf16 with masters; fp32, a master only when away
    return ModelProfile("drawn", groups, *widths, forward_s=forward_s, backward_s=draw(st.floats(1.0, 3.0)) * forward_s)


@st.composite
def tight(draw: st.DrawFn) -> PlanRequest:
    """All kinds may be placed, and the device is too small for all of them."""
    model = draw(models(5))
    limits = {Tier.DEVICE: int(model.trained * draw(st.floats(1.0, 17.0))), Tier.HOST: 40 * model.trained}
    if draw(st.booleans()):
        limits = {**limits, Tier.HOST: int(model.trained * draw(st.floats(5.0, 17.0))), Tier.DISK: 20 * model.trained}
    return request_of(
        model,
        limits,
        machine=draw(machines()),
        waits_for_norm=draw(st.booleans()),
        accumulate=draw(st.integers(1, 2)),
        num_threads=1,
    )
