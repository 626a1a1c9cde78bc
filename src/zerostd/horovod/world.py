"""The processes under Horovod's names, and the Session between `init` and `shutdown`.

A process that no launcher started is a world of one, which needs no process group. Every rank announces what it is
about to do with its optimizer. One that diverges from its peers, such as a rank that alone asks for a state_dict,
raises at once instead of waiting for them. A rank in `join` receives what the others do, and follows them.
"""

from __future__ import annotations

import enum
import os
import weakref
from typing import Any

import torch
import torch.distributed as dist

from zerostd import CommunicationError, MisuseError, NotSupportedError

OTHER_LAUNCHERS = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


class Event(enum.Enum):
    """A call that a rank is about to make. Error messages quote its fields."""

    JOIN = "hvd.join()"
    BACKWARD = "a backward pass"
    STEP = "optimizer.step()"
    CLIP = "optimizer.clip_grad_norm_()"
    STATE = "optimizer.state_dict()"


EVENTS = tuple(Event)  # they are sent by number

Call = tuple[Event, float, float]  # an announcement, with two numbers whose meaning depends on the event


class Session:
    """The announcements of all ranks, over the CPU. They are sent at once and received on request."""

    def __init__(self, owns_world: bool) -> None:
        is_distributed = dist.is_initialized()
        self.rank = dist.get_rank() if is_distributed else 0
        self.size = dist.get_world_size() if is_distributed else 1
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()  # distributed optimizers that are alive
        self.num_joined = 0  # ranks in join, as of the last announcement received
        self.last_rank = self.size - 1  # the last rank that was not
        self.owns_world = owns_world  # init made the process group, so shutdown destroys it
        self.group: Any = dist.new_group(backend="gloo") if is_distributed else None
        self._work: Any = None
        self._rows = torch.empty(0, 3)  # the last announcements, by rank

    def announce(self, event: Event, first: float = 0.0, second: float = 0.0) -> None:
        """Start to send what this rank does now. Earlier announcements are received first."""
        self.receive()
        row = torch.tensor([EVENTS.index(event), first, second], dtype=torch.float64)
        self._rows = row.repeat(self.size, 1)
        if self.group is not None:
            self._work = dist.all_gather(list(self._rows), row, group=self.group, async_op=True)

    def receive(self) -> list[Call]:
        """Wait for the last announcement of each rank. Raise if ranks that have not joined differ."""
        if self._work is not None:
            work = self._work
            self._work = None
            work.wait()
        calls = [(EVENTS[int(number)], first, second) for number, first, second in self._rows.tolist()]
        active = [rank for rank, (event, *_) in enumerate(calls) if event is not Event.JOIN]
        self.num_joined = self.size - len(active) if active else 0  # when all have joined, all continue
        if active:
            self.last_rank = active[-1]
        for rank in active:
            expected, *_ = calls[active[0]]
            event, *_ = calls[rank]
            if event is not expected:
                raise CommunicationError(
                    f"rank {active[0]} is at {expected.value} and rank {rank} at {event.value}: every rank must make "
                    "these calls, so move them out of `if hvd.rank() == 0:`. A rank without data calls hvd.join()"
                )
        return calls

    def check_present(self, call: str) -> None:
        """Refuse a call in which ranks in join would not take part."""
        self.receive()
        if self.num_joined:
            raise NotSupportedError(
                f"{call} while {self.num_joined} rank(s) are in hvd.join(): they follow backward passes, "
                "optimizer.clip_grad_norm_() and optimizer.step(), and nothing else. Call it after hvd.join()"
            )

    def share(self, value: Any) -> Any:
        """Return the value of a rank that has not joined."""
        objects = [value]
        dist.broadcast_object_list(objects, group_src=self.last_rank, group=self.group)
        return objects[0]


OPEN: list[Session] = []  # the session, from init to shutdown


def session() -> Session:
    """Return the session that `init` opened."""
    if not OPEN:
        raise MisuseError("hvd was used before hvd.init(): call hvd.init() first, on every process")
    return OPEN[0]


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the processes that torchrun started, or be a world of one. An existing process group is used."""
    if comm is not None or process_sets is not None:
        raise NotSupportedError("hvd.init(comm, process_sets): all processes take part in everything; leave them out")
    if OPEN:
        return
    num_processes = int(os.environ.get("WORLD_SIZE", "0"))
    owns_world = not dist.is_initialized() and num_processes > 1
    if owns_world:
        dist.init_process_group(backends_with(torch.accelerator.current_accelerator(check_available=True)))
    elif not dist.is_initialized() and num_processes == 0:
        for name in OTHER_LAUNCHERS:
            if int(os.environ.get(name, "1")) > 1:
                raise NotSupportedError(
                    f"{name}={os.environ[name]}: mpirun or horovodrun started the processes, so each would run alone. "
                    "Start them with `torchrun --nproc-per-node N script.py`"
                )
    OPEN.append(Session(owns_world))


def backends_with(accelerator: torch.device | None) -> str:
    """Return torch's backend for the CPU, and that for the accelerator if there is one."""
    if accelerator is None:
        return "gloo"
    return f"cpu:gloo,{accelerator.type}:{dist.get_default_backend_for_device(accelerator)}"


def shutdown() -> None:
    """Close the session, and destroy the process group if `init` made it. Distributed optimizers cannot step then."""
    while OPEN:
        last = OPEN.pop()
        if last.group is not None and dist.is_initialized():
            dist.destroy_process_group(None if last.owns_world else last.group)


def is_initialized() -> bool:
    """Return whether `init` was called."""
    return bool(OPEN)


def rank() -> int:
    """Return the number of this process."""
    return session().rank


def size() -> int:
    """Return the number of processes."""
    return session().size


def local_rank() -> int:
    """Return the number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", rank()))


def local_size() -> int:
    """Return the number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", size()))
