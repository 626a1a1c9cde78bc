"""What a placement costs, by the rules in words and none of the program's rows.

Every resource does one job at a time: of those that may begin the one that forward needs first, and it lets go of a job
as soon as a more urgent one may begin. Jobs on different resources know nothing of each other. Backward goes from the
last group to the first, each update may begin when backward has done with its group (after all of backward, if it waits
for the norm), and forward begins with a group when its update is done everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from zerostd.planning.costs import Load, Task
from zerostd.planning.program import Shares
from zerostd.policy import Tier

ROUTES = ("resident", "cpu", "streamed", "disk_cpu", "disk_streamed")

Work = dict[str, float]


def update_seconds(task: Task, load: Load, share: Shares) -> Work:
    """Of each resource, for the update of one group and to bring its parameters for the next forward."""
    n, model, machine = load.updated, task.model, task.machine
    states, weight, gradient = model.state_bytes, model.parameter_bytes, load.gradient_bytes
    off = share.parameters_host + share.parameters_disk
    by_cpu, streamed = share.cpu + share.disk_cpu, share.streamed + share.disk_streamed
    up = n * (by_cpu * weight * (1 - off) + streamed * (states + gradient * share.gradients_host))
    up += off * load.parameters
    down = n * (by_cpu * gradient * (1 - share.gradients_host) + streamed * (states + weight * off))
    down += n * gradient * share.gradients_host
    disk = n * states * (share.disk_cpu + share.disk_streamed) + load.parameters * share.parameters_disk
    memory = n * by_cpu * (gradient + weight + 2 * states) + up + down + 2 * disk
    seconds = {"cpu": n * by_cpu * machine.processor.ns(task.num_threads) * 1e-9}
    if machine.link is not None:
        seconds |= {"up": up / machine.link.up, "down": down / machine.link.down}
        seconds |= {"link": (up + down) / machine.link.both, "memory": memory / machine.processor.memory}
    if machine.disk is not None:
        seconds |= {"read": disk / machine.disk.read, "write": disk / machine.disk.write}
        seconds["disk"] = disk / machine.disk.both
    return seconds


def again_seconds(task: Task, load: Load, share: Shares) -> Work:
    """To bring a group's parameters once more, for backward."""
    machine = task.machine
    up, read = load.parameters * (share.parameters_host + share.parameters_disk), load.parameters * share.parameters_disk
    seconds: Work = {}
    if machine.link is not None:
        seconds = {"up": up / machine.link.up, "link": up / machine.link.both, "memory": up / machine.processor.memory}
    if machine.disk is not None:
        seconds |= {"read": read / machine.disk.read, "disk": read / machine.disk.both}
    return seconds


def done_at(releases: Sequence[float], works: Sequence[float]) -> list[float]:
    """When each job is done on one resource: the first of the list is the most urgent."""
    left, done, now = list(works), list(releases), 0.0
    while any(left):
        later = [release for release, work in zip(releases, left, strict=True) if work and release > now]
        ready = [i for i, work in enumerate(left) if work and releases[i] <= now]
        if not ready:
            now = min(later)
            continue
        first = ready[0]
        if later and now + left[first] > min(later):
            left[first] -= min(later) - now
            now = min(later)
        else:
            now, left[first] = now + left[first], 0.0
            done[first] = now
    return done


def step_seconds(task: Task, loads: Sequence[Load], shares: Sequence[Shares], works: Sequence[Work] = ()) -> float:
    """One step, from a backward to the next; `works` are the updates' seconds, if somebody has them already."""
    works = works or [update_seconds(task, load, share) for load, share in zip(loads, shares, strict=True)]
    again = [again_seconds(task, load, share) for load, share in zip(loads[:-1], shares[:-1], strict=True)]
    ends, now, brought = [0.0] * len(loads), 0.0, 0.0
    for group in reversed(range(len(loads))):
        brought += again[group].get("up", 0.0) if group < len(again) else 0.0
        now = max(now, brought) + loads[group].backward_s
        ends[group] = now
    releases = ends if task.is_early else [ends[0]] * len(loads)
    done = [done_at(releases, [work[resource] for work in works]) for resource in works[0]]
    updated = sum(load.updated * share.resident for load, share in zip(loads, shares, strict=True))
    now = ends[0] + updated * task.machine.resident_ns * 1e-9
    for group, load in enumerate(loads):
        now = max(now, *(one[group] for one in done)) + load.forward_s
    now += (task.accumulate - 1) * sum(load.forward_s + load.backward_s for load in loads)
    passes = 2 * task.accumulate - 1
    return max(now, *(sum(w[r] for w in works) + passes * sum(a.get(r, 0.0) for a in again) for r in works[0]))


def held_bytes(task: Task, load: Load, share: Shares) -> dict[Tier, float]:
    """Of one group in each tier."""
    n, model = load.updated, task.model
    states, copies = n * model.state_bytes, 2 if task.speculates else 1
    off, by_cpu = share.parameters_host + share.parameters_disk, share.cpu + share.disk_cpu
    device = states * share.resident + load.parameters * (1 - off) + load.pinned_gradients
    device += load.gradients * (1 - share.gradients_host)
    host = states * copies * (share.cpu + share.streamed) + load.parameters * share.parameters_host
    host += load.gradients * share.gradients_host
    if task.machine.link is not None:  # what the processor reads of a gradient, and where new parameters wait
        host += n * load.gradient_bytes * by_cpu * (1 - share.gradients_host)
        lands_on_gradient = load.gradient_bytes == model.parameter_bytes and not task.speculates
        host += 0 if lands_on_gradient else n * model.parameter_bytes * by_cpu * (1 - off)
    disk = states * (share.disk_cpu + share.disk_streamed) + load.parameters * share.parameters_disk
    return {Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: disk}


def fits(task: Task, loads: Sequence[Load], shares: Sequence[Shares], slack: float = 1e-6) -> bool:
    """Whether it does in every tier, but for a part of its limit."""
    held = [held_bytes(task, load, share) for load, share in zip(loads, shares, strict=True)]
    return all(
        sum(one[tier] for one in held) + task.fixed.get(tier, 0) <= task.limits.get(tier, 0) * (1 + slack)
        for tier in Tier
    )


def grid(num_steps: int, routes: Sequence[str]) -> Iterator[Shares]:
    """All ways to divide a group's states among routes in so many equal parts."""
    for parts in product(range(num_steps + 1), repeat=len(routes) - 1):
        if sum(parts) <= num_steps:
            whole = [*parts, num_steps - sum(parts)]
            none = dict.fromkeys(ROUTES, 0.0)
            yield Shares(**{**none, **{route: one / num_steps for route, one in zip(routes, whole, strict=True)}})
