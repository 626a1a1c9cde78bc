"""Run directories: their format as types, and how they are read.

docs/run-directory.md is the same in words. `recording` writes lines of these types; `read_run` returns them as a `Run`,
from which report, trace and scalars are made. A null field counts as left out. Lines that cannot be read are left out,
counted and named in the run's notices.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from msgspec import Meta, Struct

from zerostd.errors import StorageError
from zerostd.monitoring.decoding import convert, read_document
from zerostd.policy import Kind, Tier

FORMAT = 1  # of run directories; docs/run-directory.md
RANK_FILE = re.compile(r"rank-(0|[1-9][0-9]{0,6})\.jsonl")
MOST_NAMED = 5  # lines, ranks or kinds in a notice
LONGEST_TEXT = 2000  # characters; longer texts are cut
LONGEST_REASON = 200  # characters
LONGEST_LINE = 16 * 2**20  # bytes; the rest of a longer one is a line of its own, which cannot be read

AnyLine = TypeVar("AnyLine", bound=Struct)
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
    retries: dict[str, Count] = {}  # reads and writes of files that were made again so far, by verb and reason
    coded: dict[str, tuple[Count, Count]] = {}  # by kind of state: bytes of the numbers, and of their codes
    unpacking: Amount = 0.0  # seconds of processor time until then


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
    """The fields of run.json. The reader of `plan` checks it."""

    format: int
    zerostd: str = ""
    begun: str = ""
    world_size: Annotated[int, Meta(ge=1, le=2**20)]
    command: str = ""
    model: Named = Named()
    machine: Named = Named()
    settings: dict[str, Any] = {}
    plan: Any = None


@dataclass
class RankLog:
    """The lines of one rank by kind, in the order they were written."""

    rank: int
    lines: dict[type[Struct], list[Any]] = field(default_factory=dict)
    num_lines: int = 0
    is_torn: bool = False  # the last line is not whole
    num_unreadable: int = 0
    unreadable: list[str] = field(default_factory=list)  # the first of them, with file, line and reason
    unknown: Counter[str] = field(default_factory=Counter)  # lines by kinds of other versions
    num_repeated: int = 0  # steps that were written twice
    has_ended: bool = False  # the run ended by itself on this rank, after its last step

    def of(self, kind: type[AnyLine]) -> list[AnyLine]:
        """Return all lines of one kind."""
        return self.lines.get(kind, [])

    def seconds(self, kind: str) -> list[SecondsLine]:
        """Return the lines that are "waiting" or "busy"."""
        return [line for line in self.of(SecondsLine) if line.kind == kind]


@dataclass(frozen=True)
class Run:
    """A run as it was read; `notices` are what its reader should know about the files."""

    name: str
    info: RunInfo
    ranks: tuple[RankLog, ...]
    notices: tuple[str, ...] = ()


def read_run(path: str | Path, name: str | None = None) -> Run:
    """Read a run directory.

    Args:
        path: The directory.
        name: What the run is called; None: as its directory.

    Raises:
        StorageError: There is no directory, no run.json, no file of any rank, or run.json cannot be read or has a newer
            format. The message names the file and the remedy.
    """
    directory = Path(path)
    file = directory / "run.json"
    if not directory.is_dir():
        raise StorageError(f"{directory} is not a directory; name one that holds a run.json")
    try:
        if not file.exists():
            raise StorageError(f"{directory} holds no run.json, so it is not a run directory; name one that does")
        info = parse_run_info(read_document(file, what=str(file), error=StorageError), str(file))
        matches = [(RANK_FILE.fullmatch(file.name), file) for file in directory.iterdir()]
        files = sorted((int(match[1]), file) for match, file in matches if match)
        logs = tuple(_read_rank(rank, file) for rank, file in files)
    except OSError as error:
        raise StorageError(f"{error.filename or directory} cannot be read: {error.strerror}") from error
    if not logs:
        raise StorageError(
            f"{directory} holds a run.json, but no rank-0.jsonl: nothing was recorded, or the files of the ranks are "
            "elsewhere; put them into the directory"
        )
    return Run(tidy_text(name or directory.resolve().name) or "run", info, logs, tuple(_notices(info.world_size, logs)))


def _read_rank(rank: int, file: Path) -> RankLog:
    log = RankLog(rank)
    if not file.is_file():  # a pipe or a device may never end
        raise StorageError(f"{file} is not a regular file; put the file that the rank wrote there")
    with file.open("rb") as lines:
        for number, text in enumerate(iter(lambda: lines.readline(LONGEST_LINE), b""), start=1):
            if not text.strip():
                continue
            log.num_lines += 1
            try:
                line = parse_line(text, f"{file.name}:{number}")
            except StorageError as error:
                if not text.endswith(b"\n"):
                    log.is_torn = True
                    continue
                log.num_unreadable += 1
                if len(log.unreadable) < MOST_NAMED:
                    log.unreadable.append(tidy_text(str(error), LONGEST_REASON))
                continue
            if isinstance(line, str):
                log.unknown[line] += 1
            else:
                log.lines.setdefault(type(line), []).append(line)
                log.has_ended = (log.has_ended and not isinstance(line, StepLine)) or isinstance(line, EndLine)
    steps = log.of(StepLine)
    last = {step.step: step for step in steps}
    log.num_repeated = len(steps) - len(last)
    log.lines[StepLine] = sorted(last.values(), key=lambda step: step.step)
    return log


def _notices(world_size: int, logs: tuple[RankLog, ...]) -> Iterator[str]:
    """Yield what the reader should know about ranks and lines, a sentence each."""
    there = {log.rank for log in logs}
    if missing := [rank for rank in range(world_size) if rank not in there]:
        yield (
            f"{_ranks_are(missing)} missing of {world_size}: sums over ranks, such as samples per second, include only "
            "those that are here."
        )
    if beyond := sorted(rank for rank in there if rank >= world_size):
        yield f"{_ranks_are(beyond)} here, but run.json says there were {world_size}."
    if not any(log.of(StepLine) for log in logs):
        yield "No step was recorded."
    if going_on := [log.rank for log in logs if not log.has_ended]:
        who = "" if len(going_on) == len(logs) else f" ({_ranks_are(going_on)} without an end)"
        yield f"The run is partial: it is still running, or was killed{who}."
    if torn := [log.rank for log in logs if log.is_torn]:
        files = "file" if len(torn) == 1 else "files"
        yield f"An incomplete last line was left out of {len(torn)} {files} (rank {_first_of(torn)})."
    if num_unreadable := sum(log.num_unreadable for log in logs):
        what = "line cannot be read and was" if num_unreadable == 1 else "lines cannot be read and were"
        named = [text for log in logs for text in log.unreadable][:MOST_NAMED]
        rest = f" and {num_unreadable - len(named):,} more" if num_unreadable > len(named) else ""
        yield f"{num_unreadable:,} {what} left out: {'; '.join(named)}{rest}."
    if unknown := sum((log.unknown for log in logs), Counter[str]()):
        kinds = ", ".join(f"{kind or '(no name)'} ({count:,})" for kind, count in unknown.most_common(MOST_NAMED))
        yield f"Lines of kinds that this version does not know were left out: {kinds}."
    if num_repeated := sum(log.num_repeated for log in logs):
        steps = "1 step was" if num_repeated == 1 else f"{num_repeated:,} steps were"
        yield f"{steps} written more than once; the last line counts."


def _ranks_are(ranks: Sequence[int]) -> str:
    return f"Rank {ranks[0]} is" if len(ranks) == 1 else f"Ranks {_first_of(ranks)} are"


def _first_of(numbers: Sequence[int]) -> str:
    rest = len(numbers) - MOST_NAMED
    return ", ".join(map(str, numbers[:MOST_NAMED])) + (f" and {rest:,} more" if rest > 0 else "")


# -- JSON --


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
        raise StorageError(f"{what}: kind is {kind!r}, but must be a string")
    if kind not in KINDS:
        return kind
    line = convert(fields, KINDS[kind], what=what, error=StorageError)
    if isinstance(line, StepLine | EventLine) and line.end < line.start:
        raise StorageError(f"{what}: it ends at {line.end}, before it starts at {line.start}")
    return line


def parse_run_info(text: bytes, what: str) -> RunInfo:
    """Return what run.json holds; another format is refused."""
    fields = parse_object(text, what)
    number = fields.get("format")
    if isinstance(number, int) and number > FORMAT:
        raise StorageError(
            f"{what} has format {number}, but this zerostd reads up to {FORMAT}; use the version that wrote it"
        )
    if number != FORMAT or isinstance(number, bool):
        raise StorageError(f"{what}: format is {tidy_text(repr(number))}, but must be {FORMAT}; record the run again")
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
