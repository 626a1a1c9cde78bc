"""Queues tiles by native code: arrays in host memory pass through slots of a device, where a kernel changes them.

Each tile is copied up into a slot, changed by one kernel, and copied down. From Python, every copy, launch and event
takes the interpreter's lock, which the training loop wants too. Here one call queues all tiles without it.

Kernels are Triton's, launched by their handles. `compiled_call` compares their parameters with what the driver expects.
If they differ, or if there is no driver or no native library, callers queue tiles by torch's operations.
"""

import functools
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerostd.kernels import native

NUM_SLOTS = 4  # ZS_DEVICE_SLOTS
DRIVER = "libcuda.so.1"
COUNT = None  # in place of an argument: the elements of the tile
ALIGNED = 16  # bytes of addresses, and elements of tiles, that kernels are compiled for
NUMBER, COUNTED, ARRAY = range(3)  # kinds of parameters
WIDTHS = {"i32": 4, "fp32": 4, "fp64": 8}  # bytes, by Triton's types
PACKED = {"i32": "i", "fp32": "f", "fp64": "d"}

LANES = ("up", "update", "down")  # streams
Pair = tuple[Tensor, Tensor]  # source and target of a copy
# The copies of a tile by stream; those of `update` follow the kernel. Tensors in slots are those of one slot, and the
# others are as long as all tiles.
TileMoves = Mapping[str, Sequence[Pair]]


class KernelCall(NamedTuple):
    """A compiled kernel, with its arguments."""

    function: int
    threads: int
    shared_bytes: int
    per_program: int  # elements
    arguments: tuple[tuple[str, Any], ...]  # Triton's type, and a tensor, an address, a number or COUNT


@functools.cache
def device_driver(device_type: str) -> int | None:
    """Return the driver of a kind of device, if native code can use it."""
    return native.open_driver(DRIVER) if device_type == "cuda" else None


def compiled_call(kernel: Any, arguments: Mapping[str, Any], per_program: int) -> KernelCall | None:
    """Return the call of a kernel compiled by Triton; None if native code cannot make it. `arguments` has those that
    are not constants."""
    handle = device_driver("cuda")
    metadata = kernel.metadata
    needs = (metadata.global_scratch_size, metadata.profile_scratch_size, metadata.launch_cooperative_grid)
    if handle is None or any(needs) or metadata.launch_pdl or metadata.num_ctas != 1:
        return None
    if kernel.run is None or kernel.function is None:  # to ask for the former loads the kernel
        return None
    types = tuple((name, kind) for name, kind in kernel.src.signature.items() if kind != "constexpr")
    num_scratch = _scratch_parameters(handle, kernel.function, tuple(kind for _, kind in types))
    if num_scratch is None or any(name not in arguments for name, _ in types):
        return None
    passed = [(kind, arguments[name]) for name, kind in types]
    scratch = [("*i8", 0)] * num_scratch  # of no size
    return KernelCall(kernel.function, 32 * metadata.num_warps, metadata.shared, per_program, (*passed, *scratch))


@functools.cache
def _scratch_parameters(handle: int, function: int, types: tuple[str, ...]) -> int | None:
    """Return the number of parameters that Triton adds; None if those before do not have the widths of these types."""
    sizes = native.driver_parameters(handle, function)
    expected = [8 if kind.startswith("*") else WIDTHS.get(kind, 0) for kind in types]
    added = sizes[len(expected) :]
    return len(added) if sizes[: len(expected)] == expected and all(size == 8 for size in added) else None


def stream_handle(stream: torch.Stream) -> int:
    """Return the driver's handle of a stream."""
    of_cuda = torch.cuda.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
    return int(of_cuda.cuda_stream)


@dataclass(eq=False)
class TileQueue:
    """Queues tiles through the slots of one updater, which are `NUM_SLOTS`."""

    handle: int  # of the driver
    streams: Sequence[int]  # up, update, down, as the driver knows them
    events: Sequence[Sequence[int]]  # likewise, of each slot, recorded once: it is up, updated, home
    slots: Sequence[Mapping[str, Tensor]]  # their memory, by name
    units: Mapping[torch.dtype, tuple[int, int]]  # of codes: the numbers that are coded together, and their bytes

    def __post_init__(self) -> None:
        self._places = {
            memory.data_ptr(): [slot[name].data_ptr() for slot in self.slots]
            for each in self.slots
            for name, memory in each.items()
        }

    @staticmethod
    def whole(numel: int, tile: int) -> int:
        """Return how many of the elements it may be given: not a last tile that kernels are not compiled for."""
        last = numel % tile
        return numel - (last if last % ALIGNED else 0)

    def takes(self, moves: TileMoves, call: KernelCall) -> bool:
        """Return whether all addresses are as aligned as the kernel expects, and each copy keeps its dtype."""
        pairs = [pair for lane in LANES for pair in moves[lane]]
        addresses = [value.data_ptr() for _, value in call.arguments if isinstance(value, Tensor)]
        return not any(address % ALIGNED for address in addresses) and all(
            source.dtype == target.dtype and source.is_contiguous() and target.is_contiguous()
            for source, target in pairs
        )

    def queue(self, moves: TileMoves, call: KernelCall, numel: int, tile: int, first_slot: int) -> None:
        """Queue tiles of `tile` elements, and a shorter one. Returns when the last one is queued, which is when the
        slot that it takes is free."""
        pairs = [pair for lane in LANES for pair in moves[lane]]
        copies = array("Q", [word for pair in pairs for tensor in pair for word in self._array(tensor)])
        parameters = array("Q", [word for kind, value in call.arguments for word in self._parameter(kind, value)])
        sizes = [*(len(moves[lane]) for lane in LANES), len(call.arguments)]
        events = [event for moments in self.events for event in moments]
        launch = (call.function, call.per_program, call.threads, call.shared_bytes)
        pointers = (copies.buffer_info()[0], parameters.buffer_info()[0])
        words = array("Q", [numel, tile, first_slot, *sizes, *launch, *self.streams, *events, *pointers])
        native.queue_tiles(self.handle, words)

    def _array(self, tensor: Tensor) -> list[int]:
        """Return `struct zs_device_array`."""
        address = tensor.data_ptr()
        unit = self.units.get(tensor.dtype, (1, tensor.itemsize))
        places = self._places.get(address)
        return [address, 0, 0, 0, 1, *unit] if places is None else [*places, 0, *unit]

    def _parameter(self, kind: str, value: Any) -> list[int]:
        """Return `struct zs_device_parameter`."""
        if isinstance(value, Tensor):
            return [ARRAY, 0, *self._array(value)]
        number = 0 if value is COUNT else value
        if not kind.startswith("*"):
            number = int.from_bytes(struct.pack(PACKED[kind], number), "little")
        return [COUNTED if value is COUNT else NUMBER, number, *[0] * 7]
