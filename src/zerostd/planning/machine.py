"""What a machine can do, as plain data: rates of its links and processors, and what is free of each tier.

Measured by `measuring`, or written by hand for a machine that is elsewhere: a profile is JSON both ways. Rates are in
bytes or operations per second, times in seconds.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, Self

from zerostd.errors import PrepareError

__all__ = ["DiskRates", "Link", "MachineProfile", "Processor", "Wire"]


@dataclass(frozen=True)
class Link:
    """Between host and device."""

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
        """Nanoseconds for one parameter with this many threads; between measured numbers by interpolation of rates."""
        known = sorted(self.update_ns.items())
        if num_threads <= known[0][0]:
            return known[0][1] * known[0][0] / max(1, num_threads)
        for (low, slow), (high, fast) in pairwise(known):
            if num_threads <= high:
                part = (num_threads - low) / (high - low)
                return 1.0 / ((1.0 - part) / slow + part / fast)
        return known[-1][1]

    def at_pace(self, pace: float) -> Processor:
        """The same with this part of its rates, while others use it too."""
        slower = {num_threads: ns / pace for num_threads, ns in self.update_ns.items()}
        return replace(self, update_ns=slower, memory=self.memory * pace)


@dataclass(frozen=True)
class DiskRates:
    """One directory's file system."""

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
        for what, value in _numbers("", asdict(self)):
            if not (math.isfinite(value) and value >= 0):
                raise PrepareError(f"machine profile: {what} is {value!r}; rates, times and bytes are numbers >= 0")
        for name, table in (("matrix", self.matrix), ("processor.update_ns", self.processor.update_ns)):
            if not table:
                raise PrepareError(f"machine profile: {name} is {table!r}, and must have fields")
        for what, value in self._rates():
            if not isinstance(value, int | float) or not value > 0:
                raise PrepareError(f"machine profile: {what} is {value!r}, and must be a number above 0")

    def _rates(self) -> Iterator[tuple[str, Any]]:
        """What time is divided by, by name."""
        processor = self.processor
        yield from (("processor.num_cores", processor.num_cores), ("processor.memory", processor.memory))
        yield from ((f"processor.update_ns.{threads}", ns) for threads, ns in processor.update_ns.items())
        yield from (("ranks_per_node", self.ranks_per_node), ("achieved", self.achieved))
        yield from ((f"matrix.{dtype}", rate) for dtype, rate in self.matrix.items())
        for name, rates in (("link", ("up", "down", "both")), ("disk", ("read", "write", "both"))):
            if (part := getattr(self, name)) is not None:
                yield from ((f"{name}.{rate}", getattr(part, rate)) for rate in rates)
        for index, wire in enumerate(self.wires):
            yield from ((f"wires.{index}.ranks", wire.ranks), (f"wires.{index}.bandwidth", wire.bandwidth))

    def to_json(self) -> str:
        """As text that from_json takes."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "machine profile") -> Self:
        """The counterpart of to_json; an error names the field that is missing, unknown or not what it must be."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PrepareError(f"{source} is not JSON ({error}); measure again with `zerostd measure`") from error
        try:
            made = dict(data)
            made["processor"] = _make(Processor, data["processor"], "processor.")
            made["link"] = None if data.get("link") is None else _make(Link, data["link"], "link.")
            made["disk"] = None if data.get("disk") is None else _make(DiskRates, data["disk"], "disk.")
            wires = _checked(data.get("wires", ()), list | tuple, "wires", "be a list")
            made["wires"] = tuple(_make(Wire, wire, f"wires.{place}.") for place, wire in enumerate(wires))
            profile: Self = _make(cls, made, "")
            return profile
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PrepareError(f"{source}: {error}; measure again with `zerostd measure`, or correct it") from error


def _make(kind: type[Any], data: Mapping[str, Any], where: str) -> Any:
    """One part of a profile. An error names the field that is unknown or of another type."""
    known = {one.name: str(one.type) for one in fields(kind)}
    made = {}
    for name, value in _checked(data, Mapping, where.rstrip(".") or kind.__name__, "have fields").items():
        if name not in known:
            raise ValueError(f"{kind.__name__} has no field {name!r}")
        table = re.fullmatch(r"Mapping\[(\w+), (\w+)\]", known[name])
        if table is not None:
            items = _checked(value, Mapping, where + name, "have fields").items()
            if table[1] == "int" and not all(str(key).isdecimal() for key, _ in items):
                raise ValueError(f"{where}{name} is {value!r}, and its fields must be whole numbers")
            convert = int if table[1] == "int" else str
            value = {convert(key): _one(one, table[2], f"{where}{name}.{key}") for key, one in items}
        made[name] = _one(value, known[name], where + name)
    return kind(**made)


def _one(value: Any, kind: str, where: str) -> Any:
    """A value of a field of this type; of those that are not in here, any."""
    if kind == "float":
        return _checked(value, int | float, where, "be a number")
    if kind == "int":
        is_whole = isinstance(value, float) and value.is_integer()  # 80e9
        return int(_checked(int(value) if is_whole else value, int, where, "be a whole number"))
    return _checked(value, str, where, "be a text") if kind == "str" else value


def _checked(value: Any, kind: Any, where: str, what: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(f"{where} is {value!r}, and must {what}")
    return value


def _numbers(what: str, value: Any) -> list[tuple[str, float]]:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return []
    if isinstance(value, int | float):
        return [(what, float(value))]
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    return [found for key, part in items for found in _numbers(f"{what}.{key}".lstrip("."), part)]
