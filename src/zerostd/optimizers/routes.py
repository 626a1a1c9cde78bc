"""The routes of updates off the device's own states, side by side, each made only if some portion takes it."""

from __future__ import annotations

import torch

from zerostd.optimizers import from_disk
from zerostd.optimizers.arithmetic import HostNumber
from zerostd.optimizers.from_disk import FromDisk
from zerostd.optimizers.on_cpu import OnCpu
from zerostd.optimizers.orders import Order
from zerostd.optimizers.streamed import Streamed
from zerostd.optimizers.tiles import tile_numel
from zerostd.parameters import Group
from zerostd.parameters.state_shard import StateShard
from zerostd.policy import Kind, Route, Tier
from zerostd.tiers import Streams, TierAllocator, Transfer, record_event

__all__ = ["Routes"]

TILE_NUMEL = 8 << 20
NUM_NUMBERS = 4


class Routes:
    """Sends each run by its portion's route."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        groups: tuple[Group, ...],
        stores: TierAllocator,
        streams: Streams,
        *,
        num_threads: int,
    ) -> None:
        self.stores = stores
        self.device = stores.device
        state_shards = [shard for group in groups for flat in group.trainable for shard in flat.state_shards]
        self.cpu: OnCpu | None = None
        self.disk: FromDisk | None = None
        if _some(state_shards, Tier.HOST, Route.CPU):
            self.cpu = OnCpu(inner, stores, streams, num_threads=num_threads, name="the update on the processor")

        def make_streamed(tier: Tier) -> Streamed | None:
            found = _some(state_shards, tier, Route.STREAMED)
            if not found:
                return None
            all_tiles = found if tier is Tier.HOST else [one for one in state_shards if one.portion.tier is tier]
            longest = max(shard.portion.numel for shard in all_tiles)  # of the disk they come as the disk cuts them
            most = TILE_NUMEL if tier is Tier.HOST else from_disk.TILE_NUMEL
            return Streamed(inner, _columns(found), tile_numel(most, longest), self.device, streams, stores.ledger)

        self.streamed = make_streamed(Tier.HOST)
        on_disk = [shard for shard in state_shards if shard.portion.tier is Tier.DISK]
        if on_disk:
            self.disk = FromDisk(inner, stores, streams, num_threads=num_threads, name="the update of states on disk")
            self.disk.reserve_slots(_columns(on_disk), max(shard.portion.numel for shard in on_disk))
            self.disk.streamed = make_streamed(Tier.DISK)
        for route, tier in ((self.cpu, Tier.HOST), (self.disk, Tier.DISK)):
            if route is not None:
                flats = [flat for group in groups for flat in group.trainable]
                route.reserve_all([flat for flat in flats if any(s.portion.tier is tier for s in flat.state_shards)])
        for updater in self._made:
            stores.before_close(updater.worker.stop)
        self._numbers = stores.host.allocate(NUM_NUMBERS * 4, Kind.BUFFERS).view(torch.float32)
        self._turn = 0

    def launch(self, order: Order) -> Transfer:
        """Start the update of one run."""
        portion = order.run.shard.portion
        route = self.streamed if portion.route is Route.STREAMED else self.cpu
        route = self.disk if portion.tier is Tier.DISK else route
        assert route is not None
        return route.launch(order)

    @property
    def _made(self) -> list[OnCpu | Streamed]:
        return [route for route in (self.cpu, self.streamed, self.disk) if route is not None]

    def to_host(self, factor: torch.Tensor | None) -> HostNumber | None:
        """A factor on its way to the threads that need it as a number."""
        if factor is None:
            return None
        self._turn = (self._turn + 1) % NUM_NUMBERS
        memory = self._numbers[self._turn]
        memory.copy_(factor.reshape(()), non_blocking=True)
        return HostNumber(memory, record_event(self.device))

    def close(self) -> None:
        """End the threads and give their memory back; nothing may be under way."""
        for route in self._made:
            route.close()
        self.stores.host.free(self._numbers)

    def drain(self) -> None:
        """Return when every update so far is done; raise if one failed."""
        for route in self._made:
            route.worker.drain()
        if self.disk is not None:
            self.disk.settle()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def busy(self) -> dict[str, float]:
        """Seconds that each route's thread has worked since it was made."""
        routes = {"cpu": self.cpu, "streamed": self.streamed, "disk": self.disk}
        return {name: route.busy_s for name, route in routes.items() if route is not None}

    def check(self) -> None:
        """Raise if a thread has failed."""
        for route in self._made:
            route.worker.check()


def _some(state_shards: list[StateShard], tier: Tier, route: Route) -> list[StateShard]:
    return [shard for shard in state_shards if shard.portion.tier is tier and shard.portion.route is route]


def _columns(state_shards: list[StateShard]) -> dict[str, torch.dtype]:
    """Names and dtypes of all columns, the widest dtype of each."""
    found: dict[str, torch.dtype] = {}
    for shard in state_shards:
        for name, column in shard.columns.items():
            found[name] = torch.promote_types(found.get(name, column.dtype), column.dtype)
    return found
