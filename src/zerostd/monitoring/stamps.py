"""Moments: events of a device's stream, or the clock where work is done as it is put in."""

from __future__ import annotations

import time

import torch

__all__ = ["Stamp"]


class Stamp:
    """A moment of a stream, None being the current one: an event of the device, or the clock where work is done as it
    is put in."""

    def __init__(self, device: torch.device, stream: torch.Stream | None = None) -> None:
        self._time = time.perf_counter()
        self._event: torch.Event | None = None
        if device.type != "cpu":
            self._event = torch.Event(device, enable_timing=True, blocking=True)
            self._event.record(stream or torch.accelerator.current_stream(device))

    def has_passed(self) -> bool:
        """Whether the device has come to it."""
        return self._event is None or self._event.query()

    def after(self, other: Stamp) -> float:
        """Seconds from the other moment to this one, by the device's time where both have it, else by the host's; may
        be negative."""
        if self._event is None or other._event is None:
            return self._time - other._time
        self._event.synchronize()
        return other._event.elapsed_time(self._event) / 1e3

    def since(self, other: Stamp) -> float:
        """Seconds from the other moment to this one, which the host waits for."""
        return max(self.after(other), 1e-9)
