"""The linear program: where each share of a group's states, gradients and parameters is kept, by which route its update
goes, and how its activations are handled, so that a step is as short as possible.

Time runs from the start of the last backward pass of a step. E[g] is when backward has done with group g, F[g] when the
next forward begins with it, so E falls and F rises with g. A group's update lies between the two (after the whole of
backward, if it waits for the norm), and the windows of earlier groups lie inside those of later ones. On one resource
such jobs can be done in time if and only if, for every g, those up to g fit between E[g] and F[g]. These rows, and that
each resource has no more to do than a step is long, are the whole schedule; the rest are bytes. If the CPU is the
device, it has to compute and to update; else to launch and to update.

Activations that go to the host leave after their group's forward, one after the other, and forward begins with a group
when those of the second before it are gone. They come back in the order of backward, each not before backward has done
with the second group after it, and backward waits for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import numpy

from zerostd.planning.demands import (
    ALWAYS,
    NAMES,
    NUM_BUFFERS,
    OFF,
    PRODUCTS,
    STATES,
    WHOLE,
    ActivationChoice,
    Factors,
    GroupShares,
    ResourceDemands,
    activation_choices,
    choice_of,
    products,
    states_of,
    staying,
)
from zerostd.planning.linear import Array, Infeasible, LinearProgram, LinearSolution, Term
from zerostd.planning.request import PlanRequest
from zerostd.policy import Kind, Tier

GIGA = 1e9
SLACK = 0.03  # a step that much longer is worth fewer bytes on disk and host: no prediction is surer than that
DISK_BYTE = 64.0  # bytes of the host that one of the disk is worth, among steps of the same length
MOVED_BYTE = 0.5  # bytes of the host that one over the link is worth: what need not be moved cannot be late
NEARER = 1e-3  # bytes of the host that it is worth to have a byte at the front on the device, and not one at the end


class ScheduleProgram:
    """The variables and constraints. Without times, only the constraints on bytes."""

    def __init__(self, request: PlanRequest, choice: ActivationChoice, *, has_times: bool = True) -> None:
        self.request = request
        self.costs = request.costs
        self.choice = choice
        self.linear = LinearProgram()
        self.demands = ResourceDemands(request)
        self.columns = self._share_variables()
        self.columns |= {name: self.linear.variables(len(self.costs), 1.0) for name in PRODUCTS}
        for name, plus, minus, bound in products(request):  # product >= plus - minus - bound
            added = [(self.columns[share], 1.0) for share in plus]
            taken = [(self.columns[share], -numpy.asarray(times)) for share, times in minus.items()]
            self.linear.each_at_most([*added, *taken, (self.columns[name], -1.0)], bound)
        self.bytes: dict[Tier, list[Term]] = {}  # sums, in units of GIGA
        self.constant: dict[Tier, float] = {}  # bytes that are there in any case
        for tier in Tier:
            self.bytes[tier] = []
            self.constant[tier] = 0.0
            if tier is Tier.DEVICE:
                self.constant[tier] = choice.beside if has_times else staying(request)
            for factors in self.demands.bytes(tier).values():
                self.constant[tier] += float(factors.pop(ALWAYS, numpy.zeros(1)).sum())
                self.bytes[tier] += self._terms(factors, 1 / GIGA)
        if has_times:
            self.limit({})
            self._schedule()
            if not self.request.keeps_gradients:
                self._share_evenly()

    def limit(self, more: Mapping[Tier, Sequence[Term]]) -> None:
        """Let no tier hold more than its limit; `more` adds further bytes, in units of GIGA."""
        for tier in Tier:
            room = self.request.limits.get(tier, 0) - self.request.fixed.get(tier, 0) - self.constant[tier]
            self.linear.at_most([*self.bytes[tier], *more.get(tier, ())], room / GIGA, tier.value)

    def hold(self, shares: Sequence[GroupShares], names: Sequence[str] = NAMES) -> None:
        for name in names:
            self.linear.fix(self.columns[name], [getattr(share, name) for share in shares])

    def shares(self, solution: LinearSolution) -> list[GroupShares]:
        values = [numpy.clip(solution.values[self.columns[name]], 0.0, 1.0) for name in NAMES]
        return [GroupShares(*(float(share) for share in row)) for row in zip(*values, strict=True)]

    def _share_variables(self) -> dict[str, Array]:
        request = self.request
        linear = self.linear
        places = (self.demands.updated > 0) * request.may_place(Kind.OPTIMIZER_STATES)
        moves = (self.demands.parameters > 0) * request.may_place(Kind.PARAMETERS)
        lands = (self.demands.gradients > 0) * request.may_place(Kind.GRADIENTS)
        has_link = request.machine.link is not None
        has_host = Tier.HOST in request.limits
        has_disk = Tier.DISK in request.limits and request.machine.disk is not None
        may = {
            "resident": numpy.ones(len(self.costs)),
            "cpu": places * has_host,
            "streamed": places * (has_host and has_link),
            "disk_cpu": places * has_disk,
            "disk_streamed": places * (has_disk and has_link),
            "parameters_host": moves * has_host,
            "parameters_disk": moves * has_disk,
            "gradients_host": lands * has_host,
            "activations_recomputed": self.choice.recomputed,
            "activations_host": self.choice.sent,
        }
        columns = {name: linear.variables(len(self.costs), may[name]) for name in NAMES}
        if request.rests is not None:
            linear.fix(columns["parameters_host"], [cost.rests is Tier.HOST for cost in self.costs])
            linear.fix(columns["parameters_disk"], [cost.rests is Tier.DISK for cost in self.costs])
        share = {name: (variables, 1.0) for name, variables in columns.items()}
        linear.each_equals([share[name] for name in STATES], 1.0)
        linear.each_at_most([share["parameters_host"], share["parameters_disk"]], 1.0)
        linear.each_at_most([share["gradients_host"], share["resident"]], 1.0)  # it would come up again
        streamed = [share["streamed"], share["disk_streamed"]]
        linear.each_at_most([*streamed, share["parameters_disk"]], 1.0)  # they go to the disk from the host
        if self.choice.changes:
            changed = [share["activations_recomputed"], share["activations_host"]]
            (linear.each_equals if self.choice.must else linear.each_at_most)(changed, 1.0)
        return columns

    def _terms(self, factors: Factors, times: Array | float = 1.0) -> list[Term]:
        return [(self.columns[name], factor * times) for name, factor in factors.items()]

    def _summed(self, terms: Sequence[Term], by: int = 1) -> Array:
        """Return, for each group, the sum of terms up to it: from the first one, or with -1 from the last."""
        so_far = self.linear.variables(len(self.costs))
        self.linear.each_equals([*terms, _shifted(so_far, by), (so_far, -1.0)], 0.0)
        return so_far

    def _share_evenly(self) -> None:
        """Let states of all groups have the same shares. Where gradients are freed inside backward, each update must
        keep pace with backward, or backward waits for it."""
        updated = numpy.flatnonzero(self.demands.updated)
        if len(updated) > 1:
            for name in STATES:
                columns = self.columns[name]
                self.linear.each_equals([(columns[updated[1:]], 1.0), (columns[updated[:-1]], -1.0)], 0.0)

    def _schedule(self) -> None:
        self.begin = self.linear.variables(len(self.costs))  # F
        self.end = self.linear.variables(len(self.costs))  # E
        self.step = self.linear.variables()
        self.totals: dict[str, list[Term]] = {}  # work of each resource in a step
        self._sequence()
        self._windows(self._sent() if self.choice.sent.any() else {})
        self._brought()
        if self.request.launching:  # the CPU updates, and computes or launches
            part = self.request.launching * self.request.accumulate
            computed = part * (self.demands.forward_s + self.demands.backward_s).sum()
            longer = (self.columns["activations_recomputed"], part * self.demands.longer_s)
            beside: list[Term] = [longer] if self.request.machine.link is not None else [longer, self._resident()]
            self.linear.at_most([*self.totals["cpu"], *beside, (self.step, -1.0)], -float(computed))

    def _sequence(self) -> None:
        """Run groups one after the other: backward from the last to the first, forward the other way."""
        self._backward_after(_shifted(self.end, -1))
        self._in_order(self.begin)
        self.linear.at_most([(self.end[:1], 1.0), (self.begin[:1], -1.0), self._resident()], 0.0)
        terms, constant = self._other_passes(self.request.accumulate - 1)
        last = [(self.begin[-1:], 1.0), (self.step, -1.0)]
        self.linear.at_most([*last, *terms], -float(self.demands.forward_s[-1] + constant))

    def _resident(self) -> Term:
        """Return the seconds of updates on the device."""
        return self.columns["resident"], self.demands.updated * self.request.resident_s

    def _backward_after(self, ready: Term) -> None:
        longer = (self.columns["activations_recomputed"], self.demands.longer_s)
        self.linear.each_at_most([ready, longer, (self.end, -1.0)], -self.demands.backward_s)

    def _in_order(self, begin: Array) -> None:
        if len(begin) > 1:
            self.linear.each_at_most([(begin[:-1], 1.0), (begin[1:], -1.0)], -self.demands.forward_s[:-1])

    def _other_passes(self, count: int) -> tuple[list[Term], float]:
        """Return the seconds of this many further passes: a sum of terms, and a constant."""
        if not count or not self.choice.sent.any():
            longer = (self.columns["activations_recomputed"], self.demands.longer_s * count)
            return [longer], count * (self.demands.forward_s + self.demands.backward_s).sum()
        begin = self.linear.variables(len(self.costs))  # the pace that activations leave at
        self._in_order(begin)
        self._leaving(begin)
        return [(begin[-1:], float(count)), (self.end[:1], float(count))], count * self.demands.forward_s[-1]

    def _windows(self, sent: Mapping[str, Term]) -> None:
        """Fit the work of all groups up to each one between its E and its F, while activations leave."""
        start = self.end if self.request.is_early else numpy.full(len(self.costs), self.end[0])
        passes = self.demands.passes()
        for resource, factors in self.demands.update().items():
            so_far = self._summed(self._terms(factors))
            beside = [sent[resource]] if resource in sent else []
            self.linear.each_at_most([(so_far, 1.0), (self.begin, -1.0), (start, 1.0), *beside], 0.0)
            total: list[Term] = [(so_far[-1:], 1.0)]
            for resources, times in passes:
                total += self._terms(resources.get(resource, {}), times)
            self.totals[resource] = total
            self.linear.at_most([*total, (self.step, -1.0)], 0.0)

    def _leaving(self, begin: Array) -> None:
        """Let activations leave one after the other, those of a group before the second group after it runs."""
        link = self.request.machine.link
        assert link is not None
        down = (self.columns["activations_host"], self.demands.kept / link.down)
        gone = self.linear.variables(len(self.costs))
        self.linear.each_at_most([(begin, 1.0), down, (gone, -1.0)], -self.demands.forward_s)
        self.linear.each_at_most([_shifted(gone, 1), down, (gone, -1.0)], 0.0)
        self.linear.each_at_most([_shifted(gone, NUM_BUFFERS), (begin, -1.0)], 0.0)

    def _sent(self) -> dict[str, Term]:
        """Return, by resource, the time that activations leaving during the first forward take until a group runs."""
        link = self.request.machine.link
        assert link is not None
        self._leaving(self.begin)
        so_far = self._summed([(self.columns["activations_host"], self.demands.kept / GIGA)])
        columns, is_there = _shifted(so_far, NUM_BUFFERS)
        rates = {"down": link.down, "link": link.both, "memory": self.request.memory_rate}
        return {resource: (columns, is_there * (GIGA / rate)) for resource, rate in rates.items()}

    def _brought(self) -> None:
        """Bring what backward needs before it reaches a group: parameters, which the last group has from forward, and
        activations, which have room once backward has finished the second group after it."""
        link = self.request.machine.link
        if link is None:
            return
        parameters = numpy.append(self.demands.parameters[:-1], 0.0) / link.up
        activations = (self.columns["activations_host"], self.demands.kept / link.up)
        brought = self._summed([*self._terms(dict.fromkeys(OFF, parameters)), activations], -1)
        self._backward_after((brought, 1.0))
        if self.choice.sent.any():
            there = self.linear.variables(len(self.costs))
            for before in (_shifted(there, -1), _shifted(self.end, -NUM_BUFFERS)):
                self.linear.each_at_most([before, activations, (there, -1.0)], 0.0)
            self._backward_after((there, 1.0))

    def bytes_cost(self) -> list[Term]:
        """Return the cost that compares steps of equal length: bytes by tier, groups needed first in nearer tiers."""
        demands = self.demands
        places = numpy.arange(len(self.costs)) / len(self.costs)
        nearest = {"resident": demands.states * places}
        if self.request.is_early:
            nearest |= {name: demands.parameters * (1 - places) for name in OFF}
            nearest["gradients_host"] = demands.gradients * (1 - places)
        spared = numpy.maximum(demands.kept - demands.boundary, 0.0)
        again = spared * (1 + NEARER * places)  # nothing is recomputed for no gain, and what has to wait longest first
        total = [*self._terms(nearest, NEARER / GIGA), *self._terms({"activations_recomputed": again}, 1 / GIGA)]
        total += [(columns, DISK_BYTE * size) for columns, size in self.bytes[Tier.DISK]]
        total += self.bytes[Tier.HOST]
        link = self.request.machine.link
        if link is not None:
            moved = self.totals["link"]
            total += [(columns, MOVED_BYTE * seconds * link.both / GIGA) for columns, seconds in moved]
        return total


def quickest(
    request: PlanRequest, fixed: Sequence[GroupShares] | None = None
) -> tuple[ScheduleProgram, LinearSolution]:
    """Return the shortest step and the program it was found in: of several choices about activations the first within
    SLACK of the best. With `fixed`, the choices for whole groups are given. Raises Infeasible."""
    solved = []
    for choice in activation_choices(request) if fixed is None else [choice_of(request, fixed)]:
        program = ScheduleProgram(request, choice)
        if fixed is not None:
            program.hold(fixed, WHOLE)
        with contextlib.suppress(Infeasible):
            solved.append((program, program.linear.minimise([(program.step, 1.0)])))
    if not solved:
        raise Infeasible("nothing fits")
    shortest = min(solution.objective for _, solution in solved)
    return next(pair for pair in solved if pair[1].objective <= shortest * (1 + SLACK) + 1e-9)


def prices_of(shortest: LinearSolution) -> dict[Tier, float]:
    """Return the seconds that one more byte of a tier would save."""
    return {tier: shortest.prices.get(tier.value, 0.0) / GIGA for tier in Tier}


def optimise(request: PlanRequest, fixed: Sequence[GroupShares] | None = None) -> tuple[float, list[GroupShares]]:
    """Return the seconds of the shortest step, and the shares with the fewest bytes off the device among those within
    SLACK of it. With `fixed`, only the states are placed, and the other choices are given. Raises Infeasible."""
    program, shortest = quickest(request, fixed)
    program.linear.at_most([(program.step, 1.0)], shortest.objective * (1 + SLACK) + 1e-9)
    shares = program.shares(program.linear.minimise(program.bytes_cost()))
    if fixed is not None:
        shares = [states_of(share, whole) for share, whole in zip(shares, fixed, strict=True)]
    return shortest.objective, shares


def _shifted(columns: Array, by: int) -> tuple[Array, Array]:
    """Return for each group the variable of the one `by` places before it, or after it if negative; none at the end."""
    is_there = numpy.ones(len(columns))
    if by > 0:
        is_there[:by] = 0.0
    else:
        is_there[by:] = 0.0
    return numpy.roll(columns, by), is_there
