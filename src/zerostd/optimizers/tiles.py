"""How long the tiles are that states pass through a tier's buffers in."""

from __future__ import annotations

from zerostd.sharding.portions import UNIT

__all__ = ["tile_numel"]

FEW = 4  # tiles that a portion is cut into if one tile could hold it: reading, updating and writing overlap
LEAST = 1 << 16


def tile_numel(most: int, longest: int) -> int:
    """Elements of a tile where the longest portion has so many: `most`, or less where that would be one tile for all,
    so that buffers stay small beside what they serve."""
    if longest >= most:
        return most
    return min(most, -(-max(LEAST, -(-longest // FEW)) // UNIT) * UNIT, -(-longest // UNIT) * UNIT)
