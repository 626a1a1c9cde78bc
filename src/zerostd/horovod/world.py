"""Who I am among the processes, by Horovod's names. A process that no launcher started is a world of one."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
import torch.distributed as dist

from zerostd import MisuseError, NotSupportedError

__all__ = [
    "SESSION",
    "check_process_set",
    "check_rank",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "gloo_built",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "shutdown",
    "size",
]

OTHER_LAUNCHERS = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


class ProcessSet:
    """All processes: the only set there is."""

    def __repr__(self) -> str:
        return "global_process_set"


global_process_set = ProcessSet()


class Session:
    """What is between `init` and `shutdown`."""

    def __init__(self) -> None:
        self.is_open = False
        self.owns_group = False  # init made the process group, so shutdown ends it
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()  # distributed ones that are alive


SESSION = Session()


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the processes that torchrun started, or be a world of one. A process group that is there is used.

    Raises:
        NotSupportedError: A communicator or process sets are passed, or another launcher than torchrun is at work.
    """
    if comm is not None or process_sets is not None:
        raise NotSupportedError(
            f"hvd.init(comm={comm!r}, process_sets={process_sets!r}): all processes take part in everything; call "
            "hvd.init() and start as many processes as there should be ranks"
        )
    if not dist.is_initialized():
        if "WORLD_SIZE" not in os.environ:
            _check_launcher()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
            SESSION.owns_group = True
    SESSION.is_open = True


def _check_launcher() -> None:
    for name in OTHER_LAUNCHERS:
        if int(os.environ.get(name, "1")) > 1:
            raise NotSupportedError(
                f"{name}={os.environ[name]}: the processes were started by mpirun or horovodrun, and each would be a "
                "world of one. Start them with `torchrun --nproc-per-node N script.py`"
            )


def shutdown() -> None:
    """Leave. The process group goes if `init` made it; models stay as they are, their optimizers cannot step."""
    SESSION.optimizers.clear()
    if SESSION.owns_group and dist.is_initialized():
        dist.destroy_process_group()
    SESSION.is_open = SESSION.owns_group = False


def is_initialized() -> bool:
    """Whether `init` was called."""
    return SESSION.is_open


def rank() -> int:
    """This process's number among all."""
    return dist.get_rank() if _is_grouped("rank") else 0


def size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if _is_grouped("size") else 1


def local_rank() -> int:
    """This process's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", rank())) if _is_grouped("local_rank") else 0


def local_size() -> int:
    """How many processes are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", size())) if _is_grouped("local_size") else 1


def cross_rank() -> int:
    """This machine's number."""
    return rank() // local_size()


def cross_size() -> int:
    """How many machines there are, if all have as many processes."""
    return -(-size() // local_size())


def _is_grouped(call: str) -> bool:
    if not SESSION.is_open:
        raise MisuseError(f"hvd.{call}() before hvd.init(): call hvd.init() first, on every process")
    return dist.is_initialized()


def gloo_built() -> bool:
    """Whether torch has gloo, which carries tensors of the CPU."""
    return dist.is_gloo_available()


def nccl_built() -> bool:
    """Whether torch has nccl, which carries tensors of GPUs."""
    return dist.is_nccl_available()


def mpi_built() -> bool:
    """No: there is no MPI underneath."""
    return False


def mpi_threads_supported() -> bool:
    """No: there is no MPI underneath."""
    return False


def check_process_set(process_set: ProcessSet) -> None:
    """Refuse any set but that of all processes."""
    if process_set is not global_process_set:
        raise NotSupportedError(f"process_set={process_set!r}: only hvd.global_process_set is supported; leave it out")


def check_rank(root_rank: int) -> None:
    """Refuse a root that is not there."""
    if isinstance(root_rank, bool) or not isinstance(root_rank, int) or not 0 <= root_rank < size():
        raise MisuseError(f"root_rank={root_rank!r}: there are {size()} ranks, so it must be from 0 to {size() - 1}")
