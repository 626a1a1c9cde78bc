"""The format of run directories as types: what run.json and the lines of a rank's file hold.

`recording` writes these types and `reading` returns them; docs/run-directory.md is the same in words. A null is the
same as a field that is left out. Where something is wrong, StorageError names the place, the field and its value.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, Struct

from zerostd.errors import StorageError
from zerostd.monitoring.decoding import convert
from zerostd.policy import Kind, Tier

FORMAT = 1  # of run directories; docs/run-directory.md
MOST_RANKS = 2**20
LONGEST_TEXT = 2000  # characters; longer texts are cut

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Amount = Annotated[float, Meta(ge=0, le=1e15)]  # seconds, samples, tokens; sums of them stay finite
Moment = Annotated[float, Meta(ge=-1e15, le=1e15)]  # seconds since the run began; clocks may be a little ahead of it
Name = Annotated[str, Meta(min_length=1)]
TierName = Annotated[str, Meta(pattern=f"^({'|'.join(Tier)})$")]
KindName = Annotated[str, Meta(pattern=f"^({'|'.join(Kind)})$")]
Bytes = dict[TierName, dict[KindName, Count]]


class StepLine(Struct, tag_field="kind", tag="step"):
    """One step. Numbers of all lines are of the rank that writes them."""

    step: Count
    start: Moment
    end: Moment
    loss: float | None = None  # may be nan or inf
    samples: Amount | None = None
    tokens: Amount | None = None
    grad_norm: float | None = None
    lr: float | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


class MemoryLine(Struct, tag_field="kind", tag="memory"):
    """Bytes at one moment, and the peak of each kind since the model was prepared."""

    step: Count
    time: Moment
    bytes: Bytes = {}
    peak: Bytes = {}
    allocated: Count | None = None  # by the device's allocator
    most_allocated: Count | None = None  # until then
    reserved: Count | None = None


class EventLine(Struct, tag_field="kind", tag="event"):
    """Something that took from `start` to `end` on one lane."""

    step: Count
    name: Name
    lane: Name
    start: Moment
    end: Moment
    group: str = ""
    tier: str | None = None  # a transfer goes from `tier` to `to`
    to: str | None = None
    bytes: Count = 0
    cause: str | None = None  # of a wait


class SecondsLine(Struct):
    """Seconds of one step by name: by cause for which the loop waited, or by resource that was busy."""

    kind: Literal["waiting", "busy"]
    step: Count
    seconds: dict[str, Amount] = {}


class QualityLine(Struct, tag_field="kind", tag="quality"):
    step: Count
    name: Name  # of a number that says how good the model is
    value: float


class LeakLine(Struct, tag_field="kind", tag="leak"):
    """Bytes that should have been given back."""

    step: Count
    group: str = ""
    what: str = ""
    tier: str | None = None
    bytes: Count = 0
    where: str = ""


class PlanLine(Struct, tag_field="kind", tag="plan"):
    """A new plan, in force from this step on."""

    step: Count
    plan: dict[str, Any]
    reason: str = ""


class EndLine(Struct, tag_field="kind", tag="end"):
    time: Moment  # the run ended by itself


Line = StepLine | MemoryLine | EventLine | SecondsLine | QualityLine | LeakLine | PlanLine | EndLine  # of a rank's file
KINDS: dict[str, type[Line]] = {line.__struct_config__.tag: line for line in get_args(Line) if line is not SecondsLine}
KINDS |= {"waiting": SecondsLine, "busy": SecondsLine}


class Named(Struct, frozen=True, omit_defaults=True):
    """A model or a machine."""

    name: str = ""
    parameters: Count | None = None  # of a model


class RunInfo(Struct, frozen=True, kw_only=True):
    """What run.json holds. `plan` is checked by whoever reads it."""

    format: int
    zerostd: str = ""
    begun: str = ""
    world_size: Annotated[int, Meta(ge=1, le=MOST_RANKS)]
    command: str = ""
    model: Named = Named()
    machine: Named = Named()
    settings: dict[str, Any] = {}
    plan: Any = None


def parse_object(text: bytes, what: str, *, parse_float: Callable[[str], float] = float) -> dict[str, Any]:
    """Return a JSON object with tidy texts and without the fields that are null; `what` names it in errors."""
    try:
        value = json.loads(text.decode("utf-8"), object_hook=_tidy_texts, parse_float=parse_float)
    except UnicodeDecodeError as error:
        raise StorageError(f"{what}: byte {error.start} is not UTF-8") from error
    except (ValueError, RecursionError) as error:  # also an integer of thousands of digits
        problem = "nested too deeply" if isinstance(error, RecursionError) else error
        raise StorageError(f"{what} is not JSON ({problem})") from error
    if not isinstance(value, dict):
        raise StorageError(f"{what} is not a JSON object")
    return {name: field for name, field in value.items() if field is not None}


def parse_line(text: bytes, what: str) -> Line | str:
    """Return a line of a rank's file, or its kind if that is unknown to this version."""
    fields = parse_object(text, what, parse_float=_int_or_float)
    kind = fields.get("kind")
    if not isinstance(kind, str):
        raise StorageError(f"{what}: kind is {kind!r}, and must be a text")
    if kind not in KINDS:
        return kind
    line = convert(fields, KINDS[kind], what=what, error=StorageError)
    if isinstance(line, StepLine | EventLine) and line.end < line.start:
        raise StorageError(f"{what}: it ends at {line.end} and starts at {line.start}")
    return line


def parse_run_info(text: bytes, what: str) -> RunInfo:
    """Return what run.json holds; another format is refused."""
    fields = parse_object(text, what)
    number = fields.get("format")
    if isinstance(number, int) and number > FORMAT:
        raise StorageError(
            f"{what} has format {number}, and this zerostd reads up to {FORMAT}; use the version that wrote it"
        )
    if number != FORMAT or isinstance(number, bool):
        raise StorageError(f"{what}: format is {tidy_text(repr(number))}, and must be {FORMAT}; record the run again")
    return convert(fields, RunInfo, what=what, error=StorageError, remedy="correct it")


def tidy_text(text: str, longest: int = LONGEST_TEXT) -> str:
    """Return a text as one printable line of at most `longest` characters."""
    line = " ".join(text[: 2 * longest].split())
    line = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line)
    return line if len(line) <= longest else line[: longest - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _tidy_texts(fields: dict[str, Any]) -> dict[str, Any]:
    return {tidy_text(name): tidy_text(value) if isinstance(value, str) else value for name, value in fields.items()}


def _int_or_float(text: str) -> float:
    """Return a number from JSON; some writers put counts down as 8.0."""
    number = float(text)
    return int(number) if number.is_integer() else number
