"""The memory, streams and threads of one prepared model: what groups are built on and updates run on."""

from __future__ import annotations

from dataclasses import dataclass

from zerostd.parameters.host_gradient import Staging
from zerostd.tiers import Streams, TierAllocator, Uploader


@dataclass(frozen=True)
class Resources:
    """Made once, before the first group."""

    allocator: TierAllocator  # memory of each tier
    streams: Streams  # queues of work on the device
    uploader: Uploader  # brings parameters that rest elsewhere to the device
    staging: Staging  # buffers on the device for gradients that rest on the host
    num_threads: int  # for updates on the CPU
