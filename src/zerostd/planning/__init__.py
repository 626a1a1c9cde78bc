"""What should rest where: from profiles of a machine and a model to a Plan. Pure: nothing here touches a device.

machine.py     what a machine can do          model.py       what a model needs
described.py   models that are only numbers   costs.py       bytes and seconds of each group on one rank
linear.py      a linear program               program.py     the schedule as one
simulation.py  steps, event by event          planner.py     from a task to a plan
plan.py        the plan
"""

from zerostd.planning.costs import Task
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
    "Prediction",
    "Processor",
    "Task",
    "Wire",
    "make_plan",
]
