"""What should rest where: from profiles of a machine and a model to a Plan. Pure: nothing here touches a device.

machine.py      what a machine can do             model.py       what a model needs
described.py    models that are only numbers      costs.py       bytes and seconds of each group on one rank
demands.py      what shares of a group take       activations.py keep, recompute or send them
linear.py       a linear program                  program.py     the schedule as one
rounding.py     whole groups                      simulation.py  steps, event by event
solution.py     homes and bytes of shares         planner.py     from a request to a plan
advice.py       what to tell when nothing fits    plan.py        the plan
cluster.py      models and machines on paper      search.py      passes and stages that are left open
refitting.py    rates as they were seen           limits.py      what a rank may use of each tier
"""

from zerostd.planning.costs import PlanRequest
from zerostd.planning.machine import DiskRates, Link, MachineProfile, Processor, Wire
from zerostd.planning.model import GroupProfile, ModelProfile
from zerostd.planning.plan import Plan, Prediction
from zerostd.planning.planner import make_plan

__all__ = [
    "DiskRates",
    "GroupProfile",
    "Link",
    "MachineProfile",
    "ModelProfile",
    "Plan",
    "PlanRequest",
    "Prediction",
    "Processor",
    "Wire",
    "make_plan",
]
