"""UpdateSpans: neighbours with equal options are one span; a cut takes its states along."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

from zerostd.monitoring import Ledger
from zerostd.optimizers.spans import UpdateSpans
from zerostd.parameters import Flat
from zerostd.parameters.state_shard import MASTER, StateShard
from zerostd.policy import Route, Tier
from zerostd.sharding import make_layout
from zerostd.tiers import TierAllocator, TierTensor
from zerostd.tiers.host import Host

SIZES = (4, 6, 2, 8)


def shard(start: int, stop: int, tier: Tier, route: Route) -> StateShard:
    names = (MASTER,) if route is Route.RESIDENT else (MASTER, "mean")
    tensors = {}
    for name in names:
        values = torch.arange(start, stop, dtype=torch.float32)
        tensors[name] = TierTensor(stop - start, torch.float32, tier, values)
    return StateShard(start, stop, tier, route, tensors)


def spans_of(*shards: StateShard, param_groups: tuple[int | None, ...] = (0, 0, 0, 0)) -> tuple[UpdateSpans, Any]:
    parameters = [nn.Parameter(torch.zeros(size)) for size in SIZES]
    layout = make_layout([(str(index), (size,)) for index, size in enumerate(SIZES)], 1, 16)
    cpu = torch.device("cpu")
    ledger = Ledger()
    allocator = TierAllocator(cpu, Host(cpu, ledger, 1), None, ledger)
    region = slice(0, layout.numel)
    flat = Flat(layout, parameters, torch.float32, allocator, region=region, state_shards=shards)
    state: Any = defaultdict(dict)
    return UpdateSpans(flat, param_groups, state), state


RESIDENT = (0, 64, Tier.DEVICE, Route.RESIDENT)
ON_HOST = (0, 64, Tier.HOST, Route.CPU)


def test_equal_options_in_one_shard_are_one_span_without_padding():
    spans, _ = spans_of(shard(*RESIDENT))
    assert [(span.region.start, span.region.stop) for span in spans] == [(0, 20)]


def test_spans_end_where_options_change_and_leave_out_what_nobody_updates():
    spans, _ = spans_of(shard(*RESIDENT), param_groups=(0, 1, 1, None))
    assert [(span.param_group, span.region.start, span.region.stop) for span in spans] == [(0, 0, 4), (1, 4, 12)]


def test_a_parameter_in_two_shards_is_in_two_spans_that_join_to_all_of_it():
    spans, _ = spans_of(shard(0, 7, Tier.DEVICE, Route.RESIDENT), shard(7, 64, Tier.HOST, Route.CPU))
    parameter = spans.flat.parameters[1]
    places = spans.by_parameter()[parameter]
    assert [(piece.start, piece.stop) for _, piece in places] == [(0, 3), (3, 6)]
    assert [span.in_shard for span, _ in places] == [slice(0, 7), slice(0, 13)]


@pytest.mark.parametrize("place", [RESIDENT, ON_HOST], ids=["resident", "on host"])
def test_a_cut_gives_each_part_its_states_and_its_own_step_count(place):
    spans, state = spans_of(shard(*place))
    (whole,) = spans
    if whole.tensor is not None:
        state[whole.tensor] = {"mean": torch.arange(20.0), "step": torch.tensor(5.0)}
    else:
        whole.scalars = {"step": torch.tensor(5.0)}
    active = spans.active([True, False, True, True])
    assert [(span.region.start, span.region.stop) for span in active] == [(0, 4), (10, 20)]
    assert [(span.region.start, span.region.stop) for span in spans] == [(0, 4), (4, 10), (10, 20)]
    states = [spans.read(span, span.pieces[0]) for span in spans]
    assert [found["mean"].tolist() for found in states] == [
        [0.0, 1.0, 2.0, 3.0],
        [4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
        [10.0, 11.0],
    ]
    steps = [state[span.tensor]["step"] if span.tensor is not None else span.scalars["step"] for span in spans]
    steps[0] += 1
    assert [step.item() for step in steps] == [6.0, 5.0, 5.0]
    assert len(state) == (3 if place is RESIDENT else 0)


def test_nothing_is_cut_while_all_have_gradients():
    spans, _ = spans_of(shard(*ON_HOST))
    before = list(spans)
    assert spans.active([True] * 4) == before == list(spans)


def test_a_span_that_was_never_updated_has_no_states():
    spans, _ = spans_of(shard(*ON_HOST))
    (span,) = spans
    assert spans.read(span, span.pieces[0]) == {}
    span.scalars = {}
    assert list(spans.read(span, span.pieces[0])) == ["mean"]


def test_speculative_scalars_count_only_when_committed():
    spans, _ = spans_of(shard(*ON_HOST))
    (span,) = spans
    span.keep({"step": 1}, is_speculative=False)
    span.keep({"step": 2}, is_speculative=True)
    span.finish_commit()
    assert span.scalars == {"step": 1}
    span.is_committed = True
    span.finish_commit()
    assert (span.scalars, span.speculative_scalars, span.is_committed) == ({"step": 2}, None, False)


def test_a_later_certain_update_discards_a_speculative_one():
    spans, _ = spans_of(shard(*ON_HOST))
    (span,) = spans
    span.keep({"step": 2}, is_speculative=True)
    span.keep({"step": 1}, is_speculative=False)
    assert (span.scalars, span.speculative_scalars) == ({"step": 1}, None)


def test_commit_exchanges_the_tensors_of_a_shard():
    made = shard(*ON_HOST)
    made.spare = shard(*ON_HOST).tensors
    true, spare = made.tensors, made.spare
    made.commit_speculative()
    assert made.tensors is spare and made.spare is true
    assert made.master is spare[MASTER]
