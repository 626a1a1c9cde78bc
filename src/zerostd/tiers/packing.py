"""Packing: lossless compression of numbers, in tiles.

The exponents of trained weights take few values. So a plane of exponents shrinks to a third of its bytes, and weights
in bf16 shrink to two thirds. A packer turns a tile of numbers into bytes in its own memory, and back.

A packed tile begins with the length of each plane, as int32. The planes follow. A plane that would not shrink is stored
as it is, with its full length. A tile that would not shrink is not packed.
"""

from __future__ import annotations

import contextlib
import functools
from types import ModuleType

import torch

from zerostd.errors import PrepareError
from zerostd.kernels import join_planes, split_planes
from zerostd.tiers.host import aligned, padded

TILE_BYTES = 2**20  # what is packed at once
WORTH = 0.97  # of its bytes: a plane that is not shorter than this is stored as it is
HEADER = torch.int32  # of the length of a plane


@functools.cache
def coder() -> ModuleType:
    """Return the module that packs planes; raise PrepareError where it is not installed."""
    with contextlib.suppress(ImportError):
        import zstandard

        return zstandard
    raise PrepareError(
        "codec={'parameters': 'lossless'} needs the package zstandard: pip install 'zerostd[lossless]', or leave "
        "'parameters' out of the codec"
    )


class Packer:
    """Packs and unpacks tiles, in memory that one thread has for it."""

    NUM_BYTES = 3 * TILE_BYTES  # of that memory

    def __init__(self) -> None:
        zstandard = coder()
        # A search for repeated strings takes time and finds none in exponents. With a tiny table the coder finds none
        # at once, and an entropy code of single bytes remains.
        options = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=6, min_match=7, target_length=0
        )
        self._compressor = zstandard.ZstdCompressor(compression_params=options)
        self._decompressor = zstandard.ZstdDecompressor()
        self.tile = aligned(TILE_BYTES)  # numbers of which a part is wanted
        self.packed = aligned(TILE_BYTES)  # on their way to the file, or from there
        self._planes = torch.empty(TILE_BYTES, dtype=torch.uint8)

    def pack(self, values: torch.Tensor, item_bytes: int) -> int:
        """Fill `packed` with a tile; return its bytes there, or 0 if it would not be shorter."""
        planes = self._planes[: len(values)].view(item_bytes, -1).unbind()
        split_planes(values, planes)
        lengths = self.packed[: HEADER.itemsize * item_bytes].view(HEADER)
        done = lengths.nbytes
        for index, plane in enumerate(planes):
            data: memoryview | bytes = self._compressor.compress(plane.numpy().data)
            if len(data) > WORTH * len(plane):
                data = plane.numpy().data
            if padded(done + len(data)) >= padded(len(values)):
                return 0
            self.packed.numpy().data[done : done + len(data)] = data
            lengths[index] = len(data)
            done += len(data)
        self.packed[done : padded(done)] = 0
        return done

    def unpack(self, item_bytes: int, values: torch.Tensor) -> None:
        """Write the numbers of the tile in `packed` to `values`."""
        planes = list(self._planes[: len(values)].view(item_bytes, -1).unbind())
        lengths: list[int] = self.packed[: HEADER.itemsize * item_bytes].view(HEADER).tolist()
        start = HEADER.itemsize * item_bytes
        for index, length in enumerate(lengths):
            data = self.packed[start : start + length]
            if length == len(planes[index]):
                planes[index] = data
            else:
                self._decompressor.stream_reader(data.numpy().data).readinto(planes[index].numpy().data)
            start += length
        join_planes(planes, values)
