"""Numbers as people read them. What is not there is a dash."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zerostd.monitoring.texts import size_text

__all__ = [
    "NONE",
    "Format",
    "bytes_text",
    "count_text",
    "percent_text",
    "plain_text",
    "rate_text",
    "seconds_text",
    "share_text",
    "value_text",
]

NONE = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"
Format = Callable[[Any], str]


def seconds_text(value: float | None) -> str:
    """Seconds in the unit that fits."""
    if value is None:
        return NONE
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("\N{MICRO SIGN}s", 1e-6)):
        if abs(value) >= size:
            return f"{_digits(value / size)} {unit}"
    return "0 s" if value == 0 else f"{value * 1e9:.3g} ns"


def bytes_text(value: float | None) -> str:
    """Bytes in the unit that fits."""
    return NONE if value is None else size_text(value) if value else "0 B"


def rate_text(value: float | None) -> str:
    """So many a second."""
    return NONE if value is None else _digits(value)


def share_text(value: float | None) -> str:
    """A part of one, in percent."""
    return NONE if value is None else f"{100 * value:,.1f} %"


def percent_text(value: float | None) -> str:
    """Percent with their sign."""
    if value is None:
        return NONE
    return f"{'+' if value >= 0 else MINUS}{abs(value):,.1f} %"


def value_text(value: float | None) -> str:
    """A loss or a quality."""
    return NONE if value is None else f"{value:.4g}".replace("-", MINUS)


def count_text(value: float | None) -> str:
    """A whole number."""
    return NONE if value is None else f"{value:,.0f}"


def plain_text(value: Any) -> str:
    """A text, or a value of run.json's settings."""
    if value is None or value == "":
        return NONE
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _digits(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
