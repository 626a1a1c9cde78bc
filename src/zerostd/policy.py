"""Frozen policies: what the user decides, checked once, then only read.

Stage, Kind and Tier are the words of the whole library; Precision, Placement and Budget are the values of
`prepare`'s keywords. Nothing here touches a model, a device or a process group.
"""

from __future__ import annotations

import enum
import fnmatch
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from zerostd.errors import OTHER_NAMES, PrepareError, check_flag, hint_for, is_number, is_whole

MOST_RANKS = 10**7  # also passes of a step, and samples
LOSSLESS = "lossless"  # the codec that changes no result


class Stage(enum.IntEnum):
    """Says how much is sharded: 0 DATA_PARALLEL, 1 OPTIMIZER_STATES, 2 also GRADIENTS, 3 also PARAMETERS."""

    DATA_PARALLEL = 0
    OPTIMIZER_STATES = 1
    GRADIENTS = 2
    PARAMETERS = 3

    @classmethod
    def parse(cls, value: int | Stage) -> Stage:
        """Return the stage that `value` stands for, or raise an error that lists the four there are."""
        if not is_whole(value) or value not in tuple(cls):
            raise PrepareError(
                f"stage={value!r} is not a ZeRO stage; use 0 (data parallel), 1 (shard optimizer states), "
                "2 (also gradients) or 3 (also parameters)"
            )
        return cls(value)


class Kind(enum.StrEnum):
    """Meanings of bytes. AVERAGES are `zerostd.averaged`'s; BUFFERS are working memory: staging, gathered groups."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER_STATES = "optimizer_states"
    ACTIVATIONS = "activations"
    AVERAGES = "averages"
    BUFFERS = "buffers"


class Tier(enum.StrEnum):
    """Names the memory that keeps bytes."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"

    @classmethod
    def parse(cls, value: str) -> Tier:
        """Return a tier from its name."""
        if value not in tuple(cls):
            raise PrepareError(
                f"tier={value!r}: {hint_for(value, tuple(cls))}use one of {[tier.value for tier in cls]}"
            )
        return cls(value)


class Route(enum.StrEnum):
    """How a stretch of optimizer states is updated. States on disk pass through host memory on the last two."""

    RESIDENT = "resident"  # on the device, where they are kept
    CPU = "cpu"  # by the processor, in host memory
    STREAMED = "streamed"  # through the device, tile by tile


class Way(enum.StrEnum):
    """Ways of a group's activations between forward and backward. A recomputed group keeps its inputs only.

    Plans and the command line say "keep" for DEVICE: `Way("keep")` reads it, `in_plan` writes it.
    """

    DEVICE = "device"
    RECOMPUTE = "recompute"
    HOST = "host"
    RECOMPUTE_HOST = "recompute+host"  # from inputs that are kept on the host
    DISK = "disk"
    RECOMPUTE_DISK = "recompute+disk"

    @classmethod
    def _missing_(cls, value: object) -> Way | None:
        return cls.DEVICE if value == "keep" else None

    @property
    def in_plan(self) -> str:
        """The word for it in plans and on the command line."""
        return "keep" if self is Way.DEVICE else self.value

    @property
    def recomputes(self) -> bool:
        """Whether forward runs again in backward."""
        return self in (Way.RECOMPUTE, Way.RECOMPUTE_HOST, Way.RECOMPUTE_DISK)

    @property
    def tier(self) -> Tier:
        """The tier of the activations or inputs that are kept."""
        if self in (Way.HOST, Way.RECOMPUTE_HOST):
            return Tier.HOST
        return Tier.DISK if self in (Way.DISK, Way.RECOMPUTE_DISK) else Tier.DEVICE


# The first stage that shards each kind.
SHARDED_FROM = {Kind.OPTIMIZER_STATES: 1, Kind.GRADIENTS: 2, Kind.PARAMETERS: 3}


def shards(stage: Stage, kind: Kind) -> bool:
    """Return whether a stage shards a kind: the only table in which the stages differ."""
    return stage >= SHARDED_FROM[kind]


# The dtype of parameters whose fp32 masters are kept as two halves, one of which is the parameter. None: masters are
# whole, for benchmarks to compare with.
SPLIT_DTYPE: torch.dtype | None = torch.bfloat16


def splits_masters(dtype: torch.dtype) -> bool:
    """Return whether the masters of parameters of a dtype are kept as two halves."""
    return dtype is SPLIT_DTYPE


def is_at_hand(parameters: Tier, route: Route, *, has_own_memory: bool) -> bool:
    """Return whether an update by a route has the parameters in memory where it runs, or can bring them there with the
    states: then a bf16 parameter is the upper half of its master, and only the lower half is kept beside it."""
    if route is Route.STREAMED:
        return parameters is not Tier.DISK
    if route is Route.CPU and has_own_memory:
        return parameters is Tier.HOST
    return parameters is Tier.DEVICE or (parameters is Tier.HOST and route is Route.CPU)


@dataclass(frozen=True)
class Precision:
    """Sets the dtypes of a run.

    `compute` is the dtype of parameters in forward and backward; `reduce` is the dtype in which gradients are sent and
    kept. None keeps each parameter's own dtype. 16-bit parameters get fp32 masters; all updates are done in fp32.
    `Precision("mine", compute=torch.bfloat16, reduce=torch.float32)` sends gradients in fp32, with twice the bytes.
    """

    name: str
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    scales_loss: bool = False  # fp16 only: gradients are scaled against underflow, see optimizers/gradients.py

    @classmethod
    def parse(cls, value: str | Precision | None) -> Precision:
        """Return a policy by its name."""
        if isinstance(value, Precision):
            return value
        known = {
            None: cls("as given"),
            "fp32": cls("fp32", torch.float32, torch.float32),
            "bf16": cls("bf16", torch.bfloat16, torch.bfloat16),
            "fp16": cls("fp16", torch.float16, torch.float16, scales_loss=True),
        }
        if not isinstance(value, str | None) or value not in known:
            raise PrepareError(
                f"precision={value!r} is unknown; {hint_for(value, ('fp32', 'bf16', 'fp16'))}use "
                "'fp32', 'bf16' or 'fp16', or None to keep each parameter's dtype"
            )
        return known[value]


def _check_fields(option: str, given: Mapping[str, Any], known: list[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        unknown_field = f"unknown field {unknown[0]!r}; {hint_for(unknown[0], known)}use one of {known}"
        raise PrepareError(f"{option}={dict(given)!r}: {unknown_field}")


Share = str | Mapping[str, float]
Ways = str | Mapping[str, float] | Mapping[str, str]


@dataclass(frozen=True)
class Placement:
    """Sets the home of each kind of state: a tier, or shares of tiers that sum to 1.

    Placement(gradients="host", optimizer_states={"device": 0.3, "host": 0.7})

    Shares are taken from the front of the model: the state that forward needs first gets the nearest tier. Optimizer
    states are divided exactly at the share, parameters and gradients between two parameters. A share that whole
    parameters miss by more than a tenth is refused with the nearest one that works. Models of fewer than 32,768
    elements keep whole groups in one tier, with a warning.

    `cpu_share` is the part of the offloaded states that the CPU updates; None: from the number of cores. The rest is
    streamed through the device. `speculate` updates inside backward, before the norm for `max_grad_norm` is known,
    into a second copy of the states, and repeats the update if the step is clipped. It is faster if compute is the
    bottleneck, and takes twice the host memory. `keep_gradients=False` updates each group inside backward and frees
    its gradient at once, so `p.grad` cannot be read. Results are the same with all of these.

    Activations are placed by whole groups: 'device', 'recompute', 'host', 'recompute+host', 'disk', 'recompute+disk'
    for all groups, in shares of them, or by globs of names. The first matching glob counts; others stay on the device:

    Placement(activations={"device": 0.5, "host": 0.5})
    Placement(activations={"blocks.1?": "device", "blocks.*": "recompute"})

    These shares are taken from the end of the model, because backward needs the last activations first. Activations of
    the root module itself stay on the device. `same_activations` is a process group whose ranks compute the same
    activations, as in tensor parallel models: each rank keeps one slice, and backward gathers the slices.

    `codec={"gather": "int8", "reduce": "int8"}` sends parameters and gradients as 8-bit codes.
    `codec={"optimizer_states": "int8"}` keeps the moments of Adam and AdamW as 8-bit codes, in blocks of 64 with one
    scale each: 2.125 bytes per parameter instead of 8, in every tier and over every link. With "bf16" they take 4
    bytes, and updates round them up or down at random, so that small changes add up. All of these are lossy, and need
    `prepare(exact=False)`. `codec={"parameters": "lossless"}` packs frozen parameters on disk: 0.67 of bf16's bytes.

    `secondary_shards=True` is for stage 3 with a mesh of (nodes, ranks per node). All ranks share the model state. From
    the first gather of a step to the update, a rank keeps 1/(ranks per node) of the parameters on the device, and
    further gathers stay inside the node.
    """

    parameters: Share = "device"
    gradients: Share = "device"
    optimizer_states: Share = "device"
    activations: Ways = "device"
    cpu_share: float | None = None
    speculate: bool = False
    keep_gradients: bool = True
    same_activations: Any = field(default=None, repr=False, compare=False)
    codec: Mapping[str, str] = field(default_factory=dict)
    secondary_shards: bool = False

    @classmethod
    def parse(cls, value: Placement | Mapping[str, Any] | None) -> Placement | None:
        """Return a placement from one, or from a dict of its fields."""
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            _check_fields("placement", value, [entry.name for entry in fields(cls)])
            return cls(**value)
        tier = OTHER_NAMES.get(str(value).lower(), str(value))
        example = tier if tier in tuple(Tier) else "host"
        raise PrepareError(
            f"placement={value!r} does not say which kind of state to keep there: write "
            f"zerostd.Placement(optimizer_states={example!r}), and likewise parameters= and gradients="
        )

    def __post_init__(self) -> None:
        for kind in ("parameters", "gradients", "optimizer_states"):
            self._check(kind, getattr(self, kind), [tier.value for tier in Tier], "a tier")
        activations: Any = self.activations
        for given in activations.values() if self._goes_by_group else [activations]:
            self._check("activations", given, [way.value for way in Way], "a way for activations")
        share = self.cpu_share
        if share is not None and not (is_number(share) and 0.0 <= share <= 1.0):
            raise PrepareError(f"Placement(cpu_share={self.cpu_share!r}) must be from 0 (all streamed) to 1 (all cpu)")
        for name in ("speculate", "keep_gradients", "secondary_shards"):
            check_flag(f"Placement: {name}", getattr(self, name))

    def bits(self, name: str) -> int | None:
        """Return the bits of a code; None if there is no codec of this name."""
        return int(self.codec[name].removeprefix("int")) if name in self.codec else None

    @staticmethod
    def _check(kind: str, share: Any, known: list[str], what: str) -> None:
        if not isinstance(share, str | Mapping):
            raise PrepareError(f"Placement({kind}={share!r}) must be {what}, or a dict of shares; use one of {known}")
        shares = dict(share) if isinstance(share, Mapping) else {share: 1.0}
        unknown = [name for name in shares if name not in known]
        if unknown:
            raise PrepareError(
                f"Placement({kind}={share!r}): {unknown[0]!r} is not {what}; "
                f"{hint_for(unknown[0], known)}use one of {known}"
            )
        if not all(isinstance(part, int | float) for part in shares.values()):
            raise PrepareError(f"Placement({kind}={share!r}): shares must be numbers")
        if any(part < 0 for part in shares.values()) or not math.isclose(sum(shares.values()), 1.0, abs_tol=1e-6):
            raise PrepareError(
                f"Placement({kind}={share!r}): shares must be >= 0 and sum to 1; these sum to {sum(shares.values()):g}"
            )

    def shares(self, kind: Kind) -> dict[Tier, float]:
        """Return the shares of a kind by tier, without zero shares."""
        share = getattr(self, kind.value)
        parts = {share: 1.0} if isinstance(share, str) else share
        return {Tier(name): float(part) for name, part in parts.items() if part > 0}

    @property
    def _goes_by_group(self) -> bool:
        """Whether activations are given by globs of groups' names."""
        given = self.activations
        return isinstance(given, Mapping) and any(isinstance(value, str) for value in given.values())

    def ways(self, groups: Sequence[str]) -> dict[str, Way]:
        """Return the way of each group's activations; raise PrepareError if a glob matches no group."""
        given = self.activations
        if isinstance(given, str):
            return dict.fromkeys(groups, Way(given))
        if not self._goes_by_group:
            return _in_shares(groups, {Way(name): float(part) for name, part in given.items()})
        for glob in given:
            if not any(fnmatch.fnmatchcase(name, glob) for name in groups):
                raise PrepareError(
                    f"Placement(activations={given!r}): no group matches {glob!r}; the groups are {', '.join(groups)}"
                )
        ways: dict[str, Way] = {}
        for name in groups:
            fitting = [Way(str(way)) for glob, way in given.items() if fnmatch.fnmatchcase(name, glob)]
            ways[name] = fitting[0] if fitting else Way.DEVICE
        return ways


def _in_shares(groups: Sequence[str], shares: Mapping[Way, float]) -> dict[str, Way]:
    """Return the way of each group, from the last one on: the groups that backward needs first stay nearest."""
    ways: dict[str, Way] = {}
    backwards = list(reversed(groups))
    share = 0.0
    for way in Way:
        share += shares.get(way, 0.0)
        stop = round(share * len(groups))
        ways |= dict.fromkeys(backwards[len(ways) : stop], way)
    return {name: ways[name] for name in groups}


@dataclass(frozen=True)
class Homes:
    """The tiers that keep the state of one group, and the routes of its updates, as a plan has them."""

    parameters: Tier = Tier.DEVICE
    gradients: Tier = Tier.DEVICE
    states: tuple[tuple[Tier, Route, float], ...] = ((Tier.DEVICE, Route.RESIDENT, 1.0),)  # shares, in this order

    def __post_init__(self) -> None:
        shares = [share for _, _, share in self.states]
        if any(share < 0 for share in shares) or not math.isclose(sum(shares), 1.0, abs_tol=1e-6):
            raise PrepareError(f"states={self.states!r} of a plan: shares must be >= 0 and sum to 1")
        for tier, route, _ in self.states:
            if (tier is Tier.DEVICE) != (route is Route.RESIDENT):
                raise PrepareError(
                    f"states={self.states!r} of a plan: {route.value} is not a route for the {tier.value}"
                )
            if route is Route.STREAMED and self.parameters is Tier.DISK:
                raise PrepareError(
                    f"states={self.states!r} of a plan: states cannot be streamed if parameters are on disk, since new "
                    "parameters go to disk from the host; give their share to the route cpu"
                )


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(value: int | str) -> int:
    """Return the bytes of an integer or a text with a unit: 24GiB, 500MB."""
    if is_whole(value):
        return value
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    if match is None or match.group(2).upper() not in _UNITS:
        raise PrepareError(f"{value!r} is not a size; write it like '24GiB', '500MB' or as an integer of bytes")
    return int(float(match.group(1)) * _UNITS[match.group(2).upper()])


def limit_of(size: int | str | None) -> int | None:
    """Return the bytes of a size in a budget; None: without limit."""
    return None if size is None else parse_bytes(size)


@dataclass(frozen=True)
class Budget:
    """Limits the bytes of each tier: a number, or a text such as '24GiB'. None: the free memory, less a margin.

    `background` is the part of the disk's time that checkpoints and averages may take while other transfers use it."""

    device: int | str | None = None
    host: int | str | None = None
    disk: int | str | None = None
    disk_path: str | None = None
    background: float | None = None  # None: no limit

    @classmethod
    def parse(cls, value: Budget | Mapping[str, Any] | int | str | None) -> Budget:
        """Return a budget from one, from a dict of its fields, or from a size, which limits the device."""
        if value is None or isinstance(value, Budget):
            return value or cls()
        if isinstance(value, Mapping):
            _check_fields("budget", value, [entry.name for entry in fields(cls)])
            return cls(**value)
        return cls(device=parse_bytes(value))

    def __post_init__(self) -> None:
        for size in (self.device, self.host, self.disk):
            limit_of(size)
        if not isinstance(self.disk_path, str | os.PathLike | None) or "\x00" in str(self.disk_path):
            raise PrepareError(f"Budget(disk_path={self.disk_path!r}) must be the path of a directory")
