"""A small simulation of steps as the runtime makes them: one thing after the other in the loop, a worker for each
route, parameters brought as they are needed. The linear program knows the work of each resource. The simulation also
knows its order, and so finds the waits.

Every worker has one job at a time, with a speed that follows from what they share. The next event is the end of a job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from zerostd.planning.demands import NUM_BUFFERS, GroupShares, again_seconds, rates_of, way_of
from zerostd.planning.plan import Span
from zerostd.planning.request import PlanRequest

NUM_STEPS = 2  # the last one is taken: what a step leaves to the next is the same from the first one on
MOST_PASSES = 4  # that are simulated one by one
AHEAD = 1  # groups that are brought before they are needed
TILE = 2 << 20  # parameters that are streamed at a time
LAUNCH_S = 0.05e-3  # that a tile keeps Python's lock from the loop: an estimate, 0.2 ms for a request of four tiles
QUEUED = 2.0  # such tiles that are in the stream before parameters that are to be brought
ALIKE = 0.01  # of their activations' bytes, that groups differ in which are taken for the same
MOST_HELD = 2  # groups under update when the next gradient lands, where gradients are not kept
EPSILON = 1e-12


@dataclass
class _Job:
    """Parameters or bytes left to do, and what one of them takes of each shared resource."""

    left: float
    takes: dict[str, float]  # bytes of up, down and memory for one unit
    group: int = -1
    most: float = 1e15  # per second, with nothing beside it
    updates: bool = False  # the group, when this job is done
    behind: float = 0.0  # of parameters to be brought: those of tiles that are in the stream before them
    name: str = ""  # of what is computed: forward, backward
    begun: float = math.inf

    def __post_init__(self) -> None:
        self.kind = tuple(self.takes.items())  # the same for jobs that take the same


@dataclass(frozen=True)
class Timeline:
    """The seconds of one step."""

    step_s: float = 0.0
    compute_s: float = 0.0  # of it the device computes
    busy: dict[str, float] = field(default_factory=dict)  # seconds that each worker has something to do
    spans: tuple[Span, ...] = ()  # of the step, in the order in which they end


class StepSimulation:
    """The state of the simulation."""

    def __init__(self, request: PlanRequest, shares: Sequence[GroupShares]) -> None:
        self.request = request
        self.costs = request.costs
        self.shares = shares
        self.now = 0.0
        self.busy: dict[str, float] = {}  # seconds that each worker had something to do
        self.spans: list[Span] = []  # since the step began
        self.rates = {"cpu": 1.0, "launch": 1.0, **rates_of(request)}
        self.waiting = {worker: list[_Job]() for worker in ("cpu", "streamed", "disk", "land", "resident")}
        self.running: dict[str, _Job] = {}
        self.unfinished = [0] * len(shares)  # jobs of each group's update
        self.present = [not share.parameters_off for share in shares]
        self.wanted: list[int] = []  # groups to bring, in order
        self.traffic = ActivationTraffic(request, shares)
        self.lands_before = not request.is_early and request.machine.link is not None  # gradients, before their update
        self.speeds: dict[Any, dict[str, float]] = {}  # by what is running: it is the same again and again

    def land(self, group: int, *, last: bool, adds: bool) -> None:
        """Take a group's gradient, which stays on the device or goes to the host; in the last pass its update follows.
        With `adds` it is added to what is kept there, which is read for that."""
        cost = self.costs[group]
        share = self.shares[group]
        updates = last and self.request.is_early
        on_host = share.gradients_host > 0.5
        read = share.cpu + share.disk_cpu if last and self.lands_before else 0.0
        part = 1.0 if on_host else read  # else what the CPU reads goes down as part of the update
        if not part:
            if updates:
                self.update(group)
            return
        ways = 2.0 if adds and on_host else 1.0
        takes = {"up": ways - 1.0, "down": 1.0, "link": ways, "memory": ways}
        self._queue("land", _Job(part * cost.updated * cost.gradient_bytes, takes, group, updates=updates))

    def _queue(self, worker: str, job: _Job) -> None:
        jobs = self.waiting[worker]
        jobs.append(job)
        jobs.sort(key=lambda job: job.group, reverse=worker == "land")  # gradients of the last group come first
        self.unfinished[job.group] += 1

    def update_when_landed(self, group: int) -> None:
        jobs = (self.running.get("land"), *self.waiting["land"])
        landing = [job for job in jobs if job is not None and job.group == group]
        if landing:
            landing[-1].updates = True
        else:
            self.update(group)

    def update(self, group: int) -> None:
        cost = self.costs[group]
        share = self.shares[group]
        model = self.request.model
        states = model.state_bytes + model.master_bytes
        shared = 0 if self.request.speculates else model.shared_bytes
        gradient_up = cost.gradient_bytes if share.gradients_host > 0.5 else 0
        gradient_down = 0 if share.gradients_host > 0.5 or self.lands_before else cost.gradient_bytes
        weight_down = model.parameter_bytes if share.parameters_off else 0
        weight_up = model.parameter_bytes - weight_down
        written = 0 if model.shared_bytes else model.parameter_bytes  # beside the master
        by_cpu = {
            "cpu": self.request.cpu_s,
            "up": weight_up,
            "down": gradient_down,
            "memory": cost.gradient_bytes + written + 2 * states + weight_up + gradient_down,
        }
        up = states - shared + gradient_up + (shared if share.parameters_off else 0)
        down = states - shared + weight_down
        streamed = {"up": up, "down": down, "memory": up + down, "launch": LAUNCH_S / TILE}
        by_device = {"up": gradient_up, "down": weight_down, "memory": gradient_up + weight_down}
        for worker, part, takes in (
            ("resident", share.resident if by_device["memory"] else 0.0, by_device),
            ("cpu", share.cpu, by_cpu),
            ("streamed", share.streamed, streamed),
            ("disk", share.disk_cpu, {**by_cpu, "read": states, "write": states}),
            ("disk", share.disk_streamed, {**streamed, "read": states - shared, "write": states - shared}),
        ):
            if part * cost.updated > 0.5:
                read = takes.get("read", 0)  # and written as much, all of which passes through memory
                beside = {"link": takes["up"] + takes["down"], "memory": takes["memory"] + 2 * read, "disk": read}
                takes = {**takes, **beside}
                self._queue(worker, _Job(part * cost.updated, takes, group))

    def _start(self) -> None:
        """Give every worker that has nothing to do its next job."""
        for worker, jobs in self.waiting.items():
            if jobs and worker not in self.running:
                self.running[worker] = jobs.pop(0)
        if "bring" not in self.running and self.wanted and not self.unfinished[self.wanted[0]]:
            group = self.wanted.pop(0)
            takes = {"up": 1.0, "link": 1.0, "memory": 1.0}
            if self.shares[group].parameters_disk > 0.5:
                takes |= {"read": 1.0, "disk": 1.0}
            self.running["bring"] = _Job(self.costs[group].parameters, takes, group, behind=QUEUED * TILE)
        if "bring" in self.running and "streamed" not in self.running:
            self.running["bring"].behind = 0.0
        for worker, group in self.traffic.jobs():
            if worker not in self.running:
                takes = {"down" if worker == "send" else "up": 1.0, "link": 1.0, "memory": 1.0}
                self.running[worker] = _Job(self.traffic.sizes[group], takes, group)

    def _speeds(self) -> dict[str, float]:
        """Return the units a second of each running job: as fast as its scarcest resource allows, shared evenly among
        those that want it and what they leave to the others."""
        running = tuple((worker, job.kind, job.behind > 0) for worker, job in self.running.items())
        if running in self.speeds:
            return self.speeds[running]
        speeds = {worker: job.most for worker, job in self.running.items()}
        if "bring" in speeds and "streamed" in speeds:  # one after the other in a stream
            speeds["bring" if self.running["bring"].behind > 0 else "streamed"] = 0.0
        for _ in range(8):
            scarcest = ""
            least = 1.0
            for resource, rate in self.rates.items():
                asked = sum(speeds[worker] * job.takes.get(resource, 0.0) for worker, job in self.running.items())
                if asked > rate * (1 + 1e-9) and rate / asked < least:
                    scarcest = resource
                    least = rate / asked
            if not scarcest:
                break
            speeds |= self._share(speeds, scarcest)
        self.speeds[running] = speeds
        return speeds

    def _share(self, speeds: dict[str, float], resource: str) -> dict[str, float]:
        takes = {worker: job.takes.get(resource, 0.0) for worker, job in self.running.items()}
        users = [worker for worker in takes if takes[worker] > 0]
        users.sort(key=lambda worker: speeds[worker] * takes[worker])
        left = self.rates[resource]
        shared = {}
        for place, worker in enumerate(users):
            shared[worker] = min(speeds[worker], left / (len(users) - place) / takes[worker])
            left -= shared[worker] * takes[worker]
        return shared

    def run(self, seconds: float, what: str = "compute", name: str = "", group: int = -1) -> None:
        """Let the device compute. While the CPU updates, that takes longer if it is the device or launches a lot. One
        thread of Python launches at a time."""
        takes = {"cpu": self.request.launching, "launch": self.request.launching}
        self.running[what] = _Job(seconds, takes, group, most=1.0, name=name)
        while what in self.running:
            self._advance()

    def want(self, group: int, place: int) -> None:
        """Bring a group's parameters, unless they are there or on their way; `place` is that in the queue."""
        coming = self.running["bring"].group if "bring" in self.running else None
        if not self.present[group] and group not in self.wanted and group != coming:
            self.wanted.insert(place, group)

    def wait_for(self, group: int) -> None:
        """Let time pass until a group is updated and its parameters are there."""
        self.want(group, 0)
        self.wait_until(lambda group: self.present[group] and not self.unfinished[group], group)

    def wait_until(self, is_ready: Callable[[int], bool], group: int) -> None:
        begun = self.now
        while not is_ready(group):
            self._advance()
        self.note("wait", group, begun)

    def note(self, worker: str, group: int, begun: float, name: str = "") -> None:
        """Record work that has just ended for the timeline."""
        if self.now > begun + EPSILON:
            group_name = self.costs[group].name if 0 <= group < len(self.costs) else ""
            self.spans.append((worker, name, group_name, begun, self.now))

    def _advance(self) -> None:
        """Let time pass until the next job is done."""
        self._start()
        speeds = self._speeds()
        ends = {worker: job.left / max(speeds[worker], 1e-30) for worker, job in self.running.items()}
        bring = self.running.get("bring")
        if bring is not None and bring.behind > 0:
            ends["behind"] = bring.behind / max(speeds["streamed"], 1e-30)
        step = min(ends.values())  # somebody waits for one of them
        self.now += step
        if bring is not None and bring.behind > 0:
            bring.behind = 0.0 if ends["behind"] <= step * (1 + 1e-12) else bring.behind - speeds["streamed"] * step
        for worker, job in list(self.running.items()):
            job.left -= speeds[worker] * step
            job.begun = min(job.begun, self.now - step)
            self.busy[worker] = self.busy.get(worker, 0.0) + step
            if ends[worker] <= step * (1 + 1e-12) + EPSILON:
                del self.running[worker]
                self.note(worker, job.group, job.begun, job.name)
                self._finish(worker, job)

    def _finish(self, worker: str, job: _Job) -> None:
        if worker == "bring":
            self.present[job.group] = True
        elif worker in ("send", "return"):
            self.traffic.finish(worker, job.group)
        elif worker in self.waiting:
            if job.updates:
                self.update(job.group)
            self.unfinished[job.group] -= 1

    def passes(self, count: int) -> None:
        """Run the passes of a step. Of many passes all but the first two and the last are alike, and run once."""
        num_run = min(count, MOST_PASSES)
        for number in range(num_run):
            begun = self.now
            before = dict(self.busy)
            self._forward()
            self._backward(last=number == num_run - 1, adds=number > 0)
            if number == num_run - 2 and count > num_run:
                more = count - num_run
                more_s = more * (self.now - begun)
                self.now += more_s
                self.note("compute", -1, self.now - more_s, "several")
                for job in self.running.values():
                    job.begun += more_s
                for worker, seconds in self.busy.items():
                    self.busy[worker] = seconds + more * (seconds - before.get(worker, 0.0))

    def _forward(self) -> None:
        num_groups = len(self.costs)
        self.traffic.begin()
        for group, cost in enumerate(self.costs):
            for ahead in range(group, min(num_groups, group + AHEAD + 1)):
                self.want(ahead, len(self.wanted))
            self.wait_for(group)
            self.wait_until(self.traffic.has_room, group)
            self.run(cost.forward_s, name="forward", group=group)
            self.traffic.leave(group)
            if group < num_groups - 1:  # the last one stays for backward
                self.present[group] = not self.shares[group].parameters_off
        self.wait_until(self.traffic.has_room, num_groups)

    def _backward(self, *, last: bool, adds: bool) -> None:
        for group in reversed(range(len(self.costs))):
            cost = self.costs[group]
            for ahead in range(group, max(-1, group - AHEAD - 1), -1):
                self.want(ahead, len(self.wanted))
            self.traffic.want(group)
            self.wait_for(group)
            self.wait_until(lambda group: not self.traffic.gone[group], group)
            again_s = cost.activations.longer_s if way_of(self.shares[group]) == "recompute" else 0.0
            self.run(cost.backward_s + again_s, "compute", "backward", group)
            self.present[group] = not self.shares[group].parameters_off
            if not self.request.keeps_gradients:
                self.wait_until(lambda _: sum(map(bool, self.unfinished)) <= MOST_HELD, group)
            self.land(group, last=last, adds=adds)


def simulate(request: PlanRequest, shares: Sequence[GroupShares]) -> Timeline:
    """Return one step in the steady state, for whole placements of parameters and gradients."""
    steps = StepSimulation(request, shares)
    compute_s = request.accumulate * (sum(cost.compute_s for cost in request.costs) + again_seconds(request, shares))
    pairs = zip(request.costs, shares, strict=True)
    resident_s = sum(cost.updated * share.resident * request.resident_s for cost, share in pairs)
    begun = 0.0
    for _ in range(NUM_STEPS):
        begun = steps.now
        steps.busy = {}
        steps.spans = []
        steps.passes(request.accumulate)
        steps.run(resident_s, "update")
        if not request.is_early:
            for group in range(len(shares)):
                steps.update_when_landed(group)
    for worker, job in steps.running.items():  # into the next step
        steps.note(worker, job.group, job.begun, job.name)
    step_s = max(steps.now - begun, compute_s + resident_s)  # but for rounding it never is less
    spans = tuple((*span[:3], max(0.0, span[3] - begun), span[4] - begun) for span in steps.spans)
    return Timeline(step_s, compute_s + resident_s, steps.busy, spans)


class ActivationTraffic:
    """Activations that are kept on the host: on their way there, and wanted back. Those of other groups stay, and make
    room for them: before they are there in forward, and when backward has passed them. As in scheduling/offloading.py,
    except that at most one group's activations are leaving, not two, if the next group sends its own."""

    def __init__(self, request: PlanRequest, shares: Sequence[GroupShares]) -> None:
        ways = [way_of(share) for share in shares]
        left = [cost.activations.left(way) for cost, way in zip(request.costs, ways, strict=True)]
        self.sizes = [size if way == "host" else 0.0 for size, way in zip(left, ways, strict=True)]
        self.stays: list[float | None] = []
        for size, way in zip(left, ways, strict=True):
            is_known = way == "recompute" or any(abs(size - sent) <= ALIKE * sent for sent in self.sizes if sent)
            self.stays.append(None if way == "host" else size if is_known else 0.0)
        self.leaving: list[int] = []  # groups, in order; the first is on its way
        self.gone = [False] * len(shares)
        self.wanted: list[int] = []
        self.begin()

    def begin(self) -> None:
        self.freed = 0.0  # bytes of groups passed in backward
        self.held = 0.0  # bytes of the group that backward is in

    def leave(self, group: int) -> None:
        if self.sizes[group]:
            self.gone[group] = True
            self.leaving.append(group)

    def has_room(self, group: int) -> bool:
        """Return whether activations may still leave while groups from this one on run: if it is no more than will stay
        of them. Otherwise only the last one's is, or two while groups run that send nothing, none when the last did."""
        to_come = [size for size in self.stays[group:] if size is not None]  # of groups that send nothing
        if sum(self.sizes[leaving] for leaving in self.leaving) <= sum(to_come):
            return True
        if group and self.stays[group - 1] is not None:
            num_staying = sum(size is not None for size in self.stays)
            return len(self.leaving) <= math.ceil(NUM_BUFFERS * len(to_come) / num_staying)
        return group == len(self.sizes) or len(self.leaving) < NUM_BUFFERS

    def want(self, group: int) -> None:
        """Handle backward coming to a group: what is away of it and of the next one is needed, more may come."""
        stays = self.stays[group]
        num_needed = NUM_BUFFERS
        if stays is not None:
            num_needed = 0
            self.freed += self.held
            self.held = stays
        size = 0.0
        for candidate in range(group, -1, -1):
            size += self.sizes[candidate]
            if candidate <= group - num_needed and size > self.freed:
                break
            if self.gone[candidate] and candidate not in self.wanted:
                self.wanted.append(candidate)

    def jobs(self) -> Iterator[tuple[str, int]]:
        """Yield what can be done now: "send" or "return", and the group."""
        if self.leaving:
            yield "send", self.leaving[0]
        if self.wanted and self.wanted[0] not in self.leaving:
            yield "return", self.wanted[0]

    def finish(self, job: str, group: int) -> None:
        if job == "send":
            self.leaving.remove(group)
        else:
            self.wanted.remove(group)
            self.gone[group] = False
