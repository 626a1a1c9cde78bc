"""The model of a checkpoint as ordinary safetensors files, as the Hugging Face hub has them.

Numbers go from file to file in short slices, through memory that stays in the processor's cache; the checksum of each
block of the checkpoint is taken on the way. The result does not depend on the number of ranks that saved.
"""

from __future__ import annotations

import json
import logging
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from zerostd.checkpointing.storage.directory import Draft, check_headers, read_manifest
from zerostd.checkpointing.storage.files import Reader, write_file
from zerostd.checkpointing.storage.manifest import BLOCK, Manifest, TensorEntry
from zerostd.checkpointing.storage.progress import Progress
from zerostd.checkpointing.storage.sinks import Sink, view_of
from zerostd.checkpointing.storage.values import DTYPES, dtype_of
from zerostd.errors import CheckpointError
from zerostd.kernels import crc32
from zerostd.policy import parse_bytes

__all__ = ["merge", "merge_checkpoint"]

STEM, INDEX = "model", "model.safetensors.index.json"
SHORT = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
FORMAT = {"format": "pt"}  # what transformers looks for
SLICE = 512 << 10  # bytes
CONVERTED = 1 << 15  # elements: so few that torch converts them without threads of its own
NUMBER = re.compile("([0-9]{1,18})")

log = logging.getLogger("zerostd")


def merge(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
) -> list[str]:
    """Write the model of a checkpoint as ordinary safetensors files, which torch, transformers and the hub read.

    For one process, without a GPU or the model; no tensor is ever whole in memory. Parameters and persistent buffers
    are what `full_state_dict` gave when it was saved, bit by bit. One with several names is there once, under its
    first. What modules gave in `get_extra_state` has no place in such files, and the log says so.

    Args:
        checkpoint: A directory that `zerostd.save` wrote.
        out: A directory that is not there yet; it appears whole or not at all.
        dtype: Of all floating-point tensors: 'fp32', 'bf16' or 'fp16', rounded once from what training kept. None: the
            one that each had before prepare.
        max_shard_size: Most bytes of a file; a larger tensor has one of its own. Several files get an index.

    Returns:
        The paths of the files.

    Raises:
        CheckpointError: It is damaged, or `out` is there already; nothing is left of what was written.
    """
    found = merge_checkpoint(Path(checkpoint), Path(out), dtype, parse_bytes(max_shard_size))
    return [str(path) for path in found]


def merge_checkpoint(checkpoint: Path, out: Path, dtype: str | None, max_shard_size: int) -> list[Path]:
    """The files, an index last."""
    if max_shard_size < 1:
        raise CheckpointError(f"a largest file of {max_shard_size} bytes holds nothing; say '5GB', for example")
    chosen = None if dtype is None else _chosen(dtype)
    manifest = read_manifest(checkpoint)
    if manifest.modules:
        log.warning("the extra state of %s is left out of %s", ", ".join(map(repr, manifest.modules)), out)
    if not manifest.frozen:
        log.warning("%s was saved without parameters that did not train, so %s is not a whole model", checkpoint, out)
    readers: dict[str, Reader] = {}
    try:
        check_headers(checkpoint, manifest, readers.__setitem__)
        files = _files([_Tensor.of(entry, readers, chosen) for entry in _entries(manifest)], max_shard_size)
        draft = Draft(out, "name another directory, or remove it")
        try:
            _write(draft, files, _other_names(manifest))
            draft.commit()
        except BaseException:
            draft.drop()
            raise
    finally:
        for reader in readers.values():
            reader.close()
    return [out / name for name in (*files, *([INDEX] if len(files) > 1 else []))]


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the checkpoint on its way into a file: its blocks are those that have checksums."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    numel: int
    entry: TensorEntry  # with its parts in order
    starts: tuple[int, ...]  # of the parts
    readers: Mapping[str, Reader]

    @classmethod
    def of(cls, entry: TensorEntry, readers: Mapping[str, Reader], chosen: torch.dtype | None) -> _Tensor:
        """In the dtype it had before prepare, or the one that was chosen."""
        dtype = dtype_of(entry.original or entry.dtype)
        if chosen is not None and dtype.is_floating_point:
            dtype = chosen
        entry = replace(entry, parts=tuple(sorted(entry.parts, key=lambda part: part.start)))
        starts = tuple(part.start for part in entry.parts)
        return cls(entry.of, dtype, entry.shape, entry.numel, entry, starts, readers)

    @property
    def num_bytes(self) -> int:
        """In the new file."""
        return self.numel * self.dtype.itemsize

    @property
    def step(self) -> int:
        """Elements of a block."""
        return BLOCK // dtype_of(self.entry.dtype).itemsize

    def blocks(self) -> Iterator[tuple[int, int]]:
        """As they have checksums."""
        for part in self.entry.parts:
            for low in range(part.start, part.stop, self.step):
                yield low, min(part.stop, low + self.step)

    def write(self, sink: Sink, low: int, high: int, offset: int) -> int:
        """A block to its place. It is there before it is known to be whole: if it is not, all of it goes."""
        part = self.entry.parts[bisect_right(self.starts, low) - 1]
        reader, kept, crc = self.readers[part.file], dtype_of(self.entry.dtype), 0
        step = SLICE // kept.itemsize if kept == self.dtype else CONVERTED
        numbers = torch.empty(min(step, high - low), dtype=kept)
        result = numbers if kept == self.dtype else torch.empty_like(numbers, dtype=self.dtype)
        source = view_of(numbers)
        for start in range(low, high, step):
            count = min(step, high - start)
            read = source[: count * kept.itemsize]
            reader.read_bytes(part.key, start - part.start, read)
            crc = crc32(numbers[:count], crc)
            if result is not numbers:
                result.copy_(numbers)
            place = offset + (start - low) * self.dtype.itemsize
            sink.put(result[:count], place)
        if crc != part.crc32[(low - part.start) // self.step]:
            raise CheckpointError(
                f"{reader.path} is damaged: elements {low} to {high} of {self.entry.label} are not as written; use "
                "another checkpoint"
            )
        return crc


def _chosen(name: str) -> torch.dtype:
    dtype = DTYPES.get(SHORT.get(name, name))
    if dtype is None or not dtype.is_floating_point:
        raise CheckpointError(f"dtype={name!r} is no floating-point dtype; use 'fp32', 'bf16' or 'fp16'")
    return dtype


def _entries(manifest: Manifest) -> list[TensorEntry]:
    """What a state_dict has, in an order that is always the same: by name, numbers in it as numbers."""
    found: dict[str, TensorEntry] = {}
    for entry in (*manifest.of_kind("parameter"), *manifest.of_kind("buffer")):
        if entry.of in found or entry.of == "__metadata__":
            raise CheckpointError(f"{entry.label} cannot have this name in a safetensors file, or two tensors have it")
        found[entry.of] = entry
    return sorted(found.values(), key=lambda entry: _in_order(entry.of))


def _in_order(name: str) -> list[tuple[int, str]]:
    return [(int(text), "") if place % 2 else (0, text) for place, text in enumerate(NUMBER.split(name))]


def _other_names(manifest: Manifest) -> dict[str, str]:
    """Names that are not there, of tensors that are: what the hub keeps among the metadata."""
    return {name: one.of for one in _entries(manifest) for name in one.names if name != one.of}


def _files(tensors: Sequence[_Tensor], most: int) -> dict[str, list[_Tensor]]:
    """What goes into which file, filled one after another. Wide dtypes are in front, so that all are aligned."""
    shards: list[list[_Tensor]] = [[]]
    used = 0
    for tensor in tensors:
        if shards[-1] and used + tensor.num_bytes > most:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor.num_bytes
    if len(shards) == 1:
        names = [f"{STEM}.safetensors"]
    else:
        names = [f"{STEM}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    ordered = [sorted(shard, key=lambda tensor: -tensor.dtype.itemsize) for shard in shards]
    return dict(zip(names, ordered, strict=True))


def _write(draft: Draft, files: Mapping[str, Sequence[_Tensor]], others: Mapping[str, str]) -> None:
    """All files, and the index if there are several."""
    total = sum(tensor.num_bytes for inside in files.values() for tensor in inside)
    metadata = FORMAT if len(files) > 1 else {**others, **FORMAT}
    with Progress("merging", total, is_shown=True) as progress:

        def on_written(_: str, num_bytes: int) -> None:
            progress.add(num_bytes)

        for name, inside in files.items():
            write_file(draft.folder / name, inside, on_written, metadata)
    if len(files) > 1:
        weights = {tensor.key: name for name, inside in files.items() for tensor in inside}
        index = {"metadata": {**others, "total_size": total}, "weight_map": weights}
        draft.write(INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
