"""Demands of a group's shares: bytes of every tier and seconds of every resource, as factors of the shares.

All demands are linear in the shares and in a few products of two shares. The program bounds the products from below,
and they have a closed form if parameters and gradients of a group are in one place. Factors are arrays, with an element
for each cost.

Only the memory for activations that a group needs while it runs is not linear: a recomputed group keeps all of them for
a moment, and those that go to the host leave by way of buffers for two groups. A linear program would let all groups do
it by half to halve that. So the program is solved several times, each time with other groups allowed and room for the
largest of them: these are the choices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy

from zerostd.planning.linear import Array
from zerostd.planning.request import GroupCost, PlanRequest
from zerostd.policy import Kind, Tier

NUM_BUFFERS = 2  # groups whose activations are on the device, where they are kept on the host
MOST_SIZES = 3  # of groups, up to which others than kept activations are tried

Factors = dict[str, Array]  # by the name of a share or a product
NOTHING: Factors = {}


@dataclass(frozen=True)
class GroupShares:
    """Shares of one group: states by route and tier, and what is off the device of its other kinds."""

    resident: float = 1.0
    cpu: float = 0.0
    streamed: float = 0.0
    disk_cpu: float = 0.0
    disk_streamed: float = 0.0
    parameters_host: float = 0.0
    parameters_disk: float = 0.0
    gradients_host: float = 0.0
    activations_recomputed: float = 0.0
    activations_host: float = 0.0

    @property
    def parameters_off(self) -> float:
        return self.parameters_host + self.parameters_disk


STATES = ("resident", "cpu", "streamed", "disk_cpu", "disk_streamed")
BY_CPU = ("cpu", "disk_cpu")
OFF = ("parameters_host", "parameters_disk")
MASTERS = ("master_device", "master_host", "master_disk")
PRODUCTS = ("weights_up", "weights_down", "weights_held", "gradients_down", "gradients_up", *MASTERS)
ALWAYS = "always"  # of every group, whatever its shares
NAMES = tuple(field.name for field in fields(GroupShares))
WHOLE = NAMES[len(STATES) :]  # what a group does as a whole, in the end


def states_of(share: GroupShares, whole: GroupShares) -> GroupShares:
    """Return the states of one share with all else of another."""
    return GroupShares(*(getattr(share, name) for name in STATES), *(getattr(whole, name) for name in WHOLE))


class ResourceDemands:
    """The factors of all groups of a request."""

    def __init__(self, request: PlanRequest) -> None:
        model = request.model
        costs = request.costs
        self.request = request
        self.updated = _array(cost.updated for cost in costs)
        self.parameters = _array(cost.parameters for cost in costs)
        self.gradients = _array(cost.gradients for cost in costs)
        self.pinned = _array(cost.pinned_gradients for cost in costs)
        self.gradient = self.updated * _array(cost.gradient_bytes for cost in costs)  # bytes, as it crosses the link
        self.weights = self.updated * model.parameter_bytes
        self.states = self.updated * model.state_bytes
        self.masters = self.updated * model.master_bytes
        self.shared = self.updated * model.shared_bytes  # of `states`, where parameters are at hand
        self.kept = _array(cost.activations.kept for cost in costs)
        self.boundary = _array(cost.activations.boundary for cost in costs)
        self.forward_s = _array(cost.forward_s for cost in costs)
        self.backward_s = _array(cost.backward_s for cost in costs)
        self.longer_s = _array(cost.activations.longer_s for cost in costs)

    @property
    def _inputs(self) -> Array:
        """Inputs of recomputed groups that go to the host."""
        return _array(cost.activations.inputs for cost in self.request.costs)

    @property
    def _shared_off(self) -> Array:
        """The same for states off the device."""
        return self.shared * (not self.request.speculates)

    def bytes(self, tier: Tier) -> dict[Kind, Factors]:
        """Return what shares take of one tier, by kind."""
        if tier is Tier.DEVICE:
            return {
                Kind.PARAMETERS: {ALWAYS: self.parameters, **dict.fromkeys(OFF, -self.parameters)},
                Kind.GRADIENTS: {ALWAYS: self.gradients + self.pinned, "gradients_host": -self.gradients},
                Kind.OPTIMIZER_STATES: {
                    "resident": self.states - self.shared,
                    "master_device": self.masters + self.shared,
                },
                Kind.ACTIVATIONS: {
                    ALWAYS: self.kept,
                    "activations_recomputed": self.boundary - self.kept,
                    "activations_host": -self.kept,
                },
            }
        if tier is Tier.HOST:
            copies = 2 if self.request.speculates else 1
            has_link = self.request.machine.link is not None
            states = self.states * copies - self._shared_off
            return {
                Kind.PARAMETERS: {"parameters_host": self.parameters},
                Kind.GRADIENTS: {"gradients_host": self.gradients},
                Kind.OPTIMIZER_STATES: {
                    "cpu": states,
                    "streamed": states,
                    "master_host": self.masters * copies + self._shared_off,
                },
                Kind.ACTIVATIONS: {"activations_host": self.kept, "activations_recomputed": self._inputs},
                Kind.BUFFERS: {
                    "gradients_down": self.gradient * has_link,
                    "weights_held": self.weights * has_link,
                },
            }
        on_disk = self.states + self.masters - self._shared_off
        return {
            Kind.PARAMETERS: {"parameters_disk": self.parameters},
            Kind.OPTIMIZER_STATES: {"disk_cpu": on_disk, "disk_streamed": on_disk, "master_disk": self._shared_off},
        }

    def update(self) -> dict[str, Factors]:
        """Return, by resource, the cost of the update of a group and of the transfers that its next forward needs."""
        model = self.request.model
        states = self.updated * (model.state_bytes + model.master_bytes)
        streamed = states - self._shared_off
        up = {
            "streamed": streamed,
            "disk_streamed": streamed,
            "weights_down": self._shared_off,  # parameters from the host that are halves of masters
            "weights_up": self.weights,
            "gradients_up": self.gradient,
            "parameters_host": self.parameters,
            "parameters_disk": self.parameters,
        }
        down = {
            "streamed": streamed,
            "disk_streamed": streamed,
            "gradients_down": self.gradient,
            "weights_down": self.weights,
            "gradients_host": self.gradient,
        }
        read = {"disk_cpu": states, "disk_streamed": streamed, "parameters_disk": self.parameters}
        by_cpu = {"cpu": self.updated, "disk_cpu": self.updated}
        written = self.weights * (not model.shared_bytes)  # beside the master, which else has them as one half
        in_memory = {name: self.gradient + written + 2 * states for name in by_cpu}
        work = {"cpu": _scaled(by_cpu, self.request.cpu_s)}
        return work | self._seconds(up, down, _sum(in_memory, _scaled(read, 2)), read=read, written=read)

    def passes(self) -> list[tuple[dict[str, Factors], Array | float]]:
        """Return, by resource, the transfers that passes of a step need after the first forward, and how often."""
        count = self.request.accumulate
        off = dict.fromkeys(OFF, self.parameters)
        brought = self._seconds(off, NOTHING, read={"parameters_disk": self.parameters})
        often = numpy.full(len(self.updated), 2.0 * count - 1.0)
        often[-1] = count - 1.0  # the last group stays for backward
        summed = {"gradients_host": self.gradients}  # they come up to be added to
        sent = {"activations_host": self.kept, "activations_recomputed": self._inputs}
        return [
            (brought, often),
            (self._seconds(summed, summed), count - 1.0),
            (self._seconds(sent, sent) if self.request.chooses else {}, float(count)),
        ]

    def _seconds(
        self,
        up: Factors,
        down: Factors,
        beside: Factors = NOTHING,
        *,
        read: Factors = NOTHING,
        written: Factors = NOTHING,
    ) -> dict[str, Factors]:
        """Return, by resource, the seconds of bytes over the link, `beside` it in host memory, and of the disk."""
        moved = {"up": up, "down": down, "link": _sum(up, down), "memory": _sum(up, down, beside)}
        moved |= {"read": read, "write": written, "disk": read}
        return {name: _scaled(moved[name], 1 / rate) for name, rate in rates_of(self.request).items()}


def rates_of(request: PlanRequest) -> dict[str, float]:
    """Return, by resource, how many bytes a second pass through it."""
    link = request.machine.link
    disk = request.disk
    rates: dict[str, float] = {}
    if link is not None:
        rates = {"up": link.up, "down": link.down, "link": link.both, "memory": request.memory_rate}
    if disk is not None:
        rates |= {"read": disk.read, "write": disk.write, "disk": disk.both}
    return rates


def products(request: PlanRequest) -> Iterator[tuple[str, Sequence[str], Mapping[str, Array | float], float]]:
    """Yield the terms that depend on two shares: the name, the shares that are added, the subtracted shares with their
    factors, and a subtracted number. A product is the result, or 0 if that is negative."""
    off = dict.fromkeys(OFF, 1.0)
    by_cpu = dict.fromkeys(BY_CPU, 1.0)
    yield "weights_up", BY_CPU, off, 0.0  # new parameters that go to the device from the CPU
    yield "weights_down", OFF, by_cpu, 0.0  # and from the device to where they are kept
    yield "gradients_down", BY_CPU, {"gradients_host": 1.0}, 0.0  # gradients on the device that the CPU reads a copy of
    yield "gradients_up", ("gradients_host",), by_cpu, 0.0  # gradients on the host that the device reads
    yield "master_device", ("resident", *OFF), {}, 1.0  # masters, or halves of them, that are no parameters themselves
    on_host = {"parameters_host": 1.0}
    if not request.model.shared_bytes:
        yield "master_host", ("cpu", "streamed"), {} if request.speculates else on_host, 0.0
    elif request.machine.link is None:
        yield "master_host", ("cpu", "parameters_disk"), {}, 1.0
        yield "master_disk", ("disk_cpu", "parameters_disk"), {}, 1.0
    else:
        yield "master_host", ("cpu",), on_host, 0.0
        yield "master_disk", ("disk_cpu",), on_host, 0.0
    lands = _array(lands_on_copy(request, cost) for cost in request.costs)
    if request.model.shared_bytes:  # new values on the host are halves of masters
        yield "weights_held", ("disk_cpu",), {**off, "gradients_down": lands}, 0.0
    else:
        yield "weights_held", ("weights_up",), {"gradients_down": lands}, 0.0  # that take no gradient's place


def lands_on_copy(request: PlanRequest, cost: GroupCost) -> bool:
    """Return whether new parameters take the place of the gradient's copy on the host."""
    return cost.gradient_bytes == request.model.parameter_bytes and not request.speculates


def values_of(request: PlanRequest, shares: Sequence[GroupShares]) -> Factors:
    """Return shares and their products by name, an array over groups each."""
    values = {name: _array(getattr(share, name) for share in shares) for name in NAMES}
    values |= {ALWAYS: numpy.ones(len(shares)), "master_disk": numpy.zeros(len(shares))}
    for name, plus, minus, bound in products(request):
        rest = sum(values[share] for share in plus) - sum(values[share] * times for share, times in minus.items())
        values[name] = numpy.maximum(rest - bound, 0.0)
    return values


def summed(factors: Factors, values: Factors, times: Array | float = 1.0) -> float:
    return sum(float((factor * values[name] * times).sum()) for name, factor in factors.items())


def work(request: PlanRequest, shares: Sequence[GroupShares]) -> dict[str, float]:
    """Return the seconds of work in a step, by resource."""
    values = values_of(request, shares)
    demands = ResourceDemands(request)
    total: dict[str, float] = {}
    for resources, times in [(demands.update(), 1.0), *demands.passes()]:
        for resource, factors in resources.items():
            total[resource] = total.get(resource, 0.0) + summed(factors, values, times)
    return total


def _array(numbers: Iterable[float]) -> Array:
    return numpy.array(list(numbers), float)


def _scaled(factors: Mapping[str, Array], by: float) -> Factors:
    return {name: factor * by for name, factor in factors.items()}


def _sum(*many: Mapping[str, Array]) -> Factors:
    total: Factors = {}
    for factors in many:
        for name, factor in factors.items():
            total[name] = total[name] + factor if name in total else factor
    return total


# -- activations --


@dataclass(frozen=True)
class ActivationChoice:
    """Which groups may do what, and the bytes of the device that they need for it while they run."""

    recomputed: Array  # by group, 1.0 or 0.0
    sent: Array
    must: bool = False  # no group may keep them
    beside: float = 0.0
    passing: float = 0.0  # of these: on their way to the host, or from there

    @property
    def changes(self) -> bool:
        return bool(self.recomputed.any() or self.sent.any())


def activation_choices(request: PlanRequest) -> list[ActivationChoice]:
    """Return the choices worth trying, keeping everything first; the only one where the plan does not choose."""
    every = any_choice(request)
    if not request.chooses or every.must:
        return [every]
    nothing = numpy.zeros(len(request.costs))
    kept = _array(cost.activations.kept for cost in request.costs)
    boundary = _array(cost.activations.boundary for cost in request.costs)
    choices = [_choice(request, nothing, nothing)]
    least: dict[tuple[str, ...], float] = {}  # bytes of the device, by ways
    for small in _up_to_sizes(request):
        for ways in (("recompute",), ("host",), ("recompute", "host")):
            if ("recompute" in ways and not request.recomputes) or ("host" in ways and "host" not in request.ways):
                continue
            recomputed = small * (kept > boundary) * ("recompute" in ways)
            sent = small * (kept > 0) * ("host" in ways)
            choice = _choice(request, recomputed, sent)
            left = numpy.where(sent > 0, 0.0, numpy.where(recomputed > 0, boundary, kept)).sum() + choice.beside
            if choice.changes and left < least.get(ways, math.inf):  # else larger groups cost more than they save
                least[ways] = left
                choices.append(choice)
    return choices


def choice_of(request: PlanRequest, shares: Sequence[GroupShares]) -> ActivationChoice:
    """Return the choice that given whole shares need."""
    recomputed = _array(way_of(share) == "recompute" for share in shares)
    return _choice(request, recomputed, _array(way_of(share) == "host" for share in shares))


def any_choice(request: PlanRequest) -> ActivationChoice:
    """Return all that may be done."""
    every = numpy.full(len(request.costs), float(request.chooses))
    must = request.chooses and "keep" not in request.ways
    return _choice(request, every * request.recomputes, every * ("host" in request.ways), must=must)


def staying(request: PlanRequest) -> float:
    """Return the bytes of activations that are on the device in any case."""
    if not request.chooses:
        return request.model.activations()
    return sum(cost.activations.staying for cost in request.costs)


def _choice(request: PlanRequest, recomputed: Array, sent: Array, *, must: bool = False) -> ActivationChoice:
    activations = [cost.activations for cost in request.costs]
    inside = max(cost.inside if again else cost.peak for cost, again in zip(activations, recomputed, strict=True))
    leaving = max(cost.largest * goes for cost, goes in zip(activations, sent, strict=True))
    inputs = [cost.activations.inputs / len(cost.members) for cost in request.costs]
    leaving = max(leaving, *(size * again for size, again in zip(inputs, recomputed, strict=True)))
    passing = NUM_BUFFERS * leaving
    return ActivationChoice(recomputed, sent, must, inside + passing + staying(request), passing)


def _up_to_sizes(request: PlanRequest) -> Iterator[Array]:
    """Yield the groups that are no larger than some size, for a few sizes and at last for all."""
    largest = _array(cost.activations.largest for cost in request.costs)
    sizes = numpy.unique(numpy.round(largest[largest > 0], -1))
    if len(sizes) > MOST_SIZES:
        places = numpy.linspace(0, len(sizes) - 1, MOST_SIZES + 1)[1:]
        sizes = sizes[places.astype(int)]
    for size in sizes:
        yield (largest <= size + 10).astype(float)


def activation_bytes(request: PlanRequest, shares: Sequence[GroupShares]) -> tuple[float, float]:
    """Return the bytes that activations take of the device and of the host in one pass, for given whole shares."""
    ways = [(cost.activations, way_of(share)) for cost, share in zip(request.costs, shares, strict=True)]
    device = sum(activations.left(way) for activations, way in ways if way != "host")
    host = sum(activations.kept if way == "host" else activations.inputs for activations, way in ways if way != "keep")
    return device + choice_of(request, shares).beside, host


def again_seconds(request: PlanRequest, shares: Sequence[GroupShares]) -> float:
    """Return the seconds of recomputation in one pass."""
    pairs = zip(request.costs, shares, strict=True)
    return sum(cost.activations.again_s for cost, share in pairs if way_of(share) == "recompute")


def way_of(share: GroupShares) -> str:
    if share.activations_recomputed > 0.5:
        return "recompute"
    return "host" if share.activations_host > 0.5 else "keep"
