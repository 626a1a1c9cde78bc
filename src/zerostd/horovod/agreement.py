"""CallAgreement: every rank announces what it is about to do with its optimizer, so that all ranks do the same.

Ranks that diverge, such as one that alone asks for a state_dict, raise at once instead of waiting for each other. A
rank in `join` announces that, learns what the others do, and follows them.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import torch.distributed as dist

from zerostd import CommunicationError

__all__ = ["Call", "CallAgreement", "Event"]


class Event(enum.Enum):
    """What a rank is about to do, in words for errors."""

    JOIN = "hvd.join()"
    BACKWARD = "a backward pass"
    STEP = "optimizer.step()"
    CLIP = "optimizer.clip_grad_norm_()"
    STATE = "optimizer.state_dict()"


class Call(NamedTuple):
    """The announcement of one rank."""

    event: Event
    detail: Any  # what a rank in join must know to follow
    has_loaded: bool  # the optimizer has states that it must take first


class CallAgreement:
    """The announcements of all ranks, sent over the CPU."""

    num_joined: int  # ranks that are in join, as of the last announcement
    last_rank: int  # the last rank that was not

    def __init__(self) -> None:
        self._group: Any = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.num_joined = 0
        self.last_rank = 0 if self._group is None else dist.get_world_size() - 1

    def agree(self, call: Call) -> list[Call]:
        """Return the calls of all ranks. Raise if those of ranks that have not joined differ."""
        calls = [call]
        if self._group is not None:
            calls *= dist.get_world_size()
            dist.all_gather_object(calls, call, group=self._group)
        active = [number for number, call in enumerate(calls) if call.event is not Event.JOIN]
        self.num_joined = len(calls) - len(active) if active else 0  # when all have joined, all continue
        if active:
            self.last_rank = active[-1]
        for number in active:
            first = active[0]
            if calls[number].event is not calls[first].event:
                raise CommunicationError(
                    f"rank {first} is at {calls[first].event.value} and rank {number} at {calls[number].event.value}: "
                    "every rank must make these calls, so move them out of `if hvd.rank() == 0:`. A rank that has no "
                    "data left calls hvd.join()"
                )
        return calls

    def close(self) -> None:
        """Give the group back."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
