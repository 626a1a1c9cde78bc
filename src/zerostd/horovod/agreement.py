"""CallAgreement: every rank announces what it is about to do with its optimizer, so that all ranks do the same.

A rank that diverges from its peers, such as one that alone asks for a state_dict, raises at once instead of waiting for
them. A rank in `join` announces that, receives what the others do, and follows them.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerostd import CommunicationError


class Event(enum.IntEnum):
    """What a rank is about to do."""

    JOIN = 0
    BACKWARD = 1
    STEP = 2
    CLIP = 3
    STATE = 4


IN_WORDS = (
    "hvd.join()",
    "a backward pass",
    "optimizer.step()",
    "optimizer.clip_grad_norm_()",
    "optimizer.state_dict()",
)


class Call(NamedTuple):
    """The announcement of one rank, with two numbers whose meaning depends on the event."""

    event: Event
    has_loaded: bool  # the optimizer has states that it must take first
    first: float = 0.0
    second: float = 0.0


class CallAgreement:
    """The announcements of all ranks, over the CPU. They are sent at once and received when somebody asks."""

    num_joined: int  # ranks in join, as of the last announcement received
    last_rank: int  # the last rank that was not

    def __init__(self) -> None:
        self._group: Any = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._work: Any = None
        self._rows = [torch.zeros(len(Call._fields)) for _ in range(dist.get_world_size() if self._group else 1)]
        self.num_joined = 0
        self.last_rank = len(self._rows) - 1

    def announce(self, call: Call) -> None:
        """Start to send what this rank does now. Earlier announcements are received first."""
        self.receive()
        row = torch.tensor(call, dtype=torch.float64)
        self._rows = [torch.empty_like(row) for _ in self._rows] if self._group is not None else [row]
        if self._group is not None:
            self._work = dist.all_gather(self._rows, row, group=self._group, async_op=True)

    def receive(self) -> list[Call]:
        """Wait for the last announcement of each rank. Raise if ranks that have not joined differ."""
        if self._work is not None:
            work = self._work
            self._work = None
            work.wait()
        calls = [
            Call(Event(int(event)), bool(has_loaded), first, second)
            for event, has_loaded, first, second in (row.tolist() for row in self._rows)
        ]
        active = [rank for rank, call in enumerate(calls) if call.event is not Event.JOIN]
        self.num_joined = len(calls) - len(active) if active else 0  # when all have joined, all continue
        if active:
            self.last_rank = active[-1]
        for rank in active:
            first_rank = active[0]
            if calls[rank].event is not calls[first_rank].event:
                raise CommunicationError(
                    f"rank {first_rank} is at {IN_WORDS[calls[first_rank].event]} and rank {rank} at "
                    f"{IN_WORDS[calls[rank].event]}: every rank must make these calls, so move them out of `if "
                    "hvd.rank() == 0:`. A rank that has no data left calls hvd.join()"
                )
        return calls

    def share(self, value: Any) -> Any:
        """Return the value of a rank that has not joined."""
        objects = [value]
        dist.broadcast_object_list(objects, group_src=self.last_rank, group=self._group)
        return objects[0]

    def close(self) -> None:
        """Destroy the group."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
