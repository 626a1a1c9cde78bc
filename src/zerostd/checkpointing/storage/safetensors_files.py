"""Write one safetensors file block by block, from wherever its numbers are kept, and read one in intervals.

Writing needs memory for a few blocks; the safetensors library's own writer wants all tensors in memory at once. Whole
pages bypass the page cache (O_DIRECT) where the file system supports that: it is several times faster, and the host
keeps its memory. Pages that two blocks share, and everything on other file systems, go through the cache, in short
slices and by one thread at a time: longer slices, and several at once, take twice as long (1 GB on ext4: 0.7 s).
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy
import torch
from msgspec import Struct

from zerostd.checkpointing.storage.manifest import DTYPE_BY_CODE, SAFETENSORS_CODES, Count, Shape
from zerostd.checkpointing.storage.remote import AnyPath, RemotePath
from zerostd.errors import CheckpointError
from zerostd.monitoring.decoding import convert, decode
from zerostd.monitoring.retrying import Retries
from zerostd.tiers.host import PAGE, aligned
from zerostd.tiers.scratch_files import DIRECT, reason

NUM_THREADS = 4
MOST_HEADER = 256 << 20
CACHED_SLICE = 256 << 10  # bytes written at a time through the page cache
START_EVERY = 32 << 20  # bytes through the page cache after which the system is asked to start writing to disk
RANGE_WRITE = 2  # SYNC_FILE_RANGE_WRITE
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)

_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

Bytes: TypeAlias = Any  # a numpy array of uint8: its stubs for Python 3.11 do not say that it is a buffer
Job = TypeVar("Job")
Result = TypeVar("Result")


@contextmanager
def system_errors(what: str) -> Iterator[None]:
    """Turn the system's errors inside into a CheckpointError that begins with `what`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {reason(error)}") from error


@contextmanager
def job_threads() -> Iterator[ThreadPool]:
    """Open threads for jobs; at the end, drop jobs that have not begun and wait for the others. Executors of
    concurrent.futures take no job once the interpreter has begun to end, when a checkpoint may still be on its way."""
    threads = ThreadPool(NUM_THREADS)
    try:
        yield threads
    finally:
        threads.terminate()
        threads.join()


def ordered_results(threads: ThreadPool, work: Callable[[Job], Result], jobs: Iterable[Job]) -> Iterator[Result]:
    """Run `work` on jobs in threads, and return the results in the order of the jobs. After an error none begins."""
    errors: list[Exception] = []

    def work_unless_failed(job: Job) -> Result:
        if errors:
            raise errors[0]
        try:
            return work(job)
        except Exception as error:
            errors.append(error)
            raise

    return threads.imap(work_unless_failed, jobs)


def _reserve(fd: int, num_bytes: int) -> None:
    fallocate = getattr(_LIBC, "fallocate", None)
    if fallocate is not None and fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class DirectFileWriter:
    """A file of `num_bytes` at `path`, which must not exist yet. Raises the system's OSErrors, after retries."""

    def __init__(self, path: Path, num_bytes: int, retries: Retries) -> None:
        self._path = path
        self._retries = retries
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._direct_fd = -1  # where the file system has no O_DIRECT
        self._scratch = threading.local()  # aligned memory of each thread
        self._lock = threading.Lock()
        self._bytes_since_start = 0
        try:
            with _unless_refused():
                self._direct_fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | DIRECT) if DIRECT else -1
            with _unless_refused():  # a full disk shows at once, and writes need not wait for blocks
                retries.attempt("reserving", f"{num_bytes} bytes of {path}", _reserve, self._fd, num_bytes)
        except BaseException:
            self.close()
            raise

    def write(self, values: torch.Tensor, offset: int) -> None:
        """Write a contiguous tensor on the host at `offset` of the file. Threads may write parts at the same time."""
        raw = bytes_of(values)
        start = min(len(raw), -offset % PAGE)
        stop = start + (len(raw) - start) // PAGE * PAGE
        if self._direct_fd >= 0 and start < stop:
            with _unless_refused():
                self._write_direct(raw[start:stop], offset + start)
                self._write_cached(raw[:start], offset)
                self._write_cached(raw[stop:], offset + stop)
                return
        self._write_cached(raw, offset)

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        for fd in (self._fd, self._direct_fd):
            if fd >= 0:
                os.close(fd)

    def _write(self, fd: int, values: Bytes, offset: int) -> int:
        where = f"{len(values)} bytes at offset {offset} of {self._path}"
        return self._retries.attempt("writing", where, os.pwrite, fd, values, offset)

    def _write_direct(self, pages: Bytes, offset: int) -> None:
        """Write whole pages past the cache, from memory that starts on a page."""
        if pages.ctypes.data % PAGE:
            if len(getattr(self._scratch, "memory", ())) < len(pages):
                self._scratch.memory = bytes_of(aligned(len(pages)))
            memory = self._scratch.memory[: len(pages)]
            memory[:] = pages
            pages = memory
        done = 0
        while done < len(pages) and done % PAGE == 0:
            done += self._write(self._direct_fd, pages[done:], offset + done)
        self._write_cached(pages[done:], offset + done)  # after a short write the rest does not start on a page

    def _write_cached(self, values: Bytes, offset: int) -> None:
        done = 0
        with self._lock:
            while done < len(values):
                done += self._write(self._fd, values[done : done + CACHED_SLICE], offset + done)
            self._bytes_since_start += len(values)
            if self._bytes_since_start < START_EVERY:
                return
            self._bytes_since_start = 0
        # So that the sync at the end is short. A sync here would wait for the file system's journal, and block other
        # threads. Errors show up in the sync at the end.
        sync_file_range = getattr(_LIBC, "sync_file_range", None)
        if sync_file_range is not None:
            sync_file_range(self._fd, ctypes.c_int64(0), ctypes.c_int64(0), RANGE_WRITE)


@contextmanager
def _unless_refused() -> Iterator[None]:
    """Go on after an error that says that the file system cannot do this."""
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSALS:
            raise


def bytes_of(values: torch.Tensor) -> Bytes:
    """Return the bytes of a contiguous tensor on the host, which share its memory. `Tensor.numpy` marks memory that can
    never be given back, as `zerostd.sleep` does."""
    flat = values.view(-1).view(torch.uint8)
    if not len(flat):
        return numpy.empty(0, numpy.uint8)
    memory: Any = (ctypes.c_uint8 * len(flat)).from_address(flat.data_ptr())
    memory.tensor = flat  # keeps it alive
    return numpy.frombuffer(memory, numpy.uint8)


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
        return math.prod(self.shape) * self.dtype.itemsize


def write_file(
    path: Path,
    tensors: Sequence[OutputTensor],
    on_written: Callable[[OutputTensor], None],
    metadata: Mapping[str, str],
    retries: Retries | None = None,
) -> tuple[int, dict[str, tuple[int, ...]]]:
    """Write a new file and sync it to disk; return its length and, by key, the checksums of each tensor's blocks.

    `on_written` is called with each tensor when all its blocks are written, in order. `metadata` goes into the header.
    """
    header, offsets, num_bytes = _make_header(tensors, metadata)
    checksums: dict[str, list[int]] = {tensor.key: [] for tensor in tensors}
    blocks = (
        (tensor, write, offset + first * tensor.dtype.itemsize)
        for tensor, offset in zip(tensors, offsets, strict=True)
        for first, write in tensor.blocks
    )
    with (
        system_errors(f"{path} cannot be written"),
        closing(DirectFileWriter(path, num_bytes, retries or Retries())) as writer,
    ):
        writer.write(torch.frombuffer(header, dtype=torch.uint8), 0)
        with job_threads() as threads:
            for tensor, crc in ordered_results(threads, lambda block: (block[0], block[1](writer, block[2])), blocks):
                checksums[tensor.key].append(crc)
                if len(checksums[tensor.key]) == len(tensor.blocks):
                    on_written(tensor)
        writer.sync()
    return num_bytes, {key: tuple(crcs) for key, crcs in checksums.items()}


def _make_header(tensors: Sequence[OutputTensor], metadata: Mapping[str, str]) -> tuple[bytearray, list[int], int]:
    """Return the start of the file, the offset of each tensor's numbers, and the file's length."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
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
    return bytearray(struct.pack("<Q", len(text)) + text), [begin + start for start in starts], begin + end


class StoredTensor(Struct, frozen=True):
    """A tensor as the header of its file describes it."""

    code: str = msgspec.field(name="dtype")
    shape: Shape
    data_offsets: tuple[Count, Count]  # [start, stop) in bytes, counted from the end of the header

    @property
    def dtype(self) -> torch.dtype:
        return DTYPE_BY_CODE[self.code]


class SafetensorsReader:
    """An open file. Its header is checked before anything is read."""

    def __init__(self, path: AnyPath, retries: Retries | None = None) -> None:
        self.path = path
        self._retries = retries or Retries()
        self._fd = -1  # below a URL nothing stays open
        with system_errors(f"{path} cannot be read"):
            if isinstance(path, Path):
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait
        try:
            with system_errors(f"{path} cannot be read"):
                status = os.fstat(self._fd) if isinstance(path, Path) else path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path} is not an ordinary file")
            self._data_start, self.tensors = self._read_header(status.st_size)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def read(self, key: str, low: int, target: torch.Tensor) -> None:
        """Fill `target`, contiguous and on the host, with the elements of a flattened tensor from `low` on."""
        tensor = self.tensors[key]
        self._read_all(bytes_of(target), self._data_start + tensor.data_offsets[0] + low * tensor.dtype.itemsize)

    def _read_all(self, memory: Bytes | bytearray, offset: int) -> None:
        done = 0
        view = memoryview(memory)
        while done < len(view):
            with system_errors(f"{self.path} cannot be read at {offset + done}"):
                where = f"{self.path} at {offset + done}"
                count = self._retries.attempt("reading", where, self._read_some, view[done:], offset + done)
            if not count:
                raise CheckpointError(f"{self.path} ends at {offset + done}: it is incomplete")
            done += count

    def _read_some(self, memory: memoryview, offset: int) -> int:
        if isinstance(self.path, RemotePath):
            return self.path.read_into(memory, offset)
        return os.preadv(self._fd, [memory], offset)

    def _read_header(self, num_bytes: int) -> tuple[int, dict[str, StoredTensor]]:
        """Return where the numbers begin, and the tensors by key."""
        if num_bytes < 8:
            raise CheckpointError(f"{self.path} has {num_bytes} bytes: it is not a safetensors file")
        start = bytearray(8)
        self._read_all(start, 0)
        (length,) = struct.unpack("<Q", start)
        if not 2 <= length <= min(num_bytes - 8, MOST_HEADER):
            raise CheckpointError(f"{self.path} is not a safetensors file: the length of its header would be {length}")
        text = bytearray(length)
        self._read_all(text, 8)
        what = f"{self.path} has a damaged header"
        entries = decode(bytes(text), dict[str, Any], what=f"{self.path}: the damaged header", error=CheckpointError)
        entries.pop("__metadata__", None)
        tensors = convert(entries, dict[str, StoredTensor], what=what, error=CheckpointError)
        for problem in _header_problems(tensors, num_bytes - 8 - length):
            raise CheckpointError(f"{what}: {problem}")
        return 8 + length, tensors


def _header_problems(tensors: Mapping[str, StoredTensor], num_bytes: int) -> Iterator[str]:
    """Yield the problems of a header. The tensors must cover all bytes that follow it, without gap or overlap."""
    end = 0
    for key, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        low, high = tensor.data_offsets
        if tensor.code not in DTYPE_BY_CODE:
            yield f"{key!r} has the unknown dtype {tensor.code!r}"
        if high - low != math.prod(tensor.shape) * tensor.dtype.itemsize:
            yield f"{key!r} has shape {tensor.shape}, {tensor.code} and offsets [{low}, {high})"
        if low != end:
            yield f"{'a gap' if low > end else 'tensors that overlap'} at {end}"
        end = high
    if end > num_bytes:
        yield f"the tensors need {end} bytes, but the file has {num_bytes}"
    if end < num_bytes:
        yield f"{num_bytes - end} bytes follow the last tensor"
