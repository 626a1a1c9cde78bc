"""A run directory, read: run.json, and a file for each rank. Damaged lines are left out, counted and named."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from zerostd.errors import StorageError
from zerostd.reporting.records import (
    Ended,
    Fields,
    Record,
    Seconds,
    Step,
    UnknownKind,
    parse_json,
    parse_line,
    tidy_text,
)

__all__ = ["FORMAT", "About", "RankLog", "Run", "numbers_text", "read_run"]

FORMAT = 1  # of run directories; docs/run-directory.md
MOST_RANKS = 2**20
MOST_NAMED = 5  # lines, ranks or kinds in a notice
RANK_FILE = re.compile(r"rank-(0|[1-9][0-9]{0,6})\.jsonl")
Kept = TypeVar("Kept", bound=Record)


@dataclass(frozen=True)
class About:
    """What run.json says. `plan` is as it was written, and not checked yet."""

    name: str
    world_size: int
    zerostd: str = ""
    begun: str = ""
    command: str = ""
    model: str = ""
    parameters: int | None = None
    machine: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    plan: Any = None


@dataclass
class RankLog:
    """What one rank wrote, by kind, in the order it was written."""

    rank: int
    records: dict[type[Any], list[Any]] = field(default_factory=dict)
    num_lines: int = 0
    is_torn: bool = False  # the last line is not whole
    num_unreadable: int = 0
    unreadable: list[str] = field(default_factory=list)  # the first of them, with file, line and reason
    unknown: Counter[str] = field(default_factory=Counter)  # lines by kinds of other versions
    num_repeated: int = 0  # steps that were written twice

    def of(self, kind: type[Kept]) -> list[Kept]:
        """All records of one kind."""
        return self.records.get(kind, [])

    def seconds(self, kind: str) -> list[Seconds]:
        """Those that are "waiting" or "busy"."""
        return [one for one in self.of(Seconds) if one.kind == kind]

    @property
    def has_ended(self) -> bool:
        """The run ended by itself on this rank."""
        return bool(self.of(Ended))


@dataclass(frozen=True)
class Run:
    """A run as it was read; `notices` is what its reader should know about the files."""

    about: About
    ranks: tuple[RankLog, ...]
    notices: tuple[str, ...] = ()

    @property
    def num_steps(self) -> int:
        """Steps that any rank has."""
        return len({step.step for log in self.ranks for step in log.of(Step)})


def read_run(path: str | Path, name: str | None = None) -> Run:
    """Read a run directory.

    Args:
        path: The directory.
        name: What the run is called; None: as its directory.

    Raises:
        StorageError: Nothing can be said about it: no directory, no run.json or one that cannot be read, of a newer
            format, or no file of any rank. The message names the file and the remedy.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise StorageError(f"{directory} is not a directory; name one that holds a run.json")
    about = _read_about(directory, tidy_text(name or directory.resolve().name) or "run")
    logs = tuple(_read_rank(file, rank) for rank, file in _rank_files(directory))
    if not logs:
        raise StorageError(
            f"{directory} holds a run.json and no rank-0.jsonl: nothing was recorded, or the files of the ranks are "
            "elsewhere; put them into the directory"
        )
    return Run(about, logs, tuple(_notices(about, logs)))


def _read_about(directory: Path, name: str) -> About:
    file = directory / "run.json"
    try:
        data = parse_json(file.read_bytes())
    except FileNotFoundError:
        raise StorageError(f"{directory} holds no run.json, so it is no run directory; name one that does") from None
    except OSError as error:
        raise StorageError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise StorageError(f"{file} cannot be read: {error}; record the run again") from error
    if not isinstance(data, dict):
        raise StorageError(f"{file} holds no object; record the run again")
    number = data.get("format")
    if isinstance(number, int) and number > FORMAT:
        raise StorageError(
            f"{file} has format {number}, and this zerostd reads up to {FORMAT}; use the one that wrote it"
        )
    if number != FORMAT or isinstance(number, bool):
        raise StorageError(f"{file}: format is {tidy_text(repr(number))}, and must be {FORMAT}; record the run again")
    try:
        return _about(Fields(data), name)
    except ValueError as error:
        raise StorageError(f"{file} cannot be read: {error}; correct it") from error


def _about(fields: Fields, name: str) -> About:
    model, machine = Fields(fields.table("model")), Fields(fields.table("machine"))
    size = fields.whole("world_size")
    if not 1 <= size <= MOST_RANKS:
        raise ValueError(f"world_size is {size}, and must be 1 to {MOST_RANKS}")
    return About(
        name,
        size,
        zerostd=fields.text("zerostd"),
        begun=fields.text("begun"),
        command=fields.text("command"),
        model=model.text("name"),
        parameters=None if model.data.get("parameters") is None else model.whole("parameters"),
        machine=machine.text("name"),
        settings={tidy_text(key): _setting(value) for key, value in fields.table("settings").items()},
        plan=fields.data.get("plan"),
    )


def _setting(value: Any) -> str | int | bool | None:
    """Whole numbers, true, false and null as they are; everything else as a text."""
    if value is None or isinstance(value, bool) or (isinstance(value, int) and abs(value) < 2**53):
        return value
    return tidy_text(value if isinstance(value, str) else repr(value))


def _rank_files(directory: Path) -> Iterator[tuple[int, Path]]:
    try:
        names = [file for file in directory.iterdir() if RANK_FILE.fullmatch(file.name)]
    except OSError as error:
        raise StorageError(f"{directory} cannot be read: {error.strerror}") from error
    yield from sorted((int(RANK_FILE.fullmatch(file.name)[1]), file) for file in names)  # type: ignore[index]


def _read_rank(file: Path, rank: int) -> RankLog:
    log = RankLog(rank)
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    _take(log, line, f"{file.name}:{number}")
    except OSError as error:
        raise StorageError(f"{file} cannot be read: {error.strerror}") from error
    steps = log.of(Step)
    if steps:
        last = {step.step: step for step in steps}
        log.num_repeated = len(steps) - len(last)
        log.records[Step] = sorted(last.values(), key=lambda step: step.step)
    return log


def _take(log: RankLog, line: bytes, where: str) -> None:
    log.num_lines += 1
    try:
        record = parse_line(line)
    except UnknownKind as error:
        log.unknown[str(error)] += 1
    except ValueError as error:
        if not line.endswith(b"\n"):
            log.is_torn = True
            return
        log.num_unreadable += 1
        if len(log.unreadable) < MOST_NAMED:
            log.unreadable.append(f"{where} ({error})")
    else:
        log.records.setdefault(type(record), []).append(record)


# -- what the reader should know --


def _notices(about: About, logs: tuple[RankLog, ...]) -> Iterator[str]:
    there = {log.rank for log in logs}
    missing = about.world_size - len([rank for rank in there if rank < about.world_size])
    if missing:
        names = (rank for rank in range(about.world_size) if rank not in there)
        yield (
            f"{_of_ranks(names, missing)} missing of {about.world_size}: sums over ranks, such as samples a second, "
            "are of those that are here."
        )
    beyond = sorted(rank for rank in there if rank >= about.world_size)
    if beyond:
        yield f"{_of_ranks(beyond, len(beyond))} here, and run.json says there were {about.world_size}."
    if not any(log.of(Step) for log in logs):
        yield "No step was recorded."
    open_ranks = [log.rank for log in logs if not log.has_ended]
    if open_ranks:
        who = "" if len(open_ranks) == len(logs) else f" ({_of_ranks(open_ranks, len(open_ranks))} without an end)"
        yield f"The run is partial: it still goes on, or was ended from outside{who}."
    torn = sum(log.is_torn for log in logs)
    if torn:
        names = (log.rank for log in logs if log.is_torn)
        yield f"A torn last line was left out of {torn} {_plural('file', torn)} (rank {numbers_text(names, torn)})."
    bad = sum(log.num_unreadable for log in logs)
    if bad:
        named = [text for log in logs for text in log.unreadable][:MOST_NAMED]
        rest = f" and {bad - len(named):,} more" if bad > len(named) else ""
        yield f"{bad:,} {_plural('line', bad)} cannot be read, and left out: {'; '.join(named)}{rest}."
    unknown: Counter[str] = sum((log.unknown for log in logs), Counter())
    if unknown:
        kinds = ", ".join(f"{kind or '(no name)'} ({count:,})" for kind, count in unknown.most_common(MOST_NAMED))
        yield f"Lines of kinds that this version does not know were left out: {kinds}."
    repeated = sum(log.num_repeated for log in logs)
    if repeated:
        times = "1 step was" if repeated == 1 else f"{repeated:,} steps were"
        yield f"{times} written more than once; the last line counts."


def _of_ranks(ranks: Iterable[int], count: int) -> str:
    return f"{_plural('Rank', count)} {numbers_text(ranks, count)} {'is' if count == 1 else 'are'}"


def numbers_text(numbers: Iterable[int], count: int) -> str:
    """The first of them by number, and how many more there are."""
    named = [str(number) for number, _ in zip(numbers, range(MOST_NAMED), strict=False)]
    return ", ".join(named) + (f" and {count - len(named):,} more" if count > len(named) else "")


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
