"""A fault from one number: the same seed always gives the same fault, in the same place, on the same rank.

Numbers below `FIRST_OF_MACHINES` draw what happens to ranks, those from there on what happens to drives, connections
and hooks, and those from `FIRST_OF_FEATURES` on any of these, in a training that uses one more feature.
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
FIRST_OF_FEATURES = 2000
FEATURES: dict[str, tuple[int, ...]] = {  # and the stages that it is for
    "an average": (0, 1, 2, 3),
    "coded moments": (0, 1, 2, 3),
    "equal models": (3,),  # a second model that shares frozen parameters
    "freed gradients": (0, 3),
    "gradients on disk": (2, 3),
    "packed parameters": (3,),  # frozen ones, on disk
    "saves beside training": (0, 1, 2, 3),  # with a share of the disk
    "secondary shards": (3,),
    "sleep": (0, 1, 2, 3),
}
NOT_WITH: dict[str, set[str]] = {  # kinds and phases
    # Nothing is clipped, and a pass that fails after updates have begun cannot be repeated.
    "freed gradients": {"clip", "clip norm", "backward pre-hook", "backward hook", "parameter hook", "step pre-hook"}
    | {"gradients dropped"},
    "packed parameters": {"drive is full", "drive cannot be written"},  # they do not move to host memory
}
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
    feature: str = ""  # of FEATURES


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
    if seed >= FIRST_OF_FEATURES:
        return _with_feature(seed, choice, device)
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


def _with_feature(seed: int, choice: random.Random, device: str) -> Fault:
    """Return a fault of an earlier seed, in a job with a feature."""
    feature = choice.choice([*FEATURES])
    fault = draw(choice.randrange(FIRST_OF_FEATURES), device)
    while {fault.kind, fault.phase} & NOT_WITH.get(feature, set()):
        fault = draw(choice.randrange(FIRST_OF_FEATURES), device)
    # Nodes of two ranks; and with codes a shard begins at a multiple of 64 elements, so further ranks may have nothing.
    world_size = {"secondary shards": 4, "coded moments": 2}.get(feature, fault.job.world_size)
    job = replace(fault.job, stage=choice.choice(FEATURES[feature]), world_size=world_size, feature=feature)
    rank = 0 if fault.kind == "file overwritten" else fault.rank % world_size  # the last of four may have padding only
    return replace(fault, seed=seed, job=job, rank=rank)
