"""Profiles in files: measured once, and read again while the machine and the versions are the same."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from zerostd.communication import Control, World
from zerostd.errors import PrepareError
from zerostd.measuring.identity import choose_device, machine_name, versions
from zerostd.measuring.machine import Progress, free_everywhere, from_first, measure_machine
from zerostd.measuring.rates import FULL, TrialSizes, disk_rates
from zerostd.planning.profiles import DiskRates, MachineProfile

VARIABLE = "ZEROSTD_CACHE"  # a directory
AGAIN = "measure again with `zerostd measure`"

log = logging.getLogger(__name__)


def load_or_measure(
    device: torch.device | str | None = None,
    *,
    disk_path: str | None = None,
    on_progress: Progress | None = None,
    again: bool = False,
    sizes: TrialSizes = FULL,
) -> MachineProfile:
    """Return the profile that was kept of this machine, or else a new one, which is kept; `free` is that of now.

    A kept profile is used if machine, versions and number of ranks are those of now; a directory on a disk that was not
    measured is tried and added. A call that names no directory, or one in a world of one, does without what was
    measured of them. All ranks call it together, as they do `measure_machine`; `again` measures whatever was kept.
    """
    device = choose_device(device)
    disk_path = None if disk_path is None else os.path.abspath(disk_path)
    world = World.discover(device)
    try:
        control = Control(world)
        kept = from_first(control, lambda: None if again else _read_kept(device, disk_path, world.size))
        if kept is not None and disk_path is not None and not _is_on(kept.disk, disk_path):
            disk = from_first(control, lambda: disk_rates(disk_path, sizes))
            kept = replace(kept, disk=disk)
            if world.rank == 0:
                _keep(kept)
        if kept is not None:
            free = free_everywhere(control, device, disk_path)
            return replace(kept, free=free, ranks_per_node=world.local_size)
    finally:
        world.close()
    profile = measure_machine(device, disk_path=disk_path, on_progress=on_progress, sizes=sizes)
    if world.rank == 0:
        _keep(profile)
    return profile


def load_profile(path: str | os.PathLike[str]) -> MachineProfile:
    """Read the profile in a file, kept or written by hand; PrepareError says what is wrong with it."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PrepareError(f"no machine profile in {path} ({error.strerror}); {AGAIN}, or name another file") from error
    except UnicodeDecodeError as error:
        raise PrepareError(f"{path} is not text, so no machine profile ({error}); {AGAIN}") from error
    return MachineProfile.from_json(text, str(path))


def cache_file(name: str, versions: Mapping[str, str]) -> Path:
    """Return where the profile of such a machine is kept."""
    text = json.dumps([name, dict(versions)], sort_keys=True)
    folder = os.environ.get(VARIABLE) or Path.home() / ".cache" / "zerostd"
    return Path(folder) / f"machine-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"


def _read_kept(device: torch.device, disk_path: str | None, num_ranks: int) -> MachineProfile | None:
    """Return the profile that was kept, less what is not asked for; None if it is not of here and now."""
    name = machine_name(device)
    now = versions(device)
    path = cache_file(name, now)
    if not path.exists():
        return None
    try:
        kept = load_profile(path)
    except PrepareError as error:
        log.warning("the machine profile that was kept is of no use, so the machine is measured again: %s", error)
        return None
    if (kept.name, kept.device, kept.versions) != (name, device.type, now):
        log.warning("%s is of another machine or of other versions: the machine is measured again", path)
        return None
    if num_ranks > 1 and [wire.ranks for wire in kept.wires] != [num_ranks]:
        return None
    disk = None
    if kept.disk is not None and disk_path is not None and _is_on(kept.disk, disk_path):
        disk = replace(kept.disk, path=disk_path)
    return replace(kept, disk=disk, wires=() if num_ranks == 1 else kept.wires)


def _is_on(disk: DiskRates | None, path: str) -> bool:
    """Return whether these are the rates of the file system that a directory is on."""
    if disk is None or disk.path == path:
        return disk is not None
    with contextlib.suppress(OSError):
        return os.stat(disk.path).st_dev == os.stat(path).st_dev
    return False


def _keep(profile: MachineProfile) -> None:
    """Write a profile in one go: another process sees the old file or the new one. Only the user may read it."""
    path = cache_file(profile.name, profile.versions)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".machine-", dir=path.parent) as folder:  # 0700
            file = Path(folder, path.name)
            file.write_text(profile.to_json(), encoding="utf-8")
            file.chmod(0o600)
            os.replace(file, path)
    except OSError as error:
        log.warning("the machine profile cannot be kept in %s (%s): it is measured again next time", path, error)
