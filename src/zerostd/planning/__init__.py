"""Decides what is kept where: from profiles of a machine and a model to a Plan. Pure: nothing here touches a device.

profiles.py     what a machine can do, what a model needs    described.py   models that are only numbers
request.py      what is to be planned, what groups cost      demands.py     what shares of a group take
linear.py       a linear program                             program.py     the schedule as a linear program
rounding.py     whole groups, and what is missing            simulation.py  steps, event by event
solution.py     homes of shares, rates as observed           planner.py     candidates, and which of them fit
plan.py         the plan                                     pricing.py     a candidate as a plan, with prices
searching.py    the best of many requests                    streaming.py   models that are not updated
"""

from zerostd.planning.plan import Plan, Prediction, Trial
from zerostd.planning.profiles import DiskRates, GroupProfile, Link, MachineProfile, ModelProfile, Processor, Wire
from zerostd.planning.request import PlanRequest

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
    "Trial",
    "Wire",
]
