"""What a placement costs, by the rules in words and none of the program's rows.

Every resource does one job at a time: of those that may begin the one that forward needs first, and it lets go of a job
as soon as a more urgent one may begin. Jobs on different resources know nothing of each other. Backward goes from the
last group to the first, each update may begin when backward has done with its group (after all of backward, if it waits
for the norm), and forward begins with a group when its update is done everywhere. What is updated on the device has its
gradient there, what the processor updates has it on the host. No resource has more to do than a step is long, and a
processor that is the device as well has both to do.

A group that is recomputed runs its forward again before its backward. Activations that go to the host leave in the
order of forward, and forward begins with a group when those of the second before it are gone; they come back in the
order of backward, each not before backward has done with the second group after it. With `makes_room` the groups that
send nothing make room for more: what left need not be gone as long as it is no more than they are still going to leave
on the device, and may come back when backward has passed groups that left as much.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from zerostd.planning.demands import GroupShares
from zerostd.planning.request import GroupCost, PlanRequest
from zerostd.policy import Tier

ROUTES = ("resident", "cpu", "streamed", "disk_cpu", "disk_streamed")

Work = dict[str, float]


def seconds_of(request: PlanRequest, moved: Work) -> Work:
    """By resource, from bytes: up, down, to and from the disk, and read and written in host memory."""
    link, disk = request.machine.link, request.disk
    seconds: Work = {}
    if link is not None:
        seconds = {"up": moved["up"] / link.up, "down": moved["down"] / link.down}
        seconds["link"] = (moved["up"] + moved["down"]) / link.both
        seconds["memory"] = moved["memory"] / request.memory_rate
    if disk is not None:
        seconds |= {"read": moved["read"] / disk.read, "write": moved["write"] / disk.write}
        seconds["disk"] = moved["read"] / disk.both
    return seconds


def landing(cost: GroupCost, share: GroupShares) -> float:
    """Bytes of a gradient that go to the host: all of it where it rests there, else what the processor reads."""
    return cost.updated * cost.gradient_bytes * max(share.gradients_host, share.cpu + share.disk_cpu)


def update_seconds(request: PlanRequest, cost: GroupCost, share: GroupShares, *, lands: bool = True) -> Work:
    """For the update of one group and to bring its parameters for the next forward; with `lands` its gradient's way to
    the host is part of it."""
    n, model = cost.updated, request.model
    states, weight, gradient = model.state_bytes + model.master_bytes, model.parameter_bytes, cost.gradient_bytes
    off, landed = share.parameters_host + share.parameters_disk, share.gradients_host
    by_cpu, streamed = share.cpu + share.disk_cpu, share.streamed + share.disk_streamed
    up = n * (streamed * states + by_cpu * weight * (1 - off) + (1 - by_cpu) * gradient * landed)
    up += off * cost.parameters
    down = n * (streamed * states + (1 - by_cpu) * weight * off)
    down += landing(cost, share) if lands else 0.0
    disk = n * states * (share.disk_cpu + share.disk_streamed) + cost.parameters * share.parameters_disk
    memory = n * by_cpu * (gradient + weight + 2 * states) + up + down + 2 * disk
    moved = {"up": up, "down": down, "read": disk, "write": disk, "memory": memory}
    return {"cpu": n * by_cpu * request.machine.processor.ns(request.num_threads) * 1e-9, **seconds_of(request, moved)}


def seconds_beside(request: PlanRequest, cost: GroupCost, share: GroupShares, *, is_last: bool) -> Work:
    """For what is not part of an update: parameters for every backward, unless they are still there from forward, and
    for forward in passes before the last one; sums on the host, that come up to be added to and go down again."""
    passes = request.accumulate - 1
    times = passes + (0 if is_last else passes + 1)
    sums = passes * share.gradients_host * cost.gradients
    up = times * cost.parameters * (share.parameters_host + share.parameters_disk) + sums
    read = times * cost.parameters * share.parameters_disk
    away = request.accumulate * sent(cost, share)
    moved = {"up": up + away, "down": sums + away, "read": read, "write": 0.0, "memory": up + sums + 2 * away}
    return {"cpu": 0.0, **seconds_of(request, moved)}


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


def step_seconds(
    request: PlanRequest,
    costs: Sequence[GroupCost],
    shares: Sequence[GroupShares],
    works: Sequence[Work] = (),
    *,
    makes_room: bool = False,
) -> float:
    """One step, from a backward to the next; `works` are the updates' seconds, if somebody has them already."""
    placed, last = list(zip(costs, shares, strict=True)), len(costs) - 1
    works = works or [update_seconds(request, cost, share) for cost, share in placed]
    ends = backward_ends(request, placed, makes_room=makes_room)
    releases = ends if request.is_early else [ends[0]] * len(costs)
    done = [done_at(releases, [work[resource] for work in works]) for resource in works[0]]
    updated = sum(cost.updated * share.resident for cost, share in placed)
    ready = [max(one[group] for one in done) for group in range(len(costs))]
    begun = ends[0] + updated * request.machine.resident_ns * 1e-9
    now = forward_end(request, placed, begun, ready, releases, makes_room=makes_room)
    now += (request.accumulate - 1) * pass_seconds(request, placed, ends[0], makes_room=makes_room)
    beside = [seconds_beside(request, *one, is_last=group == last) for group, one in enumerate(placed)]
    busy = {resource: sum(work[resource] for work in [*works, *beside]) for resource in works[0]}
    if request.machine.link is None:
        computed = sum(cost.forward_s + cost.backward_s + longer(cost, share) for cost, share in placed)
        busy["cpu"] += request.accumulate * computed + updated * request.machine.resident_ns * 1e-9
    return max(now, *busy.values())


Placed = Sequence[tuple[GroupCost, GroupShares]]


def sent(cost: GroupCost, share: GroupShares) -> float:
    """Bytes of activations that go to the host in one pass."""
    return cost.activations.kept * share.activations_host if cost.activations is not None else 0.0


def longer(cost: GroupCost, share: GroupShares) -> float:
    """Seconds that backward takes longer because the group is recomputed."""
    return cost.activations.longer_s * share.activations_recomputed if cost.activations is not None else 0.0


def stays(cost: GroupCost, share: GroupShares) -> float | None:
    """Bytes of activations that a group leaves on the device; None of one that sends them."""
    if share.activations_host:
        return None
    if cost.activations is None:
        return 0.0
    return cost.activations.boundary if share.activations_recomputed else cost.activations.kept


def last_gone(placed: Placed, group: int) -> int:
    """The last group whose activations must be gone when forward begins with a group, where others make room."""
    kept = [stays(*one) for one in placed]
    to_come, left = sum(size or 0.0 for size in kept[group:]), [one for one in range(group) if sent(*placed[one])]
    others = left[:-1] if group and kept[group - 1] is None else left[:-2]  # than those that may be leaving anyway
    for first in reversed(others):
        if sum(sent(*one) for one in placed[first:group]) > to_come:
            return first
    return -1


def may_return(placed: Placed, group: int) -> int:
    """The first group in backward with which those of a group may come back, where others make room."""
    kept = [stays(*one) for one in placed]
    for at in range(len(placed) - 1, group, -1):
        passed = [size for size in kept[at + 1 :] if size is not None]
        freed = sum(passed if kept[at] is not None else passed[1:])
        if (kept[at] is None and at == group + 1) or sum(sent(*one) for one in placed[group : at + 1]) <= freed:
            return at
    return group


def backward_ends(request: PlanRequest, placed: Placed, *, makes_room: bool = False) -> list[float]:
    """When backward has done with each group."""
    ends, now, brought, back = [0.0] * len(placed), 0.0, 0.0, 0.0
    for group in reversed(range(len(placed))):
        cost, share = placed[group]
        if request.machine.link is not None:
            off = share.parameters_host + share.parameters_disk if group < len(placed) - 1 else 0.0
            brought += (cost.parameters * off + sent(cost, share)) / request.machine.link.up
        if sent(cost, share):
            after = may_return(placed, group) + 1 if makes_room else group + 2
            has_room = ends[after] if after < len(placed) else 0.0
            back = max(back, has_room) + sent(cost, share) / request.machine.link.up
            now = max(now, back)
        now = max(now, brought) + cost.backward_s + longer(cost, share)
        ends[group] = now
    return ends


def forward_end(
    request: PlanRequest,
    placed: Placed,
    now: float,
    ready: Sequence[float] = (),
    starts: Sequence[float] = (),
    *,
    makes_room: bool = False,
) -> float:
    """When forward is done, if groups are `ready` then. Between the start of its updates and a group, activations of
    groups up to the second before it pass through every resource on their way."""
    gone, link = list[float](), request.machine.link
    for group, (cost, share) in enumerate(placed):
        last = last_gone(placed, group) if makes_room else group - 2
        now = max(now, gone[last] if last >= 0 else 0.0, *ready[group : group + 1])
        if starts and link is not None and last >= 0:
            leaving = sum(sent(*one) for one in placed[: last + 1])
            now = max(now, starts[group] + leaving / min(link.down, link.both, request.memory_rate))
        now += cost.forward_s
        gone.append(max([now, *gone[-1:]]) + (sent(cost, share) / link.down if link is not None else 0.0))
    return now


def pass_seconds(request: PlanRequest, placed: Placed, backward_s: float, *, makes_room: bool = False) -> float:
    """Of a pass before the last one: arithmetic, or the pace at which activations leave and come back."""
    if any(sent(cost, share) for cost, share in placed):
        return backward_s + forward_end(request, placed, 0.0, makes_room=makes_room)
    return sum(cost.forward_s + cost.backward_s + longer(cost, share) for cost, share in placed)


def held_bytes(request: PlanRequest, cost: GroupCost, share: GroupShares) -> dict[Tier, float]:
    """Of one group in each tier."""
    n, model, copies = cost.updated, request.model, 2 if request.speculates else 1
    states, master, weight = n * model.state_bytes, n * model.master_bytes, n * model.parameter_bytes
    off, by_cpu = share.parameters_host + share.parameters_disk, share.cpu + share.disk_cpu
    device = (states + master * off) * share.resident + cost.parameters * (1 - off) + cost.pinned_gradients
    device += cost.gradients * (1 - share.gradients_host)
    shares_master = share.parameters_host if copies == 1 else 0.0
    host = (states + master * (1 - shares_master)) * copies * (share.cpu + share.streamed)
    host += cost.parameters * share.parameters_host + cost.gradients * share.gradients_host
    if request.machine.link is not None:  # what the processor reads of a gradient, and where new parameters wait
        host += n * cost.gradient_bytes * by_cpu * (1 - share.gradients_host)
        lands_on_copy = cost.gradient_bytes == model.parameter_bytes and copies == 1 and not share.gradients_host
        host += 0.0 if lands_on_copy else weight * by_cpu * (1 - off)
    disk = (states + master) * (share.disk_cpu + share.disk_streamed) + cost.parameters * share.parameters_disk
    if cost.activations is not None:
        kept, again = cost.activations.kept, share.activations_recomputed
        device += kept * (1 - again - share.activations_host) + cost.activations.boundary * again
        host += kept * share.activations_host
    return {Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: disk}


def needed_inside(costs: Sequence[GroupCost], shares: Sequence[GroupShares]) -> float:
    """Bytes of the device that one group needs while it runs, and that activations on their way pass through."""
    inside, buffers = [0.0], [0.0]
    for cost, share in zip(costs, shares, strict=True):
        if cost.activations is not None:
            inside.append(cost.activations.inside if share.activations_recomputed else cost.activations.peak)
            buffers.append(2 * cost.activations.largest if share.activations_host else 0.0)
    return max(inside) + max(buffers)


def fits(request: PlanRequest, costs: Sequence[GroupCost], shares: Sequence[GroupShares], slack: float = 1e-6) -> bool:
    """Whether it does in every tier, but for a part of its limit."""
    held = [held_bytes(request, cost, share) for cost, share in zip(costs, shares, strict=True)]
    held.append({Tier.DEVICE: needed_inside(costs, shares), Tier.HOST: 0.0, Tier.DISK: 0.0})
    return all(
        sum(one[tier] for one in held) + request.fixed.get(tier, 0) <= request.limits.get(tier, 0) * (1 + slack)
        for tier in Tier
    )


def grid(num_steps: int, routes: Sequence[str]) -> Iterator[GroupShares]:
    """All ways to divide a group's states among routes in so many equal parts."""
    for parts in product(range(num_steps + 1), repeat=len(routes) - 1):
        if sum(parts) <= num_steps:
            whole = [*parts, num_steps - sum(parts)]
            none = dict.fromkeys(ROUTES, 0.0)
            yield GroupShares(**{**none, **{route: one / num_steps for route, one in zip(routes, whole, strict=True)}})
