"""The world of a model: this rank, the number of ranks, and the channels between them.

Three cases on one path: torchrun (or anything that sets its variables) with or without an initialised process group,
and no launcher at all, which is a world of one without a process group. Each prepared model makes its own channels, so
several of them in one process never mix their messages.

With parameter servers, ranks have one of two roles, and those of one role are a world: see link.py.

A mesh of two dimensions (replicate, shard) is hybrid sharding: the ranks of a row share the model state, every row
holds a replica of it, and the ranks of a column hold the same shard. Without it there is one row. Where parameters are
DTensors over another mesh, there are such rows for each of its coordinates: splits (dtensors.py). With secondary shards
the rows of the mesh are nodes: all their ranks share the model state, and each node has channels of its own beside.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zerostd.communication.attempts import is_everyone, listed, store_of
from zerostd.communication.dtensors import Rows, check_layouts, find_splits
from zerostd.communication.link import ServerLink
from zerostd.communication.meeting import meet
from zerostd.communication.meshes import Mesh, rows_of
from zerostd.communication.peers import Peers
from zerostd.compat import named_group
from zerostd.errors import MisuseError, PrepareError, is_whole
from zerostd.policy import MOST_RANKS

TIMEOUT_VARIABLE = "ZEROSTD_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 300.0
LATER = timedelta(seconds=30)  # torch's watchdog acts where ours could not: see [Note: waiting on a device] of peers.py
# Torch's watchdog would end the process without a Python exception. It aborts the communicators instead, and the next
# collective raises. See [Note: aborted communicators]. Before it aborts it would wait a minute for a dump of its own.
WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",  # 15 s by default, and it sleeps four times as long
}


@dataclass(eq=False)
class Channels:
    """Process groups of one prepared model.

    Each has messages of its own kind: their order relative to each other may differ between ranks, the order inside one
    may not. [Note: gloo ends the process] gloo calls abort() when a message is longer than the one it expects. So two
    kinds of messages share a gloo group only if a rank that diverges cannot send one kind while its peers wait for the
    other. Communicators of nccl take memory of the device, and there some of the groups are the same.
    """

    gather: dist.ProcessGroup  # of the ranks that share the model state, as the next four
    regather: dist.ProcessGroup  # gathers in backward, while a rank that strays may be in a forward
    reduce: dist.ProcessGroup
    broadcast: dist.ProcessGroup
    scalars: dist.ProcessGroup  # between backward and step, of one replica: who goes on gathers before it regathers
    control: dist.ProcessGroup  # of all, gloo, on the CPU: reading its results costs no device synchronisation
    peers: Peers  # who and where the others are, beside these groups
    replicas: dist.ProcessGroup | None = None  # of the ranks that hold the same shard, if there are several
    node: dist.ProcessGroup | None = None  # of the ranks of this node, where they keep secondary shards
    node_regather: dist.ProcessGroup | None = None  # likewise, in backward
    checkpoints: dist.ProcessGroup | None = None  # of all, gloo; made when it is first needed


@dataclass(frozen=True)
class World:
    """This process among the others, and the channels to them."""

    rank: int  # of all ranks that train the model
    size: int
    local_size: int
    device: torch.device
    timeout_s: float
    channels: Channels | None  # None in a world of one
    num_replicas: int = 1  # of the model state, one in each row of a mesh
    num_splits: int = 1  # that DTensors divide the model into
    link: ServerLink | None = None  # between workers and servers, if there are any

    @property
    def is_worker(self) -> bool:
        """Whether servers hold the masters and states that belong to this rank's model."""
        return self.link is not None and not self.link.is_server

    def check_here(self, call: str) -> None:
        """Raise if `call` needs gradients or states that parameter servers hold."""
        if self.is_worker:
            raise MisuseError(
                f"{call} on a worker: the servers hold reduced gradients and states. Clip with "
                "prepare(max_grad_norm=...), and use zerostd.save and zerostd.load"
            )

    @property
    def num_shards(self) -> int:
        """The ranks that share one replica of the model state, or of its split."""
        return self.size // (self.num_replicas * self.num_splits)

    @property
    def shard_rank(self) -> int:
        """This rank among those: it holds the shard of this number."""
        return self.rank % self.num_shards

    @property
    def row(self) -> slice:
        """Those, among all ranks."""
        return slice(self.rank - self.shard_rank, self.rank - self.shard_rank + self.num_shards)

    @property
    def replica(self) -> int:
        """The number of the replica that this rank holds a shard of."""
        return self.rank // self.num_shards % self.num_replicas

    @property
    def split(self) -> int:
        """The number of the split that this rank holds a shard of."""
        return self.rank // (self.num_shards * self.num_replicas)

    @property
    def node_size(self) -> int:
        """The ranks of a node that keep secondary shards; 1 if none are kept."""
        node = None if self.channels is None else self.channels.node
        return 1 if node is None else node.size()

    @property
    def num_hosts(self) -> int:
        """The number of hosts, if each has as many neighbouring ranks as the others; 1 if not, or if nobody knows."""
        hosts = [] if self.channels is None else [*self.channels.peers.hosts.values()]
        runs = [(host, len(list(run))) for host, run in itertools.groupby(hosts)]
        are_equal = len({size for _, size in runs}) == 1 and len({host for host, _ in runs}) == len(runs)
        return len(runs) if are_equal else 1

    @property
    def is_alone(self) -> bool:
        """Whether no other rank has gradients of the same parameters."""
        return self.num_shards * self.num_replicas == 1

    @classmethod
    def discover(
        cls,
        device: torch.device,
        mesh: Mesh = None,
        beside: DeviceMesh | None = None,
        num_servers: int = 0,
        *,
        has_nodes: bool = False,
    ) -> World:
        """Join the ranks that the launcher started, or those of a mesh; or be a world of one. `beside` is the mesh of
        parameters that are DTensors. The last `num_servers` ranks are a world of their own. With `has_nodes` the rows
        of the mesh are nodes, and not replicas."""
        timeout_s = _timeout_s()
        limit = timedelta(seconds=timeout_s)
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) != 1:
            with _environment(WATCHDOG):
                meet(torch.device("cpu") if num_servers else device, limit)  # servers have no accelerator
        nodes = rows_of(mesh, device)
        rows = [[rank for row in nodes for rank in row]] if has_nodes else nodes
        splits = find_splits(rows, beside)
        everyone = [rank for split in splits for row in split for rank in row]
        if 0 < len(everyone) <= num_servers:
            raise PrepareError(
                f"servers={num_servers} of {len(everyone)} rank(s) leaves none to train: start more ranks, or use "
                "fewer servers"
            )
        if len(everyone) == 1:
            return cls(0, 1, 1, device, timeout_s, None)
        here = everyone.index(dist.get_rank())
        num_workers = len(everyone) - num_servers
        if num_servers:
            rows = [everyone[:num_workers] if here < num_workers else everyone[num_workers:]]
            splits = [rows]
        ranks = [rank for split in splits for row in split for rank in row]
        size = len(ranks)
        local_size = min(size, int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())))
        peers = Peers(here, everyone, timeout_s)
        channels = link = None
        with contextlib.ExitStack() as on_failure, _environment(WATCHDOG):
            on_failure.callback(peers.close)
            with peers.at("the creation of its process groups"), peers.waiting():
                if size > 1:
                    backend = dist.get_default_backend_for_device(device)
                    channels = _make_channels(splits, backend, limit, peers, nodes if has_nodes else None)
                if num_servers:
                    link = ServerLink(_new_group(everyone, "gloo", limit), peers, here, num_workers, num_servers)
            on_failure.pop_all()
        rank = ranks.index(dist.get_rank())
        return cls(rank, size, local_size, device, timeout_s, channels, len(rows), len(splits), link)

    @classmethod
    def pretend(cls, device: torch.device, size: int | None, local_size: int | None) -> World:
        """Return a world to plan for, without channels: of `size` ranks, or as many as there are."""
        if size is None:
            size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        if not is_whole(size, 1) or size > MOST_RANKS:
            raise PrepareError(f"world_size={size!r} must be a whole number of ranks, from 1 to {MOST_RANKS:,}")
        if local_size is None:
            local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return cls(0, size, min(size, local_size), device, _timeout_s(), None)

    def name(self, rank: int) -> str:
        """Return what a rank of this world is called: by its number in the default process group."""
        if self.channels is not None and dist.is_initialized():
            rank = dist.get_process_group_ranks(self.channels.control)[rank]
        return f"rank {rank}"

    def inside(self, group: dist.ProcessGroup, regather: dist.ProcessGroup | None = None) -> World:
        """Return this process among those of a process group, which stays its owner's. `regather` is one of the same
        ranks, for gathers in backward."""
        assert self._peers is not None
        channels = Channels(group, regather or group, group, group, group, group, peers=self._peers)
        size = group.size()
        return World(group.rank(), size, min(size, self.local_size), self.device, self.timeout_s, channels)

    def enter(self, call: str) -> None:
        """Note the call that this rank makes now, for errors on other ranks. Backward passes and steps are counted."""
        if self._peers is not None:
            self._peers.enter(call)

    def at(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Return a context for a collective; errors inside name it, and so do those of ranks that wait for this one."""
        return contextlib.nullcontext() if self._peers is None else self._peers.at(what)

    def waiting(self) -> contextlib.AbstractContextManager[Callable[[Any], None]]:
        """Return a context for calls of torch.distributed. What they raise becomes a CommunicationError that says who
        is to blame. It gives a function that waits for what was started on gloo."""
        assert self._peers is not None
        if self.channels is None:
            return self._peers.waiting()
        channels = self.channels
        groups = (channels.gather, channels.reduce, channels.replicas, channels.node)  # with kernels, on a device
        return self._peers.waiting(*(group for group in groups if group is not None))

    @property
    def _peers(self) -> Peers | None:
        if self.channels is not None:
            return self.channels.peers
        return None if self.link is None else self.link.peers

    def checkpoint_group(self) -> dist.ProcessGroup | None:
        """Return a group for checkpoints that threads write beside training and the user's own collectives; None in a
        world of one. The first call makes it, and every rank must make that call."""
        if self.channels is None:
            return None
        if self.channels.checkpoints is None:
            ranks = dist.get_process_group_ranks(self.channels.control)
            self.channels.checkpoints = _new_group(ranks, "gloo", timedelta(seconds=self.timeout_s))
        return self.channels.checkpoints

    def close(self) -> None:
        """Close the channels, if they are still open; the user's own process group stays. They are dropped, for the
        model may stay after its release, and gloo ends its threads with the last reference to a group."""
        if self.link is not None:
            self.link.close()
        if self.channels is None:
            return
        self.channels.peers.close()
        names = [name for name in vars(self.channels) if name != "peers"]
        for group in dict.fromkeys(vars(self.channels).pop(name) for name in names):
            if group is not None and dist.is_initialized():
                with contextlib.suppress(ValueError):  # gone with the user's process group
                    dist.destroy_process_group(group)


def _make_channels(
    splits: Sequence[Rows], backend: str, limit: timedelta, peers: Peers, nodes: Rows | None
) -> Channels:
    """Make the process groups of one prepared model; see [Note: gloo ends the process]."""
    here = dist.get_rank()
    ranks = [rank for split in splits for row in split for rank in row]
    rows = next(split for split in splits if any(here in row for row in split))
    replica = next(number for number, row in enumerate(rows) if here in row)
    row = rows[replica]
    column = [other[row.index(here)] for other in rows]
    control = _new_group(ranks, "gloo", limit)
    check_layouts(splits, nodes, control)
    limit += LATER if backend != "gloo" else timedelta()
    gather = _new_group(row, backend, limit)
    reduce = _new_group(row, backend, limit)
    replicas = _new_group(column, backend, limit) if len(column) > 1 else None
    scalars = None
    if len(splits) > 1:
        scalars = _new_group([rank for split in splits for rank in split[replica]], backend, limit)
    mine = next((node for node in nodes or () if here in node), None)
    node = None if mine is None else _new_group(mine, backend, limit)
    if backend != "gloo":
        return Channels(gather, gather, reduce, gather, scalars or reduce, control, peers, replicas, node, node)
    regather = _new_group(row, backend, limit)
    broadcast = _new_group(row, backend, limit)
    again = None if mine is None else _new_group(mine, backend, limit)
    return Channels(gather, regather, reduce, broadcast, scalars or regather, control, peers, replicas, node, again)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables inside the context, where the user has not."""
    names = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in names})
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


def _new_group(ranks: Sequence[int], backend: str, limit: timedelta) -> dist.ProcessGroup:
    """Make a process group of these ranks. All of them call it, and no others need to."""
    if is_everyone(ranks):
        everyone: dist.ProcessGroup = dist.new_group(backend=backend, timeout=limit)
        return everyone
    count = store_of(ranks).add(f"groups of {dist.get_rank()}", 1)  # the same on all, which make them in one order
    group: dist.ProcessGroup = named_group(ranks, backend, limit, f"zerostd/{listed(ranks)}/{count}")
    return group


def _timeout_s() -> float:
    text = os.environ.get(TIMEOUT_VARIABLE, str(DEFAULT_TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise PrepareError(f"{TIMEOUT_VARIABLE}={text!r} must be a positive number of seconds")
    return seconds


def thread_budget(local_size: int) -> int:
    """Return the threads this rank may use: the cores it is allowed, shared with the ranks beside it. Affinity and the
    cgroup's quota count, not OMP_NUM_THREADS: torchrun sets it to 1, which is wrong for an update."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _cgroup_cores() or cores) // max(1, local_size))


def _cgroup_cores() -> int | None:
    """Return the whole cores of the cgroup's CPU quota (v2, then v1), None where there is no quota."""
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        with contextlib.suppress(OSError, ValueError):
            quota, period = "".join(Path("/sys/fs/cgroup", name).read_text() for name in names).split()
            return None if quota in ("max", "-1") else max(1, int(quota) // int(period))
    return None
