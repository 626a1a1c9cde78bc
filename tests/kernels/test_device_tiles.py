"""Tiles that native code queues: the right bytes through the right slots, in an order that streams and events keep.

The driver is a library made here, whose device is host memory: copies and kernels run when they are queued, and every
call is noted. tests/gpu/test_device_tiles.py has the same on a device.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerostd.kernels import KernelCall, TileQueue, device_tiles, native

DRIVER = r"""
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct call { int64_t what, stream, event; };
static struct call calls[4096];
static int64_t num_calls, fails_at = -1;
enum { COPY, LAUNCH, RECORD, WAIT, SYNCHRONIZE };

static int note(int64_t what, const void *stream, const void *event) {
  if (num_calls == fails_at) return 719;
  calls[num_calls].what = what;
  calls[num_calls].stream = (int64_t)(intptr_t)stream;
  calls[num_calls++].event = (int64_t)(intptr_t)event;
  return 0;
}

const struct call *noted(void) { return calls; }
int64_t num_noted(void) { return num_calls; }
void fail_at(int64_t number) { num_calls = 0; fails_at = number; }

int cuMemcpyAsync(uint64_t target, uint64_t source, size_t size, void *stream) {
  int error = note(COPY, stream, 0);
  if (!error) memcpy((void *)(uintptr_t)target, (void *)(uintptr_t)source, size);
  return error;
}

/* values[i] = factor * values[i] + gradient[i] + count, by programs of as many elements as there are threads */
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                   unsigned shared, void *stream, void **parameters, void **extra) {
  int error = note(LAUNCH, stream, function);
  if (error || y != 1 || z != 1 || ty != 1 || tz != 1 || shared != 7 || extra) return error ? error : 1;
  float *values = *(float **)parameters[0];
  const float *gradient = *(float **)parameters[1];
  float factor = *(float *)parameters[2];
  int32_t count = *(int32_t *)parameters[3];
  for (int64_t i = 0; i < (int64_t)x * threads && i < count; ++i) values[i] = factor * values[i] + gradient[i] + count;
  return 0;
}

int cuEventRecord(void *event, void *stream) { return note(RECORD, stream, event); }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return flags ? 1 : note(WAIT, stream, event); }
int cuEventSynchronize(void *event) { return note(SYNCHRONIZE, 0, event); }
int cuFuncGetParamInfo(void *function, size_t index, size_t *offset, size_t *size) {
  static const size_t sizes[] = {8, 8, 4, 4, 8, 8};
  if (!function || index >= 6) return 1;
  *offset = 8 * index;
  *size = sizes[index];
  return 0;
}
int cuGetErrorName(int error, const char **name) { *name = "CUDA_ERROR_LAUNCH_FAILED"; return error != 719; }
"""
Pair = tuple[torch.Tensor, torch.Tensor]
UP, UPDATE, DOWN = 11, 22, 33
COPY, LAUNCH, RECORD, WAIT, SYNCHRONIZE = range(5)
THREADS = 32


class Call(ctypes.Structure):
    _fields_ = (("what", ctypes.c_int64), ("stream", ctypes.c_int64), ("event", ctypes.c_int64))


class HostDriver:
    """The driver of the test."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.noted.restype = ctypes.POINTER(Call)
        self.library.num_noted.restype = ctypes.c_int64
        self.library.fail_at.argtypes = (ctypes.c_int64,)
        self.library.fail_at(-1)
        handle = native.open_driver(str(path))
        assert handle is not None
        self.handle = handle

    @property
    def calls(self) -> list[tuple[int, int, int]]:
        return [(each.what, each.stream, each.event) for each in self.library.noted()[: self.library.num_noted()]]


@pytest.fixture(scope="module")
def driver_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not native.LIBRARY.exists():
        pytest.skip("needs a C compiler and the native library")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "driver.c", "-o", "driver.so"], cwd=folder, check=True)
    return folder / "driver.so"


@pytest.fixture
def driver(driver_path: Path) -> HostDriver:
    return HostDriver(driver_path)


def queue_of(driver: HostDriver, slots: Sequence[dict[str, torch.Tensor]], units: Any = None) -> TileQueue:
    """A queue with streams and events that are only numbers."""
    events = [[100 * slot + moment for moment in range(1, 4)] for slot in range(1, 5)]
    return TileQueue(driver.handle, (UP, UPDATE, DOWN), events, slots, units or {})


def moves_of(
    up: Sequence[Pair] = (), beside: Sequence[Pair] = (), down: Sequence[Pair] = ()
) -> dict[str, Sequence[Pair]]:
    return {"up": up, "update": beside, "down": down}


def kernel_call(values: torch.Tensor, gradient: torch.Tensor) -> KernelCall:
    arguments = (("*fp32", values), ("*fp32", gradient), ("fp32", 0.5), ("i32", device_tiles.COUNT), ("*i8", 0))
    return KernelCall(99, THREADS, 7, THREADS, arguments)


@pytest.mark.parametrize("count", [16, 64, 256, 272, 64 * 9 + 48])
@pytest.mark.parametrize("first", range(4))
def test_tiles_pass_through_slots_in_turn(driver: HostDriver, count: int, first: int) -> None:
    tile = 64
    slots = [{"states": torch.zeros(tile), "landing": torch.zeros(tile)} for _ in range(4)]
    states, gradient = torch.randn(count), torch.randn(count)
    expected = torch.cat([0.5 * s + g + len(s) for s, g in zip(states.split(tile), gradient.split(tile), strict=True)])
    home, shown = states.clone(), torch.zeros(count)
    length = min(tile, count)
    staged, landing = slots[first]["states"][:length], slots[first]["landing"][:length]
    moves = moves_of(up=[(home, staged), (gradient, landing)], beside=[(staged, shown)], down=[(staged, home)])
    queue = queue_of(driver, slots)
    call = kernel_call(staged, landing)
    assert queue.takes(moves, call)
    queue.queue(moves, call, count, tile, first)
    assert torch.equal(home, expected) and torch.equal(shown, expected)
    order = []
    for number in range(-(-count // tile)):
        up, updated, landed = (100 * ((first + number) % 4 + 1) + moment for moment in range(1, 4))
        order += [(SYNCHRONIZE, 0, landed), (COPY, UP, 0), (COPY, UP, 0), (RECORD, UP, up), (WAIT, UPDATE, up)]
        order += [(LAUNCH, UPDATE, 99), (COPY, UPDATE, 0), (RECORD, UPDATE, updated)]
        order += [(WAIT, DOWN, updated), (COPY, DOWN, 0), (RECORD, DOWN, landed)]
    assert driver.calls == order


def test_a_last_tile_that_kernels_are_not_compiled_for_is_left_out() -> None:
    assert [TileQueue.whole(numel, 64) for numel in (0, 15, 16, 63, 64, 65, 80, 200)] == [0, 0, 16, 0, 64, 64, 80, 192]


def test_codes_move_by_records(driver: HostDriver) -> None:
    """64 numbers take 68 bytes, and the last record is whole."""
    tile, count = 128, 128 + 48
    slots = [{"codes": torch.zeros(136, dtype=torch.uint8), "values": torch.zeros(tile)} for _ in range(4)]
    coded = torch.randint(0, 256, (3 * 68,), dtype=torch.uint8)
    target = torch.zeros_like(coded)
    queue = queue_of(driver, slots, {torch.uint8: (64, 68)})
    values, gradient = torch.zeros(count), torch.zeros(count)
    staged = slots[2]["codes"]
    queue.queue(moves_of([(coded, staged)], [], [(staged, target)]), kernel_call(values, gradient), count, tile, 2)
    assert torch.equal(target, coded)


def test_what_the_kernel_does_not_expect_is_not_taken(driver: HostDriver) -> None:
    slots = [{"states": torch.zeros(64)} for _ in range(4)]
    queue = queue_of(driver, slots)
    numbers = torch.zeros(80)
    staged = slots[0]["states"]
    good = moves_of(up=[(numbers[:64], staged)])
    assert queue.takes(good, kernel_call(staged, numbers[4:68]))
    assert not queue.takes(good, kernel_call(staged, numbers[1:65]))  # off its alignment
    assert not queue.takes(moves_of(up=[(numbers[:64].double(), staged)]), kernel_call(staged, staged))
    assert not queue.takes(moves_of(up=[(torch.zeros(128)[::2], staged)]), kernel_call(staged, staged))


@pytest.mark.parametrize("number", range(22))
def test_an_error_of_the_driver_is_named_wherever_it_comes(driver: HostDriver, number: int) -> None:
    slots = [{"states": torch.zeros(64)} for _ in range(4)]
    home = torch.zeros(128)
    staged = slots[0]["states"]
    moves = moves_of(up=[(home, staged)], beside=[(staged, home)], down=[(staged, home)])
    driver.library.fail_at(number)
    queue = queue_of(driver, slots)
    if number >= 20:  # two tiles take 20 calls
        queue.queue(moves, kernel_call(staged, staged), 128, 64, 0)
        return
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_LAUNCH_FAILED \(error 719\)"):
        queue.queue(moves, kernel_call(staged, staged), 128, 64, 0)
    assert len(driver.calls) == number


@pytest.mark.parametrize(("place", "value"), [(1, 0), (2, 4), (8, 0), (9, 0), (6, 65)])
def test_a_malformed_request_is_refused(driver: HostDriver, place: int, value: int) -> None:
    words = [0, 64, 0, 0, 0, 0, 0, 99, 32, 32, 0, *[1] * 15, 0, 0]
    native.queue_tiles(driver.handle, array("Q", words))
    words[place] = value
    with pytest.raises(AssertionError, match="status -1"):
        native.queue_tiles(driver.handle, array("Q", words))


def compiled(**changes: Any) -> Any:
    """A kernel as Triton shows it."""
    metadata = {
        "global_scratch_size": 0, "profile_scratch_size": 0, "launch_cooperative_grid": False, "launch_pdl": False,
        "num_ctas": 1, "num_warps": 4, "shared": 0,
    }  # fmt: skip
    signature = {"values": "*fp32", "gradient": "*fp32", "factor": "fp32", "numel": "i32", "BLOCK": "constexpr"}
    signature.update(changes.pop("signature", {}))
    function = changes.pop("function", 5)
    kernel = {"metadata": SimpleNamespace(**metadata | changes), "src": SimpleNamespace(signature=signature)}
    return SimpleNamespace(run=print, function=function, **kernel)


def test_a_kernel_is_called_only_with_what_the_driver_says_it_takes(
    driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_tiles, "device_driver", lambda _: driver.handle)
    arguments = {"values": torch.zeros(4), "gradient": torch.zeros(4), "factor": 0.5, "numel": device_tiles.COUNT}
    call = device_tiles.compiled_call(compiled(), arguments, 1024)
    assert call is not None
    assert [kind for kind, _ in call.arguments] == ["*fp32", "*fp32", "fp32", "i32", "*i8", "*i8"]
    assert call.threads == 128 and call.per_program == 1024
    for changes in (
        {"signature": {"factor": "fp64"}}, {"signature": {"more": "i32"}}, {"num_ctas": 2}, {"launch_pdl": True},
        {"global_scratch_size": 8}, {"function": 0},
    ):  # fmt: skip
        assert device_tiles.compiled_call(compiled(**changes), arguments, 1024) is None, changes
    monkeypatch.setattr(device_tiles, "device_driver", lambda _: None)
    assert device_tiles.compiled_call(compiled(), arguments, 1024) is None


def test_a_library_that_is_no_driver_is_not_used() -> None:
    assert native.open_driver("no such library.so") is None
    assert native.open_driver("libc.so.6") is None
    assert device_tiles.device_driver("cpu") is None
