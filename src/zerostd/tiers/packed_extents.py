"""Packed extents: numbers that take fewer bytes on disk, and fewer bytes to read.

Numbers are packed tile by tile. A tile keeps the place that it would have unpacked: the packed tile fills the first
pages there, and the rest is a hole that takes no space. So any part can be read and written again, and each page has
its checksum as in any extent. Used for frozen parameters: packing takes longer than unpacking.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zerostd.policy import Tier
from zerostd.tiers.extents import Extent, Scratch
from zerostd.tiers.host import padded
from zerostd.tiers.packing import TILE_BYTES


@dataclass(eq=False)
class PackedExtent(Extent):
    """Space for numbers that are seldom written. It stays on its drive: a write that fails is an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lengths = [0] * -(-self.num_bytes // TILE_BYTES)  # bytes of each tile in the file; 0: never written
        self._writing = threading.Lock()  # two threads may have parts of one tile

    @property
    def held_bytes(self) -> int:
        return sum(length or self._tile_bytes(tile) for tile, length in enumerate(self._lengths))

    def read(self, offset: int, block: torch.Tensor, scratch: Scratch) -> None:
        """Fill a block from `offset` on, and check it."""
        for tile, part, place in self._parts(offset, len(block)):
            self._read_tile(tile, part, block[place], scratch)

    def write(self, offset: int, block: torch.Tensor, scratch: Scratch) -> None:
        """Pack a block, and write it to `offset`. The rest of a tile that it fills in part is read before."""
        for tile, part, place in self._parts(offset, len(block)):
            size = self._tile_bytes(tile)
            if len(block[place]) == size:
                self._write_tile(tile, block[place], scratch)
                continue
            with self._writing:
                values = scratch.packer.tile[:size]
                self._read_tile(tile, slice(0, size), values, scratch)
                values[part] = block[place]
                self._write_tile(tile, values, scratch)

    def _read_tile(self, tile: int, part: slice, target: torch.Tensor, scratch: Scratch) -> None:
        size = self._tile_bytes(tile)
        length = self._lengths[tile]
        if length in (0, size):
            super().read(tile * TILE_BYTES + part.start, target, scratch)
            return
        packer = scratch.packer
        super().read(tile * TILE_BYTES, packer.packed[: padded(length)], scratch)
        begun = time.thread_time()
        if len(target) == size:
            packer.unpack(self.item_bytes, target)
        else:
            packer.unpack(self.item_bytes, packer.tile[:size])
            target.copy_(packer.tile[part])
        self.ledger.note_unpacking(time.thread_time() - begun)

    def _write_tile(self, tile: int, values: torch.Tensor, scratch: Scratch) -> None:
        length = scratch.packer.pack(values, self.item_bytes)
        stored = scratch.packer.packed[: padded(length)] if length else values
        super().write(tile * TILE_BYTES, stored, scratch)
        before = self._lengths[tile]
        self._lengths[tile] = length or len(values)
        self.ledger.leave(self.kind, before or len(values), Tier.DISK)
        self.ledger.enter(self.kind, self._lengths[tile], Tier.DISK)
        end = padded(self._tile_bytes(tile))
        if len(stored) < end:
            self.scratch_file.punch(self.start + tile * TILE_BYTES + len(stored), end - len(stored))

    def _tile_bytes(self, tile: int) -> int:
        return min(TILE_BYTES, self.num_bytes - tile * TILE_BYTES)

    def _parts(self, offset: int, num_bytes: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield the tiles of an interval, each with its part in the interval, and that part's place there."""
        start = offset
        while start < offset + num_bytes:
            tile = start // TILE_BYTES
            stop = min(offset + num_bytes, tile * TILE_BYTES + self._tile_bytes(tile))
            begin = tile * TILE_BYTES
            yield tile, slice(start - begin, stop - begin), slice(start - offset, stop - offset)
            start = stop
