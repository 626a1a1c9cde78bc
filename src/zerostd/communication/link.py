"""The link between workers and parameter servers: gradients there, new parameters back, and calls.

The last ranks of a world are servers: they hold masters and states, and run no forward. The others are workers, which
own no shard. Every message goes from one rank to another one, over gloo, in tiles. A worker sends the same sequence to
every server, so the sequences of all workers must be alike:

    PUSH flat     this server's slice of the gradient of one flat follows, tile by tile
    STEP          the first worker's request follows; new parameters are the answer
    CALL          the first worker's request follows, for a checkpoint; the first server answers every worker
    END           this worker needs the servers no more

Parameters come back under a separate number for each flat, so they may be sent in any order.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zerostd.communication.peers import Peers
from zerostd.errors import CommunicationError

TILE_BYTES = 8 << 20
CALLS = 0  # number of the messages that are in sequence
PARAMETERS = 1  # number of the first flat's parameters


class Message(enum.IntEnum):
    """What a worker sends next."""

    PUSH = 1
    STEP = 2
    CALL = 3
    END = 4


@dataclass(frozen=True, eq=False)
class ServerLink:
    """This process among workers and servers. Ranks are those of the group: workers first."""

    group: dist.ProcessGroup  # of all, gloo
    peers: Peers
    rank: int
    num_workers: int
    num_servers: int

    @property
    def is_server(self) -> bool:
        return self.rank >= self.num_workers

    @property
    def workers(self) -> range:
        return range(self.num_workers)

    @property
    def servers(self) -> range:
        return range(self.num_workers, self.num_workers + self.num_servers)

    def send(self, tensor: torch.Tensor, to: int, number: int = CALLS) -> list[dist.Work]:
        """Start sending a contiguous tensor to a rank, tile by tile."""
        tiles = tensor.view(torch.uint8).split(TILE_BYTES)
        works = [dist.isend(tile, group_dst=to, group=self.group, tag=number) for tile in tiles]
        return [work for work in works if work is not None]

    def receive(self, tensor: torch.Tensor, source: int, number: int = CALLS) -> list[dist.Work]:
        """Start receiving into a contiguous tensor from a rank, tile by tile."""
        tiles = tensor.view(torch.uint8).split(TILE_BYTES)
        works = [dist.irecv(tile, group_src=source, group=self.group, tag=number) for tile in tiles]
        return [work for work in works if work is not None]

    def wait(self, works: Sequence[dist.Work], what: str, *, has_limit: bool = True) -> None:
        """Return when these messages have passed. A rank that is gone is named."""
        with self.peers.at(what), self.peers.waiting():
            for work in works:
                if has_limit:
                    work.wait()
                else:
                    work.wait(timedelta(days=365))

    def announce(self, message: Message, flat: int = 0) -> list[dist.Work]:
        """Start announcing the next call to every server."""
        head = torch.tensor([int(message), flat])
        return [work for server in self.servers for work in self.send(head, server)]

    def next_message(self) -> tuple[Message, int]:
        """Return what all workers send next, on a server. Waits as long as it takes."""
        heads = torch.zeros(self.num_workers, 2, dtype=torch.int64)
        works = [work for worker in self.workers for work in self.receive(heads[worker], worker)]
        self.wait(works, "the next message of the workers", has_limit=False)
        if not bool((heads == heads[0]).all()):
            said = "; ".join(f"rank {r}: {Message(int(m)).name} {int(f)}" for r, (m, f) in enumerate(heads))
            raise CommunicationError(f"workers do not make the same calls: {said}. Make the same calls on all workers")
        return Message(int(heads[0, 0])), int(heads[0, 1])

    def broadcast(self, value: torch.Tensor) -> torch.Tensor:
        """Return the first worker's values, on the device of `value`."""
        host = value.detach().to("cpu").contiguous()
        with self.peers.waiting():
            dist.broadcast(host.view(-1).view(torch.uint8), group_src=0, group=self.group)
        return host.to(value.device)

    def call(self, request: Any, what: str) -> Any:
        """Let the servers do something, on all workers; the request is the first one's. Returns their answer."""
        self.ask(Message.CALL, request, what)
        ready = torch.zeros(1, dtype=torch.int64)
        self.wait(self.receive(ready, self.servers[0]), what, has_limit=False)  # a checkpoint takes its time
        return self._receive_object(self.servers[0], what)

    def ask(self, message: Message, request: Any, what: str) -> None:
        """Announce a STEP or a CALL on all workers, and send the request of the first one."""
        self.wait(self.announce(message), what)
        for server in self.servers if self.rank == 0 else ():
            self._send_object(request, server)

    def request(self) -> Any:
        """Return the request that follows a STEP or a CALL, on a server."""
        return self._receive_object(0, "a call of the workers")

    def answer(self, value: Any) -> None:
        """Answer a call, on all servers; workers get the first one's."""
        if self.rank == self.servers[0]:
            for worker in self.workers:
                self.wait(self.send(torch.ones(1, dtype=torch.int64), worker), "the answer to a call")
                self._send_object(value, worker)

    def _send_object(self, value: Any, to: int) -> None:
        with self.peers.waiting():
            dist.send_object_list([value], group=self.group, group_dst=to)

    def _receive_object(self, source: int, what: str) -> Any:
        values = [None]
        with self.peers.at(what), self.peers.waiting():
            dist.recv_object_list(values, group=self.group, group_src=source)
        return values[0]

    def close(self) -> None:
        """Tell the servers once that this worker has ended, if they are still there, and close the way to them."""
        if not dist.is_initialized() or not self.peers.is_open:
            return
        with contextlib.suppress(RuntimeError, ValueError):
            if not self.is_server:
                for work in self.announce(Message.END):
                    work.wait(timedelta(seconds=10))
            dist.destroy_process_group(self.group)
        self.peers.close()
