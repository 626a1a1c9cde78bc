"""A checkpoint that is read in intervals, whatever the ranks that wrote it: each block is checked as it is read."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from zerostd.checkpointing.storage.directory import check_headers, read_manifest
from zerostd.checkpointing.storage.files import NUM_THREADS, Reader
from zerostd.checkpointing.storage.manifest import BLOCK, Manifest, Part, TensorEntry
from zerostd.errors import CheckpointError
from zerostd.kernels import crc32

__all__ = ["Checkpoint"]

J = TypeVar("J")
T = TypeVar("T")


@dataclass(frozen=True)
class _Block:
    """One block of a part, and what of it is wanted."""

    entry: TensorEntry
    part: Part
    index: int  # of the block
    low: int  # elements of the part
    high: int


class Checkpoint:
    """An open checkpoint: manifest and files, all checked but for the numbers themselves."""

    manifest: Manifest

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self._readers: dict[str, Reader] = {}
        self._scratch = threading.local()  # a block of memory for each thread
        self._pool = ThreadPoolExecutor(NUM_THREADS, "zerostd checkpoint")
        try:
            check_headers(folder, self.manifest, self._readers.__setitem__)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let the files go."""
        self._pool.shutdown(cancel_futures=True)
        for reader in self._readers.values():
            reader.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def verify(self, wanted: Iterable[tuple[TensorEntry, int, int]], on_bytes: Callable[[int], None]) -> None:
        """Read the blocks of these intervals and check them. Raises CheckpointError for the first that is damaged."""

        def check(block: _Block) -> int:
            return self._read_block(block, self._scratch_for(block)).nbytes

        blocks = (block for entry, low, high in wanted for block in _blocks(entry, low, high))
        for num_bytes in self._in_order(check, blocks):
            on_bytes(num_bytes)

    def read(self, entry: TensorEntry, low: int, high: int) -> torch.Tensor:
        """Elements [low, high) of a tensor, flattened, on the host."""
        values = torch.empty(high - low, dtype=getattr(torch, entry.dtype))
        self.fill([(entry, low, values)], lambda num_bytes: None)
        return values

    def fill(self, wanted: Iterable[tuple[TensorEntry, int, torch.Tensor]], on_bytes: Callable[[int], None]) -> None:
        """Read elements of tensors, each from a first one on, into flat memory of any dtype and device."""

        @torch.no_grad()
        def put(job: tuple[_Block, int, torch.Tensor]) -> int:
            block, low, values = job
            first, last = block.part.start + block.low, block.part.start + block.high
            start, stop = max(low, first), min(low + values.numel(), last)
            target = values[start - low : stop - low]
            is_there = target.device.type == "cpu" and str(target.dtype) == f"torch.{block.entry.dtype}"
            if is_there and (start, stop) == (first, last):
                return self._read_block(block, target).nbytes
            numbers = self._read_block(block, self._scratch_for(block))[start - first : stop - first]
            target.copy_(numbers)
            return numbers.nbytes

        jobs = ((b, low, values) for entry, low, values in wanted for b in _blocks(entry, low, low + values.numel()))
        for num_bytes in self._in_order(put, jobs):
            on_bytes(num_bytes)

    def _scratch_for(self, block: _Block) -> torch.Tensor:
        if not hasattr(self._scratch, "block"):
            self._scratch.block = torch.empty(BLOCK, dtype=torch.uint8)
        dtype: torch.dtype = getattr(torch, block.entry.dtype)
        numbers: torch.Tensor = self._scratch.block.view(dtype)[: block.high - block.low]
        return numbers

    def _read_block(self, block: _Block, target: torch.Tensor) -> torch.Tensor:
        numbers = self._readers[block.part.file].read(block.part.key, block.low, block.high, target)
        if crc32(numbers) != block.part.crc32[block.index]:
            raise CheckpointError(
                f"{self.folder / block.part.file} is damaged: elements {block.part.start + block.low} to "
                f"{block.part.start + block.high} of {block.entry.label} are not as written; use another checkpoint"
            )
        return numbers

    def _in_order(self, work: Callable[[J], T], jobs: Iterable[J]) -> Iterator[T]:
        """Results block by block, a few of them under way."""
        waiting: deque[Future[T]] = deque()
        for job in jobs:
            waiting.append(self._pool.submit(work, job))
            if len(waiting) > 2 * NUM_THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _blocks(entry: TensorEntry, low: int, high: int) -> Iterator[_Block]:
    """The whole blocks that [low, high) of a tensor lies in."""
    step = BLOCK // getattr(torch, entry.dtype).itemsize
    for part in entry.parts:
        start, stop = max(low, part.start) - part.start, min(high, part.stop) - part.start
        if start >= stop:
            continue
        for index in range(start // step, -(-stop // step)):
            yield _Block(entry, part, index, index * step, min(part.stop - part.start, (index + 1) * step))
