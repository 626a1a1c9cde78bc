"""Read a checkpoint in intervals, whichever ranks wrote it. Every block is checked as it is read.

In: tensors of the manifest, the intervals wanted, and where they go: memory, or tier tensors, those on disk too.
`loading` calls it: first `verify` on everything it needs, then `fill_tiers`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import pairwise
from typing import NamedTuple

import torch

from zerostd.checkpointing.storage.directory import read_manifest
from zerostd.checkpointing.storage.manifest import BLOCK, TensorEntry, TensorPart
from zerostd.checkpointing.storage.remote import AnyPath
from zerostd.checkpointing.storage.safetensors_files import SafetensorsReader, job_threads, ordered_results
from zerostd.engine.intervals import SavedInterval
from zerostd.errors import CheckpointError
from zerostd.kernels import crc32
from zerostd.monitoring.retrying import Retries
from zerostd.sharding.boxes import Stretch
from zerostd.tiers import Done, TierTensor, Transfer
from zerostd.tiers.host import PAGE, aligned

DISK_WRITE = 16 << 20  # bytes written to a disk tier at a time
NUM_BUFFERS = 3  # one is read, two are written

Target = tuple[TensorEntry, SavedInterval]  # a tensor, and which part of it goes where
OnBytes = Callable[[int], None]


class BlockOfPart(NamedTuple):
    """Elements [low, high) of a tensor, or of a box of it, that share a checksum."""

    entry: TensorEntry
    part: TensorPart
    crc32: int
    low: int
    high: int

    @property
    def stretch(self) -> Stretch:
        """Which elements of the tensor these are."""
        return self.entry.stretch_of(self.part).part(self.low, self.high)


class Checkpoint:
    """An open checkpoint. Manifest and headers are checked; the numbers are when they are read."""

    def __init__(self, folder: AnyPath, retries: Retries | None = None) -> None:
        self.manifest = read_manifest(folder)
        self._readers: dict[str, SafetensorsReader] = {}
        self._scratch = threading.local()  # a block of memory for each thread
        with ExitStack() as files:
            for name in self.manifest.files:
                self._readers[name] = files.enter_context(closing(SafetensorsReader(folder / name, retries)))
            self._check_headers()
            self._threads = files.enter_context(job_threads())
            self._files = files.pop_all()

    def _check_headers(self) -> None:
        """Raise unless the headers of the files and the manifest say the same."""
        unused = {(name, key) for name, reader in self._readers.items() for key in reader.tensors}
        for entry in self.manifest.tensors:
            for part in entry.parts:
                reader = self._readers[part.file]
                stored = reader.tensors.get(part.key)
                if stored is None:
                    raise CheckpointError(f"{reader.path} has no {part.key!r}, a part of {entry.label}")
                numel = part.stop - part.start
                if stored.dtype != entry.torch_dtype or math.prod(stored.shape) != numel:
                    raise CheckpointError(
                        f"{reader.path}: {part.key!r} is {stored.shape} of {stored.dtype}, but the manifest says "
                        f"{numel} of {entry.dtype} for {entry.label}"
                    )
                unused.discard((part.file, part.key))
        if unused:
            name, key = min(unused)
            raise CheckpointError(f"{self._readers[name].path}: {key!r} is not in the manifest")

    def close(self) -> None:
        self._files.close()

    def verify(self, wanted: Iterable[tuple[TensorEntry, Stretch]], on_bytes: OnBytes) -> None:
        """Read the blocks of these elements and check them. Raises CheckpointError for the first damaged one."""
        blocks = (block for entry, stretch in wanted for block in blocks_of(entry, stretch))
        for numbers in ordered_results(self._threads, self._read_block, blocks):
            on_bytes(numbers.nbytes)

    def read(self, entry: TensorEntry, wanted: Stretch | None = None) -> torch.Tensor:
        """Return a whole tensor, or some of its elements one after another, on the host."""
        stretch = wanted or entry.whole
        values = torch.empty(stretch.stop - stretch.start, dtype=entry.torch_dtype)
        self.fill([(entry, stretch, values)], lambda num_bytes: None)
        return values.view(entry.shape) if wanted is None else values

    def fill(self, wanted: Iterable[tuple[TensorEntry, Stretch, torch.Tensor]], on_bytes: OnBytes) -> None:
        """Read elements of tensors into flat memory of any dtype and device."""
        jobs = ((block, stretch, values) for entry, stretch, values in wanted for block in blocks_of(entry, stretch))

        @torch.no_grad()
        def fill(job: tuple[BlockOfPart, Stretch, torch.Tensor]) -> int:
            block, stretch, values = job
            if not stretch.is_of(block.stretch):
                return copy_shared(self._read_block(block), block.stretch, values, stretch)
            low = stretch.start
            start = max(low, block.low)
            stop = min(stretch.stop, block.high)
            target = values[start - low : stop - low]
            is_whole = (start, stop) == (block.low, block.high)
            if is_whole and target.device.type == "cpu" and target.dtype == block.entry.torch_dtype:
                return self._read_block(block, target).nbytes
            numbers = self._read_block(block)[start - block.low : stop - block.low]
            target.copy_(numbers)
            return numbers.nbytes

        for num_bytes in ordered_results(self._threads, fill, jobs):
            on_bytes(num_bytes)

    def fill_tiers(self, targets: Sequence[Target], on_bytes: OnBytes) -> None:
        """Read tensors into tier tensors. On disk neighbours are written together, while the next ones are read."""
        in_memory = []
        on_disk = []
        for entry, record in targets:
            record.column.keep_own()
            if record.column.tensor is None:
                on_disk.append((entry, record))
            else:
                in_memory.append((entry, record.stretch, record.column.tensor[record.place]))
        self.fill(in_memory, on_bytes)
        if not on_disk:
            return
        buffers = [aligned(DISK_WRITE) for _ in range(NUM_BUFFERS)]
        writes: list[Transfer] = [Done() for _ in buffers]
        for turn, (tensor, low, high, parts) in enumerate(_disk_stretches(on_disk)):
            slot = turn % NUM_BUFFERS
            writes[slot].wait()
            values = buffers[slot].view(tensor.dtype)[: high - low]
            self.fill(((entry, stretch, values[part]) for entry, stretch, part in parts), on_bytes)
            per_page = PAGE // tensor.dtype.itemsize
            if low % per_page == 0 and (high % per_page == 0 or high == tensor.numel):
                writes[slot] = tensor.start_write(low, values)
                continue
            for write in writes:  # it shares a page with a neighbour, which must be on disk
                write.wait()
            tensor.write(slice(low, high), values)
        for write in writes:
            write.wait()

    def _read_block(self, block: BlockOfPart, target: torch.Tensor | None = None) -> torch.Tensor:
        """Return the numbers of a block, in `target` or in memory of this thread, which its next block overwrites."""
        if target is None:
            if not hasattr(self._scratch, "memory"):
                self._scratch.memory = torch.empty(BLOCK, dtype=torch.uint8)
            target = self._scratch.memory.view(block.entry.torch_dtype)[: block.high - block.low]
        for _ in self.slices(block, target):
            pass
        return target

    def slices(self, block: BlockOfPart, memory: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the elements of a block, each time as many as `memory` holds, with the number of the first.

        At the end raises CheckpointError if they are not those that were written.
        """
        reader = self._readers[block.part.file]
        crc = 0
        for low in range(block.low, block.high, memory.numel()):
            numbers = memory[: block.high - low]
            reader.read(block.part.key, low - block.part.start, numbers)
            crc = crc32(numbers, crc)
            yield low, numbers
        if crc != block.crc32:
            raise CheckpointError(
                f"{reader.path} is damaged: elements {block.low} to {block.high} of {block.entry.label} do not match "
                "their checksum; use another checkpoint"
            )


def blocks_of(entry: TensorEntry, wanted: Stretch) -> Iterator[BlockOfPart]:
    """Yield the blocks that elements of a tensor lie in."""
    step = BLOCK // entry.torch_dtype.itemsize
    for part in entry.parts:
        stored = entry.stretch_of(part)
        is_same_box = wanted.is_of(stored)
        start = max(wanted.start, part.start) - part.start if is_same_box else 0
        stop = (min(wanted.stop, part.stop) if is_same_box else part.stop) - part.start
        for index in range(start // step, -(-stop // step)) if start < stop else ():
            begin = part.start + index * step
            block = BlockOfPart(entry, part, part.crc32[index], begin, min(part.stop, begin + step))
            if is_same_box or any(True for _ in wanted.shared(block.stretch)):
                yield block


def copy_shared(source: torch.Tensor, of: Stretch, target: torch.Tensor, to: Stretch) -> int:
    """Copy what two stretches of one tensor have in common from the flat memory of one to that of the other; returns
    the bytes."""
    num_bytes = 0
    for (before, theirs), (begin, mine), box in of.shared(to):
        numbers = source[before : before + theirs.numel].view(theirs.sizes)[box.moved(theirs.offsets, -1).slices]
        target[begin : begin + mine.numel].view(mine.sizes)[box.moved(mine.offsets, -1).slices].copy_(numbers)
        num_bytes += box.numel * source.element_size()
    return num_bytes


def _disk_stretches(
    targets: Iterable[Target],
) -> Iterator[tuple[TierTensor, int, int, list[tuple[TensorEntry, Stretch, slice]]]]:
    """Yield stretches of tier tensors, none longer than a buffer: tensor, start, stop, and what fills which part."""
    runs: list[list[Target]] = []  # of neighbours
    for target in sorted(targets, key=lambda target: (id(target[1].column), target[1].offset)):
        last = runs[-1][-1][1] if runs else None
        if last is not None and last.column is target[1].column and last.place.stop == target[1].offset:
            runs[-1].append(target)
        else:
            runs.append([target])
    for run in runs:
        column = run[0][1].column
        begin = run[0][1].offset
        end = run[-1][1].place.stop
        step = DISK_WRITE // column.dtype.itemsize
        for low, high in pairwise([begin, *range((begin // step + 1) * step, end, step), end]):
            parts = []
            for entry, record in run:
                start = max(low, record.offset)
                stop = min(high, record.place.stop)
                if start < stop:
                    first = record.start + start - record.offset
                    stretch = record.stretch.part(first, first + stop - start)
                    parts.append((entry, stretch, slice(start - low, stop - low)))
            yield column, low, high, parts
