"""From a request to a plan: solve, bring whole groups to one place, solve again, look at it in the simulation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from zerostd.errors import PrepareError
from zerostd.monitoring.texts import size_text
from zerostd.planning.demands import GroupShares, activation_bytes, again_seconds, way_of, work
from zerostd.planning.linear import Infeasible, LinearSolution
from zerostd.planning.plan import GIB, Plan, Prediction
from zerostd.planning.program import SLACK, optimise, prices_of, quickest
from zerostd.planning.request import PlanRequest
from zerostd.planning.rounding import explain_missing, optimise_whole, recomputed_bytes
from zerostd.planning.simulation import simulate
from zerostd.planning.solution import Solution, activations_by_group, fits
from zerostd.policy import Homes, Kind, Tier

CPU_PARTS = (0.4, 0.5, 0.6, 0.7, 0.85)  # of states on the host that the CPU updates, tried in the simulation
DIGITS = 9  # of seconds: among placements that differ in less, the first is taken
FEW = 1e-3  # of the bytes off the device: as good as none
WORTH_TELLING = 0.15  # of a step: what recomputing must bring
WORTH_CHANGING = 0.01  # of a step: what another answer must bring
WORTH_MOVING = 0.1  # of a step: what a plan must bring to move anything where all fits on the device
WORTH_SAYING = 0.02  # of a step: what not speculating must bring where most gradients are clipped


# -- plans --


def plan_from(
    solution: Solution,
    homes: Mapping[str, Homes],
    counted: Mapping[Tier, Mapping[Kind, int]],
    notes: Sequence[str] = (),
) -> Plan:
    """Return a solution as a plan, with bytes that were counted for its homes."""
    request = solution.request
    speculates = request.speculates and any(share.resident < 1 for share in solution.shares)
    busy = work(request, solution.shares)
    busy["wire"] = request.accumulate * sum(cost.wire_s for cost in request.costs)
    busy = {name: seconds for name, seconds in busy.items() if seconds > 1e-9}
    predicted = Prediction(bytes=counted, busy=busy, prices=_prices(solution))
    if request.model.knows_time:
        timeline = solution.timeline
        predicted = replace(predicted, step_s=timeline.step_s, compute_s=timeline.compute_s)
        if speculates:
            clipped_s = simulate(replace(request, speculates=False), solution.shares).step_s
            predicted = replace(predicted, clipped_s=clipped_s)
        about = _about_activations if request.chooses else _if_recomputed
        notes = [_twice_the_samples(solution), *about(solution), *notes]
    return Plan(
        homes=homes,
        stage=request.stage,
        world_size=request.world_size,
        speculate=speculates,
        predicted=predicted,
        limits=dict(request.limits),
        notes=tuple(notes),
        activations=activations_by_group(solution),
    )


def _prices(solution: Solution) -> dict[Tier, float]:
    """Return the seconds for a byte of the next GiB: what it takes off the program's step, in shares of groups, since
    whole ones may have to change places to make use of it. No step is shorter than its arithmetic."""
    request = solution.asked or solution.request
    prices: dict[Tier, float] = {}
    with contextlib.suppress(Infeasible):  # it is a plan that no longer fits
        shortest = _shortest(request, solution)
        prices = prices_of(shortest)
        for tier in (tier for tier in request.limits if prices[tier]):
            more = {**request.limits, tier: request.limits[tier] + GIB}
            gain = shortest.objective - _shortest(replace(request, limits=more), solution).objective
            prices[tier] = min(prices[tier], max(0.0, gain) / GIB)
    least_s = request.accumulate * sum(cost.compute_s for cost in request.costs)
    most_s = max(0.0, solution.timeline.step_s - least_s)
    return {tier: min(price, most_s / GIB) for tier, price in prices.items()}


def _shortest(request: PlanRequest, solution: Solution) -> LinearSolution:
    """Return the shortest step in shares of groups; in whole ones, where only those fit."""
    with contextlib.suppress(Infeasible):
        return quickest(request)[1]
    return quickest(request, solution.shares)[1]


def _if_recomputed(solution: Solution) -> Iterator[str]:
    request = solution.request
    activations = request.model.activations()
    recomputed = recomputed_bytes(request.model)
    most_gain = 1.0 - solution.timeline.compute_s / max(solution.timeline.step_s, 1e-12)
    if recomputed is None or recomputed >= activations or most_gain < WORTH_TELLING or not solution.bytes_off:
        return
    fixed = {**request.fixed, Tier.DEVICE: max(0, request.fixed.get(Tier.DEVICE, 0) - activations)}
    try:
        changed = _solve_as_measured(replace(request, fixed=fixed, activations=frozenset({"keep", "recompute"})))
    except PrepareError:
        return
    gain = 1.0 - changed.timeline.step_s / solution.timeline.step_s
    if gain > WORTH_TELLING:
        count = sum(len(cost.members) for cost, share in changed.pairs if way_of(share) != "keep")
        yield (
            f"Recomputing the activations of {count} of {len(request.model.groups)} groups with "
            f"torch.utils.checkpoint would make a step {gain:.0%} shorter: it leaves more of the device to model state."
        )


def _twice_the_samples(solution: Solution) -> str:
    request = solution.request
    fixed = request.fixed
    if not request.chooses:
        fixed = {**fixed, Tier.DEVICE: fixed.get(Tier.DEVICE, 0) + request.model.activations()}
    try:
        changed = _solve_as_measured(replace(request, model=request.model.with_twice_the_samples(), fixed=fixed))
    except PrepareError:
        return "Twice the samples in a pass would not fit."
    gain = 2 * solution.timeline.step_s / max(changed.timeline.step_s, 1e-12)
    return f"Twice the samples in a pass would train {gain:.2f} times as many of them in a second."


def _about_activations(solution: Solution) -> Iterator[str]:
    request = solution.request
    kept, _ = activation_bytes(request, [GroupShares()] * len(request.costs))
    held, sent = activation_bytes(request, solution.shares)
    if held < kept:
        prices = []
        again_s = request.accumulate * again_seconds(request, solution.shares)
        if again_s > 0:
            prices.append(f"{again_s:.3g} s of arithmetic a step")
        if sent > 0:
            prices.append(f"{size_text(sent)} of the host, over the link and back in every pass")
        instead = f"{size_text(held)} of the device instead of {size_text(kept)}"
        yield f"Activations take {instead}, for {' and '.join(prices)}."


def if_most_are_clipped(plan: Plan, without_s: float) -> Iterator[str]:
    """Yield what to do where a plan speculates and the best that does not takes `without_s`."""
    if (plan.predicted.clipped_s or 0.0) > without_s * (1 + WORTH_SAYING):
        yield (
            f"Without speculating each step takes {without_s:.3g} s, clipped or not: if most are, leave accumulate= "
            "out of prepare."
        )


# -- solutions --


def solve(request: PlanRequest) -> Solution:
    """Return the best placement of whole groups. Raises PrepareError with what is missing, if nothing fits."""
    best = _solve_as_measured(request)
    if best.slow_s > best.timeline.step_s * (1 + SLACK):
        return _better(best, [best.slow_request])
    return best


def place_states(solution: Solution, fixed: Mapping[Tier, int]) -> Solution | None:
    """Place the states again beside other fixed bytes, and nothing else; None if they do not fit."""
    request = replace(solution.request, fixed=fixed)
    try:
        _, shares = optimise(request, solution.shares)
    except Infeasible:
        return None
    asked = solution.asked and replace(solution.asked, fixed=fixed)
    return replace(_choose(request, shares), asked=asked)


def _solve_as_measured(request: PlanRequest) -> Solution:
    best = _solve(request)
    return _better(best, _simpler(request, best))


def _better(best: Solution, requests: Iterable[PlanRequest]) -> Solution:
    """Return this solution or a better answer to another request: the program does not see all that things cost."""
    for request in requests:
        with contextlib.suppress(PrepareError):
            answer = _solve(request)
            asked = replace(request, machine=best.request.machine)
            candidate = Solution(best.request, answer.shares, asked)
            if candidate.cost_s < best.cost_s * (1 - WORTH_CHANGING):
                best = candidate
    return best


def _simpler(request: PlanRequest, solution: Solution) -> Iterator[PlanRequest]:
    """Yield the request with less to choose from, where that can be shorter."""
    ways = {way_of(share) for share in solution.shares}
    if request.chooses and "recompute" in request.ways and ways != {"recompute"}:
        longer_s = sum(cost.activations.longer_s for cost in request.costs)
        least_s = longer_s + sum(cost.forward_s + cost.backward_s for cost in request.costs)
        if request.accumulate * least_s < solution.cost_s:
            yield replace(request, activations=frozenset({"recompute"}))
    is_off = any(share.gradients_host + share.parameters_off for share in solution.shares)
    if is_off:  # what is off comes and goes in every pass, behind what is streamed
        yield replace(request, can_place=request.can_place & {Kind.OPTIMIZER_STATES})


def _solve(request: PlanRequest) -> Solution:
    try:
        step_s, shares = optimise_whole(request)
    except Infeasible:
        raise PrepareError(explain_missing(request)) from None
    without_host = request.ways - {"host"}
    if without_host and any(share.activations_host for share in shares):  # they cost more as a whole than in shares
        with contextlib.suppress(Infeasible):
            without_s, without = optimise_whole(replace(request, activations=without_host))
            shares = without if without_s < step_s else shares
    return _choose(request, shares)


def _choose(request: PlanRequest, shares: list[GroupShares]) -> Solution:
    """Return, of a few placements that the program finds alike, the one that the simulation likes best."""
    placements = [shares, _even(request, shares)]
    if request.machine.link is not None:
        for part in CPU_PARTS:  # the program sees no harm in a CPU that has nothing to do for half of backward
            placements.append([share if share.parameters_disk else _with_cpu_part(share, part) for share in shares])
    rests = [cost.rests for cost in request.costs]
    at_home = [GroupShares(parameters_host=tier is Tier.HOST, parameters_disk=tier is Tier.DISK) for tier in rests]
    if not request.chooses or "keep" in request.ways:
        placements.append(at_home)
    solutions = list[Solution]()
    for placement in placements:
        candidate = Solution(request, placement)
        if candidate not in solutions and (fits(candidate) or not solutions):
            solutions.append(candidate)
    shortest_s = min(solution.timeline.step_s for solution in solutions)
    for solution in solutions:
        if solution.shares == at_home and solution.timeline.step_s <= shortest_s * (1 + WORTH_MOVING):
            return solution
    most_s = min(solution.cost_s for solution in solutions) * (1 + SLACK)
    near = [solution for solution in solutions if solution.cost_s <= most_s]
    few = min(solution.bytes_off for solution in near) * (1 + FEW)
    candidates = [solution for solution in near if solution.bytes_off <= few]
    return min(candidates, key=lambda solution: round(solution.cost_s, DIGITS))


def _even(request: PlanRequest, shares: Sequence[GroupShares]) -> list[GroupShares]:
    """Give the CPU the same part in all groups whose parameters and gradients are kept alike: the program does not
    care, but workers that take turns on every group wait less for each other."""
    alike: dict[tuple[float, float, float], list[int]] = {}
    for index, share in enumerate(shares):
        alike.setdefault((share.parameters_host, share.parameters_disk, share.gradients_host), []).append(index)
    even = list(shares)
    for indices in alike.values():
        cpu = sum(request.costs[index].updated * shares[index].cpu for index in indices)
        streamed = sum(request.costs[index].updated * shares[index].streamed for index in indices)
        part = cpu / (cpu + streamed) if cpu + streamed else 0.0
        for index in indices:
            even[index] = _with_cpu_part(shares[index], part)
    return even


def _with_cpu_part(share: GroupShares, part: float) -> GroupShares:
    on_host = share.cpu + share.streamed
    return replace(share, cpu=on_host * part, streamed=on_host * (1 - part))
