"""A solution as a plan: its cost, the value of one more GiB of each tier, and the effect of other choices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from zerostd.monitoring.texts import plain_seconds, size_text
from zerostd.planning.demands import GroupShares, activation_bytes, again_seconds, work
from zerostd.planning.linear import Infeasible, LinearSolution
from zerostd.planning.plan import GIB, Plan, Prediction
from zerostd.planning.planner import Counted, solve
from zerostd.planning.program import prices_of, quickest
from zerostd.planning.request import PlanRequest
from zerostd.planning.simulation import simulate
from zerostd.planning.solution import Solution, activations_by_group
from zerostd.policy import Tier

WORTH_SAYING = 0.02  # of a step: what not speculating must bring where most gradients are clipped


def plan_from(counted: Counted, notes: Sequence[str] = ()) -> Plan:
    """Return a solution as a plan, with counted bytes, prices, and sentences about what would help."""
    solution = counted.solution
    plan = bare_plan(counted)
    if solution.request.model.knows_time:
        notes = [_twice_the_samples(solution), *_about_activations(solution), *notes]
        plan = replace(plan, spans=solution.timeline.spans)
    return replace(plan, notes=tuple(notes), predicted=replace(plan.predicted, prices=_prices(solution)))


def bare_plan(counted: Counted) -> Plan:
    """Return a solution as a plan with seconds and bytes only."""
    solution = counted.solution
    request = solution.request
    plan = plan_of(solution)
    busy = work(request, solution.shares)
    busy["wire"] = request.accumulate * sum(cost.wire_s for cost in request.costs)
    busy = {name: seconds for name, seconds in busy.items() if seconds > 1e-9}
    predicted = Prediction(bytes=counted.held, busy=busy, launches=request.model.launches)
    if request.model.knows_time:
        timeline = solution.timeline
        predicted = replace(predicted, step_s=timeline.step_s, compute_s=timeline.compute_s)
        if plan.speculate:
            clipped_s = simulate(replace(request, speculates=False), solution.shares).step_s
            predicted = replace(predicted, clipped_s=clipped_s)
    return replace(plan, predicted=predicted)


def plan_of(solution: Solution) -> Plan:
    """Return a solution as a plan, without what it costs."""
    request = solution.request
    return Plan(
        homes=solution.homes,
        stage=request.stage,
        world_size=request.world_size,
        num_replicas=request.num_replicas,
        speculate=request.speculates and any(share.resident < 1 for share in solution.shares),
        keep_gradients=request.keeps_gradients,
        codec=request.codec,
        limits=dict(request.limits),
        activations=activations_by_group(solution),
    )


def _prices(solution: Solution) -> dict[Tier, float]:
    """Return the seconds that a byte of the next GiB saves in the program's step. Groups may be divided here, since
    whole groups may have to change places to use the memory. No step is shorter than its arithmetic."""
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


def _twice_the_samples(solution: Solution) -> str:
    request = solution.request
    try:
        changed = solve(replace(request, model=request.model.with_twice_the_samples()))
    except Infeasible:
        return "Doubling the micro-batch would not fit."
    gain = 2 * solution.timeline.step_s / max(changed.timeline.step_s, 1e-12)
    percent = round(100 * (gain - 1))
    if not percent:
        return "Doubling the micro-batch would not change throughput."
    return f"Doubling the micro-batch would {'raise' if percent > 0 else 'lower'} throughput by {abs(percent)} %."


def _about_activations(solution: Solution) -> Iterator[str]:
    request = solution.request
    if not request.chooses:
        return
    kept, _ = activation_bytes(request, [GroupShares()] * len(request.costs))
    held, sent = activation_bytes(request, solution.shares)
    if held < kept:
        prices = []
        again_s = request.accumulate * again_seconds(request, solution.shares)
        if again_s > 0:
            prices.append(f"{plain_seconds(again_s)} of arithmetic a step")
        if sent > 0:
            prices.append(f"{size_text(sent)} of host memory, sent over the link and back in every pass")
        instead = f"{size_text(held)} of the device instead of {size_text(kept)}"
        yield f"Activations take {instead}, at the cost of {' and '.join(prices)}."


def if_most_are_clipped(plan: Plan, without_s: float) -> Iterator[str]:
    """Yield what a plan that speculates costs where most steps are clipped, if one that does not takes `without_s`."""
    if (plan.predicted.clipped_s or 0.0) > without_s * (1 + WORTH_SAYING):
        yield (
            f"Without speculation every step takes {plain_seconds(without_s)}. If most steps are clipped, leave "
            "accumulate= out of prepare."
        )
