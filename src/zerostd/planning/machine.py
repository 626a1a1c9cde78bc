"""What a machine can do, as plain data: the rates of its links and cores, and what is free of each tier.

A profile is measured by `measuring`, or written by hand for a machine that is elsewhere; it is JSON both ways. Rates
are in bytes or operations per second, times in seconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Self

from zerostd.errors import PrepareError
from zerostd.monitoring.decoding import convert, decode

REMEDY = "measure again with `zerostd measure`, or correct it"


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

    def ns(self, num_threads: int) -> float:
        """Return nanoseconds for one parameter with this many threads; rates in between are interpolated."""
        known = sorted(self.update_ns.items())
        if num_threads <= known[0][0]:
            return known[0][1] * known[0][0] / max(1, num_threads)
        for (low, slow), (high, fast) in pairwise(known):
            if num_threads <= high:
                part = (num_threads - low) / (high - low)
                return 1.0 / ((1.0 - part) / slow + part / fast)
        return known[-1][1]

    def at_pace(self, pace: float) -> Processor:
        """Return the same processor with this part of its rates, as when others use it too."""
        slower = {num_threads: ns / pace for num_threads, ns in self.update_ns.items()}
        return replace(self, update_ns=slower, memory=self.memory * pace)


@dataclass(frozen=True)
class DiskRates:
    """The file system of one directory."""

    path: str
    read: float  # bytes/s alone
    write: float  # bytes/s alone
    both: float  # bytes/s of each direction when both are busy


@dataclass(frozen=True)
class Wire:
    """Collectives among `ranks` neighbours: levels of a cluster from the inside out, the last one for all beyond."""

    name: str
    ranks: int
    bandwidth: float  # bytes/s that one rank sends and receives
    latency: float  # s of one collective


@dataclass(frozen=True)
class MachineProfile:
    """One rank's machine: what the planner knows of the hardware."""

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
        """Refuse, by name, what no plan can be made of."""
        for name, value in _numbers("", asdict(self)):
            if not (math.isfinite(value) and value >= 0):
                raise PrepareError(f"machine profile: {name} is {value!r}; rates, times and bytes are numbers >= 0")
        for name, table in (("matrix", self.matrix), ("processor.update_ns", self.processor.update_ns)):
            if not table:
                raise PrepareError(f"machine profile: {name} is {table!r}, and must have fields")
        for name, value in self._rates():
            if not isinstance(value, int | float) or not value > 0:
                raise PrepareError(f"machine profile: {name} is {value!r}, and must be a number above 0")

    def _rates(self) -> Iterator[tuple[str, Any]]:
        """Yield what time is divided by, with its name."""
        yield "processor.num_cores", self.processor.num_cores
        yield "processor.memory", self.processor.memory
        yield "ranks_per_node", self.ranks_per_node
        yield "achieved", self.achieved
        for threads, ns in self.processor.update_ns.items():
            yield f"processor.update_ns.{threads}", ns
        for dtype, rate in self.matrix.items():
            yield f"matrix.{dtype}", rate
        for name, rates in (("link", ("up", "down", "both")), ("disk", ("read", "write", "both"))):
            part = getattr(self, name)
            if part is not None:
                yield from ((f"{name}.{rate}", getattr(part, rate)) for rate in rates)
        for index, wire in enumerate(self.wires):
            yield f"wires.{index}.ranks", wire.ranks
            yield f"wires.{index}.bandwidth", wire.bandwidth

    def to_json(self) -> str:
        """Return it as text that from_json takes."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "machine profile") -> Self:
        """Read what to_json wrote; an error names the field that is missing, unknown or not what it must be."""
        data = decode(text, dict[str, Any], what=source, error=PrepareError, remedy=REMEDY)
        return convert(_whole(data), cls, what=source, error=PrepareError, remedy=REMEDY, refuse_unknown=True)


def _whole(value: Any) -> Any:
    """Return JSON with integers in place of floats without a fraction: people write bytes as 80e9."""
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield every number in a profile, with its name."""
    if isinstance(value, Mapping | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in items:
            yield from _numbers(f"{name}.{key}".lstrip("."), part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)
