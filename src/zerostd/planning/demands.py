"""What shares of a group take: bytes of every tier and seconds of every resource, as factors of the shares.

All of it is linear in the shares and in a few products of two shares, which the program bounds from below and which
have a closed form where parameters and gradients of a group are in one place. Factors are arrays, one for each cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy

from zerostd.planning.costs import Activations, GroupCost, PlanRequest
from zerostd.planning.linear import Array
from zerostd.policy import Tier

__all__ = ["NAMES", "PRODUCTS", "STATES", "WHOLE", "Factors", "GroupShares", "ResourceDemands", "values_of", "work"]

Factors = dict[str, Array]  # by name of a share or a product


@dataclass(frozen=True)
class GroupShares:
    """Of one group: its states by route and tier, what of its parameters and gradients is off the device, and what of
    its activations is not kept there."""

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


STATES = ("resident", "cpu", "streamed", "disk_cpu", "disk_streamed")
PRODUCTS = (
    "weights_up",  # new parameters that go to the device from the processor
    "weights_down",  # and from the device to where they rest
    "weights_held",  # where the former wait, unless they take the place of the gradient's copy
    "mirror",  # gradients on the device that the processor reads a copy of
    "gradients_up",  # gradients on the host that the device reads
    "master_device",  # masters that are no parameters themselves
    "master_host",
)
NAMES = tuple(field.name for field in fields(GroupShares))
WHOLE = NAMES[len(STATES) :]  # what a group does as a whole


class ResourceDemands:
    """Of all group_costs of a request."""

    def __init__(self, request: PlanRequest, found: Sequence[GroupCost]) -> None:
        self.request = request
        self.updated, self.parameters = _column(found, "updated"), _column(found, "parameters")
        self.gradients, self.pinned = _column(found, "gradients"), _column(found, "pinned_gradients")
        self.gradient = self.updated * _column(found, "gradient_bytes")  # bytes, as it crosses the link
        self.weights = self.updated * request.model.parameter_bytes
        self.masters = self.updated * request.model.master_bytes
        none = Activations(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        activations = [cost.activations or none for cost in found]
        self.kept = numpy.array([one.kept for one in activations])
        self.boundary = numpy.array([one.boundary for one in activations])
        self.longer_s = numpy.array([one.longer_s for one in activations])

    # Bytes

    def bytes(self, tier: Tier) -> tuple[Factors, float]:
        """Of one tier: what shares take, and what is there in any case."""
        model = self.request.model
        states = self.updated * model.state_bytes
        if tier is Tier.DEVICE:
            total = {
                "resident": states,
                "master_device": self.masters,
                "parameters_host": -self.parameters,
                "parameters_disk": -self.parameters,
                "gradients_host": -self.gradients,
                "activations_recomputed": self.boundary - self.kept,
                "activations_host": -self.kept,
            }
            if self.request.has_one_memory:
                total["parameters_disk"] = self.weights - self.parameters  # on their way to the disk
            return total, float((self.parameters + self.gradients + self.pinned + self.kept).sum())
        if tier is Tier.HOST:
            copies = 2 if self.request.speculates else 1
            total = {
                "cpu": states * copies,
                "streamed": states * copies,
                "master_host": self.masters * copies,
                "parameters_host": self.parameters,
                "gradients_host": self.gradients,
                "activations_host": self.kept,
            }
            if not self.request.has_one_memory:
                total["parameters_disk"] = self.weights
            if self.request.machine.link is not None:
                total |= {"mirror": self.gradient, "weights_held": self.weights}
            return total, 0.0
        on_disk = states + self.masters
        return {"disk_cpu": on_disk, "disk_streamed": on_disk, "parameters_disk": self.parameters}, 0.0

    # Seconds

    def update(self) -> dict[str, Factors]:
        """By resource, for the update of a group and what its next forward needs from elsewhere."""
        machine, model = self.request.machine, self.request.model
        states = self.updated * (model.state_bytes + model.master_bytes)
        up = {
            "streamed": states,
            "disk_streamed": states,
            "weights_up": self.weights,
            "gradients_up": self.gradient,
            "parameters_host": self.parameters,
            "parameters_disk": self.parameters,
        }
        down = {
            "streamed": states,
            "disk_streamed": states,
            "mirror": self.gradient,
            "weights_down": self.weights,
            "gradients_host": self.gradient,
        }
        read = {"disk_cpu": states, "disk_streamed": states, "parameters_disk": self.parameters}
        by_cpu = {"cpu": self.updated, "disk_cpu": self.updated}
        in_memory = {name: self.gradient + self.weights + 2 * states for name in by_cpu}
        work = {"cpu": _scaled(by_cpu, machine.processor.ns(self.request.num_threads) * 1e-9)}
        work |= self._link(up, down, _sum(in_memory, up, down, _scaled(read, 2)))
        return work | self._disk(read, read)

    def again(self) -> dict[str, Factors]:
        """By resource, for what a pass needs from elsewhere beside the first forward."""
        up = {"parameters_host": self.parameters, "parameters_disk": self.parameters}
        return self._link(up, {}, up) | self._disk({"parameters_disk": self.parameters}, {})

    def sums(self) -> dict[str, Factors]:
        """By resource, for sums of gradients on the host to come up, be added to and go down again."""
        moved = {"gradients_host": self.gradients}
        return self._link(moved, moved, _scaled(moved, 2))

    def activations(self) -> dict[str, Factors]:
        """By resource, for activations to go down in one pass and come up again."""
        moved = {"activations_host": self.kept}
        return self._link(moved, moved, _scaled(moved, 2)) if self.request.chooses else {}

    def _link(self, up: Factors, down: Factors, memory: Factors) -> dict[str, Factors]:
        link = self.request.machine.link
        if link is None:
            return {}
        return {
            "up": _scaled(up, 1 / link.up),
            "down": _scaled(down, 1 / link.down),
            "link": _scaled(_sum(up, down), 1 / link.both),
            "memory": _scaled(memory, 1 / self.request.memory_rate),
        }

    def _disk(self, read: Factors, written: Factors) -> dict[str, Factors]:
        disk = self.request.disk
        if disk is None:
            return {}
        return {
            "read": _scaled(read, 1 / disk.read),
            "write": _scaled(written, 1 / disk.write),
            "disk": _scaled(read, 1 / disk.both),
        }


def values_of(request: PlanRequest, found: Sequence[GroupCost], shares: Sequence[GroupShares]) -> Factors:
    """Given shares as arrays, and the products of them."""
    made = {name: numpy.array([getattr(share, name) for share in shares]) for name in NAMES}
    off, by_cpu = made["parameters_host"] + made["parameters_disk"], made["cpu"] + made["disk_cpu"]
    on_host, landed = made["cpu"] + made["streamed"], made["gradients_host"]
    made["weights_up"], made["weights_down"] = _above(by_cpu - off), _above(off - by_cpu)
    made["mirror"], made["gradients_up"] = _above(by_cpu - landed), _above(landed - by_cpu)
    made["master_device"] = _above(made["resident"] + off - 1.0)
    made["master_host"] = on_host if request.speculates else _above(on_host - made["parameters_host"])
    lands = numpy.array([lands_on_copy(request, cost) for cost in found])
    made["weights_held"] = _above(made["weights_up"] - numpy.where(lands, made["mirror"], 0.0))
    return made


def lands_on_copy(request: PlanRequest, cost: GroupCost) -> bool:
    """Whether new parameters take the place of the gradient's copy on the host."""
    return cost.gradient_bytes == request.model.parameter_bytes and not request.speculates


def work(request: PlanRequest, found: Sequence[GroupCost], shares: Sequence[GroupShares]) -> dict[str, float]:
    """Seconds of work in a step, by resource, for given shares."""
    demands, values, passes = ResourceDemands(request, found), values_of(request, found, shares), request.accumulate
    later = numpy.full(len(found), 2.0 * passes - 1.0)  # times that parameters come beside the first forward
    later[-1] = passes - 1.0  # those of the last group stay for backward
    parts = ((demands.update(), 1.0), (demands.again(), later), (demands.sums(), passes - 1.0))
    total: dict[str, float] = {}
    for resources, times in (*parts, (demands.activations(), float(passes))):
        for resource, factors in resources.items():
            seconds = sum(float((factor * values[name] * times).sum()) for name, factor in factors.items())
            total[resource] = total.get(resource, 0.0) + seconds
    return total


def _column(found: Sequence[GroupCost], name: str) -> Array:
    return numpy.array([float(getattr(cost, name)) for cost in found])


def _above(values: Array) -> Array:
    made: Array = numpy.maximum(values, 0.0)
    return made


def _scaled(factors: Mapping[str, Array], by: float) -> Factors:
    return {name: factor * by for name, factor in factors.items()}


def _sum(*many: Mapping[str, Array]) -> Factors:
    total: Factors = {}
    for factors in many:
        for name, factor in factors.items():
            total[name] = total[name] + factor if name in total else factor
    return total
