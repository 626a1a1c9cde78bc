"""All ranks write one checkpoint: each its own file, rank 0 the manifest, and then it is there."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerostd.checkpointing.directory import Draft, keep_newest
from zerostd.checkpointing.files import Source, write_file
from zerostd.checkpointing.manifest import Manifest, Part, TensorEntry
from zerostd.checkpointing.progress import Progress
from zerostd.checkpointing.values import dtype_name
from zerostd.communication import Control
from zerostd.errors import CheckpointError
from zerostd.parameters.records import Record

__all__ = ["Facts", "write"]


@dataclass(frozen=True)
class Facts:
    """What goes into the manifest beside tensors. The same on all ranks but for `random` and `singles`."""

    version: str
    step: int
    stage: int
    random: Any  # of this rank's generators that are not torch's, as JSON
    originals: Mapping[str, str]  # dtypes of parameters before prepare
    names: Mapping[str, Sequence[str]]  # all names of parameters that have several
    optimizer: Mapping[str, Any] | None = None  # without singles
    singles: Mapping[str, Any] = field(default_factory=dict)  # of this rank
    loss_scale: Mapping[str, Any] | None = None
    extra: Any = None


@dataclass(frozen=True)
class _Piece:
    """A record as it was written."""

    kind: str
    of: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    part: Part


def write(target: Path, records: Sequence[Record], facts: Facts, control: Control, keep: int | None) -> None:
    """Write a checkpoint. All ranks call it, and all raise if one could not do its part."""
    draft: Draft | None = None
    try:
        if control.world.rank == 0:
            draft = Draft(target)
        begun: Any = str(draft.folder) if draft is not None else None
    except CheckpointError as error:
        begun = error
    folder = _first_or_raise(control.meet("zerostd.save()", begun))
    done: Any = None
    failed: CheckpointError | None = None
    try:
        done = _write_mine(Path(folder), records, control)
    except CheckpointError as why:
        failed = why
    brought = control.bring((done, facts.random, facts.singles, failed), "the end of zerostd.save()")
    result: Any = None
    if draft is not None:
        result = _finish(draft, brought, facts, keep)
    _first_or_raise(control.collect(result, "the end of zerostd.save()"))


def _write_mine(folder: Path, records: Sequence[Record], control: Control) -> tuple[list[_Piece], str, int]:
    world = control.world
    name = f"rank-{world.rank:05d}-of-{world.size:05d}.safetensors"
    sources = [
        Source(str(number), one.dtype, (one.stop - one.start,), one.stop - one.start, one.read)
        for number, one in enumerate(records)
    ]
    total = sum(source.numel * source.dtype.itemsize for source in sources)
    with Progress("saving", total, is_shown=world.rank == 0) as progress:
        written = write_file(folder / name, sources, progress.add)
    pieces = [
        _Piece(
            one.kind,
            one.of,
            one.state,
            dtype_name(one.dtype),
            one.shape,
            Part(one.start, one.stop, name, source.key, written.crc32[source.key]),
        )
        for one, source in zip(records, sources, strict=True)
    ]
    return pieces, name, written.num_bytes


def _finish(draft: Draft, brought: list[Any], facts: Facts, keep: int | None) -> CheckpointError | str:
    """Rank 0: the manifest, if all have written."""
    failed = [(rank, error) for rank, (_, _, _, error) in enumerate(brought) if error is not None]
    try:
        if failed:
            raise CheckpointError(f"rank {failed[0][0]}: {failed[0][1]}; nothing was saved")
        draft.commit(_manifest(brought, facts))
    except CheckpointError as error:
        draft.drop()
        return error
    if keep is not None:
        keep_newest(draft.target, keep)
    return ""


def _manifest(brought: list[Any], facts: Facts) -> Manifest:
    found: dict[tuple[str, str, str], list[_Piece]] = {}
    files: dict[str, int] = {}
    singles: dict[str, Any] = {}
    for (pieces, name, size), _, more, _ in brought:
        files[name] = size
        singles |= more
        for piece in pieces:
            found.setdefault((piece.kind, piece.of, piece.state), []).append(piece)
    return Manifest(
        zerostd=facts.version,
        saved=time.time(),
        step=facts.step,
        world_size=len(brought),
        stage=facts.stage,
        files=files,
        tensors=tuple(_entry(pieces, facts) for pieces in found.values()),
        optimizer=None if facts.optimizer is None else {**facts.optimizer, "singles": singles},
        loss_scale=facts.loss_scale,
        random={str(rank): random for rank, (_, random, _, _) in enumerate(brought)},
        extra=facts.extra,
    )


def _entry(pieces: list[_Piece], facts: Facts) -> TensorEntry:
    first = pieces[0]
    is_parameter = first.kind == "parameter"
    return TensorEntry(
        first.kind,
        first.of,
        first.dtype,
        first.shape,
        tuple(sorted((piece.part for piece in pieces), key=lambda part: part.start)),
        first.state,
        facts.originals.get(first.of, "") if is_parameter else "",
        tuple(facts.names.get(first.of, ())) if is_parameter else (),
    )


def _first_or_raise(everyone: list[Any]) -> Any:
    """Rank 0's word, or its error on all ranks."""
    if isinstance(everyone[0], CheckpointError):
        raise CheckpointError(str(everyone[0])) from everyone[0]
    return everyone[0]
