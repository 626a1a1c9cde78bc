"""A small simulation of steps as the runtime makes them: one thing after the other in the loop, a worker for each
route, parameters brought as they are needed. The linear program knows how much each resource has to do; this also knows
in which order it is done, and so finds what is waited for.

Work flows: at any moment every worker has one job, and their speeds follow from what they share. The next event is the
next end of a job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from zerostd.planning.activation_traffic import ActivationTraffic
from zerostd.planning.activations import way_of
from zerostd.planning.costs import GroupCost, PlanRequest
from zerostd.planning.demands import GroupShares

__all__ = ["Timeline", "simulate"]

NUM_STEPS = 2  # the last one is taken: what a step leaves to the next is the same from the first one on
MOST_PASSES = 4  # that are simulated one by one
AHEAD = 1  # groups that are brought before they are needed
TILE = 8 << 20  # parameters that are streamed at a time
QUEUED = 2.0  # such tiles that are in the lane before parameters that are to be brought
EPSILON = 1e-12
NOBODY = -1  # instead of a group


@dataclass
class _Job:
    """One job: parameters or bytes left to do, and what one of them takes of each shared resource."""

    left: float
    most: float  # per second, with nothing beside it
    takes: dict[str, float]  # bytes of up, down and memory for one unit
    group: int
    asks: bool = False  # for the group's update, when done
    behind: float = 0.0  # of parameters to be brought: those of tiles that are in the lane before them
    kind: Any = None  # the same for flows that take the same

    def __post_init__(self) -> None:
        self.kind = tuple(self.takes.items())


@dataclass
class Timeline:
    """What one step looks like."""

    step_s: float = 0.0
    compute_s: float = 0.0  # of it the device computes
    waits: dict[str, float] = field(default_factory=dict)  # seconds the device waits, by what for
    busy: dict[str, float] = field(default_factory=dict)  # seconds that each worker has something to do


class StepSimulation:
    """The state of the simulation."""

    def __init__(self, request: PlanRequest, found: Sequence[GroupCost], shares: Sequence[GroupShares]) -> None:
        self.request, self.costs, self.shares = request, found, shares
        self.now = 0.0
        machine = request.machine
        self.rates = {"memory": request.memory_rate, "cpu": 1.0}
        if machine.link is not None:
            self.rates |= {"up": machine.link.up, "down": machine.link.down, "link": machine.link.both}
        else:
            self.rates.pop("memory")
        self.computing = {"cpu": 1.0} if machine.link is None else dict[str, float]()
        if request.disk is not None:
            self.rates |= {"read": request.disk.both, "write": request.disk.both}
        self.waiting: dict[str, list[tuple[int, _Job]]] = {
            "cpu": [],
            "streamed": [],
            "disk": [],
            "land": [],
            "resident": [],
        }
        self.running: dict[str, _Job] = {}
        self.unfinished = [0] * len(found)  # jobs of each group's update
        self.present = [not _is_off(share) for share in shares]
        self.wanted: list[int] = []  # groups to bring, in order
        self.traffic = ActivationTraffic(found, shares)
        self.waits: dict[str, float] = {}
        self.busy: dict[str, float] = {}
        self.speeds: dict[Any, dict[str, float]] = {}  # by what is running: it is the same again and again

    # Jobs

    def land(self, group: int, *, last: bool, adds: bool) -> None:
        """A group's gradient is there, on the device or on its way to the host; in the last pass its update follows.
        With `adds` it is added to what rests there, which comes up for that."""
        cost, share, ask = self.costs[group], self.shares[group], last and self.request.is_early
        rests = share.gradients_host > 0.5
        read = share.cpu + share.disk_cpu if last and self._lands_before() else 0.0
        part = 1.0 if rests else read  # else what the processor reads goes down as part of the update
        if not part:
            if ask:
                self.ask(group)
            return
        ways = 2.0 if adds and rests else 1.0
        takes = {"up": ways - 1.0, "down": 1.0, "link": ways, "memory": ways}
        flow = _Job(part * cost.updated * cost.gradient_bytes, 1e15, takes, group, ask)
        self.waiting["land"].append((-group, flow))  # the last group's comes first
        self.unfinished[group] += 1

    def _lands_before(self) -> bool:
        """Whether gradients are on the host before their update may begin."""
        return not self.request.is_early and self.request.machine.link is not None

    def ask_when_landed(self, group: int) -> None:
        """The update of a group may begin as soon as its gradient is there."""
        landing = [flow for _, flow in self.waiting["land"] if flow.group == group]
        if "land" in self.running and self.running["land"].group == group:
            landing.insert(0, self.running["land"])
        if landing:
            landing[-1].asks = True
        else:
            self.ask(group)

    def ask(self, group: int) -> None:
        """The update of a group may begin."""
        for name, flow in self._jobs(group):
            self.waiting[name].append((group, flow))
            self.unfinished[group] += 1

    def _jobs(self, index: int) -> Iterator[tuple[str, _Job]]:
        cost, share, model, machine = self.costs[index], self.shares[index], self.request.model, self.request.machine
        states, weight = model.state_bytes + model.master_bytes, model.parameter_bytes
        gradient = cost.gradient_bytes
        on_host, off = share.gradients_host > 0.5, _is_off(share)
        ns = machine.processor.ns(self.request.num_threads)
        by_cpu: dict[str, float] = {"cpu": ns * 1e-9}  # seconds of the processor
        by_cpu |= {"up": 0.0 if off else weight, "down": 0.0 if on_host or self._lands_before() else gradient}
        by_cpu["memory"] = gradient + weight + 2 * states + by_cpu["up"] + by_cpu["down"]
        streamed = {"up": states + (gradient if on_host else 0), "down": states + (weight if off else 0)}
        streamed["memory"] = streamed["up"] + streamed["down"]
        by_device = {"up": float(gradient if on_host else 0), "down": float(weight if off else 0)}
        by_device["memory"] = by_device["up"] + by_device["down"]
        for name, part, takes in (
            ("resident", share.resident if by_device["memory"] else 0.0, by_device),
            ("cpu", share.cpu, by_cpu),
            ("streamed", share.streamed, streamed),
            ("disk", share.disk_cpu, {**by_cpu, "read": states, "write": states}),
            ("disk", share.disk_streamed, {**streamed, "read": states, "write": states}),
        ):
            if part * cost.updated > 0.5:
                through = takes.get("read", 0) + takes.get("write", 0)  # disk and memory
                takes = {**takes, "link": takes["up"] + takes["down"], "memory": takes["memory"] + through}
                yield name, _Job(part * cost.updated, 1e15, takes, index)

    def _start(self) -> None:
        for name, jobs in self.waiting.items():
            if jobs and name not in self.running:
                place = min(range(len(jobs)), key=lambda i: jobs[i][0])
                self.running[name] = jobs.pop(place)[1]
        if "bring" not in self.running and self.wanted and not self.unfinished[self.wanted[0]]:
            index = self.wanted.pop(0)
            takes = {"up": 1.0, "link": 1.0, "memory": 1.0}
            if self.shares[index].parameters_disk > 0.5:
                takes["read"] = 1.0
            self.running["bring"] = _Job(self.costs[index].parameters, 1e15, takes, index, behind=QUEUED * TILE)
        if "bring" in self.running and "streamed" not in self.running:
            self.running["bring"].behind = 0.0
        for name, group in self.traffic.jobs():
            if name not in self.running:
                takes = {"down" if name == "send" else "up": 1.0, "link": 1.0, "memory": 1.0}
                self.running[name] = _Job(self.traffic.sizes[group], 1e15, takes, group)

    def _speeds(self) -> dict[str, float]:
        """Units a second of each running job: as fast as its scarcest resource allows, shared evenly among those that
        want it and what they leave to the others."""
        running = tuple((name, flow.kind, flow.behind > 0) for name, flow in self.running.items())
        if running not in self.speeds:
            self.speeds[running] = self._find_speeds()
        return self.speeds[running]

    def _find_speeds(self) -> dict[str, float]:
        speeds = {name: flow.most for name, flow in self.running.items()}
        if "bring" in speeds and "streamed" in speeds:  # one after the other in a lane
            speeds["bring" if self.running["bring"].behind > 0 else "streamed"] = 0.0
        for _ in range(8):
            worst, ratio = "", 1.0
            for resource, rate in self.rates.items():
                wanted = sum(speeds[name] * flow.takes.get(resource, 0.0) for name, flow in self.running.items())
                if wanted > rate * (1 + 1e-9) and rate / wanted < ratio:
                    worst, ratio = resource, rate / wanted
            if not worst:
                break
            speeds = self._share(speeds, worst)
        return speeds

    def _share(self, speeds: dict[str, float], resource: str) -> dict[str, float]:
        """Even parts of one resource, but none gets more than it wants."""
        users = {name: f.takes[resource] for name, f in self.running.items() if f.takes.get(resource, 0.0) > 0}
        left, open_ = self.rates[resource], dict(sorted(users.items(), key=lambda item: speeds[item[0]] * item[1]))
        made = dict(speeds)
        while open_:
            name, takes = next(iter(open_.items()))
            made[name] = min(speeds[name], left / len(open_) / takes)
            left -= made[name] * takes
            del open_[name]
        return made

    # Time

    def run(self, seconds: float, what: str = "compute") -> None:
        """Let the device do something. Where it is the processor, that takes longer while updates are made there."""
        self.running[what] = _Job(seconds, 1.0, self.computing, NOBODY)
        while what in self.running:
            self._advance()

    def wait_for(self, group: int, what: str) -> None:
        """Let time pass until a group is updated and its parameters are there."""
        begun = self.now
        if not self.present[group] and group not in self.wanted and not self._is_coming(group):
            self.wanted.insert(0, group)
        while self.unfinished[group] or not self.present[group]:
            self._advance()
        self.waits[what] = self.waits.get(what, 0.0) + self.now - begun

    def wait_until(self, is_ready: Callable[[int], bool], group: int) -> None:
        """Let time pass while activations are on their way."""
        begun = self.now
        while not is_ready(group):
            self._advance()
        if self.now > begun:
            self.waits["activations"] = self.waits.get("activations", 0.0) + self.now - begun

    def _is_coming(self, group: int) -> bool:
        return "bring" in self.running and self.running["bring"].group == group

    def _advance(self) -> None:
        """Until the next job is done."""
        self._start()
        speeds = self._speeds()
        ends = {name: flow.left / max(speeds[name], 1e-30) for name, flow in self.running.items()}
        bring = self.running.get("bring")
        if bring is not None and bring.behind > 0:
            ends["behind"] = bring.behind / max(speeds["streamed"], 1e-30)
        step = min(ends.values())  # somebody waits for one of them
        self.now += step
        if bring is not None and bring.behind > 0:
            bring.behind = 0.0 if ends["behind"] <= step * (1 + 1e-12) else bring.behind - speeds["streamed"] * step
        for name, flow in list(self.running.items()):
            flow.left -= speeds[name] * step
            self.busy[name] = self.busy.get(name, 0.0) + step
            if ends[name] <= step * (1 + 1e-12) + EPSILON:
                del self.running[name]
                if flow.group == NOBODY:
                    continue
                if name == "bring":
                    self.present[flow.group] = True
                    continue
                if name in ("send", "return"):
                    self.traffic.done(name, flow.group)
                    continue
                if flow.asks:
                    self.ask(flow.group)
                self.unfinished[flow.group] -= 1


def simulate(request: PlanRequest, found: Sequence[GroupCost], shares: Sequence[GroupShares]) -> Timeline:
    """One step in the steady state, for whole placements of parameters and gradients."""
    steps = StepSimulation(request, found, shares)
    recomputed = [cost.activations for cost, share in zip(found, shares, strict=True) if way_of(share) == "recompute"]
    again_s = sum(one.again_s for one in recomputed if one is not None)
    compute = request.accumulate * (sum(cost.compute_s for cost in found) + again_s)
    resident = sum(
        cost.updated * share.resident * request.machine.resident_ns * 1e-9
        for cost, share in zip(found, shares, strict=True)
    )
    begun = 0.0
    for _ in range(NUM_STEPS):
        begun, steps.waits, steps.busy = steps.now, {}, {}
        _passes(steps, request.accumulate)
        steps.run(resident, "update")
        if not request.is_early:
            for group in range(len(found)):
                steps.ask_when_landed(group)
    took = max(steps.now - begun, compute + resident)  # but for rounding it never is less
    return Timeline(took, compute + resident, steps.waits, steps.busy)


def _passes(steps: StepSimulation, count: int) -> None:
    """Of many passes all but the first two and the last are alike, and made once."""
    made = min(count, MOST_PASSES)
    for number in range(made):
        before = steps.now, dict(steps.waits), dict(steps.busy)
        _forward(steps, first=number == 0)
        _backward(steps, last=number == made - 1, adds=number > 0)
        if number == made - 2 and count > made:
            now, more = steps.now, count - made
            steps.now += more * (now - before[0])
            for total, earlier in ((steps.waits, before[1]), (steps.busy, before[2])):
                for name, seconds in total.items():
                    total[name] = seconds + more * (seconds - earlier.get(name, 0.0))


def _forward(steps: StepSimulation, *, first: bool) -> None:
    what = "updates" if first else "parameters"
    steps.traffic.begin()
    for group, cost in enumerate(steps.costs):
        _bring_ahead(steps, range(group, min(len(steps.costs), group + AHEAD + 1)))
        steps.wait_for(group, what)
        steps.wait_until(steps.traffic.has_room, group)
        steps.run(cost.forward_s)
        steps.traffic.leave(group)
        _let_go(steps, group, keep=group == len(steps.costs) - 1)
    steps.wait_until(steps.traffic.has_room, len(steps.costs))


def _backward(steps: StepSimulation, *, last: bool, adds: bool) -> None:
    for group in reversed(range(len(steps.costs))):
        cost, share = steps.costs[group], steps.shares[group]
        _bring_ahead(steps, range(group, max(-1, group - AHEAD - 1), -1))
        steps.traffic.want(group)
        steps.wait_for(group, "parameters")
        steps.wait_until(steps.traffic.is_back, group)
        again = cost.activations if way_of(share) == "recompute" else None
        steps.run(cost.backward_s + (again.longer_s if again is not None else 0.0))
        _let_go(steps, group, keep=False)
        steps.land(group, last=last, adds=adds)


def _bring_ahead(steps: StepSimulation, groups: range) -> None:
    for group in groups:
        if not steps.present[group] and group not in steps.wanted and not steps._is_coming(group):
            steps.wanted.append(group)


def _let_go(steps: StepSimulation, group: int, *, keep: bool) -> None:
    if _is_off(steps.shares[group]) and not keep:
        steps.present[group] = False


def _is_off(share: GroupShares) -> bool:
    return share.parameters_host + share.parameters_disk > 0.5
