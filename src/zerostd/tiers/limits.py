"""Limits: how much host memory and disk space is free, and the refusal of what does not fit.

Nothing here allocates. Every source of a number can be passed in, so each rule can be tested separately.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from zerostd.errors import PrepareError
from zerostd.policy import Tier

UNLIMITED = 2**60  # cgroup v1 says "no limit" with a number just below 2**63

# files of one cgroup: its limit, its use, and the lines of memory.stat that the kernel gives back under pressure
V2 = ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable"))
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


@dataclass(frozen=True)
class CgroupMemory:
    """The memory limit of one control group and how much is in use, without page cache that can be dropped."""

    path: str
    limit: int
    used: int

    @property
    def free(self) -> int:
        """Bytes that may still be allocated under this limit."""
        return max(0, self.limit - self.used)


def cgroup_memory(membership: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> CgroupMemory | None:
    """Return the tightest memory limit over this process, its own cgroup's or an ancestor's; None if there is none."""
    try:
        lines = Path(membership).read_text().splitlines()
    except OSError:
        return None
    groups = [group for line in lines for group in _limits_of(line, Path(root))]
    return min(groups, key=lambda group: group.free, default=None)


def available_memory(meminfo: str = "/proc/meminfo") -> int:
    """Return the bytes the system can hand out, page cache counted as free; all memory if the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path(meminfo).read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_host(available: int | None = None, cgroup: CgroupMemory | None = None) -> int:
    """Return the bytes of host memory that can be allocated now: the system's, or the cgroup's if that is less."""
    available = available_memory() if available is None else available
    cgroup = cgroup or cgroup_memory()
    return available if cgroup is None else min(available, cgroup.free)


def memlock_limit() -> int | None:
    """Return the bytes this process may lock (ulimit -l), None without limit. Registering needs none of it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def free_disk(path: str) -> int:
    """Return the bytes a user may still write to the file system of `path`; UNLIMITED if it does not say its size."""
    stats = os.statvfs(path)
    return stats.f_bavail * stats.f_frsize if stats.f_blocks else UNLIMITED


def check_host(num_bytes: int, what: str, limit: int | None = None) -> None:
    """Refuse `num_bytes` of host memory for `what` if they are not free, or over `limit`: what the budget leaves."""
    available = available_memory()
    cgroup = cgroup_memory()
    free = free_host(available, cgroup)
    wanted = f"{what} needs {_size(num_bytes)} of host memory"
    _check_budget(num_bytes, limit, free, wanted, Tier.HOST)
    if num_bytes > free:
        group = f"; cgroup {cgroup.path}: limit {_size(cgroup.limit)}, in use {_size(cgroup.used)}" if cgroup else ""
        raise PrepareError(
            f"{wanted}, but {_size(free)} are free (system: {_size(available)} available{group}); "
            "place less on the host, use more ranks or the disk tier, or raise the memory limit"
        )


def check_disk(num_bytes: int, path: str, limit: int | None = None) -> None:
    """Refuse `num_bytes` in the file system of `path` if they are not free, or over `limit`: what the budget leaves."""
    try:
        free = free_disk(path)
    except OSError as error:
        raise PrepareError(f"{path} cannot be used as a directory ({error.strerror}); name another one") from error
    wanted = f"{_size(num_bytes)} wanted in {path}"
    _check_budget(num_bytes, limit, free, wanted, Tier.DISK)
    if num_bytes > free:
        raise PrepareError(
            f"{wanted}, but its file system has {_size(free)} free; "
            "make room, name another directory with Budget(disk_path=...), or place less on disk"
        )


def _check_budget(num_bytes: int, limit: int | None, free: int, wanted: str, tier: Tier) -> None:
    if limit is not None and num_bytes > limit and limit <= free:
        raise PrepareError(
            f"{wanted}, but the {tier.value} budget leaves {_size(limit)} ({_size(free)} are free); raise "
            f"Budget({tier.value}=...), place less on the {tier.value}, or use more ranks"
        )


def _limits_of(line: str, root: Path) -> Iterator[CgroupMemory]:
    """Yield the limits that one line of /proc/self/cgroup leads to: of its cgroup and of every one above. Inside a
    container the path may be the host's, which is not there; the walk up then ends at the container's own."""
    _, controllers, path = line.split(":", 2)
    if controllers and "memory" not in controllers.split(","):
        return
    limit_file, used_file, reclaimable = V1 if controllers else V2
    mounts = [root / "memory"] if controllers else [root, root / "unified"]
    here = PurePosixPath("/", path)
    for group, mount in itertools.product((here, *here.parents), mounts):
        folder = mount / str(group).lstrip("/")
        try:
            limit = int((folder / limit_file).read_text())
            used = int((folder / used_file).read_text())
            rows = dict(row.split(maxsplit=1) for row in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # nothing there, or "max": no limit
            continue
        if limit < UNLIMITED:
            cached = sum(int(rows.get(name, 0)) for name in reclaimable)
            yield CgroupMemory(str(folder), limit, max(0, used - cached))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB ({num_bytes} bytes)"
