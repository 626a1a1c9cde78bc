"""Room for passes: the activations that groups keep, and whether a plan has room for them, even with a larger batch.

A rank that sees a larger batch cannot wait for the others, whose batch may be small. If the plan has no room, this rank
recomputes all groups from this pass on, without asking the others. The next check makes a plan for this batch on all
ranks.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from zerostd.engine.runtime import Runtime
from zerostd.monitoring.texts import rate_text, size_text
from zerostd.planning import ModelProfile, Plan
from zerostd.policy import Tier, Way
from zerostd.preparing.options import ways_for
from zerostd.preparing.proposing import PlanSearch, least_way
from zerostd.replanning.meter import DeviceMeter
from zerostd.replanning.watching import counted_profile

NEAR = 0.7  # of the device's limit: what a plan leaves of it may be too little for a loss outside of the model
GREATER = 1.02  # times the bytes of input before: worth looking whether they fit

log = logging.getLogger("zerostd")


class PassRoom:
    """Keeps the passes of one prepared model inside its limits."""

    def __init__(self, runtime: Runtime, meter: DeviceMeter, search: PlanSearch) -> None:
        self._runtime = runtime
        self._meter = meter
        self._search = search
        self.profile: ModelProfile | None = None  # the model with the activations of the largest pass; None: not known
        self._least_way = least_way(runtime.world)
        self.why_grown = ""  # all groups recompute since a batch was larger; empty: they do as planned
        self.is_careful = False  # groups recompute in the first pass, since what the loss takes is not known
        self._largest = 0  # bytes of input in a pass so far
        self._before: tuple[int, ModelProfile | None] = (0, None)  # these, before the last larger input

    def begin_carefully(self, plan: Plan) -> None:
        """Let groups that the plan lets keep activations recompute in the first pass, if a user's limit is near."""
        is_planned = not plan.is_untried and plan.predicted.step_s is not None
        is_near = plan.predicted.total(Tier.DEVICE) > NEAR * plan.limits.get(Tier.DEVICE, 0)
        if self._runtime.settings.budget.device is None or not (is_planned and is_near):
            return
        ways = ways_for(self._runtime.settings, [group.name for group in self._runtime.groups])
        self.is_careful = bool(plan.activations) and Way.DEVICE in ways.values()
        if self.is_careful:
            recompute = {name: Way.RECOMPUTE if way is Way.DEVICE else way for name, way in ways.items()}
            self._runtime.backward.activations.change(recompute)

    def end_care(self) -> None:
        """Let groups handle their activations as the plan says, after the first pass."""
        self.is_careful = False
        names = [group.name for group in self._runtime.groups]
        self._runtime.backward.activations.change(ways_for(self._runtime.settings, names))
        self._runtime.hooks.renew()

    def count(self) -> ModelProfile | None:
        """Return the bytes that groups keep of a pass, once a pass was counted."""
        self.profile = self.profile or counted_profile(self._runtime)
        return self.profile

    def holds(self, plan: Plan, times: float = 1.0, *, in_place: bool = False, unsure: int = 0) -> bool:
        """Return whether model state and activations of a plan fit on the device, for a batch `times` as large; with
        `in_place`, whether parameters may stay where they are, too. Bytes that are `unsure` to be activations do not
        count."""
        now = self._runtime.settings.plan
        names = [group.name for group in self._runtime.blueprints if group.members]
        if in_place and any(now and plan.homes_of(name).parameters != now.homes_of(name).parameters for name in names):
            return False
        limits = self._meter.limits()
        limits[Tier.DEVICE] += unsure - int(times * self._activations_of(plan))
        return self._search.fits(plan, limits)

    def _activations_of(self, plan: Plan) -> int:
        if self.profile is None:
            return self._meter.activation_bytes() or 0
        return self._meter.activations_of(plan, self.profile)

    def follow_input(self, plan: Plan) -> bool:
        """Look at the input of the pass that begins. False if it is larger than any before and does not fit even with
        recomputing."""
        size = self._runtime.backward.passes.input_bytes
        before = self._largest
        if size <= GREATER * before:
            return True
        self._largest = size
        self._runtime.backward.activations.counter.is_on = True
        if not before or self.count() is None:
            return True
        times = size / before
        is_held = self.holds(plan, times)
        assert self.profile is not None
        self._before = (before, self.profile)
        self.profile = self.profile.scaled(times)
        if is_held:
            return True
        self.why_grown = f"a batch is {rate_text(times)} times as large as any before"
        log.info("%s, and does not fit the plan: groups are recomputed until the plan changes", self.why_grown)
        self.recompute()
        return self.holds(self._recomputing(plan))

    def take_back(self) -> None:
        """Forget the last input, whose pass is not made."""
        self._largest, self.profile = self._before
        self.obey_plan()

    def recompute(self) -> None:
        """Recompute all groups from the next forward on, if a batch has grown and no plan was made for it."""
        if self.why_grown:
            names = [group.name for group in self._runtime.groups]
            self._runtime.backward.activations.change(dict.fromkeys(names, self._least_way))

    def obey_plan(self) -> None:
        """Let groups handle their activations as the plan says."""
        if self.why_grown:
            self.why_grown = ""
            names = [group.name for group in self._runtime.groups]
            self._runtime.backward.activations.change(ways_for(self._runtime.settings, names))

    def refusal(self, plan: Plan, what: str, *, unsure: int = 0) -> str:
        """Return why a pass cannot be made inside the user's limit; empty if it can, or if there is none. For `unsure`
        see `holds`."""
        budget = self._runtime.settings.budget.device
        plan = self._recomputing(plan)
        if budget is None or self.holds(plan, unsure=unsure):
            return ""
        return (
            f"{what}: its activations would take {size_text(self._activations_of(plan))} beside the model, which does "
            f"not fit into Budget(device={budget!r}), even if all is recomputed or kept on the host. Use a smaller "
            "batch in more passes, or a larger budget. Parameters do not move during training: "
            "prepare(plan=zerostd.plan(model, optimizer, batch=batch, budget=...)) places them for this batch"
        )

    def _recomputing(self, plan: Plan) -> Plan:
        """Return a plan with all groups recomputed."""
        return replace(plan, activations={"*": self._least_way.in_plan})
