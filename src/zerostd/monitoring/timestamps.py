"""Moments of a device's stream, and the seconds between them.

A moment is an event of the device's stream; on the CPU, where work is done as it is put in, it is the host's clock.
"""

from __future__ import annotations

import time

import torch


class Timestamp:
    """A moment of a stream, by default of the device's current one."""

    def __init__(self, device: torch.device, stream: torch.Stream | None = None) -> None:
        self._time = time.perf_counter()
        self._event: torch.Event | None = None
        if device.type != "cpu":
            self._event = torch.Event(device, enable_timing=True, blocking=True)
            self._event.record(stream or torch.accelerator.current_stream(device))

    @classmethod
    def of_idle(cls, device: torch.device) -> Timestamp:
        """Return a moment in which the device has nothing to do, so that its clock and the host's agree there."""
        if device.type == "cpu":
            return cls(device)
        torch.accelerator.synchronize(device)
        moment = cls(device)
        torch.accelerator.synchronize(device)
        return moment

    def has_passed(self) -> bool:
        """Return whether the device has reached this moment."""
        return self._event is None or self._event.query()

    def after(self, earlier: Timestamp) -> float:
        """Return the seconds since another moment, negative if that is later; hold the host until both have passed.

        The seconds are the device's where both moments are of a stream, else the host's.
        """
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1e3

    def since(self, earlier: Timestamp) -> float:
        """Return the same as a duration: never 0 or less, so that rates can be computed from it."""
        return max(self.after(earlier), 1e-9)
