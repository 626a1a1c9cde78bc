"""Many requests: stages, divisions of a batch, speculation, and codes of optimizer states, of which the best is taken.
Where the gradients of all groups do not fit beside the rest, or only with a disk, they may be freed inside backward.

`search` returns what fits of all requests; `search_coded` may also give up exactness. Both serve machines that are here
and machines on paper.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from zerostd.errors import PrepareError
from zerostd.planning.demands import way_of
from zerostd.planning.planner import CountBytes, Counted, fitting, total
from zerostd.planning.profiles import RECOMPUTED
from zerostd.planning.request import WORTH_SPECULATING, PlanRequest
from zerostd.planning.solution import Solution
from zerostd.policy import Tier

WORTH_CODING = 0.05  # of a step: what results that are not exact must bring
WORTH_A_DISK = 0.02  # of all bytes, and of a step: less is not worth the buffers and threads of a disk

Refusal = tuple[PlanRequest, PrepareError]


@dataclass(frozen=True)
class SearchResult:
    """The candidates of all requests, and those that were refused."""

    candidates: list[Counted]  # the best of each request first
    refused: list[Refusal] = field(default_factory=list)
    speculating: list[Counted] = field(default_factory=list)

    @property
    def best(self) -> Counted:
        return min([*self.candidates, *self.speculating], key=lambda counted: counted.seconds)


def search_coded(
    requests: Sequence[PlanRequest], count: CountBytes, *, may_speculate: bool, may_free: bool = False
) -> SearchResult:
    """Return what `search` does, with optimizer states as codes where that is worth it or nothing else fits."""
    coded = [replace(request, model=request.model.with_codes()) for request in requests]
    try:
        exact = search(requests, count, may_speculate=may_speculate, may_free=may_free)
    except PrepareError:
        return search(coded, count, may_speculate=may_speculate, may_free=may_free)
    if exact.best.solution.bytes_off:
        with contextlib.suppress(PrepareError):
            shorter = search(coded, count, may_speculate=may_speculate, may_free=may_free)
            if shorter.best.seconds < exact.best.seconds * (1 - WORTH_CODING):
                return shorter
    return exact


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
