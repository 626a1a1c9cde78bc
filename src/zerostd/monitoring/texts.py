"""Numbers as people read them, the same in plans, reports and errors."""

from __future__ import annotations

UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def size_text(num_bytes: float) -> str:
    """Return bytes in the unit that fits; none at all are a dash."""
    for unit, size in UNITS:
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{int(num_bytes)} B" if num_bytes else "-"
