"""One line of a rank's file, checked. What is not as docs/run-directory.md says is a ValueError with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zerostd.policy import Kind, Tier

__all__ = [
    "Bytes",
    "Ended",
    "Event",
    "Fields",
    "Held",
    "Leak",
    "Quality",
    "Record",
    "Replanned",
    "Seconds",
    "Step",
    "UnknownKind",
    "parse_json",
    "parse_line",
    "tidy_text",
]

MOST = 2**63  # above it no count and no number of bytes is meant
LARGEST = 1e15  # seconds, samples and tokens; sums of them stay finite
LONGEST_TEXT = 2000  # characters; what is longer is cut

Bytes = Mapping[Tier, Mapping[Kind, int]]


class UnknownKind(ValueError):
    """A line that is whole, of a kind that this version does not know."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank."""

    step: int
    start: float
    end: float
    loss: float | None  # may be nan or inf
    samples: float | None  # of this rank
    tokens: float | None
    grad_norm: float | None
    lr: float | None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes at one moment, and the most there were of each kind since the run, or its last plan, began."""

    step: int
    time: float
    bytes: Bytes
    peak: Bytes
    allocated: int | None  # by the device's allocator
    reserved: int | None
    most_allocated: int | None  # until then


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took from `start` to `end` on one lane."""

    step: int
    name: str
    group: str
    lane: str
    tier: str
    to: str
    bytes: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of one step by name: what the loop waited for, or what was busy."""

    kind: str  # "waiting" or "busy"
    step: int
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Quality:
    """A number that says how good the model is."""

    step: int
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Leak:
    """Bytes that should have been given back."""

    step: int
    group: str
    what: str
    bytes: int
    where: str


@dataclass(frozen=True, slots=True)
class Replanned:
    """Another plan, in force from this step on."""

    step: int
    reason: str
    plan: Any


@dataclass(frozen=True, slots=True)
class Ended:
    """The run ended by itself."""

    time: float


Record = Step | Held | Event | Seconds | Quality | Leak | Replanned | Ended


@dataclass(frozen=True)
class Fields:
    """The fields of one object; a ValueError names the one that is wrong."""

    data: Mapping[str, Any]

    def number(self, name: str) -> float:
        """A finite number, 0 or more."""
        value = self.maybe(name)
        if value is None or not 0 <= value <= LARGEST:  # nan is not
            raise ValueError(f"{name} is {_short(self.data.get(name))}, and must be a number, 0 to {LARGEST:g}")
        return value

    def moment(self, name: str) -> float:
        """A time; clocks of ranks and devices may be a little ahead of the run's beginning."""
        value = self.maybe(name)
        if value is None or not -LARGEST <= value <= LARGEST:  # nan is not
            raise ValueError(f"{name} is {_short(self.data.get(name))}, and must be a time")
        return value

    def maybe(self, name: str) -> float | None:
        """Any number, nan and inf too; None where it is null or missing."""
        value = self.data.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or (isinstance(value, int) and value > MOST):
            raise ValueError(f"{name} is {_short(value)}, and must be a number")
        return float(value)

    def count(self, name: str) -> float | None:
        """A number, 0 or more; None where it is null or missing."""
        return None if self.data.get(name) is None else self.number(name)

    def whole(self, name: str, otherwise: int | None = None) -> int:
        """A whole number, 0 or more; `otherwise` where it is null or missing."""
        value = self.data.get(name)
        if value is None and otherwise is not None:
            return otherwise
        return _whole(value, name)

    def text(self, name: str) -> str:
        """A text in one line; "" where it is null or missing."""
        value = self.data.get(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise ValueError(f"{name} is {_short(value)}, and must be a text")
        return tidy_text(value)

    def table(self, name: str) -> Mapping[str, Any]:
        """An object; empty where it is null or missing."""
        value = self.data.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise ValueError(f"{name} is {_short(value)}, and must be an object")
        return value

    def bytes(self, name: str) -> Bytes:
        """Bytes by tier and kind."""
        return {
            _word(Tier, tier, name): {
                _word(Kind, kind, name): _whole(size, f"{name}, {tier}, {kind}") for kind, size in row.items()
            }
            for tier, row in ((tier, Fields(self.table(name)).table(tier)) for tier in self.table(name))
        }

    def seconds(self, name: str) -> Mapping[str, float]:
        """Seconds by name."""
        table = Fields(self.table(name))
        return {tidy_text(key): table.number(key) for key in table.data}

    def span(self) -> tuple[float, float]:
        """Start and end, in this order."""
        start, end = self.moment("start"), self.moment("end")
        if end < start:
            raise ValueError(f"it ends at {end} and starts at {start}")
        return start, end


def parse_json(line: bytes) -> Any:
    """A value from JSON; a ValueError in one line otherwise."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise ValueError("no JSON: nested too deeply") from error


def parse_line(line: bytes) -> Record:
    """A record; UnknownKind or another ValueError says what is wrong."""
    data = parse_json(line)
    if not isinstance(data, dict):
        raise ValueError(f"it is {_short(data)}, and must be an object")
    kind = data.get("kind")
    if not isinstance(kind, str):
        raise ValueError(f"kind is {_short(kind)}, and must be a text")
    if kind not in KINDS:
        raise UnknownKind(tidy_text(kind))
    return KINDS[kind](Fields(data))


def tidy_text(text: str) -> str:
    """In one line, printable, and not endless."""
    line = " ".join(text[: 2 * LONGEST_TEXT].split())
    line = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line)
    return line if len(line) <= LONGEST_TEXT else line[: LONGEST_TEXT - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _step(fields: Fields) -> Step:
    start, end = fields.span()
    samples, tokens = fields.count("samples"), fields.count("tokens")
    loss, norm, rate = (fields.maybe(name) for name in ("loss", "grad_norm", "lr"))
    return Step(fields.whole("step"), start, end, loss, samples, tokens, norm, rate)


def _held(fields: Fields) -> Held:
    names = ("allocated", "reserved", "most_allocated")
    sizes = (None if fields.data.get(name) is None else fields.whole(name) for name in names)
    now, peak = fields.bytes("bytes"), fields.bytes("peak")
    return Held(fields.whole("step"), fields.moment("time"), now, peak, *sizes)


def _event(fields: Fields) -> Event:
    name, group, lane, tier, to = (fields.text(field) for field in ("name", "group", "lane", "tier", "to"))
    if not name or not lane:
        raise ValueError("an event has no name or no lane")
    return Event(fields.whole("step"), name, group, lane, tier, to, fields.whole("bytes", 0), *fields.span())


def _seconds(fields: Fields) -> Seconds:
    return Seconds(fields.data["kind"], fields.whole("step"), fields.seconds("seconds"))


def _quality(fields: Fields) -> Quality:
    value, name = fields.maybe("value"), fields.text("name")
    if value is None or not name:
        raise ValueError("a quality has no name or no value")
    return Quality(fields.whole("step"), name, value)


def _leak(fields: Fields) -> Leak:
    group, what, where = (fields.text(field) for field in ("group", "what", "where"))
    return Leak(fields.whole("step"), group, what, fields.whole("bytes", 0), where)


def _replanned(fields: Fields) -> Replanned:
    return Replanned(fields.whole("step"), fields.text("reason"), dict(fields.table("plan")))


KINDS: dict[str, Callable[[Fields], Record]] = {
    "step": _step,
    "memory": _held,
    "event": _event,
    "waiting": _seconds,
    "busy": _seconds,
    "quality": _quality,
    "leak": _leak,
    "plan": _replanned,
    "end": lambda fields: Ended(fields.moment("time")),
}


def _whole(value: Any, name: str) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST:
        raise ValueError(f"{name} is {_short(value)}, and must be a whole number, 0 or more")
    return value


def _word(words: type[Any], value: str, name: str) -> Any:
    try:
        return words(value)
    except ValueError:
        known = ", ".join(word.value for word in words)
        raise ValueError(f"{name} has {_short(value)}, and can have {known}") from None


def _short(value: Any) -> str:
    """A value as a message shows it."""
    text = tidy_text(repr(value) if not isinstance(value, int) or abs(value) < MOST else "a number beyond 2^63")
    return text if len(text) <= 40 else text[:37] + "..."
