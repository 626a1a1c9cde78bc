"""One safetensors file, written block by block from wherever its numbers rest, and read in intervals.

Writing needs no more memory than a few blocks, and no tensor has to be whole. The format is that of the safetensors
library, which reads these files; its own writer wants everything in memory at once.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from zerostd.checkpointing.storage.manifest import BLOCK, MOST_DIMENSIONS
from zerostd.checkpointing.storage.sinks import Sink, view_of
from zerostd.checkpointing.storage.values import DTYPES, dtype_name
from zerostd.errors import CheckpointError
from zerostd.kernels import crc32
from zerostd.tiers.pages import PAGE

__all__ = ["Reader", "Source", "Writable", "Written", "reason", "write_file"]

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


class Writable(Protocol):
    """A tensor that gets itself into a file, block by block, in several threads."""

    @property
    def key(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def numel(self) -> int: ...

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Elements [low, high) of each block, in order."""

    def write(self, sink: Sink, low: int, high: int, offset: int) -> int:
        """A block to its place in the file; returns its checksum."""


@dataclass(frozen=True)
class Source:
    """Numbers to be written: so many of a dtype, and who gives them."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    numel: int
    read: Read

    def blocks(self) -> Iterator[tuple[int, int]]:
        """BLOCK bytes each."""
        step = BLOCK // self.dtype.itemsize
        return ((low, min(self.numel, low + step)) for low in range(0, self.numel, step))

    def write(self, sink: Sink, low: int, high: int, offset: int) -> int:
        """A block to its place in the file; returns its checksum."""
        values = self.read(low, high).detach().to("cpu").contiguous()  # a copy only if it was elsewhere
        crc = crc32(values)
        sink.put(values, offset)
        return crc


@dataclass(frozen=True)
class Written:
    """What became of a file: its length, and the checksums of each tensor's blocks, by key."""

    num_bytes: int
    crc32: dict[str, tuple[int, ...]]


def write_file(
    path: Path,
    sources: Sequence[Writable],
    on_written: OnWritten | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Written:
    """Write a new file and sync it to disk. `on_written` is told of each source, in their order; `metadata` is for the
    header."""
    header, offsets, end = _header(sources, metadata)
    try:
        sink = Sink(path, end)
        try:
            sink.put(header, 0)
            with ThreadPoolExecutor(NUM_THREADS, "zerostd checkpoint") as pool:
                try:
                    sums = _write_blocks(pool, sink, sources, offsets, on_written)
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
            sink.sync()
        finally:
            sink.close()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {reason(error)}") from error
    return Written(end, sums)


def _header(sources: Sequence[Writable], metadata: Mapping[str, str] | None) -> tuple[bytes, list[int], int]:
    """The file's beginning, where the numbers of each source go, and the file's length."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    places, used = [], 0
    for source in sources:
        places.append(used)
        used += source.numel * source.dtype.itemsize
        code = CODES[dtype_name(source.dtype)]
        entries[source.key] = {"dtype": code, "shape": list(source.shape), "data_offsets": [places[-1], used]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)  # numbers start on a page
    begin = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, [begin + place for place in places], begin + used


def _write_blocks(
    pool: ThreadPoolExecutor,
    sink: Sink,
    sources: Sequence[Writable],
    offsets: Sequence[int],
    on_written: OnWritten | None,
) -> dict[str, tuple[int, ...]]:
    """Sources in order, their blocks in several threads, a bounded number at a time."""
    sums: dict[str, list[int]] = {source.key: [] for source in sources}
    waiting: deque[tuple[Writable, bool, Future[int]]] = deque()

    def collect() -> None:
        source, is_last, block = waiting.popleft()
        sums[source.key].append(block.result())
        if on_written is not None and is_last:
            on_written(source.key, source.numel * source.dtype.itemsize)

    for source, offset in zip(sources, offsets, strict=True):
        for low, high in source.blocks():
            place = offset + low * source.dtype.itemsize
            block = pool.submit(source.write, sink, low, high, place)
            waiting.append((source, high == source.numel, block))
            if len(waiting) > 2 * NUM_THREADS:
                collect()
    while waiting:
        collect()
    return {key: tuple(found) for key, found in sums.items()}


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
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {reason(error)}") from error
        try:
            found = os.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode):
                raise CheckpointError(f"{path} is not an ordinary file")
            self.num_bytes = found.st_size
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
        self._read_all(view_of(target), place.offset + low * size)
        return target

    def read_bytes(self, key: str, low: int, target: memoryview) -> None:
        """The same for whoever has the bytes of a target: elements from `low` on, as many as there is room for."""
        place = self.places[key]
        self._read_all(target, place.offset + low * place.dtype.itemsize)

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
            places = {key: self._place(key, one, 8 + length) for key, one in entries.items()}
            _check_places(places, 8 + length, self.num_bytes)
            return places
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise CheckpointError(f"{self.path} has a damaged header: {error!s:.200}") from error

    def _place(self, key: str, entry: Any, begin: int) -> _Place:
        dtype, shape = DTYPE_BY_CODE.get(entry["dtype"]), entry["shape"]
        low, high = entry["data_offsets"]
        numbers = [low, high, *shape]
        is_plain = len(numbers) <= 2 + MOST_DIMENSIONS and all(
            type(one) is int and 0 <= one < 1 << 62 for one in numbers
        )
        if dtype is None or not is_plain:
            raise ValueError(f"{key!r} has dtype {entry['dtype']!r}, shape {shape!r:.80} and offsets {[low, high]!r}")
        num_bytes = dtype.itemsize
        for one in shape:
            num_bytes *= one
        if high - low != num_bytes or begin + high > self.num_bytes:
            raise ValueError(f"{key!r} needs {num_bytes} bytes and has [{low}, {high}) of {self.num_bytes - begin}")
        return _Place(dtype, tuple(shape), begin + low, num_bytes)


def _check_places(places: Mapping[str, _Place], begin: int, end: int) -> None:
    """The numbers of the tensors are all that follows the header, without gap or overlap, as safetensors has it."""
    for place in sorted(places.values(), key=lambda one: (one.offset, one.num_bytes)):
        if place.offset != begin:
            raise ValueError(f"{'a gap' if place.offset > begin else 'tensors that overlap'} at {begin}")
        begin += place.num_bytes
    if begin != end:
        raise ValueError(f"{end - begin} bytes follow the last tensor")


def reason(error: OSError) -> str:
    """The system's, with its short name."""
    return f"{errno.errorcode.get(error.errno or 0, 'error')}: {error.strerror or error}"
