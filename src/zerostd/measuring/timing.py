"""How much is tried, and how it is timed: medians of short turns, with the clock or with the device's events."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import torch

T = TypeVar("T")

PAGE = 4096
SHARE = 8  # at most one part in so many of what is free is taken for one array


@dataclass(frozen=True)
class TrialSizes:
    """How much is tried of each. These are for a profile that is kept; less memory or a slow part takes less."""

    parameters: int = 64 << 20  # to update, on the CPU and on the device: far more than caches hold
    copy: int = 64 << 20  # bytes of one copy through the link
    copies: int = 4  # in each direction
    side: int = 8192  # of the matrices on a device
    cpu_side: int = 1024  # of the matrices on the CPU
    disk: int = 1 << 30  # bytes of the file
    wire: int = 64 << 20  # bytes of the longest buffer that is gathered and reduced
    turns: int = 5  # that a median is taken of
    seconds: float = 1.0  # for one number, after which no new turn begins
    disk_seconds: float = 3.0  # for one direction of the disk, or both


FULL = TrialSizes()


def within(wanted: int, free: int) -> int:
    """Return `wanted`, or less where little is free; whole pages, and at least one."""
    return max(PAGE, min(wanted, free // SHARE) // PAGE * PAGE)


def finish(device: torch.device) -> None:
    """Hold the host until the device has done what was put in."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def turns_of(work: Callable[[], T], sizes: TrialSizes) -> list[T]:
    """Return the results of `work` turn by turn, without the first, until there are enough or the time is up."""
    work()
    turns: list[T] = []
    end = time.perf_counter() + sizes.seconds
    while len(turns) < sizes.turns and (not turns or time.perf_counter() < end):
        turns.append(work())
    return turns


def median_s(work: Callable[[], object], sizes: TrialSizes) -> float:
    """Return the seconds that `work` takes: the median of its turns."""

    def timed() -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    return max(median(turns_of(timed, sizes)), 1e-9)
