"""Write the model of a checkpoint as ordinary safetensors files, as the Hugging Face hub has them.

Numbers go from file to file in short slices, through memory that stays in the CPU's cache, and the checksum of each
block of the checkpoint is verified on the way. The result does not depend on the number of ranks that saved.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import pairwise

import torch

from zerostd.checkpointing.storage.directory import PendingDirectory
from zerostd.checkpointing.storage.manifest import DTYPES, Manifest, TensorEntry
from zerostd.checkpointing.storage.reading import BlockOfPart, Checkpoint, blocks_of
from zerostd.checkpointing.storage.remote import place_of
from zerostd.checkpointing.storage.safetensors_files import DirectFileWriter, OutputTensor, write_file
from zerostd.errors import CheckpointError
from zerostd.monitoring.decoding import path_of
from zerostd.monitoring.progress import ByteProgress
from zerostd.policy import parse_bytes
from zerostd.sharding.boxes import Stretch

INDEX = "model.safetensors.index.json"
SHORT_NAMES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
FORMAT = {"format": "pt"}  # what transformers looks for
SLICE = 512 << 10  # bytes copied at a time
GATHERED = 4 << 20  # elements put together at a time from boxes
CONVERTED = 1 << 15  # elements converted at a time: so few that torch needs no threads of its own
NUMBER = re.compile("([0-9]{1,18})")

log = logging.getLogger("zerostd")


def merge(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
) -> list[str]:
    """Write the model of a checkpoint as ordinary safetensors files, which torch, transformers and the Hub read.

    Call it in one process. It needs neither a GPU nor the model, and never holds a whole tensor. Parameters and
    persistent buffers equal what `full_state_dict` returned at the time of saving, bit for bit. A tensor with several
    names is stored under its first name. `get_extra_state` of modules is not written, and the log says so.

    Args:
        checkpoint: A directory or URL that `zerostd.save` wrote to.
        out: A directory that does not exist yet. It is either complete or absent.
        dtype: The dtype of all floating-point tensors: 'fp32', 'bf16' or 'fp16', rounded once from the masters. None:
            the dtype that each had before prepare.
        max_shard_size: The largest size of a file; a larger tensor gets its own file. Several files get an index.

    Returns:
        The paths of the files; the path of an index is the last.

    Raises:
        CheckpointError: It is damaged, or `out` already exists; nothing is left of what was written.
    """
    target = path_of(out, "out", CheckpointError)
    most_bytes = parse_bytes(max_shard_size)
    if most_bytes < 1:
        raise CheckpointError(f"max_shard_size={most_bytes} bytes is too small; use a size such as '5GB'")
    chosen = None if dtype is None else DTYPES.get(SHORT_NAMES.get(str(dtype), str(dtype)))
    if dtype is not None and (chosen is None or not chosen.is_floating_point):
        raise CheckpointError(f"dtype={dtype!r} is not a floating-point dtype; use 'fp32', 'bf16' or 'fp16'")
    with closing(Checkpoint(place_of(checkpoint, "checkpoint"))) as opened:
        manifest = opened.manifest
        if manifest.modules:
            log.warning("the extra state of %s is left out of %s", ", ".join(map(repr, manifest.modules)), target)
        if not manifest.frozen:
            text = "%s was saved without frozen parameters, so %s is not a whole model"
            log.warning(text, checkpoint, target)
        entries = _model_entries(manifest)
        files = _split([_output_tensor(opened, entry, chosen) for entry in entries], most_bytes)
        directory = PendingDirectory(target, "name another directory, or remove it")
        try:
            _write(directory, files, {name: entry.of for entry in entries for name in entry.names if name != entry.of})
            directory.commit()
        except BaseException:
            directory.drop()
            raise
    return [str(target / name) for name in (*files, *([INDEX] if len(files) > 1 else []))]


def _model_entries(manifest: Manifest) -> list[TensorEntry]:
    """Return what a state_dict has, ordered by name, with numbers in names compared as numbers."""
    entries: dict[str, TensorEntry] = {}
    for entry in (*manifest.of_kind("parameter"), *manifest.of_kind("buffer")):
        if entry.of in entries or entry.of == "__metadata__":
            raise CheckpointError(f"{entry.label}: safetensors reserves this name, or another tensor has the same name")
        entries[entry.of] = entry

    def natural_order(name: str) -> list[tuple[int, str]]:
        return [(int(text), "") if index % 2 else (0, text) for index, text in enumerate(NUMBER.split(name))]

    return [entries[name] for name in sorted(entries, key=natural_order)]


def _output_tensor(checkpoint: Checkpoint, entry: TensorEntry, chosen: torch.dtype | None) -> OutputTensor:
    """Return a tensor in its dtype before prepare, or the chosen one; its blocks are those that have checksums."""
    stored = entry.torch_dtype
    dtype = DTYPES[entry.original or entry.dtype]
    if chosen is not None and dtype.is_floating_point:
        dtype = chosen
    step = SLICE // stored.itemsize if stored == dtype else CONVERTED

    def copy(block: BlockOfPart, writer: DirectFileWriter, offset: int) -> int:
        """Copy a block slice by slice. It is written before it is known to be whole; if not, the directory goes."""
        memory = torch.empty(min(step, block.high - block.low), dtype=stored)
        converted = torch.empty_like(memory, dtype=dtype)
        for low, numbers in checkpoint.slices(block, memory):
            values = numbers if stored == dtype else converted[: numbers.numel()].copy_(numbers)
            writer.write(values, offset + (low - block.low) * dtype.itemsize)
        return block.crc32

    def gather(stretch: Stretch, writer: DirectFileWriter, offset: int) -> int:
        """Put elements together from the boxes that several ranks have written."""
        writer.write(checkpoint.read(entry, stretch).to(dtype), offset)
        return 0

    if any(part.origin for part in entry.parts):
        ends = [*range(0, entry.numel, GATHERED), entry.numel]
        stretches = [entry.whole.part(low, high) for low, high in pairwise(ends)]
        return OutputTensor(entry.of, dtype, entry.shape, [(s.start, partial(gather, s)) for s in stretches])
    blocks = [(block.low, partial(copy, block)) for block in blocks_of(entry, entry.whole)]
    return OutputTensor(entry.of, dtype, entry.shape, blocks)


def _split(tensors: Sequence[OutputTensor], most_bytes: int) -> dict[str, list[OutputTensor]]:
    """Return the tensors of each file, filled one after another. Wide dtypes come first, so that all are aligned."""
    shards: list[list[OutputTensor]] = [[]]
    used = 0
    for tensor in tensors:
        if shards[-1] and used + tensor.num_bytes > most_bytes:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor.num_bytes
    ordered = [sorted(shard, key=lambda tensor: -tensor.dtype.itemsize) for shard in shards]
    if len(ordered) == 1:
        return {"model.safetensors": ordered[0]}
    return {f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(ordered, start=1)}


def _write(directory: PendingDirectory, files: Mapping[str, list[OutputTensor]], aliases: Mapping[str, str]) -> None:
    """Write all files, and the index if there are several. The hub keeps aliases of tensors in the metadata."""
    total = sum(tensor.num_bytes for tensors in files.values() for tensor in tensors)
    metadata = FORMAT if len(files) > 1 else {**aliases, **FORMAT}
    with ByteProgress("merging", total, is_shown=True) as progress:
        for name, tensors in files.items():
            write_file(directory.folder / name, tensors, lambda tensor: progress.add(tensor.num_bytes), metadata)
    if len(files) > 1:
        weights = {tensor.key: name for name, tensors in files.items() for tensor in tensors}
        index = {"metadata": {**aliases, "total_size": total}, "weight_map": weights}
        directory.write(INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
