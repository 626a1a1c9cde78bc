"""Write one safetensors file block by block, from wherever its numbers are kept, and read one in intervals.

Writing needs memory for a few blocks, and no tensor is ever whole. The safetensors library reads these files; its own
writer wants all tensors in memory at once.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from msgspec import Struct

from zerostd.checkpointing.storage.direct_writer import DirectFileWriter, view_of
from zerostd.checkpointing.storage.dtypes import DTYPE_BY_CODE, SAFETENSORS_CODES
from zerostd.checkpointing.storage.manifest import Count, Shape
from zerostd.errors import CheckpointError
from zerostd.monitoring.decoding import convert
from zerostd.tiers.host import PAGE

NUM_THREADS = 4
MOST_HEADER = 256 << 20

Job = TypeVar("Job")
Result = TypeVar("Result")


def reason(error: OSError) -> str:
    """Return the system's message with the short name of the error."""
    return f"{errno.errorcode.get(error.errno or 0, 'error')}: {error.strerror or error}"


def ordered_results(pool: ThreadPoolExecutor, work: Callable[[Job], Result], jobs: Iterable[Job]) -> Iterator[Result]:
    """Run `work` on jobs in the pool, a few at a time, and yield the results in the order of the jobs."""
    waiting: deque[Future[Result]] = deque()
    for job in jobs:
        waiting.append(pool.submit(work, job))
        if len(waiting) > 2 * NUM_THREADS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


# Writing


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to be written, in blocks. Each has its first element and a function that writes it.

    `write(writer, offset)` writes the block at an offset of the file and returns its crc32. Several threads call it.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Sequence[tuple[int, Callable[[DirectFileWriter, int], int]]]

    @property
    def num_bytes(self) -> int:
        """Return its length in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_file(
    path: Path,
    tensors: Sequence[OutputTensor],
    on_written: Callable[[OutputTensor], None],
    metadata: Mapping[str, str] | None = None,
) -> tuple[int, dict[str, tuple[int, ...]]]:
    """Write a new file and sync it to disk; return its length and, by key, the checksums of each tensor's blocks.

    `on_written` is called with each tensor when all its blocks are written, in order. `metadata` goes into the header.
    """
    header, offsets, num_bytes = _make_header(tensors, metadata)
    try:
        writer = DirectFileWriter(path, num_bytes)
        try:
            writer.write(header, 0)
            with ThreadPoolExecutor(NUM_THREADS, "zerostd checkpoint") as pool:
                try:
                    checksums = _write_blocks(pool, writer, tensors, offsets, on_written)
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
            writer.sync()
        finally:
            writer.close()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {reason(error)}") from error
    return num_bytes, checksums


def _make_header(tensors: Sequence[OutputTensor], metadata: Mapping[str, str] | None) -> tuple[bytes, list[int], int]:
    """Return the start of the file, the offset of each tensor's numbers, and the file's length."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    starts = []
    end = 0
    for tensor in tensors:
        starts.append(end)
        end += tensor.num_bytes
        code = SAFETENSORS_CODES[tensor.dtype]
        entries[tensor.key] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [starts[-1], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)  # numbers start on a page
    begin = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, [begin + start for start in starts], begin + end


def _write_blocks(
    pool: ThreadPoolExecutor,
    writer: DirectFileWriter,
    tensors: Sequence[OutputTensor],
    offsets: Sequence[int],
    on_written: Callable[[OutputTensor], None],
) -> dict[str, tuple[int, ...]]:
    checksums: dict[str, list[int]] = {tensor.key: [] for tensor in tensors}
    jobs = (
        (tensor, partial(write, writer, offset + first * tensor.dtype.itemsize))
        for tensor, offset in zip(tensors, offsets, strict=True)
        for first, write in tensor.blocks
    )
    for tensor, crc in ordered_results(pool, lambda job: (job[0], job[1]()), jobs):
        checksums[tensor.key].append(crc)
        if len(checksums[tensor.key]) == len(tensor.blocks):
            on_written(tensor)
    return {key: tuple(crcs) for key, crcs in checksums.items()}


# Reading


class StoredTensor(Struct, frozen=True):
    """A tensor as the header of its file describes it."""

    code: str = msgspec.field(name="dtype")
    shape: Shape
    data_offsets: tuple[Count, Count]  # [start, stop) in bytes, counted from the end of the header

    @property
    def dtype(self) -> torch.dtype:
        """Return torch's dtype."""
        return DTYPE_BY_CODE[self.code]

    @property
    def num_bytes(self) -> int:
        """Return its length."""
        return self.data_offsets[1] - self.data_offsets[0]


class SafetensorsReader:
    """An open file. Its header is checked before anything is read."""

    tensors: dict[str, StoredTensor]

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {reason(error)}") from error
        try:
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path} is not an ordinary file")
            self.num_bytes = status.st_size
            self._data_start, self.tensors = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, key: str, low: int, target: torch.Tensor) -> None:
        """Fill `target`, contiguous and on the host, with the elements of a flattened tensor from `low` on."""
        tensor = self.tensors[key]
        self._read_all(view_of(target), self._data_start + tensor.data_offsets[0] + low * tensor.dtype.itemsize)

    def _read_all(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read at {offset + done}: {reason(error)}") from error
            if not count:
                raise CheckpointError(f"{self.path} ends at {offset + done}: it is not complete")
            done += count

    def _read_header(self) -> tuple[int, dict[str, StoredTensor]]:
        """Return where the numbers begin, and the tensors by key."""
        if self.num_bytes < 8:
            raise CheckpointError(f"{self.path} has {self.num_bytes} bytes: it is not a safetensors file")
        start = bytearray(8)
        self._read_all(memoryview(start), 0)
        (length,) = struct.unpack("<Q", start)
        if not 2 <= length <= min(self.num_bytes - 8, MOST_HEADER):
            raise CheckpointError(f"{self.path} has no safetensors header: its length would be {length}")
        text = bytearray(length)
        self._read_all(memoryview(text), 8)
        what = f"{self.path} has a damaged header"
        try:
            entries = json.loads(text)
            if isinstance(entries, dict):
                entries.pop("__metadata__", None)
            tensors = convert(entries, dict[str, StoredTensor], what=what, error=CheckpointError)
        except CheckpointError:
            raise
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{what}: {error!s:.200}") from error
        problem = next(_header_problems(tensors, self.num_bytes - 8 - length), None)
        if problem is not None:
            raise CheckpointError(f"{what}: {problem}")
        return 8 + length, tensors


def _header_problems(tensors: Mapping[str, StoredTensor], num_bytes: int) -> Iterator[str]:
    """Yield what is wrong with a header. The tensors must cover all bytes that follow it, without gap or overlap."""
    end = 0
    for key, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        low, high = tensor.data_offsets
        if tensor.code not in DTYPE_BY_CODE:
            yield f"{key!r} has dtype {tensor.code!r}"
        if high - low != math.prod(tensor.shape) * tensor.dtype.itemsize:
            yield f"{key!r} has shape {tensor.shape}, {tensor.code} and offsets [{low}, {high})"
        if low != end:
            yield f"{'a gap' if low > end else 'tensors that overlap'} at {end}"
        end = high
    if end > num_bytes:
        yield f"the tensors need {end} bytes and have {num_bytes}"
    if end < num_bytes:
        yield f"{num_bytes - end} bytes follow the last tensor"
