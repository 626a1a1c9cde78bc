"""Host memory: page-aligned, touched, zero-filled and, where there is a GPU, registered with its driver. What is not
free is refused before it is allocated; a cgroup may allow less than the system has.

Every tensor has a private anonymous mapping, because torch's caching allocators round sizes up to powers of two and
never give back. The tensor, and every view of it, keeps the mapping alive: there is no explicit unmap, which would
leave views that point nowhere. `free` still gives the pages back to the system at once (MADV_DONTNEED); a view that
outlives it reads zeros instead of crashing, and the addresses go with the last view.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import resource
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from zerostd.errors import PrepareError, StorageError
from zerostd.monitoring.ledger import Ledger
from zerostd.monitoring.texts import exact_size
from zerostd.policy import Kind, Tier
from zerostd.tiers.holders import Holders

PAGE = 4096  # the largest logical block of common drives: files past the page cache are read and written in pages
TOUCH_BYTES = 64 * 2**20  # one thread's share of the first touch
UNLIMITED = 2**60  # cgroup v1 says "no limit" with a number just below 2**63

# files of one cgroup: its limit, its use, and the lines of memory.stat that the kernel gives back under pressure
CGROUP_V2 = ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable"))
CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def padded(num_bytes: int) -> int:
    """Return the bytes of the whole pages that `num_bytes` take."""
    return -(-num_bytes // PAGE) * PAGE


def aligned(num_bytes: int) -> torch.Tensor:
    """Return ordinary host memory that starts on a page."""
    memory = torch.empty(num_bytes + PAGE, dtype=torch.uint8)
    skip = -memory.data_ptr() % PAGE
    return memory[skip : skip + num_bytes]


class Host:
    """Allocates host memory for transfers to `device`; with a CUDA device it is registered, so that copies overlap."""

    def __init__(self, device: torch.device, ledger: Ledger, num_threads: int) -> None:
        self.device = device
        self._ledger = ledger
        self.events = ledger.events
        self._num_threads = max(1, num_threads)
        self._mappings: dict[int, _Mapping] = {}  # by address

    def allocate(self, num_bytes: int, kind: Kind) -> torch.Tensor:
        """Return `num_bytes` zeros (uint8) that start on a page, all pages present; raise PrepareError if too large."""
        if num_bytes < 0:
            raise StorageError(f"cannot allocate {num_bytes} bytes of host memory; ask for 0 or more")
        check_host(num_bytes, kind.value)
        try:
            mapping = _Mapping(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise PrepareError(
                f"the system refused to map {num_bytes} bytes of host memory for {kind.value} ({error.strerror}); "
                "raise the address space limit (ulimit -v) or place less on the host"
            ) from error
        mapping.advise("MADV_HUGEPAGE")
        tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        address = tensor.data_ptr()

        def touch(start: int) -> None:  # memset releases the GIL
            ctypes.memset(address + start, 0, min(TOUCH_BYTES, num_bytes - start))

        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="zerostd-touch") as threads:
            list(threads.map(touch, range(0, num_bytes, TOUCH_BYTES)))
        if self.device.type == "cuda":
            mapping.register(address, self.device)
        mapping.holders = Holders(self._ledger, lambda: [(kind, num_bytes, Tier.HOST)])
        self._mappings[address] = mapping
        self._ledger.enter(kind, num_bytes, Tier.HOST)
        return tensor[:num_bytes]

    def join(self, tensor: torch.Tensor, other: Host) -> None:
        """Hold memory that another Host allocated, or this one for another owner, until `free`."""
        address = tensor.untyped_storage().data_ptr()
        self._mappings[address] = other._mappings[address]
        self.holders_of(tensor).join(self._ledger)

    def holders_of(self, tensor: torch.Tensor) -> Holders:
        """Return who holds the memory of `tensor`, which this Host holds."""
        return self._mappings[tensor.untyped_storage().data_ptr()].holders

    def free(self, tensor: torch.Tensor) -> None:
        """Give back the memory of `tensor`, which is or views what `allocate` returned. No copy from or to it may be
        waiting on a thread of the host; copies of the device are waited for."""
        address = tensor.untyped_storage().data_ptr()
        if address not in self._mappings:
            raise StorageError(
                f"{tensor.nbytes} bytes at {address:#x} are not memory of this Host, or were "
                "already freed; free each tensor of allocate once"
            )
        self._release(address)

    def free_all(self) -> None:
        """Give back everything that was not freed yet."""
        for address in list(self._mappings):
            while address in self._mappings:
                self._release(address)

    def _release(self, address: int) -> None:
        mapping = self._mappings[address]
        is_free = mapping.holders.leave(self._ledger)
        if not mapping.holders.has(self._ledger):
            del self._mappings[address]
        if is_free:
            mapping.unregister()
            mapping.advise("MADV_DONTNEED")


class _Mapping(mmap.mmap):
    """Anonymous memory that is unregistered from the CUDA driver before it goes, also without a call of `free`."""

    registered: tuple[int, torch.device, int] | None = None  # address, device, process
    holders: Holders

    def advise(self, name: str) -> None:
        """Give the kernel a hint by its name; do nothing where the kernel does not know it."""
        if hasattr(mmap, name):
            with contextlib.suppress(OSError):
                self.madvise(getattr(mmap, name))

    def register(self, address: int, device: torch.device) -> None:
        """Lock the pages and make them known to the CUDA driver. A forked child does not inherit them, as with all
        pinned memory: the kernel would have to copy locked pages."""
        with torch.cuda.device(device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, len(self), 0))
        if code != 0:
            self.advise("MADV_DONTNEED")
            raise StorageError(
                f"the CUDA driver refused to register {len(self)} bytes of host memory (cudaHostRegister returned "
                f"{code}); place less on the host, or raise the limit on locked memory (ulimit -l) and of the container"
            )
        self.registered = (address, device, os.getpid())
        self.advise("MADV_DONTFORK")

    def unregister(self) -> None:
        """Take the memory from the CUDA driver when the device has finished with it."""
        if self.registered is None:
            return
        address, device, process = self.registered
        self.registered = None
        if process != os.getpid():  # a forked child has no part in it
            return
        try:
            torch.cuda.synchronize(device)
        finally:
            torch.cuda.cudart().cudaHostUnregister(address)

    def __del__(self) -> None:
        if not sys.is_finalizing():  # the driver goes with the process
            self.unregister()


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


def check_host(num_bytes: int, what: str, limit: int | None = None) -> None:
    """Refuse `num_bytes` of host memory for `what` if they are not free, or over `limit`: what the budget leaves."""
    available = available_memory()
    cgroup = cgroup_memory()
    free = free_host(available, cgroup)
    wanted = f"{what} needs {exact_size(num_bytes)} of host memory"
    check_budget(num_bytes, limit, free, wanted, Tier.HOST)
    if num_bytes > free:
        group = ""
        if cgroup is not None:
            group = f"; cgroup {cgroup.path}: limit {exact_size(cgroup.limit)}, in use {exact_size(cgroup.used)}"
        raise PrepareError(
            f"{wanted}, but {exact_size(free)} are free (system: {exact_size(available)} available{group}); "
            "place less on the host, use more ranks or the disk tier, or raise the memory limit"
        )


def check_budget(num_bytes: int, limit: int | None, free: int, wanted: str, tier: Tier) -> None:
    """Refuse what is `wanted` of a tier if its budget leaves less."""
    if limit is not None and num_bytes > limit and limit <= free:
        raise PrepareError(
            f"{wanted}, but the {tier.value} budget leaves {exact_size(limit)} ({exact_size(free)} are free); raise "
            f"Budget({tier.value}=...), place less on the {tier.value}, or use more ranks"
        )


def _limits_of(line: str, root: Path) -> Iterator[CgroupMemory]:
    """Yield the limits that one line of /proc/self/cgroup leads to: of its cgroup and of every one above. Inside a
    container the path may be the host's, which is not there; the walk up then ends at the container's own."""
    _, controllers, path = line.split(":", 2)
    if controllers and "memory" not in controllers.split(","):
        return
    limit_file, used_file, reclaimable = CGROUP_V1 if controllers else CGROUP_V2
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
