"""Updates of states off the device: one updater for each route that some shard takes, side by side.

`Updater` hands every task for such states to `launch`; the updaters carry tasks out in threads of their own.
"""

from collections.abc import Mapping, Sequence

import torch
from torch.optim import Optimizer

from zerostd.optimizers import cpu_updater, streamed_updater
from zerostd.optimizers.cpu_updater import CpuUpdater, DiskUpdater
from zerostd.optimizers.spans import UpdateTask
from zerostd.optimizers.streamed_updater import NUM_SLOTS, StreamedUpdater, tile_numel
from zerostd.parameters import Group
from zerostd.policy import Kind, Route, Tier
from zerostd.sharding import Portion
from zerostd.tiers import Streams, TierAllocator, Transfer, record_event

NUM_FACTORS = 4


class OffloadUpdater:
    """Sends each task to the updater of its shard's route."""

    def __init__(
        self, inner: Optimizer, groups: Sequence[Group], allocator: TierAllocator, streams: Streams, *, num_threads: int
    ) -> None:
        self.allocator = allocator
        self.device = allocator.device
        flats = [flat for group in groups for flat in group.trainable]
        on_host = [(flat, shard) for flat in flats for shard in flat.state_shards if shard.tier is Tier.HOST]
        on_disk = [(flat, shard) for flat in flats for shard in flat.state_shards if shard.tier is Tier.DISK]
        streamed = [shard for _, shard in on_host if shard.route is Route.STREAMED]
        self.cpu: CpuUpdater | None = None
        self.streamed: StreamedUpdater | None = None
        self.disk: DiskUpdater | None = None
        if any(shard.route is Route.CPU for _, shard in on_host):
            self.cpu = CpuUpdater(inner, on_host, allocator, streams, num_threads=num_threads)
        if streamed:
            numel = tile_numel(streamed_updater.TILE_NUMEL, streamed)
            self.streamed = StreamedUpdater(inner, streamed, numel, allocator, streams)
        if on_disk:
            self.disk = DiskUpdater(inner, on_disk, allocator, streams, num_threads=num_threads)
        for updater in self._updaters.values():
            allocator.before_close(updater.worker.stop)
        self._factors = allocator.host.allocate(NUM_FACTORS * 4, Kind.BUFFERS).view(torch.float32)
        self._turn = 0

    @staticmethod
    def buffer_bytes(portions: Sequence[Portion], dtypes: Mapping[str, torch.dtype]) -> dict[Tier, int]:
        """Return the bytes of all staging slots by tier; `dtypes` are those of master and states."""
        on_disk = [portion for portion in portions if portion.tier is Tier.DISK]
        disk_tile = tile_numel(cpu_updater.DISK_TILE_NUMEL, on_disk)
        streamed = [portion for portion in portions if portion.route is Route.STREAMED]
        from_host = [portion for portion in streamed if portion.tier is Tier.HOST]
        on_device = tile_numel(streamed_updater.TILE_NUMEL, from_host)
        if len(from_host) < len(streamed):
            on_device += disk_tile
        on_host = NUM_SLOTS * disk_tile * sum(dtype.itemsize for dtype in dtypes.values())
        return {Tier.DEVICE: StreamedUpdater.buffer_bytes(dtypes, on_device), Tier.HOST: on_host}

    def launch(self, task: UpdateTask) -> Transfer:
        """Start the update of one span."""
        shard = task.span.shard
        updater = self.streamed if shard.route is Route.STREAMED else self.cpu
        updater = self.disk if shard.tier is Tier.DISK else updater
        assert updater is not None
        return updater.launch(task)

    @property
    def _updaters(self) -> dict[str, CpuUpdater | StreamedUpdater]:
        updaters = {"cpu": self.cpu, "streamed": self.streamed, "disk": self.disk}
        return {name: updater for name, updater in updaters.items() if updater is not None}

    def copy_to_host(self, factor: torch.Tensor) -> tuple[torch.Tensor, Transfer]:
        """Start copying a factor to the host, for the threads that need it as a number; returns its memory there, and
        when it has arrived."""
        self._turn = (self._turn + 1) % NUM_FACTORS
        memory = self._factors[self._turn]
        memory.copy_(factor.reshape(()), non_blocking=True)
        return memory, record_event(self.device)

    def close(self) -> None:
        """End the threads and give their memory back; nothing may be under way."""
        for updater in self._updaters.values():
            updater.close()
        self.allocator.host.free(self._factors)

    def drain(self) -> None:
        """Return when every update so far is done; raise if one failed."""
        for updater in self._updaters.values():
            updater.worker.drain()
        if self.disk is not None:
            self.disk.wait_writes()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def busy(self) -> dict[str, float]:
        """Return the seconds that each route's thread has worked since it was made."""
        return {name: updater.busy_s for name, updater in self._updaters.items()}

    def check(self) -> None:
        """Raise if a thread has failed."""
        for updater in self._updaters.values():
            updater.worker.check()
