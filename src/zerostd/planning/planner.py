"""From a task to a plan: solve, bring whole groups to one place, solve again, look at it in the simulation.

The program takes shares of parameters and gradients, but a group rests in one tier as a whole. So its shares are
rounded, those nearest to a half last, and the states are placed again around them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zerostd.errors import PrepareError
from zerostd.planning.costs import Load, Task, loads, merged
from zerostd.planning.linear import Infeasible
from zerostd.planning.plan import Plan, Prediction, size_text
from zerostd.planning.program import SLACK, Optimum, Shares, missing, optimise, optimise_whole, work
from zerostd.planning.simulation import Timeline, simulate
from zerostd.policy import Homes, Kind, Route, Tier

__all__ = ["Solution", "evaluate", "homes_by_group", "make_plan", "model_state", "plan_from", "solve"]

PARTS = (0.4, 0.5, 0.6, 0.7, 0.85)  # of states on the host by the processor, tried in the simulation
TOLERANCE = 1e-5
MOST_MOVES = 8  # of single groups, before all are looked at together
WORTH_MOVING = 0.05  # of a step: what a plan must bring to move anything where all fits on the device
MOST_LOADS = 160  # groups that the program sees; neighbours of larger models are placed together


@dataclass(frozen=True)
class Solution:
    """A placement of whole groups, and what it costs."""

    task: Task
    loads: list[Load]
    shares: list[Shares]
    optimum: Optimum  # of the program, with these parameters and gradients
    timeline: Timeline


def make_plan(task: Task, notes: Sequence[str] = ()) -> Plan:
    """The fastest plan that fits, its bytes by the closed form."""
    solution = solve(task)
    return plan_from(solution, homes_by_group(solution), model_state(solution), notes)


def plan_from(
    solution: Solution,
    homes: Mapping[str, Homes],
    counted: Mapping[Tier, Mapping[Kind, int]],
    notes: Sequence[str] = (),
) -> Plan:
    """A solution as a plan, with bytes that were counted for its homes."""
    task = solution.task
    knows_time = task.model.samples is not None or task.model.forward_s is not None
    busy = work(task, solution.loads, solution.shares)
    busy["wire"] = task.accumulate * sum(load.wire_s for load in solution.loads)
    predicted = Prediction(
        step_s=solution.timeline.step_s if knows_time else None,
        compute_s=solution.timeline.compute_s if knows_time else None,
        bytes=counted,
        busy={name: seconds for name, seconds in busy.items() if seconds > 1e-9},
        prices=solution.optimum.prices,
    )
    return Plan(
        homes=homes,
        stage=task.stage,
        world_size=task.world_size,
        speculate=task.speculates and any(share.resident < 1 for share in solution.shares),
        predicted=predicted,
        limits=dict(task.limits),
        notes=(_twice_the_samples(solution), *notes) if knows_time else tuple(notes),
    )


def _twice_the_samples(solution: Solution) -> str:
    """What they would buy, in words."""
    task, model = solution.task, solution.task.model
    more: dict[str, Any] = {
        name: 2 * value
        for name in ("samples", "forward_s", "backward_s", "activation_bytes")
        if (value := getattr(model, name)) is not None
    }
    fixed = {**task.fixed, Tier.DEVICE: task.fixed.get(Tier.DEVICE, 0) + model.activations()}
    try:
        other = solve(replace(task, model=replace(model, **more), fixed=fixed))
    except PrepareError:
        return "Twice the samples in a pass would not fit."
    gain = 2 * solution.timeline.step_s / max(other.timeline.step_s, 1e-12)
    return f"Twice the samples in a pass would train {gain:.2f} times as many of them in a second."


def solve(task: Task) -> Solution:
    """The best placement of whole groups. Raises PrepareError with what is missing, if nothing fits."""
    found = merged(loads(task), MOST_LOADS)
    try:
        relaxed = optimise(task, found)
    except Infeasible:
        raise PrepareError(_explain_missing(task, found)) from None
    fixed, optimum = _settle(task, found, relaxed)
    shares = [
        replace(
            one,
            parameters_host=given.parameters_host,
            parameters_disk=given.parameters_disk,
            gradients_host=given.gradients_host,
        )
        for one, given in zip(optimum.shares, fixed, strict=True)
    ]
    choices = [shares, _even(found, shares)]
    if task.machine.link is not None:
        choices += [_alike(shares, part) for part in PARTS]
    if _fits_on_device(task, found):
        choices.append([_all_resident(load) for load in found])
    made = [Solution(task, found, choice, optimum, simulate(task, found, choice)) for choice in choices]
    made = [one for one in made if _fits(one)] or made[:1]
    shortest = min(one.timeline.step_s for one in made)
    at_home = next((one for one in made if one.shares is choices[-1] and _fits_on_device(task, found)), None)
    if at_home is not None and at_home.timeline.step_s <= shortest * (1 + WORTH_MOVING):
        return at_home
    return min((one for one in made if one.timeline.step_s <= shortest * (1 + SLACK)), key=_bytes_off)


def evaluate(task: Task, homes: Mapping[str, Homes]) -> Solution:
    """What given homes cost. Groups that are placed as one must have the same."""
    found = merged(loads(task), MOST_LOADS)
    names = [group.name for group in task.model.groups]
    shares = [_shares(homes[names[load.members[0]]]) for load in found]
    timeline = simulate(task, found, shares)
    return Solution(task, found, shares, Optimum(timeline.step_s, shares, {}, {}, {}), timeline)


def _shares(homes: Homes) -> Shares:
    """The counterpart of _homes."""
    names = {
        (Tier.DEVICE, Route.RESIDENT): "resident",
        (Tier.HOST, Route.CPU): "cpu",
        (Tier.HOST, Route.STREAMED): "streamed",
        (Tier.DISK, Route.CPU): "disk_cpu",
        (Tier.DISK, Route.STREAMED): "disk_streamed",
    }
    parts = {names[tier, route]: part for tier, route, part in homes.states}
    return Shares(
        **{"resident": 0.0, **parts},
        parameters_host=float(homes.parameters is Tier.HOST),
        parameters_disk=float(homes.parameters is Tier.DISK),
        gradients_host=float(homes.gradients is Tier.HOST),
    )


def _all_resident(load: Load) -> Shares:
    """Everything on the device that may be."""
    return Shares(parameters_host=float(load.rests is Tier.HOST), parameters_disk=float(load.rests is Tier.DISK))


def _fits(solution: Solution) -> bool:
    limits = solution.task.limits
    held = {tier: sum(kinds.values()) for tier, kinds in model_state(solution).items()}
    return all(size <= limits.get(tier, 0) * (1 + TOLERANCE) + 1 for tier, size in held.items())


def _bytes_off(solution: Solution) -> float:
    """What is not on the device."""
    return sum(
        load.updated * solution.task.model.state_bytes * (1 - share.resident)
        + load.parameters * (share.parameters_host + share.parameters_disk)
        + load.gradients * share.gradients_host
        for load, share in zip(solution.loads, solution.shares, strict=True)
    )


def _alike(shares: Sequence[Shares], part: float) -> list[Shares]:
    """The same part by the processor in all groups, whatever the program says: it sees no harm in giving it all of some
    groups and none of others, and then it has nothing to do for half of backward."""
    made = []
    for share in shares:
        on_host = 0.0 if share.parameters_disk else share.cpu + share.streamed
        made.append(replace(share, cpu=on_host * part, streamed=on_host * (1 - part)) if on_host else share)
    return made


def _fits_on_device(task: Task, found: Sequence[Load]) -> bool:
    states = sum(load.updated for load in found) * task.model.state_bytes
    rest = sum(load.gradients + load.pinned_gradients for load in found)
    rest += sum(load.parameters for load in found if load.rests in (None, Tier.DEVICE))
    return states + rest + task.fixed.get(Tier.DEVICE, 0) <= task.limits.get(Tier.DEVICE, 0)


def _settle(task: Task, found: Sequence[Load], relaxed: Optimum) -> tuple[list[Shares], Optimum]:
    """Round parameters and gradients to whole groups; what does not fit goes off the device, the nearest first."""
    fixed = [_rounded(share) for share in relaxed.shares]
    for _ in range(MOST_MOVES):
        try:
            return fixed, optimise(task, found, fixed=fixed)
        except Infeasible:
            if not _move_one(task, found, relaxed.shares, fixed):
                break
    try:
        fixed = [_rounded(share) for share in optimise_whole(task, found)]
        return fixed, optimise(task, found, fixed=fixed)
    except Infeasible:
        raise PrepareError(_explain_missing(task, found)) from None


def _rounded(share: Shares) -> Shares:
    on_disk = share.parameters_disk > max(share.parameters_host, 1 - share.parameters_host - share.parameters_disk)
    on_host = not on_disk and share.parameters_host > 1 - share.parameters_host - share.parameters_disk
    return replace(
        share,
        parameters_host=float(on_host),
        parameters_disk=float(on_disk),
        gradients_host=float(share.gradients_host > 0.5),
    )


def _move_one(task: Task, found: Sequence[Load], wanted: Sequence[Shares], fixed: list[Shares]) -> bool:
    """Take the gradients or parameters of one more group off the device, or from the host to disk; False if there is
    none left."""
    best: tuple[float, int, str] | None = None
    for index, (load, want, have) in enumerate(zip(found, wanted, fixed, strict=True)):
        options = []
        if task.may_place(Kind.GRADIENTS) and Tier.HOST in task.limits and load.gradients and not have.gradients_host:
            options.append((want.gradients_host, "gradients_host"))
        is_off = have.parameters_host or have.parameters_disk
        if task.may_place(Kind.PARAMETERS) and load.parameters and not is_off:
            home = "parameters_host" if Tier.HOST in task.limits else "parameters_disk"
            options.append((want.parameters_host + want.parameters_disk, home))
        may_go_on = task.may_place(Kind.PARAMETERS) and Tier.DISK in task.limits and task.machine.disk is not None
        if have.parameters_host and may_go_on:
            options.append((want.parameters_disk - 2.0, "parameters_disk"))
        for share, name in options:
            key = (share + 1e-9 * index, index, name)
            best = key if best is None or key > best else best
    if best is None:
        return False
    index, name = best[1:]
    if name == "parameters_disk":
        fixed[index] = replace(fixed[index], parameters_host=0.0)
    fixed[index] = replace(fixed[index], **{name: 1.0})
    return True


def _even(found: Sequence[Load], shares: Sequence[Shares]) -> list[Shares]:
    """Among groups whose parameters and gradients rest alike, the processor's part of what is on the host is the same
    in all: the program does not care, but workers that take turns on every group wait less for each other."""
    made = list(shares)
    alike: dict[tuple[float, float, float], list[int]] = {}
    for index, share in enumerate(shares):
        alike.setdefault((share.parameters_host, share.parameters_disk, share.gradients_host), []).append(index)
    for indices in alike.values():
        cpu = sum(found[i].updated * shares[i].cpu for i in indices)
        streamed = sum(found[i].updated * shares[i].streamed for i in indices)
        part = cpu / (cpu + streamed) if cpu + streamed else 0.0
        for i in indices:
            on_host = shares[i].cpu + shares[i].streamed
            made[i] = replace(shares[i], cpu=on_host * part, streamed=on_host * (1 - part))
    return made


def homes_by_group(solution: Solution) -> dict[str, Homes]:
    """The shares as homes, by name of group."""
    names = [group.name for group in solution.task.model.groups]
    found = {}
    for load, share in zip(solution.loads, solution.shares, strict=True):
        homes = _homes(share)
        for index in load.members:
            found[names[index]] = homes
    return {name: found[name] for name in names}


def _homes(share: Shares) -> Homes:
    parts = [
        (Tier.DEVICE, Route.RESIDENT, share.resident),
        (Tier.HOST, Route.CPU, share.cpu),
        (Tier.HOST, Route.STREAMED, share.streamed),
        (Tier.DISK, Route.CPU, share.disk_cpu),
        (Tier.DISK, Route.STREAMED, share.disk_streamed),
    ]
    kept = [(tier, route, part) for tier, route, part in parts if part > 5e-6]
    total = sum(part for _, _, part in kept)
    parameters = Tier.HOST if share.parameters_host else Tier.DISK if share.parameters_disk else Tier.DEVICE
    return Homes(
        parameters,
        Tier.HOST if share.gradients_host else Tier.DEVICE,
        tuple((tier, route, part / total) for tier, route, part in kept),
    )


def model_state(solution: Solution) -> dict[Tier, dict[Kind, int]]:
    """Bytes by the closed form: 2 for a parameter, 2 for its gradient, 12 for its states, by what this rank holds."""
    task, model = solution.task, solution.task.model
    total: dict[Tier, dict[Kind, float]] = {tier: {} for tier in Tier}

    def add(tier: Tier, kind: Kind, size: float) -> None:
        total[tier][kind] = total[tier].get(kind, 0.0) + size

    for load, share in zip(solution.loads, solution.shares, strict=True):
        homes = _homes(share)
        add(homes.parameters, Kind.PARAMETERS, load.parameters)
        add(homes.gradients, Kind.GRADIENTS, load.gradients)
        add(Tier.DEVICE, Kind.GRADIENTS, load.pinned_gradients)
        for tier, route, part in homes.states:
            copies = 2 if task.speculates and tier is Tier.HOST else 1
            shares_master = tier is homes.parameters and tier is not Tier.DISK and copies == 1
            width = model.state_bytes + (0 if shares_master else model.master_bytes)
            add(tier, Kind.OPTIMIZER_STATES, load.updated * part * width * copies)
            if route is Route.CPU:
                add(Tier.HOST, Kind.BUFFERS, load.updated * part * _passing(task, load, homes))
    for tier, size in task.fixed.items():
        activations = model.activations() if tier is Tier.DEVICE else 0
        add(tier, Kind.ACTIVATIONS, activations)
        add(tier, Kind.BUFFERS, max(0, size - activations))
    return {tier: {kind: int(size) for kind, size in kinds.items() if size >= 1} for tier, kinds in total.items()}


def _passing(task: Task, load: Load, homes: Homes) -> int:
    """Bytes of host memory that a parameter updated by the processor takes: its gradient, its new value."""
    gradient = weight = 0
    if task.machine.link is not None and homes.gradients is Tier.DEVICE:
        gradient = load.gradient_bytes
    lands_on_gradient = gradient == task.model.parameter_bytes and not task.speculates
    if homes.parameters is Tier.DISK or (
        task.machine.link is not None and homes.parameters is Tier.DEVICE and not lands_on_gradient
    ):
        weight = task.model.parameter_bytes
    return gradient + weight


def _explain_missing(task: Task, found: Sequence[Load]) -> str:
    short = {tier: size for tier, size in missing(task, found).items() if size > 1}
    limits = ", ".join(f"{size_text(size)} of the {tier.value}" for tier, size in task.limits.items())
    where = " and ".join(f"{size_text(size)} ({int(size)} bytes) of the {tier.value}" for tier, size in short.items())
    if not short:
        largest = max(load.gathered for load in found)
        where = f"less than a group, which moves as a whole (the largest has {int(largest)} bytes of parameters),"
    advice = [f"Budget({tier.value}=...) larger by that" for tier in short or task.limits]
    if Tier.DISK not in task.limits:
        advice.append("a disk: Budget(disk=..., disk_path=...)")
    if task.model.activations():
        advice.append("fewer samples in a pass, or recomputed activations")
    if task.world_size == 1 or task.stage < 3:
        advice.append("more ranks" if task.stage == 3 else "stage=3")
    return (
        f"no placement fits {task.model.numel / 1e9:.3g} B parameters at stage {task.stage.value} on "
        f"{task.world_size} rank(s) into {limits} each: at least {where} is missing. What would fit: "
        + "; ".join(advice)
    )
