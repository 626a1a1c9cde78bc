"""Candidates, ranked by the planner on the first rank. Ranking takes seconds, so with an accelerator it is done beside
the next steps, in another process: a thread would keep Python's lock from the loop, which launches kernels. If the CPU
is the device, it would take cores from these steps."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial

import torch

from zerostd.compat import no_torch_function
from zerostd.engine.runtime import Runtime
from zerostd.errors import PrepareError
from zerostd.measuring import load_or_measure
from zerostd.monitoring.decoding import decode
from zerostd.planning import Plan
from zerostd.policy import Tier
from zerostd.preparing.proposing import PlanSearch
from zerostd.replanning.watching import RankReport
from zerostd.tiers import Done, Transfer, Worker

NICENESS = 10  # of the other process: steps come first

Search = Callable[[], tuple[Plan, list[Plan]]]  # returns the present plan as it was observed, and others

log = logging.getLogger("zerostd")


class Ranking:
    """One search for candidates. All ranks make it, and ask for it, together."""

    def __init__(self, runtime: Runtime, reason: str, report: RankReport) -> None:
        self.reason = reason  # of the search
        self.report = report  # the worst of all ranks
        self._runtime = runtime
        self._search = PlanSearch(runtime.settings, runtime.blueprints, runtime.world)  # as it is now
        self._results: list[Plan | Exception] = []  # the present plan as observed, and others; or an error
        self._work: Transfer = Done()
        self._worker: Worker | None = None

    def begin(self, limits: Mapping[Tier, int], *, speculates: bool, is_aside: bool) -> Ranking:
        """Search for plans inside the limits. Returns itself."""
        world = self._runtime.world
        settings = self._runtime.settings
        try:
            machine = load_or_measure(world.device, disk_path=settings.budget.disk_path, mesh=settings.mesh)
        except torch.OutOfMemoryError as error:  # training goes on as it did
            if world.size > 1:
                raise
            self._results.append(error)
            return self

        if world.rank != 0:
            return self
        search: Search = partial(self._search.revise, limits, machine, self.report.seen, speculates=speculates)
        if not is_aside:
            _find(search, self._results)
            return self
        if world.node_size == 1:  # else a thread searches: the ranks of a node are known by its channels
            with no_torch_function():
                on_paper = self._search.on_paper()
            revise = partial(on_paper.revise, limits, machine, self.report.seen, speculates=speculates)
            search = partial(in_process, revise)
        self._worker = Worker("the search for candidates", world.device)
        self._work = self._worker.submit(
            partial(_find, search, self._results)
        )  # without the model, which may be released
        return self

    def is_done(self) -> bool:
        """Return whether the first rank has finished ranking."""
        return all(self._runtime.gatherer.control.collect(self._work.has_arrived()))

    def plans(self) -> tuple[Plan | None, list[Plan]]:
        """Return the present plan as it was observed, and others, the best first; nothing if none fits."""
        self._work.wait()
        for error in self._results:
            if isinstance(error, Exception):
                step = self._runtime.backward.passes.num_steps
                log.warning("the plan is kept after step %d (%s): %s", step, self.reason, error)
        mine = [plan for plan in self._results if isinstance(plan, Plan)]
        plans: list[Plan] = self._runtime.gatherer.control.collect(mine)[0]
        return (plans[0], plans[1:]) if plans else (None, [])


def _find(search: Search, results: list[Plan | Exception]) -> None:
    """Add the plans that a search finds to `results`, or its error."""
    try:
        with no_torch_function():  # the shapes of released parameters are asked for, never their values
            present, others = search()
        results += [present, *others]
    except (PrepareError, OSError, subprocess.SubprocessError) as error:
        results.append(error)


def in_process(search: Search) -> tuple[Plan, list[Plan]]:
    """Call a search in another process, which sees no accelerator; return its result, or raise its error."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", f"import sys; sys.stdout = sys.stderr; from {__name__} import answer; answer()"]
    try:
        sent = pickle.dumps(search)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise subprocess.SubprocessError(f"the search for plans cannot be sent to another process: {error}") from error
    ended = subprocess.run(command, input=sent, capture_output=True, env=environment)
    if ended.returncode:
        last = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise subprocess.SubprocessError(f"the process that ranks plans ended with {ended.returncode}: {last}")
    refusal, *plans = decode(ended.stdout, list[str], what="the ranked plans", error=PrepareError)
    if refusal:
        raise PrepareError(refusal)
    present, *others = map(Plan.from_json, plans)
    return present, others


def answer() -> None:
    """Make the search that `in_process` sends through stdin. Write its refusal and its plans to the real stdout."""
    os.nice(NICENESS)
    torch.set_num_threads(1)
    search: Search = pickle.load(sys.stdin.buffer)
    try:
        present, others = search()
        result = ["", *(plan.to_json() for plan in (present, *others))]
    except PrepareError as error:
        result = [str(error)]
    assert sys.__stdout__ is not None
    sys.__stdout__.write(json.dumps(result))
