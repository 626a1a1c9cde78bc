"""The door: every rank tells what it is about to do with its optimizer, so that all do the same.

A rank that goes another way than its peers, such as one that alone asks for a state_dict, is found at once instead of
being waited for. A rank in `join` says so, hears what the others do, and follows them.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerostd import CommunicationError

__all__ = ["Call", "Door", "Event"]


class Event(enum.IntEnum):
    """What a rank is about to do."""

    JOINED = 0
    PASS = 1
    STEP = 2
    CLIP = 3
    STATE = 4

    @property
    def text(self) -> str:
        """For errors."""
        return {
            Event.JOINED: "hvd.join()",
            Event.PASS: "a backward pass",
            Event.STEP: "optimizer.step()",
            Event.CLIP: "optimizer.clip_grad_norm_()",
            Event.STATE: "optimizer.state_dict()",
        }[self]


class Call(NamedTuple):
    """What one rank said, with two numbers that belong to it."""

    event: Event
    first: float = 0.0
    second: float = 0.0


class Door:
    """Small messages of one optimizer, on the CPU. They are sent at once and heard when somebody asks."""

    num_joined: int  # ranks that were in join when ranks last heard from each other
    last_rank: int  # the last one that was not

    def __init__(self) -> None:
        self._group: Any = dist.new_group(backend="gloo")
        self._work: Any = None
        self._heard = [torch.tensor(Call(Event.STATE), dtype=torch.float64) for _ in range(dist.get_world_size())]
        self.num_joined = 0
        self.last_rank = dist.get_world_size() - 1
        weakref.finalize(self, _close, self._group)

    def tell(self, call: Call) -> None:
        """Say what this rank does now; what was said before is heard first."""
        self.hear()
        mine = torch.tensor(call, dtype=torch.float64)
        self._work = dist.all_gather(self._heard, mine, group=self._group, async_op=True)

    def hear(self) -> list[Call]:
        """What each rank said last. Raises if those that have not joined differ."""
        if self._work is not None:
            work, self._work = self._work, None
            work.wait()
        calls = [Call(Event(int(row[0])), float(row[1]), float(row[2])) for row in self._heard]
        active = [number for number, call in enumerate(calls) if call.event is not Event.JOINED]
        self.num_joined = len(calls) - len(active) if active else 0  # when all have, they go on
        if active:
            self.last_rank = active[-1]
        for number in active:
            if calls[number].event is not calls[active[0]].event:
                raise CommunicationError(
                    f"rank {active[0]} is at {calls[active[0]].event.text} and rank {number} at "
                    f"{calls[number].event.text}: every rank must make these calls, so move them out of `if "
                    "hvd.rank() == 0:`. A rank that has no data left calls hvd.join()"
                )
        return calls

    def share(self, value: Any) -> Any:
        """The value of a rank that has not joined, on all ranks."""
        held = [value]
        dist.broadcast_object_list(held, group_src=self.last_rank, group=self._group)
        return held[0]


def _close(group: Any) -> None:
    if dist.is_initialized():
        with contextlib.suppress(ValueError, AssertionError):  # it went with the process group
            dist.destroy_process_group(group)
