"""From a request to a plan: solve, bring whole groups to one place, solve again, look at it in the simulation."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from zerostd.errors import PrepareError
from zerostd.monitoring.texts import size_text
from zerostd.planning.activations import activation_bytes, way_of
from zerostd.planning.advice import explain_missing, recomputing
from zerostd.planning.costs import GroupCost, PlanRequest, group_costs, merged
from zerostd.planning.demands import WHOLE, GroupShares, work
from zerostd.planning.linear import Infeasible, LinearSolution
from zerostd.planning.plan import GIB, Plan, Prediction
from zerostd.planning.program import SLACK, Optimum, optimise, prices_of, quickest
from zerostd.planning.rounding import settle
from zerostd.planning.simulation import simulate
from zerostd.planning.solution import (
    Solution,
    activations_by_group,
    fits,
    homes_by_group,
    model_state,
    shares_of,
)
from zerostd.policy import Homes, Kind, Tier

__all__ = ["Solution", "evaluate", "homes_by_group", "make_plan", "model_state", "place_states", "plan_from", "solve"]

PARTS = (0.4, 0.5, 0.6, 0.7, 0.85)  # of states on the host by the processor, tried in the simulation
DIGITS = 9  # of seconds: among placements that differ in less, the first is taken
FEW = 1e-3  # of the bytes off the device: as good as none
WORTH_TELLING = 0.15  # of a step: what recomputing must bring
WORTH_CHANGING = 0.01  # of a step: what another answer must bring
WORTH_MOVING = 0.1  # of a step: what a plan must bring to move anything where all fits on the device
MOST_LOADS = 96  # groups that the program sees; neighbours of larger models are placed together


def make_plan(request: PlanRequest, notes: Sequence[str] = ()) -> Plan:
    """The fastest plan that fits, its bytes by the closed form."""
    solution = solve(request)
    return plan_from(solution, homes_by_group(solution), model_state(solution), notes)


def plan_from(
    solution: Solution,
    homes: Mapping[str, Homes],
    counted: Mapping[Tier, Mapping[Kind, int]],
    notes: Sequence[str] = (),
) -> Plan:
    """A solution as a plan, with bytes that were counted for its homes."""
    request = solution.request
    knows_time = request.model.samples is not None or request.model.forward_s is not None
    busy = work(request, solution.costs, solution.shares)
    busy["wire"] = request.accumulate * sum(cost.wire_s for cost in solution.costs)
    predicted = Prediction(
        step_s=solution.timeline.step_s if knows_time else None,
        compute_s=solution.timeline.compute_s if knows_time else None,
        clipped_s=_clipped_s(solution) if knows_time and _speculates(solution) else None,
        bytes=counted,
        busy={name: seconds for name, seconds in busy.items() if seconds > 1e-9},
        prices=_prices(solution),
    )
    return Plan(
        homes=homes,
        stage=request.stage,
        world_size=request.world_size,
        speculate=_speculates(solution),
        predicted=predicted,
        limits=dict(request.limits),
        notes=(*(_notes(solution) if knows_time else ()), *notes),
        activations=activations_by_group(solution),
    )


def _prices(solution: Solution) -> dict[Tier, float]:
    """Seconds for a byte, of the next GiB: by how much the program's step becomes shorter, in shares of groups, since
    whole ones may have to change places to make use of it; and a step has its arithmetic, with nothing recomputed."""
    request, found = solution.asked or solution.request, solution.costs
    made: dict[Tier, float] = {}
    with contextlib.suppress(Infeasible):  # it is a plan that no longer fits
        first = _shortest(request, solution)
        made = prices_of(first)
        for tier in (tier for tier in request.limits if made[tier]):
            more = _shortest(replace(request, limits={**request.limits, tier: request.limits[tier] + GIB}), solution)
            made[tier] = min(made[tier], max(0.0, first.objective - more.objective) / GIB)
    least_s = request.accumulate * sum(cost.compute_s for cost in found)
    most_s = max(0.0, solution.timeline.step_s - least_s)
    return {tier: min(price, most_s / GIB) for tier, price in made.items()}


def _shortest(request: PlanRequest, solution: Solution) -> LinearSolution:
    """In shares of groups; as whole ones, where only those were found to fit."""
    with contextlib.suppress(Infeasible):
        return quickest(request, solution.costs)[1]
    return quickest(request, solution.costs, fixed=solution.shares)[1]


def _notes(solution: Solution) -> Iterator[str]:
    yield _twice_the_samples(solution)
    if solution.request.chooses:
        yield from _about_activations(solution)
    else:
        yield from _if_recomputed(solution)


def _speculates(solution: Solution) -> bool:
    return solution.request.speculates and any(share.resident < 1 for share in solution.shares)


def _clipped_s(solution: Solution) -> float:
    """What a step takes whose update waits for the norm after all."""
    return simulate(replace(solution.request, speculates=False), solution.costs, solution.shares).step_s


def _about_activations(solution: Solution) -> Iterator[str]:
    """Bytes and seconds of what is not kept."""
    found, passes = solution.costs, solution.request.accumulate
    kept = activation_bytes(found, [GroupShares()] * len(found))[0]
    held, sent = activation_bytes(found, solution.shares)
    again_s = passes * sum(
        cost.activations.again_s
        for cost, share in zip(found, solution.shares, strict=True)
        if cost.activations is not None and way_of(share) == "recompute"
    )
    if held < kept:
        more = [f"{again_s:.3g} s of arithmetic a step"] * (again_s > 0)
        more += [f"{size_text(sent)} of the host, over the link and back in every pass"] * (sent > 0)
        instead = f"{size_text(held)} of the device instead of {size_text(kept)}"
        yield f"Activations take {instead}, for {' and '.join(more)}."


def _if_recomputed(solution: Solution) -> Iterator[str]:
    """Whether a step would be much shorter if the model recomputed activations, and so left room for model state."""
    request = solution.request
    again, now = recomputing(request), request.model.activations()
    could = 1.0 - solution.timeline.compute_s / max(solution.timeline.step_s, 1e-12)
    if again is None or again >= now or could < WORTH_TELLING or not _bytes_off(solution):
        return
    fixed = {**request.fixed, Tier.DEVICE: max(0, request.fixed.get(Tier.DEVICE, 0) - now)}
    try:
        other = _as_measured(replace(request, fixed=fixed, activations=frozenset({"keep", "recompute"})))
    except PrepareError:
        return
    gain = 1.0 - other.timeline.step_s / solution.timeline.step_s
    if gain > WORTH_TELLING:
        done = [
            len(cost.members) for cost, share in zip(other.costs, other.shares, strict=True) if way_of(share) != "keep"
        ]
        yield (
            f"Recomputing the activations of {sum(done)} of {len(request.model.groups)} groups with "
            f"torch.utils.checkpoint would make a step {gain:.0%} shorter: it leaves more of the device to model state."
        )


def _twice_the_samples(solution: Solution) -> str:
    """What they would buy, in words."""
    request, model = solution.request, solution.request.model
    more = {
        name: 2 * value
        for name in ("samples", "forward_s", "backward_s", "activation_bytes")
        if (value := getattr(model, name)) is not None
    }
    fixed = request.fixed
    if not request.chooses:
        fixed = {**fixed, Tier.DEVICE: fixed.get(Tier.DEVICE, 0) + model.activations()}
    try:
        other = _as_measured(replace(request, model=replace(model, **more), fixed=fixed))
    except PrepareError:
        return "Twice the samples in a pass would not fit."
    gain = 2 * solution.timeline.step_s / max(other.timeline.step_s, 1e-12)
    return f"Twice the samples in a pass would train {gain:.2f} times as many of them in a second."


def solve(request: PlanRequest) -> Solution:
    """The best placement of whole groups. Raises PrepareError with what is missing, if nothing fits."""
    best = _as_measured(request)
    if best.slow_s > best.timeline.step_s * (1 + SLACK):
        return _better(best, [best.slow_request])
    return best


def _as_measured(request: PlanRequest) -> Solution:
    """The best one for a machine that stays as it was measured."""
    best = _solve(request)
    return _better(best, _simpler(request, best))


def _better(best: Solution, others: Iterable[PlanRequest]) -> Solution:
    """This one, or the answer to another request: the program does not see all that it costs to do one thing here, one
    there, and relies on a processor that may be slow."""
    for other in others:
        with contextlib.suppress(PrepareError):
            made = _solve(other)
            timeline = simulate(best.request, made.costs, made.shares)
            found = Solution(best.request, made.costs, made.shares, timeline)
            if found.cost_s < best.cost_s * (1 - WORTH_CHANGING):
                best = replace(found, asked=replace(other, machine=found.request.machine))
    return best


def _simpler(request: PlanRequest, solution: Solution) -> Iterator[PlanRequest]:
    """The request with less to choose from, where that can be shorter."""
    used = {way_of(share) for share in solution.shares}
    if request.chooses and "recompute" in request.ways and used != {"recompute"}:
        again_s = sum(cost.activations.longer_s for cost in solution.costs if cost.activations is not None)
        least = again_s + sum(cost.forward_s + cost.backward_s for cost in solution.costs)
        if request.accumulate * least < solution.cost_s:
            yield replace(request, activations=frozenset({"recompute"}))
    is_off = any(share.gradients_host + share.parameters_host + share.parameters_disk for share in solution.shares)
    if is_off:  # what is off comes and goes in every pass, behind what is streamed
        yield replace(request, can_place=request.can_place & {Kind.OPTIMIZER_STATES})


def _solve(request: PlanRequest) -> Solution:
    found = merged(group_costs(request), MOST_LOADS)
    try:
        fixed, optimum = _settled(request, found)
    except Infeasible:
        raise PrepareError(explain_missing(request, found)) from None
    return _chosen(request, found, fixed, optimum)


def place_states(solution: Solution, fixed: Mapping[Tier, int]) -> Solution | None:
    """The states placed again beside other fixed bytes, with parameters and gradients where they are; None if they do
    not fit."""
    request = replace(solution.request, fixed=fixed)
    try:
        optimum = optimise(request, solution.costs, fixed=solution.shares)
    except Infeasible:
        return None
    chosen = _chosen(request, solution.costs, solution.shares, optimum)
    return replace(chosen, asked=solution.asked and replace(solution.asked, fixed=fixed))


def _chosen(request: PlanRequest, found: list[GroupCost], fixed: Sequence[GroupShares], optimum: Optimum) -> Solution:
    """Of a few placements that the program finds alike, the one that the simulation likes best."""
    shares = [
        replace(one, **{name: getattr(given, name) for name in WHOLE})
        for one, given in zip(optimum.shares, fixed, strict=True)
    ]
    choices = [shares, _even(found, shares)]
    if request.machine.link is not None:
        choices += [_alike(shares, part) for part in PARTS]
    at_home = [_all_resident(cost) for cost in found] if _fits_on_device(request, found) else None
    made = list[Solution]()
    for choice in choices if at_home is None else [*choices, at_home]:
        if all(choice != one.shares for one in made) and (fits(request, found, choice) or not made):
            made.append(Solution(request, found, choice, simulate(request, found, choice)))
    shortest = min(one.timeline.step_s for one in made)
    for one in made:
        if one.shares == at_home and one.timeline.step_s <= shortest * (1 + WORTH_MOVING):
            return one
    least = math.inf
    for one in sorted(made, key=lambda one: one.timeline.step_s):
        if one.timeline.step_s < least:  # else it costs more
            least = min(least, one.cost_s)
    near = [one for one in made if one.timeline.step_s <= least * (1 + SLACK) and one.cost_s <= least * (1 + SLACK)]
    few = min(_bytes_off(one) for one in near) * (1 + FEW)
    return min((one for one in near if _bytes_off(one) <= few), key=lambda one: round(one.cost_s, DIGITS))


def _settled(request: PlanRequest, found: Sequence[GroupCost]) -> tuple[list[GroupShares], Optimum]:
    """Whole groups, and the program's answer for them. Activations that go to the host cost more as a whole than in
    shares, which hide behind the arithmetic of their neighbours: so the same is tried without. Raises Infeasible."""
    fixed, optimum = settle(request, found)
    others = request.ways - {"host"}
    if others and any(share.activations_host for share in fixed):
        with contextlib.suppress(Infeasible):
            without = _settled(replace(request, activations=others), found)
            if without[1].step_s < optimum.step_s:
                return without
    return fixed, optimum


def evaluate(request: PlanRequest, homes: Mapping[str, Homes]) -> Solution:
    """What given homes cost. Groups that are placed as one must have the same."""
    found = merged(group_costs(request), MOST_LOADS)
    names = [group.name for group in request.model.groups]
    shares = [shares_of(homes[names[cost.members[0]]]) for cost in found]
    return Solution(request, found, shares, simulate(request, found, shares))


def _all_resident(cost: GroupCost) -> GroupShares:
    """Everything on the device that may be."""
    return GroupShares(parameters_host=float(cost.rests is Tier.HOST), parameters_disk=float(cost.rests is Tier.DISK))


def _bytes_off(solution: Solution) -> float:
    """What is not on the device."""
    return sum(
        cost.updated * solution.request.model.state_bytes * (1 - share.resident)
        + cost.parameters * (share.parameters_host + share.parameters_disk)
        + cost.gradients * share.gradients_host
        for cost, share in zip(solution.costs, solution.shares, strict=True)
    )


def _alike(shares: Sequence[GroupShares], part: float) -> list[GroupShares]:
    """The same part by the processor in all groups, whatever the program says: it sees no harm in giving it all of some
    groups and none of others, and then it has nothing to do for half of backward."""
    made = []
    for share in shares:
        on_host = 0.0 if share.parameters_disk else share.cpu + share.streamed
        made.append(replace(share, cpu=on_host * part, streamed=on_host * (1 - part)) if on_host else share)
    return made


def _fits_on_device(request: PlanRequest, found: Sequence[GroupCost]) -> bool:
    states = sum(cost.updated for cost in found) * request.model.state_bytes
    rest = sum(cost.gradients + cost.pinned_gradients for cost in found)
    rest += sum(cost.parameters for cost in found if cost.rests in (None, Tier.DEVICE))
    if request.chooses:
        if "keep" not in request.ways:
            return False
        rest += activation_bytes(found, [GroupShares() for _ in found])[0]
    return states + rest + request.fixed.get(Tier.DEVICE, 0) <= request.limits.get(Tier.DEVICE, 0)


def _even(found: Sequence[GroupCost], shares: Sequence[GroupShares]) -> list[GroupShares]:
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
