"""What a plan is predicted to take while the processor is slower, or faster, than it was when it was measured.

Others may use a machine too, and then a step takes longer for no fault of the plan's. The processor's pace is measured
beside every training (sweep.py); here the same simulation that the planner trusts is asked what such a pace costs.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import zerostd
from zerostd.planning import GroupProfile, MachineProfile, ModelProfile, PlanRequest, Processor
from zerostd.planning.demands import GroupShares
from zerostd.planning.profiles import WAYS
from zerostd.planning.request import threads_of
from zerostd.planning.simulation import simulate
from zerostd.planning.solution import shares_of

__all__ = ["model_from", "paced_s"]

Record = dict[str, Any]
DOES = {"recompute": "activations_recomputed", "host": "activations_host"}


def model_from(data: Record) -> ModelProfile:
    """A profile as a record has it."""
    return ModelProfile(**{**data, "groups": tuple(GroupProfile(**group) for group in data["groups"])})


def paced_s(record: Record) -> float | None:
    """A step's predicted time at the pace that was seen, the mean of before and after; None where either is missing,
    and where the processor is the device: it computes more slowly then too, and nobody measured by how much. The
    record's profile of the model is another one than the planner's, measured right after it, so it only says how much
    longer a step becomes."""
    paces = record.get("paces")
    if not paces or not record.get("predicted_s") or record.get("profile", {}).get("link") is None:
        return None
    slower = _step_s(record, sum(paces) / len(paces)) / _step_s(record, 1.0)
    return float(record["predicted_s"] * slower)


def _step_s(record: Record, pace: float) -> float:
    plan, model, job = zerostd.Plan.from_json(record["plan"]), model_from(record["model"]), record["case"]["job"]
    machine = MachineProfile.from_json(json.dumps(record["profile"]))
    task = PlanRequest(
        model,
        replace(machine, processor=at_pace(machine.processor, pace)),
        plan.limits,
        plan.stage,
        accumulate=job["accumulate"],
        waits_for_norm=bool(job["clip"]),
        speculates=plan.speculate,
        num_threads=threads_of(machine, 1),
        activations=frozenset() if model.recomputed else frozenset(WAYS),
    )
    names = [group.name for group in model.groups]
    return simulate(task, [_shares(plan, names[load.members[0]]) for load in task.costs]).step_s


def at_pace(processor: Processor, pace: float) -> Processor:
    """The same processor with this part of its rates."""
    slower = {num_threads: ns / pace for num_threads, ns in processor.update_ns.items()}
    return replace(processor, update_ns=slower, memory=processor.memory * pace)


def _shares(plan: zerostd.Plan, group: str) -> GroupShares:
    way = plan.activations_of(group)
    shares = shares_of(plan.homes_of(group))
    return replace(shares, **{DOES[way]: 1.0}) if way in DOES else shares
