"""Updates of states off the device: one updater for each route that some shard takes, in threads beside the step.

`Updater` passes an `UpdateTask` for each span, which goes to the CPU's, the streamed or the disk's updater.
`buffer_bytes` says what their slots take, for `preparing/accounting.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from zerostd.kernels import column_bytes
from zerostd.optimizers import cpu_updater, streamed_updater
from zerostd.optimizers.cpu_updater import CpuUpdater, DiskUpdater, disk_unit, dtypes_on_disk
from zerostd.optimizers.spans import UpdateTask
from zerostd.optimizers.streamed_updater import (
    NUM_SLOTS,
    Column,
    StreamedUpdater,
    staged_dtypes,
    tile_numel,
    widest_dtypes,
)
from zerostd.parameters import Group
from zerostd.policy import Kind, Route, Tier
from zerostd.sharding import Portion
from zerostd.tiers import Streams, TierAllocator, Transfer, record_event

NUM_FACTORS = 4


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
        tile = tile_numel(streamed_updater.TILE_NUMEL, streamed)
        columns = widest_dtypes(map(dtypes_on_disk, from_disk))
        disk_tile = tile_numel(cpu_updater.DISK_TILE_NUMEL, from_disk, disk_unit(columns.values()))
        slots: dict[str, Any] = {
            "cpu": bool(by_cpu),
            "streamed": (tile, widest_dtypes(staged_dtypes(shard, self.device) for shard in streamed)),
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
        host_tile = tile_numel(streamed_updater.TILE_NUMEL, [states.portion for states in from_host])
        for through_device, numel in ((from_host, host_tile), (from_disk, disk_tile)):
            if through_device:
                staged = widest_dtypes(states.staged for states in through_device)
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
