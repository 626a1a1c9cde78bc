"""The linear program: which share of each group's states, gradients and parameters rests where, and by which route its
update goes, so that a step is as short as can be.

Time runs from the start of the last backward pass of a step. E[g] is when backward has done with group g, F[g] when the
next forward begins with it, so E falls and F rises with g. A group's update lies between the two (after the whole of
backward, if it waits for the norm), and the windows of earlier groups lie inside those of later ones. On one resource
such jobs can be done in time if and only if, for every g, those up to g fit between E[g] and F[g]. These rows, and that
each resource has no more to do than a step is long, are the whole schedule; the rest are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from zerostd.planning.costs import Load, Task
from zerostd.planning.linear import Infeasible, Linear, Outcome
from zerostd.policy import Kind, Tier

__all__ = ["SLACK", "Infeasible", "Optimum", "Shares", "missing", "optimise", "optimise_whole", "work"]

GIGA = 1e9
SLACK = 0.01  # a step that much longer is worth fewer bytes on disk and host


@dataclass(frozen=True)
class Shares:
    """Of one group: its states by route and tier, and what of its parameters and gradients is off the device."""

    resident: float = 1.0
    cpu: float = 0.0
    streamed: float = 0.0
    disk_cpu: float = 0.0
    disk_streamed: float = 0.0
    parameters_host: float = 0.0
    parameters_disk: float = 0.0
    gradients_host: float = 0.0


STATES = ("resident", "cpu", "streamed", "disk_cpu", "disk_streamed")
PRODUCTS = ("weights_up", "mirror", "gradients_up", "weights_down", "master_device", "master_host", "weights_held")
NAMES = tuple(field.name for field in fields(Shares))


@dataclass(frozen=True)
class Optimum:
    """What the program found."""

    step_s: float
    shares: list[Shares]  # of each load
    prices: dict[Tier, float]  # seconds a step would be shorter with one more byte of the tier
    used: dict[Tier, float]  # bytes
    busy: dict[str, float]  # seconds of work in a step, by resource


class _Program:
    """The rows, and what they are sums of."""

    def __init__(self, task: Task, found: Sequence[Load]) -> None:
        self.task, self.loads = task, found
        self.linear = Linear()
        self.shares = [self._share_variables(load) for load in found]
        self.extra = [self._product_variables(index) for index in range(len(found))]
        self.begin = [self.linear.variable() for _ in found]  # F
        self.end = [self.linear.variable() for _ in found]  # E
        self.step = self.linear.variable()
        self.bytes = {tier: self._bytes(tier) for tier in Tier}
        for tier in Tier:
            limit = task.limits.get(tier, 0) - task.fixed.get(tier, 0)
            self.linear.at_most(self.bytes[tier], limit / GIGA, tier.value)
        self._sequence()
        self._windows()

    # Variables

    def _share_variables(self, load: Load) -> dict[str, int]:
        task, linear = self.task, self.linear
        places = task.may_place(Kind.OPTIMIZER_STATES) and load.updated > 0
        has_link, has_disk = task.machine.link is not None, Tier.DISK in task.limits and task.machine.disk is not None
        has_host = Tier.HOST in task.limits
        may = {
            "resident": True,
            "cpu": places and has_host,
            "streamed": places and has_host and has_link,
            "disk_cpu": places and has_disk,
            "disk_streamed": places and has_disk and has_link,
            "parameters_host": task.may_place(Kind.PARAMETERS) and has_host and load.parameters > 0,
            "parameters_disk": task.may_place(Kind.PARAMETERS) and has_disk and load.parameters > 0,
            "gradients_host": task.may_place(Kind.GRADIENTS) and has_host and load.gradients > 0,
        }
        made = {name: linear.variable(1.0 if may[name] else 0.0) for name in NAMES}
        if load.rests is not None:
            for name, tier in (("parameters_host", Tier.HOST), ("parameters_disk", Tier.DISK)):
                linear.fix(made[name], float(load.rests is tier))
        linear.equals({made[name]: 1.0 for name in STATES}, 1.0)
        linear.at_most({made["parameters_host"]: 1.0, made["parameters_disk"]: 1.0}, 1.0)
        streamed = {made["streamed"]: 1.0, made["disk_streamed"]: 1.0}
        linear.at_most({**streamed, made["parameters_disk"]: 1.0}, 1.0)  # such parameters go to the disk from the host
        return made

    def _product_variables(self, index: int) -> dict[str, int]:
        """What depends on two shares at once; exact where parameters and gradients are at one place as a whole."""
        made, linear = self.shares[index], self.linear
        off = {made["parameters_host"]: 1.0, made["parameters_disk"]: 1.0}
        by_cpu = {made["cpu"]: 1.0, made["disk_cpu"]: 1.0}
        host = {made["gradients_host"]: 1.0}
        found = {name: linear.variable(1.0) for name in PRODUCTS}
        linear.at_least({found["weights_up"]: 1.0, **_scaled(by_cpu, -1), **off}, 0.0)
        linear.at_least({found["mirror"]: 1.0, **_scaled(by_cpu, -1), **host}, 0.0)
        linear.at_least({found["gradients_up"]: 1.0, **by_cpu, **_scaled(host, -1)}, 0.0)
        linear.at_least({found["weights_down"]: 1.0, **by_cpu, **_scaled(off, -1)}, 0.0)
        linear.at_least({found["master_device"]: 1.0, made["resident"]: -1.0, **_scaled(off, -1)}, -1.0)
        on_host = {made["cpu"]: 1.0, made["streamed"]: 1.0}
        shared = {} if self.task.speculates else {made["parameters_host"]: 1.0}
        linear.at_least({found["master_host"]: 1.0, **_scaled(on_host, -1), **shared}, 0.0)
        fits = self.loads[index].gradient_bytes == self.task.model.parameter_bytes and not self.task.speculates
        landing = {found["mirror"]: 1.0} if fits else {}  # new parameters take the place of the gradient's copy
        linear.at_least({found["weights_held"]: 1.0, found["weights_up"]: -1.0, **landing}, 0.0)
        return found

    # Bytes

    def _bytes(self, tier: Tier) -> dict[int, float]:
        """Of one tier, in units of GIGA; what cannot be moved is in the constant `fixed`."""
        model, total = self.task.model, dict[int, float]()
        copies = 2 if self.task.speculates else 1
        constant = 0.0
        for load, share, extra in zip(self.loads, self.shares, self.extra, strict=True):
            states, gradients = load.updated * model.state_bytes, load.gradients
            master, weights = load.updated * model.master_bytes, load.updated * model.parameter_bytes
            if tier is Tier.DEVICE:
                total[share["resident"]] = states
                total[share["parameters_host"]] = total[share["parameters_disk"]] = -load.parameters
                total[share["gradients_host"]] = -gradients
                total[extra["master_device"]] = master
                constant += load.parameters + gradients + load.pinned_gradients
            elif tier is Tier.HOST:
                total[share["cpu"]] = total[share["streamed"]] = states * copies
                total[extra["master_host"]] = master * copies
                total[share["parameters_disk"]] = weights  # on their way to the disk
                total[share["parameters_host"]] = load.parameters
                total[share["gradients_host"]] = gradients
                if self.task.machine.link is not None:
                    total[extra["mirror"]] = load.updated * load.gradient_bytes
                    total[extra["weights_held"]] = weights
            else:
                total[share["disk_cpu"]] = total[share["disk_streamed"]] = states + master
                total[share["parameters_disk"]] = load.parameters
        if constant:
            total[self.linear.variable(1.0, 1.0)] = constant
        return _scaled(total, 1 / GIGA)

    # Work

    def _work(self, index: int) -> dict[str, dict[int, float]]:
        """Seconds of each resource that the update of a group takes, with what its forward needs from elsewhere."""
        load, share, extra, machine = self.loads[index], self.shares[index], self.extra[index], self.task.machine
        model, n = self.task.model, load.updated
        states, weight = n * (model.state_bytes + model.master_bytes), n * model.parameter_bytes
        gradient = n * load.gradient_bytes
        up = {
            share["streamed"]: states,
            share["disk_streamed"]: states,
            extra["weights_up"]: weight,
            extra["gradients_up"]: gradient,
            share["parameters_host"]: load.parameters,
            share["parameters_disk"]: load.parameters,
        }
        down = {
            share["streamed"]: states,
            share["disk_streamed"]: states,
            extra["mirror"]: gradient,
            extra["weights_down"]: weight,
            share["gradients_host"]: gradient,
        }
        in_memory = (gradient + weight + 2 * states) if n else 0.0
        cpu = {share["cpu"]: n, share["disk_cpu"]: n}
        read = {share["disk_cpu"]: states, share["disk_streamed"]: states, share["parameters_disk"]: load.parameters}
        memory = _sum(_scaled(cpu, in_memory / max(n, 1)), up, down, _scaled(read, 2))
        ns = machine.processor.ns(self.task.num_threads)
        work = {"cpu": _scaled(cpu, ns * 1e-9), "memory": _scaled(memory, 1 / self.task.memory_rate)}
        if machine.link is not None:
            work |= {"up": _scaled(up, 1 / machine.link.up), "down": _scaled(down, 1 / machine.link.down)}
            work["link"] = _scaled(_sum(up, down), 1 / machine.link.both)
        else:
            work["memory"] = {}
        disk = self.task.disk
        if disk is not None:
            work |= {"read": _scaled(read, 1 / disk.read), "write": _scaled(read, 1 / disk.write)}
            work["disk"] = _scaled(read, 1 / disk.both)
        return work

    def _again(self, index: int) -> dict[str, dict[int, float]]:
        """Seconds for what backward needs from elsewhere, in every pass."""
        load, share, machine = self.loads[index], self.shares[index], self.task.machine
        up = {share["parameters_host"]: load.parameters, share["parameters_disk"]: load.parameters}
        work = {}
        if machine.link is not None:
            work["up"] = _scaled(up, 1 / machine.link.up)
            work["link"] = _scaled(up, 1 / machine.link.both)
            work["memory"] = _scaled(up, 1 / self.task.memory_rate)
        disk = self.task.disk
        if disk is not None:
            read = {share["parameters_disk"]: load.parameters}
            work["read"] = _scaled(read, 1 / disk.read)
            work["disk"] = _scaled(read, 1 / disk.both)
        return work

    def _sums(self) -> dict[str, dict[int, float]]:
        """Seconds for sums of gradients on the host to come up, be added to and go down again."""
        machine = self.task.machine
        moved = {share["gradients_host"]: load.gradients for load, share in zip(self.loads, self.shares, strict=True)}
        if machine.link is None:
            return {}
        return {
            "up": _scaled(moved, 1 / machine.link.up),
            "down": _scaled(moved, 1 / machine.link.down),
            "link": _scaled(moved, 2 / machine.link.both),
            "memory": _scaled(moved, 2 / self.task.memory_rate),
        }

    # Time

    def _sequence(self) -> None:
        """Groups one after the other: backward from the last to the first, forward the other way."""
        linear, last = self.linear, len(self.loads) - 1
        resident = {
            share["resident"]: load.updated * self.task.machine.resident_ns * 1e-9
            for load, share in zip(self.loads, self.shares, strict=True)
        }
        for index, load in enumerate(self.loads):
            if index == last:
                linear.at_least({self.end[index]: 1.0}, load.backward_s)
                continue
            linear.at_least({self.end[index]: 1.0, self.end[index + 1]: -1.0}, load.backward_s)
            linear.at_least({self.begin[index + 1]: 1.0, self.begin[index]: -1.0}, load.forward_s)
        linear.at_least({self.begin[0]: 1.0, self.end[0]: -1.0, **_scaled(resident, -1)}, 0.0)
        passes = self.task.accumulate - 1
        more = passes * sum(load.forward_s + load.backward_s for load in self.loads)
        linear.at_least({self.step: 1.0, self.begin[last]: -1.0}, self.loads[last].forward_s + more)

    def _windows(self) -> None:
        linear = self.linear
        self.totals: dict[str, dict[int, float]] = {}
        before: dict[str, int] = {}
        for index in range(len(self.loads)):
            start = self.end[index] if self.task.is_early else self.end[0]
            for resource, terms in self._work(index).items():
                if not terms:
                    continue
                so_far = linear.variable()  # the work of this group and all before it
                row = {so_far: -1.0, **terms}
                if resource in before:
                    row[before[resource]] = 1.0
                linear.equals(row, 0.0)
                before[resource] = so_far
                linear.at_most({so_far: 1.0, self.begin[index]: -1.0, start: 1.0}, 0.0)
        passes = self.task.accumulate
        again: dict[str, dict[int, float]] = {}
        for index in reversed(range(len(self.loads) - 1)):
            for resource, terms in self._again(index).items():
                again[resource] = _sum(again.get(resource, {}), terms)
            if "up" in again:  # what backward needs is there when it comes to it; the last group stays from forward
                linear.at_most({**again["up"], self.end[index]: -1.0}, -self.loads[index].backward_s)
        last, sums = self._again(len(self.loads) - 1), self._sums()
        for resource, so_far in before.items():
            backward = _scaled(again.get(resource, {}), passes)
            forward = _scaled(_sum(again.get(resource, {}), last.get(resource, {})), passes - 1)
            more = _scaled(sums.get(resource, {}), passes - 1)
            self.totals[resource] = _sum({so_far: 1.0}, backward, forward, more)
            linear.at_most({**self.totals[resource], self.step: -1.0}, 0.0)


def optimise(task: Task, found: Sequence[Load], *, fixed: Sequence[Shares] | None = None) -> Optimum:
    """The shortest step; of those within SLACK of it the one with the fewest bytes on disk, then on the host. With
    `fixed`, parameters and gradients are where these say, and only the states are placed. Raises Infeasible."""
    program = _Program(task, found)
    linear = program.linear
    for made, given in zip(program.shares, fixed or (), strict=False):
        for name in ("parameters_host", "parameters_disk", "gradients_host"):
            linear.fix(made[name], getattr(given, name))
    first = linear.minimise({program.step: 1.0})
    linear.at_most({program.step: 1.0}, first.objective * (1 + SLACK) + 1e-9)
    outcome = first
    for tier in (Tier.DISK, Tier.HOST):
        if tier in task.limits:
            outcome = linear.minimise(program.bytes[tier])
            linear.at_most(program.bytes[tier], outcome.objective * (1 + 1e-6) + 1e-6)
    front = {share["resident"]: float(place) for place, share in enumerate(program.shares)}
    outcome = linear.minimise(front)  # nearest to forward's front
    return _optimum(program, first, outcome)


def work(task: Task, found: Sequence[Load], shares: Sequence[Shares]) -> dict[str, float]:
    """Seconds of work in a step, by resource, for given shares."""
    program = _Program(replace(task, limits=dict.fromkeys(Tier, 1 << 60)), found)
    for made, given in zip(program.shares, shares, strict=True):
        for name in NAMES:
            program.linear.fix(made[name], getattr(given, name))
    products = {extra: 1.0 for made in program.extra for extra in made.values()}
    outcome = program.linear.minimise({program.step: 1e3, **products})
    return {resource: outcome.of(terms) for resource, terms in program.totals.items()}


def _optimum(program: _Program, first: Outcome, outcome: Outcome) -> Optimum:
    shares = [
        Shares(**{name: min(1.0, max(0.0, outcome.values[made[name]])) for name in NAMES}) for made in program.shares
    ]
    return Optimum(
        step_s=first.objective,
        shares=shares,
        prices={tier: first.prices.get(tier.value, 0.0) / GIGA for tier in Tier},
        used={tier: outcome.of(program.bytes[tier]) * GIGA for tier in Tier},
        busy={resource: outcome.of(terms) for resource, terms in program.totals.items()},
    )


def optimise_whole(task: Task, found: Sequence[Load]) -> list[Shares]:
    """The best placement with parameters and gradients of every group in one place, by branch and bound: slower, and
    finds a way where there is one. Raises Infeasible."""
    program = _Program(task, found)
    whole = {made[name] for made in program.shares for name in NAMES if name not in STATES}
    outcome = program.linear.minimise({program.step: 1.0}, whole)
    return _optimum(program, outcome, outcome).shares


def missing(task: Task, found: Sequence[Load]) -> dict[Tier, float]:
    """How many bytes each tier is short of, at the least in all, when there is no solution."""
    program = _Program(task, found)
    linear = program.linear
    short = {tier: linear.variable() for tier in Tier}
    relaxed = Linear()
    relaxed._bounds, relaxed._equal = linear._bounds, linear._equal
    for terms, bound in linear._upper:
        relaxed.at_most(terms, bound)
    for tier, variable in short.items():
        row = linear._names[tier.value]
        terms, bound = relaxed._upper[row]
        relaxed._upper[row] = ({**terms, variable: -1.0}, bound)
    outcome = relaxed.minimise({variable: 1.0 for variable in short.values()})
    return {tier: outcome.values[variable] * GIGA for tier, variable in short.items()}


def _scaled(terms: dict[int, float], factor: float) -> dict[int, float]:
    return {index: value * factor for index, value in terms.items()}


def _sum(*many: dict[int, float]) -> dict[int, float]:
    total: dict[int, float] = {}
    for terms in many:
        for index, value in terms.items():
            total[index] = total.get(index, 0.0) + value
    return total
