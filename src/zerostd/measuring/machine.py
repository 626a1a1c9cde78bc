"""A machine's profile: measured part by part in less than half a minute, kept in a file, and read again while the
machine and the versions are the same.

With several ranks the first one measures its machine while the others wait, and all use its numbers: measurements at
the same time would disturb each other, and a plan must be the same on all ranks. They measure the wires together. Rates
are those of the whole machine; `ranks_per_node` says how many ranks share its cores and its host memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from zerostd.communication import Control, World
from zerostd.communication.meshes import Mesh, Replicas, shape_of
from zerostd.communication.world import thread_budget
from zerostd.errors import CommunicationError, PrepareError, ZerostdError
from zerostd.measuring.identity import choose_device, free_bytes, machine_name, parse_device, versions
from zerostd.measuring.rates import (
    FULL,
    UPDATE_BYTES,
    HostUpdates,
    LinkCopies,
    TrialSizes,
    busy_memory,
    disk_rates,
    finish,
    levels_of,
    link_rates,
    matrix_rates,
    resident_ns,
    wire_rates,
)
from zerostd.monitoring.decoding import path_of, read_document
from zerostd.monitoring.ledger import Ledger
from zerostd.planning.profiles import Link, MachineProfile, Processor
from zerostd.planning.request import NUM_BUSY_THREADS
from zerostd.tiers.host import Host

Progress = Callable[[str, float], None]  # what is measured next, in plain words; fraction done
T = TypeVar("T")

log = logging.getLogger(__name__)

VARIABLE = "ZEROSTD_CACHE"  # a directory
AGAIN = "measure again with `zerostd measure`"
QUIET = 0.75  # of all cores, that updates on all of them have where nothing else runs
PARTS = {  # in their order: seconds that each takes at most or so, and what it needs
    "copies between host and device": (2.0, "link"),
    "updates on the CPU": (6.0, ""),
    "host memory with everything busy": (1.0, "link"),
    "updates on the device": (2.0, "link"),
    "matrix products": (5.0, ""),
    "reading and writing files": (12.0, "disk"),
    "collectives among ranks": (7.0, "wire"),
}


def measure_machine(
    device: torch.device | str | None = None,
    *,
    disk_path: str | None = None,
    on_progress: Progress | None = None,
    sizes: TrialSizes = FULL,
) -> MachineProfile:
    """Measure this machine and return its profile. With several ranks, all of them must call it.

    Args:
        device: The device to train on; None: the accelerator, or the CPU if there is none.
        disk_path: The directory that a disk tier would use; None: no disk is measured.
        on_progress: Called before each part with a description of what is measured next and the fraction done.
        sizes: Sizes and numbers of the trials.

    Raises:
        PrepareError: `disk_path` cannot be used, or too little memory is free; says which.
    """
    device = choose_device(None if device is None else parse_device(device))
    disk_path = None if disk_path is None else os.path.abspath(path_of(disk_path, "disk_path", PrepareError))
    if not (on_progress is None or callable(on_progress)) or not isinstance(sizes, TrialSizes):
        raise PrepareError(f"on_progress={on_progress!r} must be a function, and sizes={sizes!r} a TrialSizes")
    with _joined(device, None) as world:
        control = Control(world)
        return _with_free(measure_together(control, disk_path, on_progress, sizes), control, disk_path)


def load_or_measure(
    device: torch.device | str | None = None,
    *,
    disk_path: str | None = None,
    on_progress: Progress | None = None,
    again: bool = False,
    sizes: TrialSizes = FULL,
    mesh: Mesh = None,
) -> MachineProfile:
    """Return the saved profile of this machine, or measure and save a new one; `free` is that of now.

    A kept profile is used if machine, versions and number of ranks are those of now; a directory on a disk that was not
    measured is tried and added. A call without a directory gets the profile without disk rates, and a call in a world
    of one gets it without wires. All ranks call it together, as they do `measure_machine`; `again` measures whatever
    was kept. With a mesh, its ranks are all, and its rows the inner level of the wires.
    """
    device = choose_device(device)
    disk_path = None if disk_path is None else os.path.abspath(disk_path)
    with _joined(device, mesh) as world:
        control = Control(world)
        kept = from_first(control, lambda: None if again else _read_kept(device, disk_path, levels_of(world)))
        profile = kept or measure_together(control, disk_path, on_progress, sizes)
        if disk_path is not None and profile.disk is None:
            profile = replace(profile, disk=from_first(control, lambda: disk_rates(disk_path, sizes)))
        is_new = profile is not kept
        profile = _with_free(profile, control, disk_path)
        if is_new and world.rank == 0:
            path = cache_file(profile.name, profile.versions)
            write_cached(path, profile.to_json(), "the machine profile", "it is measured again next time")
        return profile


@contextlib.contextmanager
def _joined(device: torch.device, mesh: Mesh) -> Iterator[World]:
    """Join the ranks of a mesh, all of which share a model, with its rows as nodes. Without a mesh, nodes are hosts, if
    there are several with as many neighbouring ranks each."""
    has_rows = isinstance(mesh, Replicas) or len(shape_of(mesh)) == 2
    with contextlib.closing(World.discover(device, mesh, has_nodes=has_rows)) as world:
        if mesh is None and world.num_hosts > 1:
            with contextlib.closing(World.discover(device, Replicas(world.num_hosts), has_nodes=True)) as by_host:
                yield by_host
        else:
            yield world


# -- measuring --


def measure_together(
    control: Control, disk_path: str | None, on_progress: Progress | None, sizes: TrialSizes
) -> MachineProfile:
    """Measure the first rank's machine and the wires between all ranks, which call this together."""
    world = control.world
    tell = _teller(on_progress, world, has_disk=disk_path is not None)
    try:
        profile = from_first(control, lambda: _measure(world.device, disk_path, tell, sizes))
        if world.size > 1:
            tell("collectives among ranks")
        return replace(profile, wires=control.collect(wire_rates(world, sizes))[0])
    finally:
        if world.device.type != "cpu":  # give back what torch keeps for later
            finish(world.device)
            torch.accelerator.empty_cache()


def from_first(control: Control, work: Callable[[], T]) -> T:
    """Return what `work` returns, or raise what it raises, on the first rank; the others wait for it."""
    outcome: T | ZerostdError | None = None
    if control.world.rank == 0:
        try:
            outcome = work()
        except Exception as error:
            reason = CommunicationError(f"rank 0 failed while others waited for it: {error!r}")
            control.collect(error if isinstance(error, ZerostdError) else reason)
            raise
    outcome = control.collect(outcome)[0]
    if isinstance(outcome, ZerostdError):
        raise outcome
    return cast(T, outcome)


def _with_free(profile: MachineProfile, control: Control, disk_path: str | None) -> MachineProfile:
    """Return a profile with the memory that is free now, on the rank that has least."""
    everywhere = control.collect(free_bytes(control.world.device, disk_path))
    free = {tier: min(free[tier] for free in everywhere) for tier in everywhere[0]}
    return replace(profile, free=free, ranks_per_node=control.world.local_size)


def thread_counts(cores: int) -> list[int]:
    return sorted({1, max(1, cores // 2), max(1, cores - NUM_BUSY_THREADS), cores})


def _measure(
    device: torch.device, disk_path: str | None, tell: Callable[[str], None], sizes: TrialSizes
) -> MachineProfile:
    free = free_bytes(device, None)
    link, processor = _link_and_processor(device, free, tell, sizes)
    if device.type == "cpu":
        update_ns = processor.update_ns[processor.num_cores]
    else:
        tell("updates on the device")
        update_ns = resident_ns(device, sizes, free["device"])
    tell("matrix products")
    matrix = matrix_rates(device, sizes, free["device"])
    disk = None
    if disk_path is not None:
        tell("reading and writing files")
        disk = disk_rates(disk_path, sizes)
    return MachineProfile(
        name=machine_name(device),
        device=device.type,
        matrix=matrix,
        resident_ns=update_ns,
        free={},
        processor=processor,
        link=link,
        disk=disk,
        versions=versions(device),
        measured=date.today().isoformat(),
    )


def _link_and_processor(
    device: torch.device, free: Mapping[str, int], tell: Callable[[str], None], sizes: TrialSizes
) -> tuple[Link | None, Processor]:
    cores = thread_budget(1)  # of all ranks together
    host = Host(device, Ledger(), cores)
    link = None
    copies = None
    try:
        if device.type != "cpu":
            tell("copies between host and device")
            copies = LinkCopies(device, host, sizes, min(free["host"], free["device"]))
            link = link_rates(copies, sizes)
        tell("updates on the CPU")
        updates = HostUpdates(host, sizes, free["host"])
        by_threads = {count: updates.ns(count, sizes) for count in thread_counts(cores)}
        memory = UPDATE_BYTES / by_threads[cores] * 1e9
        _check_quiet(updates.had, cores)
        if copies is not None:
            tell("host memory with everything busy")
            memory = busy_memory(updates, copies, max(1, cores - NUM_BUSY_THREADS))
        coded = updates.coded_ns(cores, sizes) / by_threads[cores]
    finally:
        host.free_all()
    return link, Processor(cores, by_threads, memory, coded)


def _check_quiet(had: float, cores: int) -> None:
    if had < QUIET:
        log.warning(
            "other programs used part of the %d cores during the measurement (updates had %.0f %% of them), so the "
            "rates are too low; run `zerostd measure --again` when the machine is idle",
            cores,
            100 * had,
        )


def _teller(on_progress: Progress | None, world: World, *, has_disk: bool) -> Callable[[str], None]:
    is_there = {"link": world.device.type != "cpu", "disk": has_disk, "wire": world.size > 1, "": True}
    seconds = {name: part_s for name, (part_s, needs) in PARTS.items() if is_there[needs]}

    def tell(name: str) -> None:
        if on_progress is not None:
            num_done = list(seconds).index(name)
            on_progress(name, sum(list(seconds.values())[:num_done]) / sum(seconds.values()))

    return tell


# -- files --


def load_profile(path: str | os.PathLike[str]) -> MachineProfile:
    """Read the profile in a file, kept or written by hand; PrepareError says what is wrong with it."""
    text = read_document(
        path, what=f"the machine profile {path}", error=PrepareError, remedy=f"{AGAIN}, or name another file"
    )
    return MachineProfile.from_json(text, str(path))


def cache_file(name: str, versions: Mapping[str, str]) -> Path:
    """Return the path of the file that holds the profile of a machine with this identity."""
    return cached("machine", [name, dict(versions)])


def cached(kind: str, key: Any) -> Path:
    """Return the path of a file in the cache, for a key of plain data."""
    folder = os.environ.get(VARIABLE) or Path.home() / ".cache" / "zerostd"
    text = json.dumps(key, sort_keys=True)
    return Path(folder) / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"


def _read_kept(device: torch.device, disk_path: str | None, levels: list[int]) -> MachineProfile | None:
    """Return the saved profile without what is not asked for; None if it is of another machine or version."""
    name = machine_name(device)
    now = versions(device)
    path = cache_file(name, now)
    kept = read_cached(path, load_profile, "measuring the machine again, because the cached profile cannot be used")
    if kept is None:
        return None
    if (kept.name, kept.device, kept.versions) != (name, device.type, now):
        log.warning("measuring the machine again: %s is from another machine or other versions", path)
        return None
    if levels and [wire.ranks for wire in kept.wires] != levels:
        return None
    disk = None
    if kept.disk is not None and disk_path is not None and _share_file_system(kept.disk.path, disk_path):
        disk = replace(kept.disk, path=disk_path)
    return replace(kept, disk=disk, wires=kept.wires if levels else ())


def _share_file_system(first: str, second: str) -> bool:
    with contextlib.suppress(OSError):
        return first == second or os.stat(first).st_dev == os.stat(second).st_dev
    return False


def read_cached(path: Path, load: Callable[[Path], T], warning: str) -> T | None:
    """Return what `load` makes of a file of the cache; None if there is none, or, with a warning, if it is invalid."""
    if not path.exists():
        return None
    try:
        return load(path)
    except PrepareError as error:
        log.warning("%s: %s", warning, error)
        return None


def write_cached(path: Path, text: str, what: str, otherwise: str) -> None:
    """Write a file of the cache in one go: another process sees the old file or the new one. Only the user may read
    it. Where it cannot be written, warn."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.stem}-", dir=path.parent) as folder:  # 0700
            file = Path(folder, path.name)
            file.write_text(text, encoding="utf-8")
            file.chmod(0o600)
            os.replace(file, path)
    except OSError as error:
        log.warning("%s cannot be saved to %s (%s); %s", what, path, error, otherwise)
