"""A fault from one number: the same seed always gives the same fault, in the same place, on the same rank.

Numbers below `FIRST_OF_MACHINES` draw what happens to ranks, others what happens to drives, connections and hooks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

# Where a fault may happen, in the order of the program.
CALLS = ("prepare", "save", "load", "full_state_dict", "gathered", "release")  # struck by a timer inside the call
HOOKS = ("loader", "forward", "loss", "backward", "clip", "step")  # struck at a point of the loop
PHASES = (*CALLS, *HOOKS)

# Kind of fault: where it may happen.
KINDS: dict[str, tuple[str, ...]] = {
    "SIGKILL": PHASES,
    "SIGTERM": PHASES,
    "SIGSTOP": PHASES,
    "SIGSTOP and SIGCONT": HOOKS,
    "exception": HOOKS,
    "exception on all ranks, caught": ("loader", "forward", "loss"),
    "delay": HOOKS,
    "connection reset": HOOKS,
    "memory limit": ("forward", "loss", "backward"),
    "call by one rank alone": ("forward", "full_state_dict", "clip", "gathered", "prepare", "save", "load", "release"),
    "rank leaves the loop": ("loader",),
    "rank skips": ("backward", "step"),
    "rank steps twice": ("step",),
    "gradients dropped": ("step",),
    "other option": ("lr before the forward", "lr before the step", "betas", "clip norm"),
    "other values loaded": ("load_state_dict",),
}
USER_HOOKS = (
    "forward pre-hook",
    "forward hook",
    "backward pre-hook",
    "backward hook",
    "parameter hook",
    "step pre-hook",
)
MACHINES: dict[str, tuple[str, ...]] = {  # these need the shim; states, and at stage 3 parameters, are on disk
    "exception in a hook": (*USER_HOOKS, "step post-hook"),
    "exception in a hook of all ranks, caught": USER_HOOKS,
    "slow connection": HOOKS,
    "slow drive": ("reading", "writing"),
    "EIO once or twice": ("reading", "writing"),
    "byte changed on its way": ("reading",),
    "drive is full": ("writing",),
    "drive cannot be written": ("writing",),
    "drive cannot be read": ("reading",),
    "file cut": ("loader", "clip"),
    "file overwritten": ("loader", "clip"),
    "checkpoint damaged": ("deleted", "cut", "overwritten"),
}
FIRST_OF_MACHINES = 1000
RECOVERED = {  # all ranks must finish, with right values
    "SIGSTOP and SIGCONT",
    "exception on all ranks, caught",
    "delay",
    "exception in a hook of all ranks, caught",
    "slow connection",
    "slow drive",
    "EIO once or twice",
    "byte changed on its way",
    "drive is full",
    "drive cannot be written",
}
ON_DISK = {*list(MACHINES)[3:-1]}  # kinds that need something there
FREQUENT = ("SIGKILL", "SIGSTOP", "exception", "SIGTERM")  # drawn more often

STAGES = (0, 1, 2, 3)
TIERS = ("device", "host", "disk")
STEPS = 4


@dataclass(frozen=True)
class Job:
    """What is trained, and how."""

    stage: int
    tier: str  # of the optimizer states; parameters and gradients follow at stage 3
    world_size: int
    device: str = "cpu"


@dataclass(frozen=True)
class Fault:
    """One fault."""

    seed: int
    job: Job
    kind: str
    phase: str
    rank: int  # that it happens to, or that does it
    step: int
    delay_s: float  # inside a call; or how long a rank is late


def draw(seed: int, device: str = "cpu") -> Fault:
    """Return the fault of a seed."""
    choice = random.Random(seed)
    is_of_machines = seed >= FIRST_OF_MACHINES
    kinds = MACHINES if is_of_machines else KINDS
    kind = choice.choice([*kinds] if is_of_machines else [*kinds, *FREQUENT])
    job = Job(choice.choice(STAGES), choice.choice(TIERS), choice.choice((2, 2, 3, 4)), device)
    if device != "cpu" and job.world_size == 4:  # they take turns on one device
        job = replace(job, world_size=2)
    if kind in ON_DISK:
        job = replace(job, tier="disk")
    phase = choice.choice(kinds[kind])
    rank = choice.randrange(job.world_size)
    step = choice.randrange(1, STEPS - 1)
    return Fault(seed, job, kind, phase, rank, step, choice.uniform(0.0, 0.03))
