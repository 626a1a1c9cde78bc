"""A machine's profile, part by part, in less than half a minute.

With several ranks the first one measures its machine while the others wait, and all take its numbers: measuring at once
they would be in each other's way, and a plan must be the same on all of them. The wires they measure together. Rates
are those of the whole machine; `ranks_per_node` says how many ranks share its cores and its host memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import date
from typing import TypeVar, cast

import torch

from zerostd.communication import Control, World
from zerostd.communication.world import thread_budget
from zerostd.errors import CommunicationError, ZerostdError
from zerostd.measuring.identity import choose_device, free_bytes, machine_name, versions
from zerostd.measuring.rates import (
    FULL,
    UPDATE_BYTES,
    HostUpdates,
    LinkCopies,
    TrialSizes,
    busy_memory,
    disk_rates,
    finish,
    link_rates,
    matrix_rates,
    resident_ns,
)
from zerostd.measuring.wire import wire_rates
from zerostd.monitoring.ledger import Ledger
from zerostd.planning.profiles import Link, MachineProfile, Processor
from zerostd.planning.request import NUM_BUSY_THREADS
from zerostd.tiers.host import Host

Progress = Callable[[str, float], None]  # what is measured next, in plain words; fraction done
T = TypeVar("T")

log = logging.getLogger(__name__)

QUIET = 0.75  # of all cores, that updates on all of them have where nothing else runs
PARTS = {  # in their order: seconds that each takes at most or so, and what it needs
    "copies between host and device": (2.0, "link"),
    "updates on the processor": (6.0, ""),
    "host memory with everything busy": (1.0, "link"),
    "updates on the device": (2.0, "link"),
    "matrix products": (5.0, ""),
    "reading and writing files": (12.0, "disk"),
    "collectives among ranks": (4.0, "wire"),
}


def measure_machine(
    device: torch.device | str | None = None,
    *,
    disk_path: str | None = None,
    on_progress: Progress | None = None,
    sizes: TrialSizes = FULL,
) -> MachineProfile:
    """Return what this machine can do, tried out now. All ranks call it together, if there are several.

    Args:
        device: The device to train on; None: the accelerator, or the processor where there is none.
        disk_path: The directory that a disk tier would use; None: no disk is measured.
        on_progress: Told before each part what is measured next, in plain words, and the fraction that is done.
        sizes: How much is tried.

    Raises:
        PrepareError: `disk_path` cannot be used, or too little memory is free; says which.
    """
    device = choose_device(device)
    disk_path = None if disk_path is None else os.path.abspath(disk_path)
    world = World.discover(device)
    try:
        control = Control(world)
        tell = _teller(on_progress, has_link=device.type != "cpu", has_disk=disk_path is not None, size=world.size)
        profile = from_first(control, lambda: _measure(device, disk_path, tell, sizes))
        if world.size > 1:
            tell("collectives among ranks")
        wires = wire_rates(world, sizes)
        free = free_everywhere(control, device, disk_path)
    finally:
        world.close()
        if device.type != "cpu":  # give back what torch keeps for later
            finish(device)
            torch.accelerator.empty_cache()
    return replace(profile, wires=wires, free=free, ranks_per_node=world.local_size)


def from_first(control: Control, work: Callable[[], T]) -> T:
    """Return what `work` returns, or raise what it raises, on the first rank; the others wait for it."""
    if control.world.rank > 0:
        outcome = control.collect(None)[0]
        if isinstance(outcome, ZerostdError):
            raise outcome
        return cast(T, outcome)
    try:
        result = work()
    except Exception as error:
        is_ours = isinstance(error, ZerostdError)
        control.collect(error if is_ours else CommunicationError(f"rank 0 failed where others wait for it: {error!r}"))
        raise
    control.collect(result)
    return result


def free_everywhere(control: Control, device: torch.device, disk_path: str | None) -> dict[str, int]:
    everywhere = control.collect(free_bytes(device, disk_path))
    return {tier: min(free[tier] for free in everywhere) for tier in everywhere[0]}


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
        tell("updates on the processor")
        updates = HostUpdates(host, sizes, free["host"])
        by_threads = {count: updates.ns(count, sizes) for count in thread_counts(cores)}
        memory = UPDATE_BYTES / by_threads[cores] * 1e9
        _check_quiet(updates.had, cores)
        if copies is not None:
            tell("host memory with everything busy")
            memory = busy_memory(updates, copies, max(1, cores - NUM_BUSY_THREADS))
    finally:
        host.free_all()
    return link, Processor(cores, by_threads, memory)


def _check_quiet(had: float, cores: int) -> None:
    if had < QUIET:
        log.warning(
            "other work took part of the %d cores while they were measured (updates had %.0f%% of them), so rates are "
            "too low; measure again with `zerostd measure` when the machine is quiet",
            cores,
            100 * had,
        )


def _teller(on_progress: Progress | None, *, has_link: bool, has_disk: bool, size: int) -> Callable[[str], None]:
    is_done = {"link": has_link, "disk": has_disk, "wire": size > 1, "": True}
    names = [name for name, (_, needs) in PARTS.items() if is_done[needs]]

    def tell(name: str) -> None:
        if on_progress is not None:
            before = sum(PARTS[each][0] for each in names[: names.index(name)])
            on_progress(name, before / sum(PARTS[each][0] for each in names))

    return tell
