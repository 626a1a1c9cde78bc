"""The update of one group: each span goes to the updater of its route.

Resident states are updated at once, by `ResidentUpdater`. `OffloadUpdater` passes an `UpdateTask` for each span with
states elsewhere to the updater of its route, which makes the update in a thread beside the step and after it; pending
updates are in `group.updates`. For the optimizer it is still one step: options are those the user set, and counters in
its param_groups move once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from operator import is_
from typing import Any, Literal, NamedTuple

import torch
from torch.optim import Optimizer

from zerostd.compat import no_torch_function
from zerostd.errors import MisuseError
from zerostd.kernels import NUM_SLOTS, column_bytes
from zerostd.monitoring import Ledger
from zerostd.optimizers import cpu_updater
from zerostd.optimizers.cpu_updater import CpuUpdater, DiskUpdater, disk_unit, dtypes_on_disk
from zerostd.optimizers.elementwise import written_options
from zerostd.optimizers.resident_updater import ResidentUpdater
from zerostd.optimizers.spans import StepOptions, UpdateSpans, UpdateTask, snapshot
from zerostd.optimizers.staging import Column, staged_dtypes, tile_numel, widest_dtypes
from zerostd.optimizers.streamed_updater import StreamedUpdater, most_numel
from zerostd.parameters import Flat, Group
from zerostd.parameters.prepared import GRAD
from zerostd.policy import Kind, Route, Tier
from zerostd.sharding import Portion
from zerostd.tiers import Streams, TierAllocator, Transfer, record_event

NUM_FACTORS = 4

Scope = Literal["all", "speculative", "rest"]


class PassingStates(NamedTuple):
    """A planned portion of states, with the dtypes by name of the states in its tier, and of the states that pass
    through the device if it is streamed."""

    portion: Portion
    kept: Mapping[str, Column]
    staged: Mapping[str, Column]


class OffloadUpdater:
    """Sends each task to the updater of its shard's route."""

    def __init__(
        self, inner: Optimizer, groups: Sequence[Group], allocator: TierAllocator, streams: Streams, *, num_threads: int
    ) -> None:
        self.allocator = allocator
        self.device = allocator.device
        self.updaters: dict[str, CpuUpdater | StreamedUpdater] = {}
        self._inner = inner
        self._streams = streams
        self._num_threads = num_threads
        self._slots: dict[str, Any] = {}  # by updater: what its memory depends on
        self.follow(groups)
        self._factors = allocator.host.allocate(NUM_FACTORS * 4, Kind.BUFFERS).view(torch.float32)
        self.last_factor: tuple[torch.Tensor, Transfer] | None = None  # of the last step that had one, and its arrival
        self._turn = 0

    def follow(self, groups: Sequence[Group]) -> None:
        """Serve the shards that are off the device now. An updater with nothing left to do ends, and one whose slots
        are too small is replaced. The others continue their work, which may be for other groups."""
        placed = [(flat, shard) for group in groups for flat in group.trainable for shard in flat.state_shards]
        on_host = [(flat, shard) for flat, shard in placed if shard.tier is Tier.HOST]
        by_cpu = [(flat, shard) for flat, shard in on_host if shard.route is Route.CPU]
        streamed = [shard for _, shard in on_host if shard.route is Route.STREAMED]
        on_disk = [(flat, shard) for flat, shard in placed if shard.tier is Tier.DISK]
        from_disk = [shard for _, shard in on_disk]
        staged = widest_dtypes(staged_dtypes(shard, self.device) for shard in streamed)
        tile = tile_numel(most_numel(staged), streamed)
        columns = widest_dtypes(map(dtypes_on_disk, from_disk))
        disk_tile = tile_numel(cpu_updater.DISK_TILE_NUMEL, from_disk, disk_unit(columns.values()))
        slots: dict[str, Any] = {
            "cpu": bool(by_cpu),
            "streamed": (tile, staged),
            "disk": (disk_tile, columns, {shard.route for shard in from_disk}),
        }
        for name in [name for name in self.updaters if self._slots[name] != slots[name]]:
            self._drain(self.updaters[name])
            self.updaters.pop(name).close()
        basis = (self.allocator, self._streams)
        if by_cpu and "cpu" not in self.updaters:
            self.updaters["cpu"] = CpuUpdater(self._inner, by_cpu, *basis, self._num_threads)
        if streamed and "streamed" not in self.updaters:
            self.updaters["streamed"] = StreamedUpdater(self._inner, streamed, tile, *basis)
        if on_disk and "disk" not in self.updaters:
            self.updaters["disk"] = DiskUpdater(self._inner, on_disk, *basis, self._num_threads)
        for name, served in (("cpu", by_cpu), ("disk", on_disk)):
            if isinstance(updater := self.updaters.get(name), CpuUpdater):
                updater.serve(served)
        self._slots = slots
        for updater in self.updaters.values():
            self.allocator.before_close(updater.worker.stop)

    @staticmethod
    def buffer_bytes(passing: Sequence[PassingStates]) -> dict[Tier, int]:
        """Return the bytes of all staging slots by tier."""
        on_disk = [states for states in passing if states.portion.tier is Tier.DISK]
        kept = widest_dtypes(states.kept for states in on_disk)
        unit = disk_unit(kept.values())
        disk_tile = tile_numel(cpu_updater.DISK_TILE_NUMEL, [states.portion for states in on_disk], unit)
        in_slots = NUM_SLOTS * sum(column_bytes(dtype, disk_tile) for dtype in kept.values())
        sizes = {Tier.DEVICE: 0, Tier.HOST: in_slots}
        streamed = [states for states in passing if states.portion.route is Route.STREAMED]
        from_host = [states for states in streamed if states.portion.tier is Tier.HOST]
        from_disk = [states for states in streamed if states.portion.tier is Tier.DISK]
        for through_device in (from_host, from_disk):
            if through_device:
                staged = widest_dtypes(states.staged for states in through_device)
                numel = disk_tile
                if through_device is from_host:
                    numel = tile_numel(most_numel(staged), [states.portion for states in from_host])
                sizes[Tier.DEVICE] += StreamedUpdater.buffer_bytes(staged, numel)
        return sizes

    def launch(self, task: UpdateTask) -> Transfer:
        """Start the update of one span."""
        shard = task.span.shard
        return self.updaters["disk" if shard.tier is Tier.DISK else shard.route.value].launch(task)

    def copy_to_host(self, factor: torch.Tensor) -> tuple[torch.Tensor, Transfer]:
        """Start copying a factor to the host, for the threads that need it as a number; returns its memory there, and
        when it has arrived."""
        self._turn = (self._turn + 1) % NUM_FACTORS
        memory = self._factors[self._turn]
        memory.copy_(factor.reshape(()), non_blocking=True)
        self.last_factor = (memory, record_event(self.device))
        return self.last_factor

    def close(self) -> None:
        """End the threads and give their memory back; nothing may be under way."""
        for updater in self.updaters.values():
            updater.close()
        self.allocator.host.free(self._factors)

    def drain(self) -> None:
        """Return when every update so far is done; raise if one failed."""
        for updater in self.updaters.values():
            self._drain(updater)

    def _drain(self, updater: CpuUpdater | StreamedUpdater) -> None:
        updater.worker.drain()
        if isinstance(updater, DiskUpdater):
            updater.wait_writes()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def busy(self) -> dict[str, float]:
        """Return the seconds that each route's thread has worked since it was made."""
        return {name: updater.busy_s for name, updater in self.updaters.items()}

    def check(self) -> None:
        """Raise if a thread has failed."""
        for updater in self.updaters.values():
            updater.worker.check()


@dataclass(eq=False, repr=False)
class Updater:
    """Updates groups."""

    inner: Optimizer
    groups: tuple[Group, ...]
    device: InitVar[torch.device]
    ledger: Ledger
    offload: OffloadUpdater | None  # None: all states are on the device
    states: Mapping[str, torch.dtype]  # long ones that the optimizer will make, as far as known

    def __post_init__(self, device: torch.device) -> None:
        self.resident = ResidentUpdater(self.inner, self.states, device, self.ledger)
        self._note_members()
        self.spans = {flat: self.make_spans(flat) for group in self.groups for flat in group.trainable}
        self._set_offload(self.offload)

    def make_spans(self, flat: Flat) -> UpdateSpans:
        """Return the spans of a flat as it is now, without states."""
        return UpdateSpans(flat, [self.param_group_of.get(p) for p in flat.parameters], self.resident.state)

    @property
    def has_new_members(self) -> bool:
        """Whether parameters were taken out of param_groups, moved to others or put in since the last step."""
        groups = self.inner.param_groups
        members = [p for group in groups for p in group["params"]]
        indices = [index for index, group in enumerate(groups) for _ in group["params"]]
        return indices != list(self.param_group_of.values()) or not all(map(is_, members, self.param_group_of))

    def _note_members(self) -> None:
        self.user_groups = self.inner.param_groups
        self.param_group_of = {p: index for index, group in enumerate(self.user_groups) for p in group["params"]}

    def _follow_members(self) -> None:
        """Let spans follow parameters that were taken out of param_groups or moved to others."""
        members = [p for group in self.inner.param_groups for p in group["params"]]
        known = {p for flat in self.spans for p in flat.parameters}
        foreign = [p for p in members if p not in known]
        if foreign or len(set(members)) < len(members):
            raise MisuseError(
                f"param_groups have {len(foreign)} parameters that this optimizer was not prepared with, or one twice: "
                "shards are already laid out. Put all parameters into the optimizer before zerostd.prepare; use lr=0 "
                "for parameters that should train later"
            )
        self.drain()
        self._note_members()
        for flat, spans in self.spans.items():
            spans.regroup([self.param_group_of.get(p) for p in flat.parameters])

    def check(self) -> None:
        """Raise if an update off the device has failed."""
        if self.offload is not None:
            self.offload.check()

    def drain(self) -> None:
        """Return when every update so far is done; raise if one failed."""
        if self.offload is not None:
            self.offload.drain()

    def moved(self, offload: OffloadUpdater | None) -> None:
        """Continue with states that have moved."""
        self._set_offload(offload)
        self.resident.count_states()

    def _set_offload(self, offload: OffloadUpdater | None) -> None:
        self.offload = offload
        # A step changes param_groups, so it must be complete before they are read again
        self.counts_in_groups = offload is not None and bool(written_options(self.inner))
        self.resident.fit(self.groups)

    def step_options(self, factor: torch.Tensor | None) -> StepOptions:
        """Return the options that a step passes to its updates; `factor` is that of the gradients, None for one."""
        if self.has_new_members:
            self._follow_members()
        self.user_groups = self.inner.param_groups
        param_groups = snapshot(self.user_groups)
        if factor is None or self.offload is None:
            return StepOptions(param_groups, factor)
        return StepOptions(param_groups, factor, *self.offload.copy_to_host(factor))

    def update(self, group: Group, options: StepOptions, scope: Scope = "all", *, is_complete: bool = False) -> None:
        """Start the update of the spans of `group` that have gradients; `is_complete` says that all have. The scope
        "speculative" are those with spare tensors, which are updated into these; "rest" are those without."""
        group.wait_readers()
        group.commit_edits()
        self.resident.begin()
        is_speculative = scope == "speculative"
        for flat in group.trainable:
            with no_torch_function():
                has_gradient = [is_complete or GRAD.__get__(p) is not None for p in flat.parameters]
            if not any(has_gradient):
                continue
            for span in self.spans[flat].active(has_gradient):
                if scope != "all" and bool(span.shard.spare) != is_speculative:
                    continue
                if span.shard.is_resident:
                    self.resident.add(flat, span, options)
                    continue
                assert self.offload is not None and flat.gradient is not None
                step = self.ledger.events.step
                task = UpdateTask.make(group, flat, span, options, step=step, is_speculative=is_speculative)
                transfer = self.offload.launch(task)
                flat.gradient.hold(transfer)
                group.add_update(transfer)
            if flat.gradient is not None and flat.gradient.host_copy is not None:
                flat.gradient.host_copy.drop_overwritten()
            flat.mark_updated()
        self.resident.finish(group, options)

    def commit_speculative(self, group: Group) -> None:
        """Commit the speculative updates of a group, which may still be running."""
        for flat in group.trainable:
            for span in self.spans[flat]:
                span.is_committed = bool(span.shard.spare)
            for shard in flat.state_shards:
                if shard.spare:
                    shard.commit_speculative()

    def keep_counters(self, options: StepOptions) -> None:
        """Copy what the optimizer wrote into its param_groups to the user's, after all groups."""
        for index, group in list(options.written.items()):  # threads may add to it
            for key, value in group.items():
                if key != "params" and not isinstance(value, torch.Tensor):
                    self.user_groups[index][key] = value

    def check_memory(self) -> None:
        """Raise if there is not enough memory for the first update, before anything has changed."""
        self.resident.check_memory(span for spans in self.spans.values() for span in spans)

    def scratch_memory(self) -> list[torch.Tensor]:
        """Return working memory on the device; nothing may be under way."""
        streamed = self.offload.updaters.get("streamed") if self.offload is not None else None
        return [self.resident.scratch, *(streamed.memories if isinstance(streamed, StreamedUpdater) else ())]
