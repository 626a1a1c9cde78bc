"""The reducer: how gradients land by themselves, and how those of several ranks pass through staging."""

from __future__ import annotations

import pytest
import torch

from scheduling.small_groups import CPU, SHAPE, Bench, Update, parameter_of
from zerostd.communication import Control, Wires
from zerostd.monitoring import Ledger
from zerostd.parameters import Gradient, GradientHandle, Group
from zerostd.parameters.host_gradient import NUM_STAGING, Staging
from zerostd.policy import Kind, Tier
from zerostd.scheduling.reducing import GroupGradients, Reducer, TrainedParameter
from zerostd.tiers import Transfer


class Ops:
    """Handles pass their calls to it; none is made here."""


def trained(group: Group) -> TrainedParameter:
    parameter = parameter_of(group)
    handle = GradientHandle(group.name, parameter, Ops())
    return TrainedParameter(group, group.flats[0], 0, parameter, handle)


def brought(group: Group, value: float, *, adds: bool = False) -> GroupGradients:
    gradients = GroupGradients(group)
    gradients.take(trained(group), torch.full(SHAPE, value), adds=adds)
    return gradients


def gradient_of(group: Group) -> Gradient:
    gradient = group.flats[0].gradient
    assert gradient is not None
    return gradient


def landed(group: Group) -> list[float]:
    """The values of its gradient, without padding."""
    return gradient_of(group).current[: parameter_of(group).numel()].unique().tolist()


class Loopback(Wires):
    """Two ranks that bring the same: this rank's slice lands when somebody waits."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench.world, bench.ledger)
        self.sent: list[Update] = []
        self.buffers: list[int] = []

    def reduce(self, full: torch.Tensor, land: torch.Tensor, *, accumulate: bool = False) -> Transfer:
        self.buffers.append(full.data_ptr())
        assert not accumulate
        self.sent.append(Update(lambda: land.copy_(full[: land.numel()])))
        return self.sent[-1]

    def reduce_everywhere(self, full: torch.Tensor) -> Transfer:
        self.sent.append(Update())
        return self.sent[-1]


def two_ranks(num_groups: int, *, keeps_whole: bool = False) -> tuple[Reducer, Loopback, list[Group], Ledger]:
    bench = Bench(world_size=2)
    wires = Loopback(bench)
    names = [f"g{index}" for index in range(num_groups)]
    groups = [bench.group(name, rests_on=Tier.DEVICE, trains=True, keeps_whole=keeps_whole) for name in names]
    reducer = Reducer(wires, Control(Bench().world))
    reducer.reserve(tuple(groups))
    return reducer, wires, groups, bench.ledger


def test_alone_a_gradient_lands_at_once_and_later_passes_add_to_it() -> None:
    bench = Bench()
    group = bench.group(trains=True)
    reducer = Reducer(bench.wires, Control(bench.world))
    first = brought(group, 1.0)
    assert reducer.launch(first, sync=True) == [group] and landed(group) == [1.0]
    assert first.grads[group.flats[0]] == [None]  # autograd's memory is free
    reducer.launch(brought(group, 2.0, adds=True), sync=True)
    assert landed(group) == [3.0] and gradient_of(group).is_summed
    reducer.launch(brought(group, 5.0, adds=False), sync=True)  # p.grad was set to None in between
    assert landed(group) == [5.0]


def test_a_second_gradient_of_the_same_pass_is_summed() -> None:
    group = Bench().group(trains=True)
    gradients = GroupGradients(group)
    assert gradients.num_missing == 1
    for _ in range(2):
        gradients.take(trained(group), torch.ones(SHAPE), adds=False)
    (grad,) = gradients.grads[group.flats[0]]
    assert gradients.num_missing == 0 and grad is not None and grad.unique().tolist() == [2.0]


def test_two_staging_buffers_serve_any_number_of_groups() -> None:
    reducer, wires, groups, ledger = two_ranks(5)
    for value, group in enumerate(groups):
        reducer.launch(brought(group, float(value)), sync=True)
    assert len(set(wires.buffers)) == NUM_STAGING
    largest = gradient_of(groups[0]).layout.numel * 4
    receives = largest  # one receive buffer of the wires
    resting = sum(flat.full.nbytes for group in groups for flat in group.flats)
    assert ledger.now[Tier.DEVICE, Kind.BUFFERS] == NUM_STAGING * largest + receives
    assert ledger.now[Tier.DEVICE, Kind.PARAMETERS] == resting


def test_a_staging_buffer_is_filled_again_only_when_what_it_held_has_left() -> None:
    reducer, wires, groups, _ = two_ranks(NUM_STAGING + 1)
    for value, group in enumerate(groups[:NUM_STAGING]):
        reducer.launch(brought(group, float(value)), sync=True)
    assert [sent.num_waits for sent in wires.sent] == [0] * NUM_STAGING
    reducer.launch(brought(groups[-1], 9.0), sync=True)
    assert [sent.num_waits for sent in wires.sent] == [1, 0, 0]
    reducer.wait()
    assert [landed(group) for group in groups] == [[0.0], [1.0], [9.0]]


def test_in_the_last_pass_a_group_has_landed_when_the_one_after_the_next_is_sent() -> None:
    reducer, wires, groups, _ = two_ranks(3)
    reducer.begin()
    assert reducer.launch(brought(groups[0], 1.0), sync=True, is_last=True) == []
    assert reducer.launch(brought(groups[1], 2.0), sync=True, is_last=True) == []
    assert [sent.num_waits for sent in wires.sent] == [0, 0]
    assert reducer.launch(brought(groups[2], 3.0), sync=True, is_last=True) == [groups[0]]
    assert landed(groups[0]) == [1.0]


def test_a_group_whose_update_goes_on_later_has_landed_when_the_next_one_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Group, "is_updated_later", True)
    reducer, _, groups, _ = two_ranks(2)
    reducer.begin()
    assert reducer.launch(brought(groups[0], 1.0), sync=True, is_last=True) == []
    assert reducer.launch(brought(groups[1], 2.0), sync=True, is_last=True) == [groups[0]]
    assert landed(groups[0]) == [1.0]


def test_without_sync_gradients_are_summed_and_sent_with_the_next_pass() -> None:
    reducer, wires, (group,), _ = two_ranks(1)
    reducer.launch(brought(group, 1.0), sync=False)
    assert wires.sent == []
    reducer.launch(brought(group, 2.0, adds=True), sync=True)
    reducer.wait()
    assert landed(group) == [3.0]


def test_gradients_kept_whole_are_summed_over_passes() -> None:
    reducer, _, (group,), ledger = two_ranks(1, keeps_whole=True)
    assert ledger.now[Tier.DEVICE, Kind.BUFFERS] == gradient_of(group).layout.numel * 4  # received, and no staging
    for value, total in ((1.0, 1.0), (2.0, 3.0), (4.0, 7.0)):
        reducer.launch(brought(group, value, adds=value > 1.0), sync=True)
        reducer.wait()
        assert landed(group) == [total]
    reducer.launch(brought(group, 5.0), sync=True)  # another step
    reducer.wait()
    assert landed(group) == [5.0]


def test_staging_grows_and_books_what_it_holds() -> None:
    ledger, staging = Ledger(), Staging()
    staging.reserve([64] * NUM_STAGING, CPU, ledger)
    first, buffer, _ = staging.take(16, torch.float32)
    assert buffer.shape == (16,)
    busy = Update()
    staging.occupy(first, until=busy)
    assert staging.take(16, torch.float32)[0] != first and staging.take(16, torch.float32)[2] is busy
    staging.reserve([32] * NUM_STAGING, CPU, ledger)  # large enough already
    assert busy.num_waits == 0 and ledger.now[Tier.DEVICE, Kind.BUFFERS] == NUM_STAGING * 64
    staging.reserve([128] * NUM_STAGING, CPU, ledger)
    assert busy.num_waits == 1 and ledger.now[Tier.DEVICE, Kind.BUFFERS] == NUM_STAGING * 128
    assert staging.take(32, torch.float32)[1].shape == (32,)


def test_staging_that_was_emptied_is_as_large_as_the_next_gradients_need() -> None:
    ledger, staging = Ledger(), Staging()
    staging.reserve([128] * NUM_STAGING, CPU, ledger)
    first, _, _ = staging.take(32, torch.float32)
    busy = Update()
    staging.occupy(first, until=busy)
    staging.empty()
    assert busy.num_waits == 1 and ledger.now[Tier.DEVICE, Kind.BUFFERS] == 0
    staging.empty()
    staging.reserve([32] * NUM_STAGING, CPU, ledger)
    assert ledger.now[Tier.DEVICE, Kind.BUFFERS] == NUM_STAGING * 32
    assert staging.take(8, torch.float32)[1].shape == (8,)


def test_only_the_largest_gradient_needs_the_larger_staging_buffer() -> None:
    ledger, staging = Ledger(), Staging()
    staging.reserve(Staging.sizes([16, 64, 32]), CPU, ledger)
    assert ledger.now[Tier.DEVICE, Kind.BUFFERS] == 64 + 32
    assert [staging.take(16, torch.float32)[0] for _ in range(2)] == [0, 0]
    assert {staging.take(8, torch.float32)[0] for _ in range(2)} == {0, 1}
    alone = Staging()
    alone.reserve(Staging.sizes([64]), CPU, ledger)
    assert [alone.take(16, torch.float32)[0] for _ in range(2)] == [0, 0]
