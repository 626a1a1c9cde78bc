"""What a rank may use of each tier: its part of a budget, or of what is free, less a margin."""

from __future__ import annotations

from collections.abc import Mapping

from zerostd.errors import PrepareError
from zerostd.planning.costs import FOR_ACTIVATIONS, FOR_LIBRARIES, MARGIN
from zerostd.policy import Budget, Tier, parse_bytes

__all__ = ["limits_for"]


def limits_for(
    budget: Budget,
    free: Mapping[str, int],
    local: int,
    *,
    is_host: bool,
    has_disk: bool,
    held: int = 0,
    knows_activations: bool = True,
) -> dict[Tier, int]:
    """Bytes by tier, for one of `local` ranks that share a host; host and disk are left out if nobody knows of them.

    Where the device is the processor (`is_host`) they share its memory too; an accelerator leaves some to libraries.
    `held` bytes of the device are the model's own already.
    """
    limits: dict[Tier, int] = {}
    left = 1.0 - MARGIN
    if budget.device is not None:
        limits[Tier.DEVICE] = max(0, parse_bytes(budget.device) - (0 if is_host else FOR_LIBRARIES))
    elif "device" not in free:
        raise PrepareError("machine profile: free.device is missing; complete it, or give a budget for the device")
    else:
        part = left if knows_activations else left * (1.0 - FOR_ACTIVATIONS)
        limits[Tier.DEVICE] = int((free["device"] // (local if is_host else 1) + held) * part)
    if budget.host is not None:
        limits[Tier.HOST] = parse_bytes(budget.host) // local
    elif "host" in free:
        taken = limits.get(Tier.DEVICE, 0) - held if is_host else 0
        limits[Tier.HOST] = max(0, int(free["host"] * left) // local - taken)
    if has_disk and (budget.disk is not None or "disk" in free):
        on_disk = parse_bytes(budget.disk) if budget.disk is not None else int(free["disk"] * left)
        limits[Tier.DISK] = on_disk // local
    return limits
