"""The linear program: which share of each group's states, gradients and parameters rests where, by which route its
update goes, and what is done with its activations, so that a step is as short as can be.

Time runs from the start of the last backward pass of a step. E[g] is when backward has done with group g, F[g] when the
next forward begins with it, so E falls and F rises with g. A group's update lies between the two (after the whole of
backward, if it waits for the norm), and the windows of earlier groups lie inside those of later ones. On one resource
such jobs can be done in time if and only if, for every g, those up to g fit between E[g] and F[g]. These rows, and that
each resource has no more to do than a step is long, are the whole schedule; the rest are bytes. A processor that is the
device as well has both to do.

Activations that go to the host leave after their group's forward, one after the other, and forward begins with a group
when those of the second before it are gone. They come back in the order of backward, each not before backward has done
with the second group after it, and backward waits for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy

from zerostd.planning.activations import NUM_BUFFERS, ActivationChoice, activation_choices, choice_of
from zerostd.planning.costs import GroupCost, PlanRequest
from zerostd.planning.demands import (
    NAMES,
    PRODUCTS,
    STATES,
    WHOLE,
    Factors,
    GroupShares,
    ResourceDemands,
    lands_on_copy,
)
from zerostd.planning.linear import Array, Infeasible, LinearProgram, LinearSolution, Term
from zerostd.policy import Kind, Tier

__all__ = ["GIGA", "SLACK", "Infeasible", "Optimum", "ScheduleProgram", "optimise", "prices_of", "quickest"]

GIGA = 1e9
SLACK = 0.03  # a step that much longer is worth fewer bytes on disk and host: no prediction is surer than that
DISK_BYTE = 64.0  # bytes of the host that one of the disk is worth, among steps of the same length
MOVED_BYTE = 0.5  # bytes of the host that one over the link is worth: what need not be moved cannot be late
OFF = ("parameters_host", "parameters_disk")
NEARER = 1e-3  # bytes of the host that it is worth to have a byte at the front on the device, and not one at the end


@dataclass(frozen=True)
class Optimum:
    """What the program found."""

    step_s: float
    shares: list[GroupShares]  # of each cost
    used: dict[Tier, float]  # bytes
    busy: dict[str, float]  # seconds of work in a step, by resource


class ScheduleProgram:
    """The rows, and what they are sums of. Without times there is nothing in it but what may be where."""

    def __init__(
        self, request: PlanRequest, found: Sequence[GroupCost], choice: ActivationChoice, *, has_times: bool = True
    ) -> None:
        self.request, self.costs, self.choice = request, found, choice
        self.linear, self.demands = LinearProgram(), ResourceDemands(request, found)
        self.columns = self._share_variables()
        self.columns |= self._product_variables()
        self.bytes, self.constant = {}, {}
        for tier in Tier:
            self.bytes[tier], self.constant[tier] = self._bytes(tier)
        if not has_times:
            return
        self.limit()
        self.begin, self.end = (self.linear.variables(len(found)) for _ in range(2))  # F, E
        self.step = self.linear.variable()
        self.totals: dict[str, dict[int, float]] = {}  # work of each resource in a step
        self._sequence()
        sent = self._sent() if choice.sent.any() else {}
        self._windows(sent)
        self._brought()
        if request.machine.link is None:
            self._one_processor()

    def limit(self, more: Mapping[Tier, Mapping[int, float]] | None = None) -> None:
        """No tier holds more than it may; `more` is what else counts there, in units of GIGA."""
        for tier in Tier:
            room = self.request.limits.get(tier, 0) - self.request.fixed.get(tier, 0) - self.constant[tier]
            self.linear.at_most({**self.bytes[tier], **(more or {}).get(tier, {})}, room / GIGA, tier.value)

    def hold(self, shares: Sequence[GroupShares], names: Sequence[str] = NAMES) -> None:
        """From now on these shares are as given."""
        for name in names:
            for column, share in zip(self.columns[name], shares, strict=True):
                self.linear.fix(int(column), getattr(share, name))

    def shares(self, outcome: LinearSolution) -> list[GroupShares]:
        """What was found."""
        values = [numpy.clip(outcome.values[self.columns[name]], 0.0, 1.0) for name in NAMES]
        return [GroupShares(*(float(one) for one in row)) for row in zip(*values, strict=True)]

    # Variables

    def _share_variables(self) -> dict[str, Array]:
        request, linear, demands = self.request, self.linear, self.demands
        places = (demands.updated > 0) * request.may_place(Kind.OPTIMIZER_STATES)
        moves = (demands.parameters > 0) * request.may_place(Kind.PARAMETERS)
        lands = (demands.gradients > 0) * request.may_place(Kind.GRADIENTS)
        has_link, has_host = request.machine.link is not None, Tier.HOST in request.limits
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
        made = {name: linear.variables(len(self.costs), may[name]) for name in NAMES}
        for name, tier in (("parameters_host", Tier.HOST), ("parameters_disk", Tier.DISK)):
            for column, cost in zip(made[name], self.costs, strict=True):
                if cost.rests is not None:
                    linear.fix(int(column), float(cost.rests is tier))
        linear.each_equals([(made[name], 1.0) for name in STATES], 1.0)
        linear.each_at_most([(made["parameters_host"], 1.0), (made["parameters_disk"], 1.0)], 1.0)
        linear.each_at_most([(made["gradients_host"], 1.0), (made["resident"], 1.0)], 1.0)  # it would come up again
        streamed = [(made["streamed"], 1.0), (made["disk_streamed"], 1.0)]
        linear.each_at_most([*streamed, (made["parameters_disk"], 1.0)], 1.0)  # they go to the disk from the host
        if self.choice.changes:
            changed = [(made["activations_recomputed"], 1.0), (made["activations_host"], 1.0)]
            (linear.each_equals if self.choice.must else linear.each_at_most)(changed, 1.0)
        return made

    def _product_variables(self) -> dict[str, Array]:
        """What depends on two shares at once; exact where parameters and gradients are at one place as a whole."""
        linear, share = self.linear, {name: (columns, 1.0) for name, columns in self.columns.items()}
        found = {name: linear.variables(len(self.costs), 1.0) for name in PRODUCTS}

        def at_least(name: str, plus: Sequence[Term], minus: Sequence[Term] = (), bound: float = 0.0) -> None:
            """product >= plus - minus - bound"""
            negative = [(columns, -numpy.asarray(factor)) for columns, factor in minus]
            linear.each_at_most([*plus, *negative, (found[name], -1.0)], bound)

        off, landed = [share["parameters_host"], share["parameters_disk"]], [share["gradients_host"]]
        by_cpu = [share["cpu"], share["disk_cpu"]]
        at_least("weights_up", by_cpu, off)
        at_least("weights_down", off, by_cpu)
        at_least("mirror", by_cpu, landed)
        at_least("gradients_up", landed, by_cpu)
        at_least("master_device", [share["resident"], *off], bound=1.0)
        shared = [] if self.request.speculates else [share["parameters_host"]]
        at_least("master_host", [share["cpu"], share["streamed"]], shared)
        lands = numpy.array([float(lands_on_copy(self.request, cost)) for cost in self.costs])
        at_least("weights_held", [(found["weights_up"], 1.0)], [(found["mirror"], lands)])
        return found

    # Bytes

    def _bytes(self, tier: Tier) -> tuple[dict[int, float], float]:
        """Of one tier: a sum in units of GIGA, and bytes that are there in any case."""
        factors, constant = self.demands.bytes(tier)
        return self._in_one(factors, 1 / GIGA), constant + (self.choice.beside if tier is Tier.DEVICE else 0.0)

    def _in_one(self, factors: Factors, times: Array | float) -> dict[int, float]:
        """A sum over all group_costs."""
        total: dict[int, float] = {}
        for name, factor in factors.items():
            total |= zip(self.columns[name].tolist(), (factor * times).tolist(), strict=True)
        return total

    def _each(self, factors: Factors) -> list[Term]:
        """A sum for each cost."""
        return [(self.columns[name], factor) for name, factor in factors.items()]

    # Time

    def _sequence(self) -> None:
        """Groups one after the other: backward from the last to the first, forward the other way."""
        linear, request = self.linear, self.request
        forward_s, backward_s = self._seconds("forward_s"), self._seconds("backward_s")
        longer = [(self.columns["activations_recomputed"], self.demands.longer_s)]
        linear.each_at_most([*longer, _shifted(self.end, -1), (self.end, -1.0)], -backward_s)
        if len(self.costs) > 1:
            linear.each_at_most([(self.begin[:-1], 1.0), (self.begin[1:], -1.0)], -forward_s[:-1])
        resident = {"resident": self.demands.updated * request.machine.resident_ns * 1e-9}
        update = self._in_one(resident, 1.0)
        linear.at_most({int(self.end[0]): 1.0, int(self.begin[0]): -1.0, **update}, 0.0)
        terms, constant = self._other_passes(request.accumulate - 1, forward_s, backward_s)
        last = {int(self.begin[-1]): 1.0, self.step: -1.0}
        linear.at_most({**last, **terms}, -float(forward_s[-1] + constant))

    def _other_passes(self, count: int, forward_s: Array, backward_s: Array) -> tuple[dict[int, float], float]:
        """Seconds of so many more passes: a sum, and what it is in any case."""
        if not count or not self.choice.sent.any():
            longer = self._in_one({"activations_recomputed": self.demands.longer_s}, count)
            return longer, count * (forward_s + backward_s).sum()
        begin, size = self.linear.variables(len(self.costs)), len(self.costs)  # the pace that activations leave at
        if size > 1:
            self.linear.each_at_most([(begin[:-1], 1.0), (begin[1:], -1.0)], -forward_s[:-1])
        self._leaving(begin)
        return {int(begin[-1]): float(count), int(self.end[0]): float(count)}, count * forward_s[-1]

    def _seconds(self, name: str) -> Array:
        return numpy.array([getattr(cost, name) for cost in self.costs])

    def _windows(self, sent: Mapping[str, Term]) -> None:
        """The work of all groups up to one is done between its E and its F; beside it, activations leave."""
        linear, passes = self.linear, self.request.accumulate
        start = self.end if self.request.is_early else numpy.full(len(self.costs), self.end[0])
        later = numpy.full(len(self.costs), 2.0 * passes - 1.0)  # times that parameters come beside the first forward
        later[-1] = passes - 1.0  # those of the last group stay for backward
        again, sums, activations = self.demands.again(), self.demands.sums(), self.demands.activations()
        for resource, factors in self.demands.update().items():
            so_far = linear.variables(len(self.costs))  # the work of a group and all before it
            linear.each_equals([*self._each(factors), _shifted(so_far, 1), (so_far, -1.0)], 0.0)
            beside = [sent[resource]] if resource in sent else []
            linear.each_at_most([(so_far, 1.0), (self.begin, -1.0), (start, 1.0), *beside], 0.0)
            total = {int(so_far[-1]): 1.0}
            for more, times in ((again, later), (sums, passes - 1.0), (activations, float(passes))):
                for index, factor in self._in_one(more.get(resource, {}), times).items():
                    total[index] = total.get(index, 0.0) + factor
            self.totals[resource] = total
            linear.at_most({**total, self.step: -1.0}, 0.0)

    def _leaving(self, begin: Array) -> None:
        """Activations leave one after the other, and no group runs before those of the second before it are gone."""
        linear, link = self.linear, self.request.machine.link
        assert link is not None
        down = (self.columns["activations_host"], self.demands.kept / link.down)
        gone = linear.variables(len(self.costs))
        linear.each_at_most([(begin, 1.0), down, (gone, -1.0)], -self._seconds("forward_s"))
        linear.each_at_most([_shifted(gone, 1), down, (gone, -1.0)], 0.0)
        linear.each_at_most([_shifted(gone, NUM_BUFFERS), (begin, -1.0)], 0.0)

    def _sent(self) -> dict[str, Term]:
        """By resource, what activations that leave beside the first forward take of it until a group runs."""
        linear, link = self.linear, self.request.machine.link
        assert link is not None
        self._leaving(self.begin)
        so_far = linear.variables(len(self.costs))
        kept = (self.columns["activations_host"], self.demands.kept / GIGA)
        linear.each_equals([kept, _shifted(so_far, 1), (so_far, -1.0)], 0.0)
        columns, is_there = _shifted(so_far, NUM_BUFFERS)
        rates = {"down": link.down, "link": link.both, "memory": self.request.memory_rate}
        return {resource: (columns, is_there * (GIGA / rate)) for resource, rate in rates.items()}

    def _brought(self) -> None:
        """What backward needs is there when it comes to a group: parameters, which the last group has from forward, and
        activations, which have room when backward has done with the second group after it."""
        linear, link = self.linear, self.request.machine.link
        if link is None:
            return
        columns, backward_s = self.columns, self._seconds("backward_s")
        longer = (columns["activations_recomputed"], self.demands.longer_s)
        needed = [(columns[name], numpy.append(self.demands.parameters[:-1], 0.0) / link.up) for name in OFF]
        activations = (columns["activations_host"], self.demands.kept / link.up)
        brought = linear.variables(len(self.costs))
        linear.each_equals([*needed, activations, _shifted(brought, -1), (brought, -1.0)], 0.0)
        linear.each_at_most([(brought, 1.0), longer, (self.end, -1.0)], -backward_s)
        if self.choice.sent.any():
            there = linear.variables(len(self.costs))
            for before in (_shifted(there, -1), _shifted(self.end, -NUM_BUFFERS)):
                linear.each_at_most([before, activations, (there, -1.0)], 0.0)
            linear.each_at_most([(there, 1.0), longer, (self.end, -1.0)], -backward_s)

    def _one_processor(self) -> None:
        """Where the processor is the device as well, it computes and updates, one thing after the other."""
        linear, request, demands = self.linear, self.request, self.demands
        computed = request.accumulate * (self._seconds("forward_s") + self._seconds("backward_s")).sum()
        own = {"resident": demands.updated * request.machine.resident_ns * 1e-9}
        own["activations_recomputed"] = request.accumulate * demands.longer_s
        linear.at_most({**self.totals["cpu"], **self._in_one(own, 1.0), self.step: -1.0}, -float(computed))


def quickest(
    request: PlanRequest, found: Sequence[GroupCost], *, fixed: Sequence[GroupShares] | None = None
) -> tuple[ScheduleProgram, LinearSolution]:
    """The shortest step, and the program it was found in: of several activation_choices the first within SLACK of the best. With
    `fixed`, what a group does as a whole is as these say. Raises Infeasible."""
    tried = []
    for choice in activation_choices(request, found) if fixed is None else [choice_of(found, fixed)]:
        program = ScheduleProgram(request, found, choice)
        if fixed is not None:
            program.hold(fixed, WHOLE)
        with contextlib.suppress(Infeasible):
            tried.append((program, program.linear.minimise({program.step: 1.0})))
    if not tried:
        raise Infeasible("nothing fits")
    shortest = min(outcome.objective for _, outcome in tried)
    return next(one for one in tried if one[1].objective <= shortest * (1 + SLACK) + 1e-9)


def prices_of(shortest: LinearSolution) -> dict[Tier, float]:
    """Seconds the shortest step would be shorter with one more byte of a tier."""
    return {tier: shortest.prices.get(tier.value, 0.0) / GIGA for tier in Tier}


def optimise(
    request: PlanRequest, found: Sequence[GroupCost], *, fixed: Sequence[GroupShares] | None = None
) -> Optimum:
    """The shortest step; of those within SLACK of it the one with the fewest bytes on disk, then on the host, and what
    forward needs first is nearest. With `fixed` only the states are placed. Raises Infeasible."""
    program, first = quickest(request, found, fixed=fixed)
    linear, demands = program.linear, program.demands
    linear.at_most({program.step: 1.0}, first.objective * (1 + SLACK) + 1e-9)
    places = numpy.arange(len(found)) / len(found)
    nearest = {"resident": demands.updated * request.model.state_bytes * places}
    if request.is_early:
        nearest |= {name: demands.parameters * (1 - places) for name in OFF}
        nearest["gradients_host"] = demands.gradients * (1 - places)
    cost = program._in_one(nearest, NEARER / GIGA)
    spared = numpy.maximum(demands.kept - demands.boundary, 0.0)
    again = spared * (1 + NEARER * places)  # nothing is recomputed for no gain, and what has to wait longest first
    cost |= program._in_one({"activations_recomputed": again}, 1 / GIGA)
    for tier, worth in ((Tier.DISK, DISK_BYTE), (Tier.HOST, 1.0)):
        for index, factor in program.bytes[tier].items():
            cost[index] = cost.get(index, 0.0) + worth * factor
    if request.machine.link is not None:
        for index, seconds in program.totals["link"].items():
            cost[index] = cost.get(index, 0.0) + MOVED_BYTE * seconds * request.machine.link.both / GIGA
    outcome = linear.minimise(cost)
    return Optimum(
        step_s=first.objective,
        shares=program.shares(outcome),
        used={tier: outcome.of(program.bytes[tier]) * GIGA + program.constant[tier] for tier in Tier},
        busy={resource: outcome.of(terms) for resource, terms in program.totals.items()},
    )


def _shifted(columns: Array, by: int) -> tuple[Array, Array]:
    """For each cost the variable of the one `by` places before it, or after it if negative; none at the end."""
    moved = numpy.roll(columns, by)
    is_there = numpy.ones(len(columns))
    if by > 0:
        is_there[:by] = 0.0
    else:
        is_there[by:] = 0.0
    return moved, is_there
