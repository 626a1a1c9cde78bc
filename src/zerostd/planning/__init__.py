"""What should be kept where: from profiles of a machine and a model to a Plan. Pure: nothing here touches a device.

machine.py      what a machine can do                 model.py       what a model needs
described.py    models that are only numbers          request.py     what is to be planned, and the limits
costs.py        bytes and seconds of each group       demands.py     what shares of a group take
activations.py  keep, recompute or send them          linear.py      a linear program
program.py      the schedule as a linear program      rounding.py    whole groups instead of shares
simulation.py   steps, event by event                 activation_traffic.py  activations that come and go in it
solution.py     homes and bytes of shares             advice.py      what to tell when nothing fits
planner.py      from a request to a plan              plan.py        the plan
search.py       passes and stages that are left open  cluster.py     many world sizes side by side
refitting.py    rates as they were observed
"""

from zerostd.planning.machine import DiskRates, Link, MachineProfile, Processor, Wire
from zerostd.planning.model import GroupProfile, ModelProfile
from zerostd.planning.plan import Plan, Prediction
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
    "Wire",
]
