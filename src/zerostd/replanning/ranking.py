"""Candidates, ranked by the planner on the first rank. Ranking takes seconds, so with an accelerator a thread does it
beside the next steps. If the CPU is the device, a thread would take cores from these steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from zerostd.compat import no_torch_function
from zerostd.engine.runtime import Runtime
from zerostd.errors import PrepareError
from zerostd.measuring import load_or_measure
from zerostd.planning import Plan
from zerostd.policy import Tier
from zerostd.preparing.proposing import PlanSearch
from zerostd.replanning.watching import RankReport
from zerostd.tiers import Done, Transfer, Worker

log = logging.getLogger("zerostd")


class Ranking:
    """One search for candidates. All ranks make it, and ask for it, together."""

    def __init__(self, runtime: Runtime, reason: str, report: RankReport) -> None:
        self.reason = reason  # of the search
        self.report = report  # the worst of all ranks
        self._runtime = runtime
        self._search = PlanSearch(runtime.settings, runtime.blueprints, runtime.world)  # as it is now
        self._plans: list[Plan] = []  # the present one as it was observed, and others
        self._work: Transfer = Done()
        self._worker: Worker | None = None

    def begin(self, limits: Mapping[Tier, int], *, speculates: bool, is_aside: bool) -> None:
        """Search for plans inside the limits."""
        world = self._runtime.world
        settings = self._runtime.settings
        try:
            machine = load_or_measure(world.device, disk_path=settings.budget.disk_path, mesh=settings.mesh)
        except torch.OutOfMemoryError as error:  # training goes on as it did
            if world.size > 1:
                raise
            self._warn(error)
            return

        def search() -> None:
            try:
                with no_torch_function():  # the shapes of released parameters are asked for, never their values
                    present, others = self._search.revise(limits, machine, self.report.seen, speculates=speculates)
                self._plans = [present, *others]
            except PrepareError as error:
                self._warn(error)

        if world.rank == 0 and is_aside:
            self._worker = Worker("the search for candidates", world.device)
            self._work = self._worker.submit(search)
        elif world.rank == 0:
            search()

    def _warn(self, error: Exception) -> None:
        step = self._runtime.backward.passes.num_steps
        log.warning("the plan is kept after step %d (%s): %s", step, self.reason, error)

    def is_done(self) -> bool:
        """Return whether the first rank has finished ranking."""
        return all(self._runtime.gatherer.control.collect(self._work.has_arrived()))

    def plans(self) -> tuple[Plan | None, list[Plan]]:
        """Return the present plan as it was observed, and others, the best first; nothing if none fits."""
        self._work.wait()
        plans: list[Plan] = self._runtime.gatherer.control.collect(self._plans)[0]
        return (plans[0], plans[1:]) if plans else (None, [])
