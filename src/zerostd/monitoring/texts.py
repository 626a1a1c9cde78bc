"""Numbers as people read them, the same in plans, reports and errors."""

from __future__ import annotations

COUNTS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))  # of parameters
UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def size_text(num_bytes: float) -> str:
    """Return bytes in the unit that fits; none at all are a dash."""
    for unit, size in UNITS:
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{int(num_bytes)} B" if num_bytes else "-"


def exact_size(num_bytes: int) -> str:
    """Return bytes in GiB and as they are, for refusals."""
    return f"{num_bytes / 2**30:.2f} GiB ({num_bytes} bytes)"


def short_size(num_bytes: float) -> str:
    """Return bytes with three digits, for tables that must fit a terminal."""
    for unit, size in UNITS:
        if abs(num_bytes) >= size:
            value = num_bytes / size
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
    return size_text(num_bytes)


def seconds_text(value: float) -> str:
    """Return seconds in the unit that fits, with three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("\N{MICRO SIGN}s", 1e-6)):
        if abs(value) >= size:
            return f"{rate_text(value / size)} {unit}"
    return "0 s" if value == 0 else f"{value * 1e9:.3g} ns"


def rate_text(value: float) -> str:
    """Return a number with three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def plain_seconds(value: float) -> str:
    """Return seconds as sentences show them: "0.0713 s"; another unit below a millisecond."""
    return f"{rate_text(value)} s" if value == 0 or abs(value) >= 1e-3 else seconds_text(value)


def percent_text(share: float) -> str:
    """Return a share as a whole percentage: 0.97 is 97 %."""
    return f"{100 * share:.0f} %"


def value_text(value: float) -> str:
    """Return a loss or another measured value with four digits, or all before the point."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def count_text(count: int) -> str:
    """Return a number of parameters as people say it: 13 B, 350 M, 144."""
    size, unit = next(((size, unit) for size, unit in COUNTS if count >= size), (1, ""))
    return f"{rate_text(count / size)} {unit}".strip()
