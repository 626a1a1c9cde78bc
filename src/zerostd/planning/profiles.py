"""Profiles as plain data: what a machine can do, and what a model needs.

`measuring` makes both; a machine that is elsewhere is written by hand, in JSON, and a model that does not exist yet is
made from a few numbers. Rates are in bytes or operations per second, times in seconds. A sample is one row of the
batch: an image, a sequence, a graph.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy

from zerostd.errors import PrepareError
from zerostd.monitoring.decoding import convert, decode
from zerostd.policy import Way

DIVISORS = re.compile(  # of bytes and operations, by name
    r"matrix[.].*|processor[.].*|(link|disk)[.](up|down|read|write|both)|wires[.].*(ranks|bandwidth)|ranks_per_node|achieved"
)
REMEDY = "measure again with `zerostd measure`, or correct it"
MOMENT_BYTES = 8  # of one parameter: both of Adam in fp32
STATES = "optimizer_states"
WIRES = "wires"
CODABLE = frozenset({STATES, WIRES})  # what may be codes of 8 bits: Adam's moments; parameters and gradients on wires
LEAST_BANDWIDTH = 1e6  # bytes/s of a wire, however slow it was
CODE_BYTES = 68 / 64  # of one number on a wire, as a code of 8 bits with a scale for 64 of them
CODED_BYTES = 2 * CODE_BYTES  # the same as codes
OF_A_PASS = ("samples", "forward_s", "backward_s", "activation_bytes")  # of a model: twice of twice the samples
DTYPES = ("parameter_bytes", "gradient_bytes", "state_bytes", "master_bytes", "shared_bytes", "dtype")  # of a model
# Ways that plans choose among. Either all recomputed groups keep their inputs on the device, or none does.
WAYS = tuple(way.in_plan for way in (Way.DEVICE, Way.RECOMPUTE, Way.RECOMPUTE_HOST, Way.HOST))
RECOMPUTED = (Way.RECOMPUTE.in_plan, Way.RECOMPUTE_HOST.in_plan)


@dataclass(frozen=True)
class Link:
    """The link between host and device."""

    up: float  # bytes/s, host to device, large pinned copies
    down: float  # bytes/s, device to host
    both: float  # bytes/s, the two directions together when both are busy
    latency: float = 1e-5  # s, before a copy's first byte


@dataclass(frozen=True)
class Processor:
    """The host's cores and memory."""

    num_cores: int
    update_ns: Mapping[int, float]  # ns to update one parameter (AdamW, 28 bytes), by number of threads, nothing beside
    memory: float  # bytes/s of host memory when the processor updates and the link is busy both ways
    coded_factor: float = 1.7  # times as long with Adam's moments as codes of 8 bits; the default is of AVX2

    def ns(self, num_threads: int) -> float:
        """Return nanoseconds for one parameter with this many threads; rates in between are interpolated."""
        known = sorted(self.update_ns.items())
        rates = [0.0, *(1.0 / ns for _, ns in known)]
        return 1.0 / float(numpy.interp(max(1, num_threads), [0, *(threads for threads, _ in known)], rates))


@dataclass(frozen=True)
class DiskRates:
    """The file system of one directory."""

    path: str
    read: float  # bytes/s alone
    write: float  # bytes/s alone
    both: float  # bytes/s of each direction when both are busy

    def slower(self, by: float) -> DiskRates:
        return DiskRates(self.path, self.read / by, self.write / by, self.both / by)


@dataclass(frozen=True)
class Wire:
    """Collectives among `ranks` neighbours: levels of a cluster from the inside out, the last one for all beyond."""

    name: str
    ranks: int
    bandwidth: float  # bytes/s that one rank sends and receives
    latency: float  # s of one collective
    coded: float = 0.0  # bytes/s of 16-bit numbers that travel as codes of 8 bits; 0: not measured

    def numbers_per_s(self, width: float, *, is_coded: bool) -> float:
        """Return how many numbers of `width` bytes one rank sends in a second, plain or coded. Coding is free in a
        profile that has no measured rate of codes."""
        if is_coded:
            return self.coded / 2 if self.coded else max(self.bandwidth, LEAST_BANDWIDTH) / CODE_BYTES
        return max(self.bandwidth, LEAST_BANDWIDTH) / width


@dataclass(frozen=True)
class MachineProfile:
    """Describes the machine of one rank for the planner."""

    name: str  # of the device and the processor; what a cached profile is checked against
    device: str
    matrix: Mapping[str, float]  # FLOP/s of large matrix products, by dtype: "bfloat16", "float32"
    resident_ns: float  # ns to update one parameter where it rests on the device
    free: Mapping[str, int]  # bytes, by tier: device, host, disk
    processor: Processor
    link: Link | None  # None: the device is the processor
    disk: DiskRates | None = None
    wires: tuple[Wire, ...] = ()
    ranks_per_node: int = 1
    achieved: float = 0.65  # of the matrix rate, in training
    versions: Mapping[str, str] = field(default_factory=dict)
    measured: str = ""  # date; empty: written by hand

    def __post_init__(self) -> None:
        for name, table in (("matrix", self.matrix), ("processor.update_ns", self.processor.update_ns)):
            if not table:
                raise PrepareError(f"machine profile: {name} is {table!r}, but must have fields")
        for name, value in _leaves("", asdict(self)):
            is_number = isinstance(value, int | float)
            if is_number and not (math.isfinite(value) and value >= 0):
                raise PrepareError(f"machine profile: {name} is {value!r}; rates, times and bytes are numbers >= 0")
            if DIVISORS.fullmatch(name) and not (is_number and value):
                raise PrepareError(f"machine profile: {name} is {value!r}, but must be a number above 0")

    def to_json(self) -> str:
        """Return the profile as JSON, which `from_json` reads."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "machine profile") -> Self:
        """Read a profile from JSON; an error names the field that is missing, unknown or invalid."""
        data = decode(text, dict[str, Any], what=source, error=PrepareError, remedy=REMEDY)
        return convert(_whole(data), cls, what=source, error=PrepareError, remedy=REMEDY, refuse_unknown=True)


def _whole(value: Any) -> Any:
    """Return JSON with integers in place of floats without a fraction: people write bytes as 80e9."""
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping | tuple):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(f"{name}.{key}".lstrip("."), part)
    else:
        yield name, value


# -- models --


@dataclass(frozen=True)
class GroupProfile:
    """One group, whole: what a rank holds of it follows from the stage."""

    name: str
    trained: int  # parameters that are updated
    frozen: int = 0  # parameters that are not
    forward_flops: float = 0.0  # of one sample; backward takes twice that
    kept_bytes: float = 0.0  # of activations that one sample leaves for backward
    boundary_bytes: float = 0.0  # of them when the group is recomputed: its inputs
    peak_bytes: float = 0.0  # most that one sample needs beside what is kept, while the group runs
    inside_bytes: float | None = None  # the same while it is recomputed, if measured; None: all it keeps, and the peak
    passing_bytes: float = 0.0  # of the latter: inputs of groups on their way to the host, where those are sent
    stays: bool = False  # its activations are kept, whatever others do with theirs
    again_flops: float | None = None  # when it is recomputed, up to the last tensor that is saved; None: all
    forward_part: float | None = None  # of the model's `forward_s`, as it was timed; None: by its operations
    backward_part: float | None = None  # of its `backward_s`

    def scaled(self, kept: float, peak: float) -> GroupProfile:
        """Return the same with this many times the activations, kept and beside them."""
        return replace(
            self,
            kept_bytes=kept * self.kept_bytes,
            boundary_bytes=kept * self.boundary_bytes,
            peak_bytes=peak * self.peak_bytes,
        )


@dataclass(frozen=True)
class ModelProfile:
    """A model and how it is to be trained."""

    name: str
    groups: tuple[GroupProfile, ...]
    parameter_bytes: int = 2  # of one parameter, as it computes
    gradient_bytes: int = 2  # of one gradient, as it rests when a step is one pass
    state_bytes: float = 12  # of one parameter's master and optimizer states
    master_bytes: int = 0  # more off the device, where a parameter on it is its own master
    shared_bytes: int = 0  # of `state_bytes`: the half of a split master that is the parameter, where it is at hand
    codes: frozenset[str] = frozenset()  # of CODABLE: what is kept or sent as codes
    dtype: str = "bfloat16"  # of the matrix products
    samples: int | None = None  # in one pass on one rank; None: not known, so neither is the time to compute
    recomputed: float = 0.0  # of forward, by the model itself: what it keeps is in the groups already
    forward_s: float | None = None  # of one pass, if measured
    backward_s: float | None = None
    activation_bytes: int | None = None  # on the device at most, beside model state, if measured
    launches: float = 0.0  # part of forward in which the host launches kernels; 1: the device waits for launches

    @property
    def trained(self) -> int:
        return sum(group.trained for group in self.groups)

    @property
    def is_coded(self) -> bool:
        """Whether `state_bytes` are those of Adam's moments as codes."""
        return STATES in self.codes

    @property
    def numel(self) -> int:
        return sum(group.trained + group.frozen for group in self.groups)

    @property
    def knows_time(self) -> bool:
        return self.samples is not None or self.forward_s is not None

    def activations(self) -> int:
        """Return the bytes of activations on one rank at their peak, measured or estimated; 0 without samples."""
        return int(self._estimate()) if self.activation_bytes is None else self.activation_bytes

    def with_codes(self) -> ModelProfile:
        """Return the same with Adam's moments as codes of 8 bits."""
        return replace(self, state_bytes=self.state_bytes - MOMENT_BYTES + CODED_BYTES, codes=self.codes | {STATES})

    def with_coded_wires(self) -> ModelProfile:
        """Return the same with parameters and gradients that travel as codes of 8 bits."""
        return replace(self, codes=self.codes | {WIRES})

    def with_twice_the_samples(self) -> ModelProfile:
        known = {name: getattr(self, name) for name in OF_A_PASS}
        doubled = {name: 2 * value for name, value in known.items() if value is not None}
        return replace(self, **doubled, launches=self.launches / 2)

    @cached_property
    def knows_activations(self) -> bool:
        """Whether the activations that each group keeps are known."""
        return self.samples is not None and any(group.kept_bytes for group in self.groups)

    def in_dtypes_of(self, other: ModelProfile) -> ModelProfile:
        """Return the same with the dtypes of another model; activations take as many times the bytes as parameters."""
        times = other.parameter_bytes / self.parameter_bytes
        return replace(self.scaled(times), **{name: getattr(other, name) for name in DTYPES})

    def scaled(self, times: float) -> ModelProfile:
        """Return the same with activations `times` as large."""
        return replace(self, groups=tuple(group.scaled(times, times) for group in self.groups))

    @cached_property
    def measured_groups(self) -> tuple[GroupProfile, ...]:
        """The groups with activations that add up to what was measured. Bytes above the estimate are needed for a
        moment only: kept bytes were counted, but the working memory of an operation was not."""
        estimate = self._estimate()
        measured = self.activation_bytes
        if measured is None or not estimate:
            return self.groups
        most = (self.samples or 0) * max(group.peak_bytes for group in self.groups)
        kept = measured / estimate
        peak = kept
        if measured > estimate and most:
            kept = 1.0
            peak = 1 + (measured - estimate) / most
        return tuple(group.scaled(kept, peak) for group in self.groups)

    def _estimate(self) -> float:
        if self.samples is None:
            return 0.0
        kept = sum(group.kept_bytes for group in self.groups)
        return self.samples * (kept + max((group.peak_bytes for group in self.groups), default=0))
