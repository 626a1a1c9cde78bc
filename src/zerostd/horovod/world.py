"""The processes under Horovod's names: who this one is, and how many there are.

`init` and `shutdown` open and close the SESSION that the other files of this room look into. A process that no
launcher started is a world of one, which needs no process group.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
import torch.distributed as dist

from zerostd import MisuseError, NotSupportedError
from zerostd.horovod.agreement import CallAgreement

OTHER_LAUNCHERS = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


class Session:
    """State between `init` and `shutdown`."""

    def __init__(self) -> None:
        self.agreement: CallAgreement | None = None  # there is one while the session is open
        self.owns_group = False  # init made the process group, so shutdown destroys it
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()  # distributed optimizers that are alive


SESSION = Session()


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the processes that torchrun started, or be a world of one. An existing process group is used.

    Raises:
        NotSupportedError: A communicator or process sets are passed, or a launcher other than torchrun is used.
    """
    if comm is not None or process_sets is not None:
        raise NotSupportedError(
            f"hvd.init(comm={comm!r}, process_sets={process_sets!r}): all processes take part in everything; call "
            "hvd.init() and start as many processes as there should be ranks"
        )
    num_processes = int(os.environ.get("WORLD_SIZE", "0"))
    if not dist.is_initialized() and num_processes == 0:
        _check_launcher()
    if not dist.is_initialized() and num_processes > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        SESSION.owns_group = True
    if SESSION.agreement is None:
        SESSION.agreement = CallAgreement()


def _check_launcher() -> None:
    for name in OTHER_LAUNCHERS:
        if int(os.environ.get(name, "1")) > 1:
            raise NotSupportedError(
                f"{name}={os.environ[name]}: the processes were started by mpirun or horovodrun, and each would be a "
                "world of one. Start them with `torchrun --nproc-per-node N script.py`"
            )


def shutdown() -> None:
    """Close the session, and destroy the process group if `init` made it. Distributed optimizers cannot step then."""
    SESSION.optimizers.clear()
    if SESSION.agreement is not None:
        SESSION.agreement.close()
        SESSION.agreement = None
    if SESSION.owns_group and dist.is_initialized():
        dist.destroy_process_group()
    SESSION.owns_group = False


def is_initialized() -> bool:
    """Return whether `init` was called."""
    return SESSION.agreement is not None


def rank() -> int:
    """Return the number of this process."""
    agreement()
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """Return the number of processes."""
    agreement()
    return dist.get_world_size() if dist.is_initialized() else 1


def local_rank() -> int:
    """Return the number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", rank()))


def local_size() -> int:
    """Return the number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", size()))


def cross_rank() -> int:
    """Return the number of this machine."""
    return rank() // local_size()


def cross_size() -> int:
    """Return the number of machines, all of which have the same number of processes."""
    return -(-size() // local_size())


def agreement() -> CallAgreement:
    """Return the agreement of this session's ranks."""
    if SESSION.agreement is None:
        raise MisuseError("hvd was used before hvd.init(): call hvd.init() first, on every process")
    return SESSION.agreement
