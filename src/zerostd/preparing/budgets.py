"""Budgets: the bytes of each tier that a rank may use, from the user's budget or from free memory less a margin."""

from __future__ import annotations

from collections.abc import Mapping

from zerostd.communication import Control, World
from zerostd.errors import PrepareError
from zerostd.measuring.identity import free_bytes
from zerostd.policy import Budget, Tier, parse_bytes

MARGIN = 0.1  # of what is free: the part that no plan uses
FOR_ACTIVATIONS = 0.4  # of the device, if the batch is not known and there is no budget,
FOR_PASSES = 0.15  # and where nothing is kept for backward
FOR_LIBRARIES = 128 << 20  # bytes of an accelerator that matrix products take to work in: 110 to 125 MiB were seen
UNSEEN = 0.01  # of an accelerator's budget, or as much as for libraries: what operations take that nobody counts


def least_limits(
    control: Control, budget: Budget, held: int, *, left: float = FOR_ACTIVATIONS, world: World | None = None
) -> dict[Tier, int]:
    """Return what the rank with the least may use of each tier, in this world or another one. All ranks call it
    together."""
    by_rank: list[dict[Tier, int]] = control.collect(find_limits(budget, world or control.world, held, left=left))
    return {tier: min(limits[tier] for limits in by_rank) for tier in by_rank[0]}


def find_limits(
    budget: Budget,
    world: World,
    held: int,
    free: Mapping[str, int] | None = None,
    *,
    left: float = FOR_ACTIVATIONS,
) -> dict[Tier, int]:
    """Return the bytes that this rank may use of each tier. Host and disk are left out if nothing is known of them.

    `held` bytes of the device are the model's own already; `free` is given for another machine. `left` is the part of
    the device that activations get, without a budget. Ranks of a node share host and disk, and the device if that is
    the CPU.
    """
    if free is None:
        free = free_bytes(world.device, budget.disk_path)
    is_host = world.device.type == "cpu"
    local = world.local_size
    usable = 1.0 - MARGIN
    if budget.device is not None:
        whole = parse_bytes(budget.device)
        device = max(0, whole - (0 if is_host else max(FOR_LIBRARIES, int(UNSEEN * whole))))
    elif "device" not in free:
        raise PrepareError("machine profile: free.device is missing; complete it, or give a budget for the device")
    else:
        device = int((free["device"] // (local if is_host else 1) + held) * usable * (1.0 - left))
    limits: dict[Tier, int] = {Tier.DEVICE: device}
    if budget.host is not None:
        limits[Tier.HOST] = parse_bytes(budget.host) // local
    elif "host" in free:
        limits[Tier.HOST] = max(0, int(free["host"] * usable) // local - (device - held if is_host else 0))
    if budget.disk is not None and (budget.disk_path is not None or "disk" in free):
        limits[Tier.DISK] = parse_bytes(budget.disk) // local
    elif budget.disk_path is not None and "disk" in free:
        limits[Tier.DISK] = int(free["disk"] * usable) // local
    return limits
