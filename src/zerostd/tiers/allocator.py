"""The allocator of a prepared model: tier tensors on the device, the host and the disk.

On host and disk an owner (a name) reserves an arena of the exact size for each kind, and its tensors are cut from it;
so what it has can be given back when it moves. `preparing` and `replanning` allocate; the runtime closes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import torch

from zerostd.monitoring import Ledger
from zerostd.policy import Kind, Tier
from zerostd.tiers.disk import Disk, Extent
from zerostd.tiers.host import Host
from zerostd.tiers.pages import padded
from zerostd.tiers.tier_tensor import TierTensor

Arena = tuple[str, Tier, Kind]  # of an owner


class TierAllocator:
    """Allocates in the tiers of one prepared model."""

    disk: Disk | None

    def __init__(self, device: torch.device, host: Host, disk: Disk | None, ledger: Ledger) -> None:
        self.device = device
        self.host = host
        self.disk = disk
        self.ledger = ledger
        self._arenas: dict[Arena, torch.Tensor | Extent] = {}
        self._used: Counter[Arena] = Counter()  # bytes of each
        self._on_device: dict[tuple[str, Kind], list[int]] = {}  # bytes of each tensor, by owner
        self._stops: list[Callable[[], None]] = []

    def reserve(self, owner: str, tier: Tier, kind: Kind, num_bytes: int) -> None:
        """Allocate the arena that an owner's tensors of one kind will be cut from; the device needs none."""
        if num_bytes > 0 and tier is not Tier.DEVICE:
            self._arenas[owner, tier, kind] = self.allocate_bytes(tier, kind, num_bytes)

    def allocate(self, owner: str, tier: Tier, kind: Kind, numel: int, dtype: torch.dtype) -> TierTensor:
        """Return zeros in a tier. On host and disk they come from the arena reserved for owner and kind."""
        if tier is Tier.DEVICE:
            tensor = torch.zeros(numel, dtype=dtype, device=self.device)
            self.ledger.enter(kind, tensor.nbytes)
            self._on_device.setdefault((owner, kind), []).append(tensor.nbytes)
            return TierTensor(numel, dtype, tier, tensor)
        arena = (owner, tier, kind)
        start = self._used[arena]
        self._used[arena] += padded(numel * dtype.itemsize)
        return TierTensor.cut(self._arenas[arena], start, numel, dtype, self.disk)

    def free(self, owner: str, kind: Kind) -> None:
        """Give back what an owner has of one kind; its tensors must not be used any more."""
        for num_bytes in self._on_device.pop((owner, kind), ()):
            self.ledger.leave(kind, num_bytes)
        for tier in (Tier.HOST, Tier.DISK):
            self._used.pop((owner, tier, kind), None)
            memory = self._arenas.pop((owner, tier, kind), None)
            if memory is not None:
                self.free_bytes(memory)

    def allocate_bytes(self, tier: Tier, kind: Kind, num_bytes: int) -> torch.Tensor | Extent:
        """Return memory of the host or an extent of the disk."""
        if tier is Tier.HOST:
            return self.host.allocate(num_bytes, kind)
        assert self.disk is not None
        return self.disk.allocate(num_bytes, kind)

    def free_bytes(self, memory: torch.Tensor | Extent) -> None:
        """Give back what `allocate_bytes` returned."""
        if isinstance(memory, Extent):
            assert self.disk is not None
            self.disk.free(memory)
        else:
            self.host.free(memory)

    def before_close(self, stop: Callable[[], None]) -> None:
        """Call `stop` before anything is given back: it ends a thread that uses the memory."""
        self._stops.append(stop)

    def close(self) -> None:
        """Give back everything off the device."""
        for stop in self._stops:
            stop()
        self._arenas.clear()
        self.host.free_all()
        if self.disk is not None:
            self.disk.close()

    def close_aside(self) -> None:
        """Do the same from any thread, also from one that `close` waits for: the garbage collector runs anywhere."""
        if threading.current_thread() is threading.main_thread():
            self.close()
        else:
            threading.Thread(target=self.close).start()
