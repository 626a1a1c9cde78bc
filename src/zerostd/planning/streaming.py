"""A plan for a model that is not updated: parameters alone are placed, and a pass is one forward.

In: the bytes of each group in forward order, and what a rank may use of each tier. Out: a tier for each group, and the
seconds of a pass. What fits stays on the device. The others are streamed through it in every pass: from the host, and
from the disk where the host is full. Groups of one tier are spread over the model, so that links and arithmetic work
side by side.
"""

from __future__ import annotations

from collections.abc import Mapping

from zerostd.monitoring.texts import size_text
from zerostd.planning.plan import Prediction
from zerostd.planning.profiles import MachineProfile, ModelProfile
from zerostd.planning.request import forward_seconds
from zerostd.policy import Tier

COPIED = 2  # bytes of memory that a byte takes where the device is the processor: read and written


def spread(sizes: Mapping[str, int], room: int) -> set[str]:
    """Return the groups that fit into `room` bytes, taken evenly from the first to the last."""
    share = min(1.0, room / max(1, sum(sizes.values())))
    taken: set[str] = set()
    used = 0
    wanted = 0.0
    for name, size in sizes.items():
        wanted += share * size
        if used + size <= min(room, wanted + size / 2):
            taken.add(name)
            used += size
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if name not in taken and used + sizes[name] <= room:
            taken.add(name)
            used += sizes[name]
    return taken


def place_groups(sizes: Mapping[str, int], room: Mapping[Tier, int]) -> dict[str, Tier]:
    """Return the tier of each group, nearest tiers filled first. The first group is the root, which is gathered for as
    long as a forward lasts: it saves nothing elsewhere. What fits nowhere goes to the last tier there is."""
    root, *_ = sizes
    left = {name: size for name, size in sizes.items() if name != root}
    tiers = {root: Tier.DEVICE}
    for tier in (tier for tier in Tier if tier in room):
        space = room[tier] - (sizes[root] if tier is Tier.DEVICE else 0)
        for name in spread(left, max(0, space)):
            tiers[name] = tier
            del left[name]
    last = [tier for tier in Tier if tier in room][-1]
    return {name: tiers.get(name, last) for name in sizes}


def predict_pass(held: Mapping[Tier, int], model: ModelProfile | None, machine: MachineProfile | None) -> Prediction:
    """Return the seconds of a pass, without its bytes: the next groups are on their way while one computes, also from
    one pass to the next, so the slowest resource decides. Without a batch nothing is known of the arithmetic."""
    if machine is None:
        return Prediction()
    off = held[Tier.HOST] + held[Tier.DISK]
    busy: dict[str, float] = {}
    if off and machine.link is not None:
        busy["up"] = off / machine.link.up
    elif off:
        busy["memory"] = COPIED * off / machine.processor.memory
    if held[Tier.DISK] and machine.disk is not None:
        busy["read"] = held[Tier.DISK] / machine.disk.read
    if model is None or not model.knows_time:
        return Prediction(busy=busy)
    compute_s = sum(forward_seconds(model, machine))
    step_s = max([compute_s, *busy.values()])
    return Prediction(step_s=step_s, compute_s=compute_s, busy=busy, samples=model.samples)


def describe_pass(held: Mapping[Tier, int]) -> tuple[str, ...]:
    """Return in a sentence what stays, and what passes through the device."""
    off = [f"{size_text(held[tier])} from the {tier.value}" for tier in (Tier.HOST, Tier.DISK) if held[tier]]
    if not off:
        return ("Everything fits on the device, so nothing has to move.",)
    stays = f"{size_text(held[Tier.DEVICE])} of parameters stay on the device"
    return (f"{stays}; every pass streams {' and '.join(off)} through it.",)


def explain_pass(held: Mapping[Tier, int], limits: Mapping[Tier, int], over: Mapping[Tier, int]) -> str:
    """Return why groups cannot be placed: what their tiers miss, and what would help."""
    parts = []
    for tier, size in over.items():
        if size > 0:
            limit = limits.get(tier, 0)
            beside = ""
            if tier is Tier.DEVICE:
                beside = f": {size_text(held[tier])} stay there, and groups in transit take the rest"
            needed = f"{size_text(limit + size)} ({limit + size} bytes){beside}"
            parts.append(f"the {tier.value} must hold {needed}, but the limit is {size_text(limit)}")
    remedies = [f"Budget({tier.value}={limits.get(tier, 0) + size})" for tier, size in over.items() if size > 0]
    if Tier.DISK not in limits and over.get(Tier.HOST, 0) > 0:
        remedies.append("a disk, with Budget(disk_path=...)")
    if over.get(Tier.DEVICE, 0) > 0:
        remedies.append("smaller groups, with groups=[...]")
    return (
        f"{size_text(sum(held.values()))} of parameters do not fit: {'; '.join(parts)}. What would help: "
        f"{'; or '.join(remedies)}"
    )
