"""From a run directory to a `Run`: run.json, and the lines of each rank by kind.

Lines that cannot be read are left out, counted and named in the run's notices. Report, trace and scalars are made from
the `Run`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from zerostd.errors import StorageError
from zerostd.reporting.records import EndLine, RunInfo, SecondsLine, StepLine, parse_line, parse_run_info, tidy_text

MOST_NAMED = 5  # lines, ranks or kinds in a notice
LONGEST_REASON = 200  # characters
RANK_FILE = re.compile(r"rank-(0|[1-9][0-9]{0,6})\.jsonl")
AnyLine = TypeVar("AnyLine", bound=Struct)


@dataclass
class RankLog:
    """What one rank wrote, by kind, in the order it was written."""

    rank: int
    lines: dict[type[Struct], list[Any]] = field(default_factory=dict)
    num_lines: int = 0
    is_torn: bool = False  # the last line is not whole
    num_unreadable: int = 0
    unreadable: list[str] = field(default_factory=list)  # the first of them, with file, line and reason
    unknown: Counter[str] = field(default_factory=Counter)  # lines by kinds of other versions
    num_repeated: int = 0  # steps that were written twice

    def of(self, kind: type[AnyLine]) -> list[AnyLine]:
        """Return all lines of one kind."""
        return self.lines.get(kind, [])

    def seconds(self, kind: str) -> list[SecondsLine]:
        """Return the lines that are "waiting" or "busy"."""
        return [line for line in self.of(SecondsLine) if line.kind == kind]

    @property
    def has_ended(self) -> bool:
        """Whether the run ended by itself on this rank."""
        return bool(self.of(EndLine))


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
            raise StorageError(f"{directory} holds no run.json, so it is no run directory; name one that does")
        info = parse_run_info(file.read_bytes(), str(file))
        matches = [(RANK_FILE.fullmatch(file.name), file) for file in directory.iterdir()]
        files = sorted((int(match[1]), file) for match, file in matches if match)
        logs = tuple(_read_rank(rank, file) for rank, file in files)
    except OSError as error:
        raise StorageError(f"{error.filename or directory} cannot be read: {error.strerror}") from error
    if not logs:
        raise StorageError(
            f"{directory} holds a run.json and no rank-0.jsonl: nothing was recorded, or the files of the ranks are "
            "elsewhere; put them into the directory"
        )
    return Run(tidy_text(name or directory.resolve().name) or "run", info, logs, tuple(_notices(info.world_size, logs)))


def _read_rank(rank: int, file: Path) -> RankLog:
    log = RankLog(rank)
    with file.open("rb") as lines:
        for number, text in enumerate(lines, start=1):
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
    steps = log.of(StepLine)
    last = {step.step: step for step in steps}
    log.num_repeated = len(steps) - len(last)
    log.lines[StepLine] = sorted(last.values(), key=lambda step: step.step)
    return log


def _notices(world_size: int, logs: tuple[RankLog, ...]) -> Iterator[str]:
    """Yield what the reader should know about ranks and lines, a sentence each."""
    there = {log.rank for log in logs}
    missing = [rank for rank in range(world_size) if rank not in there]
    if missing:
        yield (
            f"{_ranks_are(missing)} missing of {world_size}: sums over ranks, such as samples a second, are of those "
            "that are here."
        )
    if beyond := sorted(rank for rank in there if rank >= world_size):
        yield f"{_ranks_are(beyond)} here, and run.json says there were {world_size}."
    if not any(log.of(StepLine) for log in logs):
        yield "No step was recorded."
    if going_on := [log.rank for log in logs if not log.has_ended]:
        who = "" if len(going_on) == len(logs) else f" ({_ranks_are(going_on)} without an end)"
        yield f"The run is partial: it still goes on, or was ended from outside{who}."
    if torn := [log.rank for log in logs if log.is_torn]:
        files = "file" if len(torn) == 1 else "files"
        yield f"A torn last line was left out of {len(torn)} {files} (rank {_first_of(torn)})."
    if num_unreadable := sum(log.num_unreadable for log in logs):
        lines = "line" if num_unreadable == 1 else "lines"
        named = [text for log in logs for text in log.unreadable][:MOST_NAMED]
        rest = f" and {num_unreadable - len(named):,} more" if num_unreadable > len(named) else ""
        yield f"{num_unreadable:,} {lines} cannot be read, and left out: {'; '.join(named)}{rest}."
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
