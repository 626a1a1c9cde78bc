"""Traffic between workers and servers: gradients are pushed and added up, new parameters come back.

`WorkerWires` are a worker's wires: a reduce sends every server its slice, and a gather receives the slices from there.
`GradientSums` is the other end of a push. Sums are in the order of ranks, so bits are those of ranks without servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
import torch.distributed as dist

from zerostd.communication.link import PARAMETERS, TILE_BYTES, Message, ServerLink
from zerostd.communication.wires import Collective, Wires, as_real
from zerostd.communication.world import World
from zerostd.compat import storage_of
from zerostd.errors import MisuseError
from zerostd.kernels import sum_slices
from zerostd.monitoring import Ledger
from zerostd.policy import Kind
from zerostd.tiers import Transfer


class WorkerWires(Wires):
    """The wires of a worker: gradients go to the servers, and parameters come from there."""

    def __init__(self, world: World, ledger: Ledger) -> None:
        super().__init__(world, ledger)
        assert world.link is not None
        self.link = world.link
        self.is_alone = False
        self._numbers: dict[int, int] = {}  # of flats, by the storage of their parameters and of their gradients

    def register(self, flats: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """Note the gathered parameters and the gradients of all flats that train, in the same order on all ranks."""
        for number, tensors in enumerate(flats):
            for tensor in tensors:
                assert tensor is not None
                self._numbers[storage_of(tensor)] = number

    def reserve(self, largest: int) -> None:
        """Do nothing: nothing is received here."""

    def reduce(self, full: torch.Tensor, land: torch.Tensor, *, accumulate: bool = False) -> Transfer:
        """Start sending every server its slice of a gradient. Nothing lands here."""
        if accumulate:
            raise MisuseError(
                "a backward pass would add to gradients that the servers have used already: call optimizer.zero_grad() "
                "after each optimizer.step(), and pass the number of passes in a step to prepare(accumulate=...)"
            )
        number = self._numbers[storage_of(full)]
        host = full if full.device.type == "cpu" else _to_host(full)
        works = []
        with self.link.peers.waiting():
            works += self.link.announce(Message.PUSH, number)
            for server, part in zip(self.link.servers, host.view(self.link.num_servers, -1), strict=True):
                works += self.link.send(part, server)
        self.ledger.sent["reduce"] += full.nbytes
        return Collective(self.world, works)

    def gather(self, full: torch.Tensor, shard: torch.Tensor | None = None) -> Transfer:
        """Start receiving the parameters of a flat, a slice from every server."""
        number = self._numbers[storage_of(full)]
        is_here = full.device.type == "cpu"
        host = full if is_here else torch.empty_like(full, device="cpu", pin_memory=True)
        works = []
        with self.link.peers.waiting():
            for server, part in zip(self.link.servers, host.view(self.link.num_servers, -1), strict=True):
                works += self.link.receive(part, server, PARAMETERS + number)

        def bring_up() -> None:
            full.copy_(host, non_blocking=True)

        return Collective(self.world, works, None if is_here else bring_up)


def _to_host(full: torch.Tensor) -> torch.Tensor:
    """Return a gradient in pinned host memory; holds the host until it is there."""
    host = torch.empty_like(full, device="cpu", pin_memory=True)
    host.copy_(full, non_blocking=True)
    torch.accelerator.current_stream(full.device).synchronize()
    return host


class GradientSums:
    """Sums the gradients that all workers send to one server, tile by tile: the next is received meanwhile."""

    def __init__(self, link: ServerLink, ledger: Ledger, num_threads: int, *, factor: float) -> None:
        self.link = link
        self._num_threads = num_threads
        self._factor = factor  # of the sum
        self._memories = [torch.empty(link.num_workers * TILE_BYTES, dtype=torch.uint8) for _ in range(2)]
        ledger.enter(Kind.BUFFERS, 2 * link.num_workers * TILE_BYTES)

    def land(self, target: torch.Tensor, dtype: torch.dtype, name: str) -> None:
        """Write to `target` the sum of what workers send for it in `dtype`, in the order of their ranks."""
        rounds = enumerate(target.split(TILE_BYTES // dtype.itemsize))
        pending = [self._receive(index, part, dtype) for index, part in islice(rounds, 1)]
        while pending:
            received, works, part = pending.pop()
            pending += [self._receive(index, following, dtype) for index, following in islice(rounds, 1)]
            self.link.wait(works, f"the gradient of {name!r}")
            slices = as_real(received)
            sum_slices(slices, self.link.num_workers, self._factor, as_real(part), num_threads=self._num_threads)

    def _receive(
        self, index: int, part: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, list[dist.Work], torch.Tensor]:
        num_bytes = self.link.num_workers * part.numel() * dtype.itemsize
        received = self._memories[index % 2][:num_bytes].view(dtype)
        rows = received.view(self.link.num_workers, -1)
        works = [work for worker in self.link.workers for work in self.link.receive(rows[worker], worker)]
        return received, works, part
