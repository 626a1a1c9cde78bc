"""Control messages: small, on the CPU, once or twice a step. Ranks agree, or learn who is missing.

`check_equal` at prepare finds ranks with different models before they can hang. `agree` after each backward says
which parameters were used on any rank, and that all ranks gathered the same groups in the same order. `explain`
turns a time-out into an error that names the rank that is behind. Called by scheduling, preparing and checkpointing.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from zerostd.communication.world import World
from zerostd.errors import CommunicationError, MisuseError, PrepareError


class Control:
    """Exchanges small messages for one prepared model."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.num_backwards = 0
        self.num_meetings = 0
        self._key = "zerostd" if world.channels is None else f"zerostd/{world.channels.control.group_name}"

    def begin_backward(self) -> None:
        """Publish that this rank is in its next backward, for `explain` on other ranks."""
        self.num_backwards += 1
        if self.world.channels is not None:
            self.world.channels.store.set(f"{self._key}/{self.world.rank}", str(self.num_backwards))

    def agree(self, used: Sequence[bool], sequence: Sequence[str]) -> list[bool]:
        """Return for each parameter whether any rank used it; raise if ranks gathered groups in another `sequence`."""
        assert self.world.channels is not None
        checksum = zlib.crc32("\n".join(sequence).encode()).to_bytes(4, "little")
        tail = checksum + bytes(255 - byte for byte in checksum)
        message = torch.frombuffer(bytearray(bytes(used) + tail), dtype=torch.uint8)
        with self.explain("the end of backward" if used else "an agreement"):
            dist.all_reduce(message, dist.ReduceOp.MAX, group=self.world.channels.control)
        if not torch.equal(message[-8:-4], 255 - message[-4:]):
            everyone = self.collect(list(sequence))  # all ranks are here
            raise CommunicationError(
                "ranks gathered groups in different orders, so parameters may hold mixed values and this step was not "
                f"applied: {_first_difference(everyone)}. Modules that only some ranks call "
                "must share a group with one that all ranks call: pass groups=[...] with their parent's name"
            )
        return [bool(flag) for flag in message[:-8].tolist()]

    def confirm(self, name: str, num_flags: int) -> None:
        """Raise on all ranks unless all want to gather the group `name` now. With the `num_flags` of `agree`, a rank
        that is already at the end of backward is noticed too."""
        self.agree([False] * num_flags, ["now", name])

    def check_equal(self, what: str, lines: Sequence[str]) -> None:
        """Raise PrepareError if the `lines` of the ranks differ, with the first difference."""
        digests = self.collect(f"{len(lines)}:{zlib.crc32(chr(10).join(lines).encode())}")
        if len(set(digests)) > 1:
            everyone = self.collect(list(lines))
            raise PrepareError(f"ranks were given different {what}: {_first_difference(everyone)}")

    def collect(self, value: Any, what: str = "an exchange between ranks") -> list[Any]:
        """Return everyone's value, by rank; `what` names the exchange in errors."""
        if self.world.channels is None:
            return [value]
        out: list[Any] = [None] * self.world.size
        with self.explain(what):
            dist.all_gather_object(out, value, group=self.world.channels.control)
        return out

    def meet(self, what: str, value: Any) -> list[Any]:
        """Do the same for a call that all ranks must make, so that errors name a rank that did not."""
        self.num_meetings += 1
        if self.world.channels is not None:
            self.world.channels.store.set(f"{self._key}/met/{self.world.rank}", str(self.num_meetings))
        return self.collect(value, what)

    def collect_on_first(self, value: Any, what: str) -> list[Any]:
        """Return everyone's value on rank 0, nothing on the others."""
        if self.world.channels is None:
            return [value]
        out: list[Any] | None = [None] * self.world.size if self.world.rank == 0 else None
        with self.explain(what):
            dist.gather_object(value, out, group=self.world.channels.control, group_dst=0)
        return out or []

    @contextlib.contextmanager
    def explain(self, what: str) -> Iterator[None]:
        """Turn a failed or late collective into a CommunicationError that names the rank and the place."""
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            if isinstance(error, CommunicationError) or self.world.channels is None:
                raise
            raise CommunicationError(self._explanation(what, error)) from error

    def _explanation(self, what: str, error: BaseException) -> str:
        behind = []
        for rank in range(self.world.size):
            with contextlib.suppress(Exception):
                done = self._count(f"{rank}")
                if done < self.num_backwards:
                    behind.append(f"rank {rank} has begun {done} backward passes, this rank {self.num_backwards}")
                elif self._count(f"met/{rank}") < self.num_meetings:
                    behind.append(f"rank {rank} has not come to it")
        who = "; ".join(behind) or "no rank is behind in its count of backward passes, so one of them has failed"
        return (
            f"rank {self.world.rank} gave up waiting in {what} (time limit {self.world.timeout_s:g} s): {who}. Every "
            f"rank must run the same forwards, backwards and steps. Cause: {str(error).strip().splitlines()[0][:200]}"
        )

    def _count(self, name: str) -> int:
        assert self.world.channels is not None
        store = self.world.channels.store
        key = f"{self._key}/{name}"
        return int(store.get(key)) if store.check([key]) else 0


def check_same_activations(world: World, name: str, sizes: Sequence[int]) -> None:
    """Raise on all ranks of a user's process group if their activations of a group differ in number or size."""
    everyone = Control(world).collect(list(sizes))
    if any(theirs != everyone[0] for theirs in everyone):
        counts = [f"rank {rank}: {len(theirs)} of {sum(theirs)} bytes" for rank, theirs in enumerate(everyone)]
        raise MisuseError(
            "Placement(same_activations=...): the ranks of that process group have different activations in group "
            f"{name!r} ({', '.join(counts)}); name a group whose ranks run the same forward on the same batch"
        )


def _first_difference(everyone: list[list[str]]) -> str:
    """Return where the first rank that differs from rank 0 does so."""
    rank = next((rank for rank, lines in enumerate(everyone) if lines != everyone[0]), 0)
    for index, (ours, theirs) in enumerate(zip_longest(everyone[0], everyone[rank])):
        if ours is None or theirs is None:
            longer = 0 if theirs is None else rank
            num_more = len(everyone[longer]) - index
            return f"rank {longer} has {num_more} more, the first is {everyone[longer][index]!r}"
        if ours != theirs:
            return f"entry {index} is {ours!r} on rank 0 and {theirs!r} on rank {rank}"
    return "none, when they were compared again"
