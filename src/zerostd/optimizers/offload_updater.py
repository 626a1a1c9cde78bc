"""Updates of states off the device: one updater for each route that some shard takes, side by side.

`Updater` hands every task for such states to `launch`; the updaters carry tasks out in threads of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from zerostd.optimizers import disk_updater, streamed_updater
from zerostd.optimizers.cpu_updater import CpuUpdater
from zerostd.optimizers.disk_updater import DiskUpdater
from zerostd.optimizers.staging import tile_numel, widest_dtypes
from zerostd.optimizers.streamed_updater import StreamedUpdater
from zerostd.optimizers.tasks import UpdateTask
from zerostd.parameters import Group
from zerostd.parameters.flat import StateShard
from zerostd.policy import Kind, Route, Tier
from zerostd.sharding import Portion
from zerostd.tiers import Streams, TierAllocator, Transfer, record_event

NUM_FACTORS = 4


class OffloadUpdater:
    """Sends each task to the updater of its shard's route."""

    cpu: CpuUpdater | None
    streamed: StreamedUpdater | None
    disk: DiskUpdater | None

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        groups: tuple[Group, ...],
        allocator: TierAllocator,
        streams: Streams,
        *,
        num_threads: int,
    ) -> None:
        self.allocator = allocator
        self.device = allocator.device
        flats = [flat for group in groups for flat in group.trainable]
        placed = [(flat, shard) for flat in flats for shard in flat.state_shards]
        shards = [shard for _, shard in placed]

        def make_streamed(tier: Tier) -> StreamedUpdater | None:
            numel = _streamed_tile_numel(shards, tier)
            if not numel:
                return None
            dtypes = widest_dtypes(_on_route(shards, tier, Route.STREAMED))
            return StreamedUpdater(inner, dtypes, numel, self.device, streams, allocator.ledger)

        self.cpu = None
        if _on_route(shards, Tier.HOST, Route.CPU):
            on_host = [(flat, shard) for flat, shard in placed if shard.tier is Tier.HOST]
            self.cpu = CpuUpdater(inner, on_host, allocator, streams, num_threads=num_threads)
        self.streamed = make_streamed(Tier.HOST)
        self.disk = None
        on_disk = [(flat, shard) for flat, shard in placed if shard.tier is Tier.DISK]
        if on_disk:
            streamed = make_streamed(Tier.DISK)
            self.disk = DiskUpdater(inner, on_disk, allocator, streams, num_threads=num_threads, streamed=streamed)
        for updater in self._updaters.values():
            allocator.before_close(updater.worker.stop)
        self._factors = allocator.host.allocate(NUM_FACTORS * 4, Kind.BUFFERS).view(torch.float32)
        self._turn = 0

    @staticmethod
    def buffer_bytes(portions: Sequence[Portion], dtypes: Mapping[str, torch.dtype]) -> dict[Tier, int]:
        """Return the bytes of all staging slots by tier; `dtypes` are those of master and states."""
        on_device = [
            StreamedUpdater.buffer_bytes(dtypes, _streamed_tile_numel(portions, tier))
            for tier in (Tier.HOST, Tier.DISK)
        ]
        longest = max((portion.numel for portion in portions if portion.tier is Tier.DISK), default=0)
        return {Tier.DEVICE: sum(on_device), Tier.HOST: DiskUpdater.buffer_bytes(dtypes, longest)}

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


def _on_route(shards: Sequence[StateShard], tier: Tier, route: Route) -> list[StateShard]:
    return [shard for shard in shards if shard.tier is tier and shard.route is route]


def _streamed_tile_numel(stretches: Sequence[Portion | StateShard], tier: Tier) -> int:
    """Return the elements of a tile that passes through the device; 0 if no states of the tier do."""
    in_tier = [stretch for stretch in stretches if stretch.tier is tier]
    streamed = [stretch.numel for stretch in in_tier if stretch.route is Route.STREAMED]
    if not streamed:
        return 0
    if tier is Tier.HOST:
        return tile_numel(streamed_updater.TILE_NUMEL, max(streamed))
    return tile_numel(disk_updater.TILE_NUMEL, max(stretch.numel for stretch in in_tier))  # as the disk cuts them
