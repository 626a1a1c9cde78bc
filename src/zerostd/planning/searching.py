"""Many requests: stages, divisions of a batch, speculation, and codes, of which the best is taken.
Where the gradients of all groups do not fit beside the rest, or only with a disk, they may be freed inside backward.

`search` returns what fits of all requests; `search_coded` may also give up exactness. Both serve machines that are here
and machines on paper.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from zerostd.errors import PrepareError
from zerostd.monitoring.texts import plain_seconds
from zerostd.planning.demands import way_of
from zerostd.planning.planner import Counted, fitting, total
from zerostd.planning.profiles import CODABLE, RECOMPUTED, STATES, WIRES
from zerostd.planning.request import WORTH_SPECULATING, PlanRequest
from zerostd.planning.solution import CountBytes, Solution
from zerostd.policy import Tier

WORTH_CODING = 0.05  # of a step: what results that are not exact must bring
WORTH_A_DISK = 0.02  # of all bytes, and of a step: less is not worth the buffers and threads of a disk

MOST_TRIED = 8  # divisions of a batch into passes
ALMOST = 0.01  # of a step
MISSING = re.compile(r"[^:.]*(?:[.]\d[^:.]*)* is missing")  # what of a refusal goes into the table

Refusal = tuple[PlanRequest, PrepareError]


@dataclass(frozen=True)
class SearchResult:
    """The candidates of all requests, and those that were refused."""

    candidates: list[Counted]  # the best of each request first
    refused: list[Refusal] = field(default_factory=list)
    speculating: list[Counted] = field(default_factory=list)

    @property
    def best(self) -> Counted:
        return min([self.shortest, *self.speculating], key=lambda counted: counted.seconds)

    @property
    def shortest(self) -> Counted:
        """The shortest without speculation; of nearly equal ones at a stage, that with more samples a pass or fewer
        replicas."""
        best = min(self.candidates, key=lambda each: each.seconds)
        most_s = best.seconds * (1 + ALMOST)
        stage = best.solution.request.stage
        near = [each for each in self.candidates if each.solution.request.stage is stage and each.seconds <= most_s]

        def rank(each: Counted) -> tuple[int, int, float]:
            request = each.solution.request
            return (request.model.samples or 0, -request.num_replicas, -each.seconds)

        return max(near, key=rank)


Find = Callable[[Sequence[PlanRequest]], SearchResult]

# -- divisions of a batch --


def divide(batch: int | None, samples: int | None, passes: int | None) -> list[tuple[int | None, int]]:
    """Return the samples of a pass and the passes of a step that are worth trying for a batch on one rank."""
    if batch is None:
        return [(samples, passes or 1)]
    if samples is None and passes is None:
        return [*divisions(batch)]
    if batch % (samples or passes or 1) or (samples and passes and samples * passes != batch):
        raise PrepareError(
            f"a batch of {batch} cannot be divided into {f'{passes} ' if passes else ''}passes"
            f"{f' of {samples} samples' if samples else ''}: give numbers that divide it, or only the batch"
        )
    return [(samples or batch // (passes or 1), passes or batch // (samples or 1))]


def divisions(batch: int, most: int = MOST_TRIED) -> list[tuple[int, int]]:
    """Return divisions of a batch into samples in a pass and passes: all, or a selection at equal ratios."""
    small = [size for size in range(1, math.isqrt(batch) + 1) if batch % size == 0]
    sizes = sorted({*small, *(batch // size for size in small)})
    if len(sizes) > most:
        wanted = [math.log(batch) * place / (most - 1) for place in range(most)]
        sizes = sorted({min(sizes, key=lambda size: abs(math.log(size) - power)) for power in wanted})
    return [(size, batch // size) for size in reversed(sizes)]


def table(result: SearchResult) -> str:
    """Return the divisions of a batch that were tried, a line each, with the best stage."""
    outcomes = {}
    for request, error in result.refused:
        match = MISSING.search(str(error))
        outcomes[request.model.samples or 1, request.accumulate] = match.group().strip() if match else str(error)
    for each in sorted(result.candidates, key=lambda each: each.seconds, reverse=True):
        request = each.solution.request
        outcomes[request.model.samples or 1, request.accumulate] = f"{plain_seconds(each.seconds)} a step"
    chosen = result.shortest.solution.request
    samples = chosen.model.samples or 1
    passes = chosen.accumulate
    lines = [f"A step of {samples * passes} samples is divided into passes of {samples}: accumulate={passes}. Tried:"]
    lines += [f"  {size} x {count}: {outcomes[size, count]}" for size, count in sorted(outcomes, reverse=True)]
    return "\n".join(lines)


# -- what fits --


def search_coded(
    requests: Sequence[PlanRequest],
    count: CountBytes,
    *,
    may_speculate: bool,
    may_free: bool = False,
    codable: frozenset[str] = CODABLE,
) -> SearchResult:
    """Return what `search` does, with codes where they may be and are worth it: first of optimizer states, also if
    nothing else fits; then of what travels between ranks."""
    find = partial(search, count=count, may_speculate=may_speculate, may_free=may_free)
    coded = [replace(each, model=each.model.with_codes()) for each in requests if STATES in codable]
    try:
        best = find(requests)
    except PrepareError:
        if not coded:
            raise
        best = find(coded)
    else:
        if best.best.solution.bytes_off:
            best = _shorter(best, coded, find)
    kept = coded if best.best.solution.request.model.is_coded else requests
    priced = [each for each in kept if each.world_size > 1 and each.machine.wires and each.model.knows_time]
    sent = [replace(each, model=each.model.with_coded_wires()) for each in priced if WIRES in codable]
    return _shorter(best, sent, find)


def _shorter(best: SearchResult, coded: Sequence[PlanRequest], find: Find) -> SearchResult:
    """Return what fits of coded requests, if the step is shorter by enough."""
    with contextlib.suppress(PrepareError):
        if coded and (other := find(coded)).best.seconds < best.best.seconds * (1 - WORTH_CODING):
            return other
    return best


def search(
    requests: Sequence[PlanRequest], count: CountBytes, *, may_speculate: bool, may_free: bool = False
) -> SearchResult:
    """Return what fits of all requests. With `may_free`, return what fits with gradients freed inside backward, where
    nothing else does or a step that needs the disk takes longer. Raises the last refusal if nothing fits."""
    early = [request for request in requests if may_free and request.accumulate == 1 and request.is_early]
    freeing = [replace(request, keeps_gradients=False) for request in early]
    try:
        kept = _search(requests, count, may_speculate=may_speculate)
    except PrepareError:
        if not freeing:
            raise
        return _search(freeing, count, may_speculate=False)
    if freeing and total(kept.best.held, Tier.DISK):
        with contextlib.suppress(PrepareError):
            freed = _search(freeing, count, may_speculate=False)
            if freed.best.seconds < kept.best.seconds:
                return freed
    return kept


def _search(requests: Iterable[PlanRequest], count: CountBytes, *, may_speculate: bool) -> SearchResult:
    """Return what fits of all requests, and of each once more with speculation, where that is worth its memory."""
    result = SearchResult([])
    for request in requests:
        try:
            counted = _with_inputs_sent(request, count)
        except PrepareError as error:
            result.refused.append((request, error))
            continue
        result.candidates.extend(counted)
        request = counted[0].solution.request
        is_off = total(counted[0].held, Tier.HOST) and request.model.knows_time
        if may_speculate and is_off:
            with contextlib.suppress(PrepareError):
                best = fitting(replace(request, speculates=True), count)[0]
                if best.seconds < (1.0 - WORTH_SPECULATING) * counted[0].seconds:
                    result.speculating.append(best)
    if not result.candidates:
        raise result.refused[-1][1]
    return result


def _with_inputs_sent(request: PlanRequest, count: CountBytes) -> list[Counted]:
    """Return the candidates that fit, the best first. Where groups must be recomputed, their inputs may also go to the
    host."""
    refusal: PrepareError | None = None
    counted: list[Counted] = []
    try:
        counted = _worth_a_disk(request, fitting(request, count), count)
    except PrepareError as error:
        refusal = error
    may_send = request.chooses and request.ways.issuperset(RECOMPUTED)
    if may_send and (not counted or any(way_of(share) == "recompute" for share in counted[0].solution.shares)):
        sends = replace(request, activations=request.activations - {"recompute"})
        with contextlib.suppress(PrepareError):
            counted += _worth_a_disk(sends, fitting(sends, count), count)
    if not counted and refusal is not None:
        raise refusal
    return sorted(counted, key=lambda each: each.seconds)


def _worth_a_disk(request: PlanRequest, counted: list[Counted], count: CountBytes) -> list[Counted]:
    """Return the candidates without a disk, if it would hold next to nothing."""
    best = counted[0]
    on_disk = total(best.held, Tier.DISK)
    if not 0 < on_disk < WORTH_A_DISK * sum(total(best.held, tier) for tier in Tier):
        return counted
    limits: dict[Tier, int] = {tier: size for tier, size in request.limits.items() if tier is not Tier.DISK}
    with contextlib.suppress(PrepareError):
        without = fitting(replace(request, limits=limits), count)
        if without[0].seconds <= (1 + WORTH_A_DISK) * best.seconds:
            return [replace(each, solution=_with_limits(each.solution, request)) for each in without]
    return counted


def _with_limits(solution: Solution, request: PlanRequest) -> Solution:
    return replace(solution, request=replace(solution.request, limits=request.limits))
