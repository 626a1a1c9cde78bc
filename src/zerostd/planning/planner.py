"""From a request to plans: the linear program and a few variations of it give candidates, whole groups each. A
simulation of one step ranks them, and the code that will allocate the bytes counts them.

`solve` takes the best, `fitting` makes room for bytes that the program does not know. Both serve machines that are
here, where `count` is exact, and machines on paper. The first of a list is the plan; training may try others on real
steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zerostd.errors import PrepareError
from zerostd.planning.demands import GroupShares, way_of, work
from zerostd.planning.linear import Infeasible
from zerostd.planning.profiles import RECOMPUTED
from zerostd.planning.program import SLACK, optimise
from zerostd.planning.request import PlanRequest
from zerostd.planning.rounding import explain_missing, least_of, missing_bytes, optimise_whole
from zerostd.planning.solution import Bytes, CountBytes, Solution, fits, model_state
from zerostd.policy import Kind, Tier

DIGITS = 9  # of seconds: among placements that differ in less, the first is taken
FEW = 1e-3  # of the bytes off the device: as good as none
WORTH_CHANGING = 0.01  # of a step: what a variation must bring to be the plan
LAUNCHED_PARAMETERS = 0.3  # of a step that waits for launches: what parameters off the device add to it
LAUNCHED_GRADIENTS = 0.1  # the same for gradients
WORTH_MOVING = 0.1  # of a step: what a plan must bring to move anything where all fits on the device
MOST_ROUNDS = 8  # of making room for what the program does not know
ROUNDING = 1.002  # the linear program keeps to its limits only this exactly
PLENTY = 1 << 60  # bytes of a tier: more than anything takes
SCRAP = 0.1  # of a group's states on the host: not worth a second worker
MOST_SPLITS = 6  # of updates between CPU and device, that are looked at
NEIGHBOURS = (0.8, 1.2)  # times the CPU's part of an update: how busy a processor is with other things, nobody knows
VARIATIONS = (0.8, 1.2, 0.5, 0.0)  # the same for candidates that training may try


def total(held: Bytes, tier: Tier) -> int:
    return sum(held.get(tier, {}).values())


# -- candidates --


def solve(request: PlanRequest) -> Solution:
    """Return the best placement of whole groups. Raises Infeasible."""
    return _candidates(request)[0]


def _candidates(request: PlanRequest) -> list[Solution]:
    """Return placements of whole groups, the best first. Raises Infeasible."""
    _, shares = optimise_whole(request)
    ranked = _ranked(request, [*_splits(request, shares), *_at_home(request)])
    best = ranked[0]
    for simpler, worth in _simpler(request, best):
        with contextlib.suppress(Infeasible):
            _, shares = optimise_whole(simpler)
            answers = _ranked(request, _splits(request, shares), simpler)
            if answers[0].timeline.step_s < best.timeline.step_s * (1 - worth):
                ranked = [*answers, *ranked]
                best = answers[0]
            else:
                ranked = [*ranked, *answers]
    return [best, *sorted(ranked[1:], key=lambda solution: solution.timeline.step_s)]


def neighbours(solution: Solution, times: Sequence[float] = NEIGHBOURS) -> list[Solution]:
    """Return the same placement with the CPU's part of updates multiplied, if it can change."""
    if solution.request.machine.link is None:
        return []
    parts = [_with_cpu_part(solution.request, solution.shares, each) for each in times]
    changed = [replace(solution, shares=shares) for shares in parts if shares != solution.shares]
    return [candidate for candidate in changed if fits(candidate)]


def place_states(solution: Solution, fixed: Mapping[Tier, int]) -> Solution | None:
    """Place the states again beside other fixed bytes, and nothing else; None if they do not fit."""
    request = replace(solution.request, fixed=fixed)
    try:
        _, shares = optimise(request, solution.shares)
    except Infeasible:
        return None
    asked = solution.asked and replace(solution.asked, fixed=fixed)
    return _ranked(request, _splits(request, shares), asked)[0]


def _ranked(
    request: PlanRequest, placements: Iterable[list[GroupShares]], asked: PlanRequest | None = None
) -> list[Solution]:
    """Return the placements that fit, of a few. The first one has the shortest step; among those within SLACK of it,
    the one with the fewest bytes off the device comes first, and moving nothing is preferred to a small gain."""
    solutions = list[Solution]()
    for placement in placements:
        candidate = Solution(request, placement, asked)
        if candidate not in solutions and (fits(candidate) or not solutions):
            solutions.append(candidate)
    shortest_s = min(solution.timeline.step_s for solution in solutions)
    near = [solution for solution in solutions if solution.timeline.step_s <= shortest_s * (1 + SLACK)]
    few = min(solution.bytes_off for solution in near) * (1 + FEW)
    few_off = [solution for solution in near if solution.bytes_off <= few]
    best = min(few_off, key=lambda solution: round(solution.timeline.step_s, DIGITS))
    for home in _at_home(request):
        stays = [solution for solution in solutions if solution.shares == home]
        best = next((each for each in stays if each.timeline.step_s <= shortest_s * (1 + WORTH_MOVING)), best)
    return [best, *(solution for solution in solutions if solution is not best)]


def _at_home(request: PlanRequest) -> Iterator[list[GroupShares]]:
    """Yield the placement in which nothing moves, unless activations may not be kept."""
    if not request.chooses or "keep" in request.ways:
        rests = [cost.rests for cost in request.costs]
        yield [GroupShares(parameters_host=tier is Tier.HOST, parameters_disk=tier is Tier.DISK) for tier in rests]


def _simpler(request: PlanRequest, solution: Solution) -> Iterator[tuple[PlanRequest, float]]:
    """Yield simpler requests, whose step may be shorter because the program does not know all costs, each with the part
    of a step that it must save. The part is negative where the solution has costs that are not known."""
    ways = {way_of(share) for share in solution.shares}
    if request.chooses and request.recomputes and ways != {"recompute"}:
        longer_s = sum(cost.activations.longer_s for cost in request.costs)
        least_s = longer_s + sum(cost.forward_s + cost.backward_s for cost in request.costs)
        if request.accumulate * least_s < solution.timeline.step_s:
            yield replace(request, activations=request.ways.intersection(RECOMPUTED)), WORTH_CHANGING
    if "host" in ways and request.ways > {"host"}:  # they cost more as a whole than in shares
        yield replace(request, activations=request.ways - {"host"}), WORTH_CHANGING
    # What is off comes and goes in every pass, behind what is streamed; each group takes launches of its own.
    launches = request.model.launches
    if launches and any(share.parameters_off for share in solution.shares):
        can_place = request.can_place - {Kind.PARAMETERS}
        yield replace(request, can_place=can_place), WORTH_CHANGING - LAUNCHED_PARAMETERS * launches
    if any(share.gradients_host + share.parameters_off for share in solution.shares):
        can_place = request.can_place & {Kind.OPTIMIZER_STATES}
        yield replace(request, can_place=can_place), WORTH_CHANGING - LAUNCHED_GRADIENTS * launches


def _splits(request: PlanRequest, shares: list[GroupShares]) -> list[list[GroupShares]]:
    """Return the shares without scraps, and with the same CPU part in all groups that are kept alike: for the program
    this is equal, but workers that take turns on every group wait less for each other. As long as the simulation
    prefers a smaller or larger CPU part (the CPU is idle for half of backward), that is returned too."""
    splits = [shares, [_without_scraps(share) for share in shares], _with_cpu_part(request, shares, 1.0)]
    best = Solution(request, splits[-1])
    while len(splits) < MOST_SPLITS:
        near = [solution for solution in neighbours(best) if solution.shares not in splits]
        better = min(near, key=lambda solution: solution.timeline.step_s, default=best)
        if better.timeline.step_s >= best.timeline.step_s:
            break
        splits.append(better.shares)
        best = better
    return splits


def _without_scraps(share: GroupShares) -> GroupShares:
    """Return the share with all of a group's host states updated by one worker, if the other worker would have almost
    none of them and only delay the group."""
    on_host = share.cpu + share.streamed
    if min(share.cpu, share.streamed) > SCRAP * on_host:
        return share
    by_cpu = share.cpu > share.streamed
    return replace(share, cpu=on_host * by_cpu, streamed=on_host * (not by_cpu))


def _with_cpu_part(request: PlanRequest, shares: Sequence[GroupShares], times: float) -> list[GroupShares]:
    """Return the shares with `times` the CPU's part, equal in all groups that are kept alike."""
    alike: dict[tuple[float, float, float], list[int]] = {}
    for index, share in enumerate(shares):
        alike.setdefault((share.parameters_host, share.parameters_disk, share.gradients_host), []).append(index)
    even = list(shares)
    for (_, on_disk, _), indices in alike.items():
        cpu = sum(request.costs[index].updated * shares[index].cpu for index in indices)
        streamed = sum(request.costs[index].updated * shares[index].streamed for index in indices)
        part = 1.0 if on_disk else min(1.0, times * cpu / (cpu + streamed)) if cpu + streamed else 0.0
        for index in indices:
            on_host = shares[index].cpu + shares[index].streamed
            even[index] = replace(shares[index], cpu=on_host * part, streamed=on_host * (1 - part))
    return even


# -- bytes, counted --


@dataclass(frozen=True)
class Counted:
    """A placement with its bytes as counted by the code that allocates."""

    solution: Solution
    held: Bytes

    @property
    def seconds(self) -> float:
        """Seconds of a step; without a time, the most that a resource has to do."""
        request = self.solution.request
        if request.model.knows_time:
            return self.solution.timeline.step_s
        return max(work(request, self.solution.shares).values(), default=0.0)


def fitting(request: PlanRequest, count: CountBytes) -> list[Counted]:
    """Return the candidates whose counted bytes fit, the best first. Raises PrepareError with the missing bytes,
    working memory included, so the bytes that a refusal names are enough."""
    counted = _make_room(request, count)
    if counted:
        return counted
    least = {tier: _least(request, tier, count) for tier in request.limits}
    alone: dict[Tier, int] = {}  # bytes that a tier lacks, where it lacks them alone
    for tier, fewest in least.items():
        if fewest is None:
            continue
        alone[tier] = total(fewest.held, tier) - request.limits[tier]
        if alone[tier] <= 0:
            faster = place_states(fewest.solution, _with_unknown(fewest.solution, fewest.held))
            return [(faster and _counted(request, faster, count)) or fewest]
    raise PrepareError(explain_missing(request, _enough(request, alone, count)))


def _make_room(request: PlanRequest, count: CountBytes) -> list[Counted]:
    """Return the candidates whose counted bytes fit, or none. Bytes that the program does not know, such as buffers,
    depend on its solution. First only the states of that solution are placed again beside them, then everything is."""
    fixed: Mapping[Tier, int] = {}
    for _ in range(MOST_ROUNDS):
        try:
            answers = _candidates(replace(request, fixed=fixed))
        except Infeasible:
            break
        counted = [taken for answer in answers if (taken := _counted(request, answer, count)) is not None]
        if counted:
            return counted
        fixed = _with_unknown(answers[0], count(answers[0]))
    return []


def _least(request: PlanRequest, tier: Tier, count: CountBytes) -> Counted | None:
    """Return the whole groups that take the fewest counted bytes of a tier while the other tiers keep their limits;
    None if that is impossible. The tier's own limit is ignored: a refusal names these bytes, and with that limit the
    same groups are found again."""
    fixed: Mapping[Tier, int] = {}
    for _ in range(MOST_ROUNDS):
        asked = replace(request, fixed=fixed)
        try:
            solution = Solution(asked, least_of(asked, tier))
        except Infeasible:
            return None
        answers = [Counted(each, count(each)) for each in (solution, _by_cpu(solution))]
        within = [
            each
            for each in answers
            if all(total(each.held, other) <= request.limits.get(other, 0) for other in Tier if other is not tier)
        ]
        if within:
            return min(within, key=lambda each: total(each.held, tier))
        fixed = {**_with_unknown(solution, answers[0].held), tier: fixed.get(tier, 0)}
    return None


def _enough(request: PlanRequest, alone: Mapping[Tier, int], count: CountBytes) -> list[dict[Tier, int]]:
    """Return enlarged limits that are enough, the fewest bytes first: for each tier alone, and for several tiers if
    that takes fewer bytes or is the only way."""
    lacks = {tier: size for tier, size in missing_bytes(request, is_whole=True).items() if tier in request.limits}
    by = _enlarged(request, lacks, count) or _enlarged(request, dict.fromkeys(request.limits, 0.0), count)
    ways = [{tier: size} for tier, size in alone.items()]
    if by and by not in ways:
        ways.append(by)
    return sorted(ways, key=lambda way: sum(way.values()))


def _enlarged(request: PlanRequest, by: Mapping[Tier, float], count: CountBytes) -> dict[Tier, int]:
    """Return by how many bytes these tiers must be larger, one after the other: each by the least that is enough if the
    later tiers have plenty. Empty if that does not help."""
    limits: dict[Tier, int] = {tier: limit + int(by.get(tier, 0.0)) for tier, limit in request.limits.items()}
    tiers = list(by)
    for index, tier in enumerate(tiers):
        plenty = dict.fromkeys(tiers[index + 1 :], PLENTY)
        least = _least(replace(request, limits={**limits, **plenty}), tier, count)
        if least is None:
            return {}
        is_last = not plenty
        limits[tier] = max(request.limits[tier] if is_last else limits[tier], total(least.held, tier))
    return {tier: limits[tier] - request.limits[tier] for tier in tiers if limits[tier] > request.limits[tier]}


def _counted(request: PlanRequest, answer: Solution, count: CountBytes) -> Counted | None:
    """Return a solution with its counted bytes. If it does not fit, its states are placed again, or updated by the CPU
    alone; None if that does not help."""
    solution: Solution | None = answer
    for _ in range(3):
        if solution is None:
            return None
        for candidate in (solution, _by_cpu(solution)):
            held = count(candidate)
            if all(total(held, tier) <= request.limits.get(tier, 0) for tier in Tier):
                return Counted(candidate, held)
        solution = place_states(solution, _with_unknown(solution, count(solution)))
    return None


def _by_cpu(solution: Solution) -> Solution:
    """Return the same placement with nothing streamed: slots may take more of the device than states do."""
    shares = [replace(share, cpu=share.cpu + share.streamed, streamed=0.0) for share in solution.shares]
    return solution if solution.request.machine.link is None else replace(solution, shares=shares)


def _with_unknown(solution: Solution, held: Bytes) -> dict[Tier, int]:
    """Return the bytes of each tier that the program should treat as fixed: more than before, and all bytes that it did
    not know, rounded up. The program may count less than the closed form, so bytes over the limit are added too."""
    known = model_state(solution)
    before = solution.request.fixed
    limits = solution.request.limits
    beside = {tier: total(held, tier) - total(known, tier) + before.get(tier, 0) for tier in Tier}
    over = {tier: total(held, tier) - limits.get(tier, 0) + before.get(tier, 0) for tier in Tier}
    beside = {tier: max(size, over[tier]) if tier in limits else size for tier, size in beside.items()}
    empty = {tier for tier in Tier if not limits.get(tier)}  # where not even a byte fits
    unknown = {tier: 0 if tier in empty else int(ROUNDING * size) + 1 for tier, size in beside.items()}
    return {tier: max(int(before.get(tier, 0) * ROUNDING), size) for tier, size in unknown.items()}
