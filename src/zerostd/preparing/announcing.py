"""What prepare tells the user when it is done: one line about the plan, and a warning if an accelerator is idle."""

from __future__ import annotations

import logging
import sys
import warnings

import torch

from zerostd.communication import World
from zerostd.engine.settings import Settings
from zerostd.monitoring.texts import size_text
from zerostd.policy import Kind, Placement, Tier

SHOWN = (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER_STATES)

log = logging.getLogger("zerostd")


def announce(settings: Settings, world: World) -> None:
    """Log what was decided, on rank 0. Where logging was not configured, Python would drop the line, so it goes to
    stderr; `logging.getLogger("zerostd").setLevel("WARNING")` silences it."""
    if world.rank != 0:
        return
    line = summary(settings, world)
    if log.hasHandlers() or log.level != logging.NOTSET:
        log.info("%s", line)
    else:
        print(f"zerostd: {line}", file=sys.stderr)


def summary(settings: Settings, world: World) -> str:
    """Return stage, ranks, precision, homes and, of a plan, bytes and the predicted step in one line."""
    stage, placement = settings.decided
    kinds = SHOWN if settings.has_optimizer else SHOWN[:1]
    homes: dict[str, list[str]] = {}
    for kind in kinds:
        homes.setdefault(_home(placement, kind), []).append(kind.value.replace("_", " "))
    ranks = f"{world.size} rank{'s' if world.size > 1 else ''}"
    dtypes = "dtypes as given" if settings.precision.compute is None else settings.precision.name
    parts = [f"stage {stage.value} on {ranks} ({world.device}), {dtypes}"]
    parts += [f"{', '.join(names)} on {home}" for home, names in homes.items()]
    plan = settings.plan
    if plan is not None:
        sizes = [f"{size_text(plan.predicted.total(tier))} {tier.value}" for tier in Tier if plan.predicted.total(tier)]
        parts += ["planned " + ", ".join(sizes)] if sizes else []
        parts += [f"a step in {plan.predicted.step_s:.3g} s"] if plan.predicted.step_s else []
    return "; ".join(parts)


def _home(placement: Placement, kind: Kind) -> str:
    shares = placement.shares(kind)
    if len(shares) == 1:
        return f"the {next(iter(shares)).value}"
    return ", ".join(f"{tier.value} {share:.0%}" for tier, share in shares.items())


def warn_of_idle_accelerator(settings: Settings, world: World) -> None:
    """Warn if the model trains on the CPU although there is an accelerator and nobody asked for the CPU."""
    is_asked_for = settings.device is not None or settings.servers is not None
    if world.device.type == "cpu" and not is_asked_for and torch.accelerator.is_available():
        name = torch.accelerator.current_accelerator()
        warnings.warn(
            f"the model is on the CPU and will train there, but this machine has an accelerator ({name}): pass "
            f"device='{name}' to prepare to use it, or device='cpu' to silence this warning",
            UserWarning,
            stacklevel=4,
        )
