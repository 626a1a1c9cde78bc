"""One safetensors file, written block by block from wherever its numbers rest, and read in intervals.

Writing needs no more memory than a few blocks, and no tensor has to be whole. The format is that of the safetensors
library, which reads these files; its own writer wants everything in memory at once.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerostd.checkpointing.manifest import BLOCK, num_blocks
from zerostd.checkpointing.values import DTYPES
from zerostd.errors import CheckpointError

__all__ = ["Reader", "Source", "Written", "reason", "write_file"]

NUM_THREADS = 4
MOST_HEADER = 256 << 20
CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
DTYPE_BY_CODE = {code: DTYPES[name] for name, code in CODES.items()}

Read = Callable[[int, int], torch.Tensor]  # elements [low, high), in memory
OnWritten = Callable[[str, int], None]  # key and bytes of a source


@dataclass(frozen=True)
class Source:
    """Numbers to be written: so many of a dtype, and who gives them."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    numel: int
    read: Read


@dataclass(frozen=True)
class Written:
    """What became of a file: its length, and the checksums of each tensor's blocks, by key."""

    num_bytes: int
    crc32: dict[str, tuple[int, ...]]


def write_file(path: Path, sources: Sequence[Source], on_written: OnWritten | None = None) -> Written:
    """Write a new file and sync it to disk. `on_written` is told of each source, in their order."""
    header, offsets, end = _header(sources)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            _write_all(fd, memoryview(header), 0)
            with ThreadPoolExecutor(NUM_THREADS, "zerostd checkpoint") as pool:
                try:
                    sums = _write_blocks(pool, fd, sources, offsets, on_written)
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {reason(error)}") from error
    return Written(end, sums)


def _header(sources: Sequence[Source]) -> tuple[bytes, list[int], int]:
    """The file's beginning, where the numbers of each source go, and the file's length."""
    entries, places, used = {}, [], 0
    for source in sources:
        places.append(used)
        used += source.numel * source.dtype.itemsize
        code = CODES[str(source.dtype).removeprefix("torch.")]
        entries[source.key] = {"dtype": code, "shape": list(source.shape), "data_offsets": [places[-1], used]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)  # numbers start on a cache line, and on a page where the header is one long
    begin = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, [begin + place for place in places], begin + used


def _write_blocks(
    pool: ThreadPoolExecutor, fd: int, sources: Sequence[Source], offsets: Sequence[int], on_written: OnWritten | None
) -> dict[str, tuple[int, ...]]:
    """Sources in order, their blocks in several threads, a bounded number at a time."""
    sums: dict[str, list[int]] = {source.key: [] for source in sources}
    waiting: deque[tuple[Source, Future[int]]] = deque()

    def collect() -> None:
        source, block = waiting.popleft()
        sums[source.key].append(block.result())
        num_bytes = source.numel * source.dtype.itemsize
        if on_written is not None and len(sums[source.key]) == num_blocks(num_bytes):
            on_written(source.key, num_bytes)

    for source, offset in zip(sources, offsets, strict=True):
        step = BLOCK // source.dtype.itemsize
        for low in range(0, source.numel, step):
            high, place = min(source.numel, low + step), offset + low * source.dtype.itemsize
            waiting.append((source, pool.submit(_write_block, fd, source.read, low, high, place)))
            if len(waiting) > 2 * NUM_THREADS:
                collect()
    while waiting:
        collect()
    return {key: tuple(found) for key, found in sums.items()}


def _write_block(fd: int, read: Read, low: int, high: int, offset: int) -> int:
    view = _bytes_of(read(low, high))
    crc = zlib.crc32(view)
    _write_all(fd, view, offset)
    return crc


def _bytes_of(values: torch.Tensor) -> memoryview:
    """The memory of numbers, copied only if it is not plain host memory."""
    return _view(values.detach().to("cpu").contiguous())


def _view(values: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host."""
    flat: Any = values.view(-1).view(torch.uint8).numpy() if values.numel() else b""
    return memoryview(flat)


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


# Reading


@dataclass(frozen=True)
class _Place:
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # in the file
    num_bytes: int


class Reader:
    """An open file. Its header is checked before anything is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {reason(error)}") from error
        try:
            self.num_bytes = os.fstat(self._fd).st_size
            self.places = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let the file go."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, key: str, low: int, high: int, target: torch.Tensor | None = None) -> torch.Tensor:
        """Elements [low, high) of a tensor, flattened; into `target`, if that is given, contiguous and on the host."""
        place = self.places[key]
        size = place.dtype.itemsize
        if target is None:
            target = torch.empty(high - low, dtype=place.dtype)
        self._read_all(_view(target), place.offset + low * size)
        return target

    def _read_all(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            try:
                got = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read at {offset + done}: {reason(error)}") from error
            if not got:
                raise CheckpointError(f"{self.path} ends at {offset + done}: it is not complete")
            done += got

    def _read_header(self) -> dict[str, _Place]:
        if self.num_bytes < 8:
            raise CheckpointError(f"{self.path} has {self.num_bytes} bytes: it is not a safetensors file")
        start = bytearray(8)
        self._read_all(memoryview(start), 0)
        (length,) = struct.unpack("<Q", start)
        if not 2 <= length <= min(self.num_bytes - 8, MOST_HEADER):
            raise CheckpointError(f"{self.path} has no safetensors header: its length would be {length}")
        text = bytearray(length)
        self._read_all(memoryview(text), 8)
        try:
            entries = json.loads(text)
            entries.pop("__metadata__", None)
            return {key: self._place(key, one, 8 + length) for key, one in entries.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise CheckpointError(f"{self.path} has a damaged header: {error!s:.200}") from error

    def _place(self, key: str, entry: Any, begin: int) -> _Place:
        dtype, shape = DTYPE_BY_CODE.get(entry["dtype"]), entry["shape"]
        low, high = entry["data_offsets"]
        numbers = [low, high, *shape]
        if dtype is None or not all(type(one) is int and 0 <= one < 1 << 62 for one in numbers):
            raise ValueError(f"{key!r} has dtype {entry['dtype']!r}, shape {shape!r} and offsets {[low, high]!r}")
        num_bytes = dtype.itemsize
        for one in shape:
            num_bytes *= one
        if high - low != num_bytes or begin + high > self.num_bytes:
            raise ValueError(f"{key!r} needs {num_bytes} bytes and has [{low}, {high}) of {self.num_bytes - begin}")
        return _Place(dtype, tuple(shape), begin + low, num_bytes)


def reason(error: OSError) -> str:
    """The system's, with its short name."""
    return f"{errno.errorcode.get(error.errno or 0, 'error')}: {error.strerror or error}"
