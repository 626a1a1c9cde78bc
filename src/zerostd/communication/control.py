"""Control messages: small, on the CPU, once or twice a step. Ranks agree, or learn who is missing.

`check_equal` at prepare finds ranks with different models before they can hang. `agree` after each backward says
which parameters were used on any rank, and that all ranks gathered the same groups in the same order. `explain`
turns a time-out into an error that names the rank that is behind.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerostd.communication.world import World
from zerostd.errors import CommunicationError, PrepareError

__all__ = ["Control"]


class Control:
    """Small messages of one prepared model."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.num_backwards = 0
        self.num_meetings = 0
        self._key = "zerostd" if world.channels is None else f"zerostd/{world.channels.control.group_name}"

    def begin_backward(self) -> None:
        """Leave word that this rank is in its next backward: what `explain` reads."""
        self.num_backwards += 1
        if self.world.channels is not None:
            self.world.channels.store.set(f"{self._key}/{self.world.rank}", str(self.num_backwards))

    def agree(self, used: Sequence[bool], sequence: Sequence[str]) -> list[bool]:
        """By parameter: whether any rank used it. Raises if ranks differ in `sequence`, the groups they gathered."""
        assert self.world.channels is not None
        checksum = zlib.crc32("\n".join(sequence).encode()).to_bytes(4, "little")
        tail = checksum + bytes(255 - byte for byte in checksum)
        message = torch.frombuffer(bytearray(bytes(used) + tail), dtype=torch.uint8)
        with self.explain("the end of backward" if used else "an agreement"):
            dist.all_reduce(message, dist.ReduceOp.MAX, group=self.world.channels.control)
        if not torch.equal(message[-8:-4], 255 - message[-4:]):
            self._raise_for_order(list(sequence))
        return [bool(flag) for flag in message[:-8].tolist()]

    def confirm(self, name: str, num_flags: int) -> None:
        """All ranks want to gather the group `name` now, or all get an error. As long as an agreement, so that a rank
        that is there already is noticed too: `num_flags` is the number of parameters that train."""
        self.agree([False] * num_flags, ["now", name])

    def check_equal(self, what: str, lines: Sequence[str]) -> None:
        """Refuse ranks whose `lines` differ, naming the first difference."""
        if self.world.size == 1:
            return
        digest = f"{len(lines)}:{zlib.crc32(chr(10).join(lines).encode())}"
        digests = self.collect(digest)
        if len(set(digests)) == 1:
            return
        everyone = self.collect(list(lines))
        other = next(rank for rank, found in enumerate(digests) if found != digests[0])
        raise PrepareError(
            f"ranks were given different {what}: {_first_difference(everyone[0], everyone[other], other)}"
        )

    def collect(self, value: Any, what: str = "an exchange between ranks") -> list[Any]:
        """Everyone's value, by rank."""
        if self.world.channels is None:
            return [value]
        out: list[Any] = [None] * self.world.size
        with self.explain(what):
            dist.all_gather_object(out, value, group=self.world.channels.control)
        return out

    def meet(self, what: str, value: Any) -> list[Any]:
        """The same for a call that all ranks must make: one that does not is named."""
        self.num_meetings += 1
        if self.world.channels is not None:
            self.world.channels.store.set(f"{self._key}/met/{self.world.rank}", str(self.num_meetings))
        return self.collect(value, what)

    def collect_on_first(self, value: Any, what: str) -> list[Any]:
        """Everyone's value on rank 0, nothing on the others."""
        if self.world.channels is None:
            return [value]
        out: list[Any] | None = [None] * self.world.size if self.world.rank == 0 else None
        with self.explain(what):
            dist.gather_object(value, out, group=self.world.channels.control, group_dst=0)
        return out or []

    def _raise_for_order(self, sequence: list[str]) -> None:
        """All ranks are here: say where their orders part."""
        everyone = self.collect(sequence)
        other = next((rank for rank, found in enumerate(everyone) if found != everyone[0]), 0)
        raise CommunicationError(
            "ranks gathered groups in different orders, so parameters may hold mixed values and this step was not "
            f"applied: {_first_difference(everyone[0], everyone[other], other)}. Modules that only some ranks call "
            "must share a group with one that all ranks call: pass groups=[...] with their parent's name"
        )

    @contextlib.contextmanager
    def explain(self, what: str) -> Iterator[None]:
        """Turn a failed or late collective into an error that names rank and place."""
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            if isinstance(error, CommunicationError) or self.world.channels is None:
                raise
            raise CommunicationError(self._story(what, error)) from error

    def _story(self, what: str, error: BaseException) -> str:
        behind = []
        for rank in range(self.world.size):
            with contextlib.suppress(Exception):
                done, met = self._count(f"{rank}"), self._count(f"met/{rank}")
                if done < self.num_backwards:
                    behind.append(f"rank {rank} has begun {done} backward passes, this rank {self.num_backwards}")
                elif met < self.num_meetings:
                    behind.append(f"rank {rank} has not come to it")
        who = "; ".join(behind) or "no rank is behind in its count of backward passes, so one of them has failed"
        return (
            f"rank {self.world.rank} gave up waiting in {what} (time limit {self.world.timeout_s:g} s): {who}. Every "
            f"rank must run the same forwards, backwards and steps. Cause: {str(error).strip().splitlines()[0][:200]}"
        )

    def _count(self, name: str) -> int:
        """What a rank left word of."""
        assert self.world.channels is not None
        store, key = self.world.channels.store, f"{self._key}/{name}"
        return int(store.get(key)) if store.check([key]) else 0


def _first_difference(mine: list[str], theirs: list[str], other: int) -> str:
    for index, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        if a != b:
            return f"entry {index} is {a!r} on rank 0 and {b!r} on rank {other}"
    longer, rank = (mine, 0) if len(mine) > len(theirs) else (theirs, other)
    return f"rank {rank} has {abs(len(mine) - len(theirs))} more, the first is {longer[min(len(mine), len(theirs))]!r}"
