"""Where bytes are kept and how they move: device, host and disk. Knows bytes, offsets and alignment, not their meaning.

transfer.py     work in flight, how to wait for it, and the streams of the device
pacing.py       priorities, and the share of background work
worker.py       a thread that does jobs, the most needed first
holders.py      who keeps the same memory
host.py         pinned memory of exact size, and how much is free
scratch_files.py  files without a name, and how much of the drive is free
packing.py      lossless compression of numbers, in tiles
extents.py      space in scratch files, in pages that have checksums
packed_extents.py  the same for numbers that are packed
disk.py         threads that move bytes between extents and host memory
allocator.py    tier tensors: their allocator, and the way to the device
shared_tensors.py  tier tensors with equal bytes, kept once
pool.py         blocks that come and go
aside.py        device memory that is given to others for a while
store.py        users' own tensors, by name, in any tier
debug.py        modes that make mistakes visible
"""

from zerostd.tiers.allocator import TierAllocator, TierTensor, Uploader
from zerostd.tiers.aside import Aside
from zerostd.tiers.transfer import AllOf, Done, Stream, StreamEvent, Streams, Transfer, record_event
from zerostd.tiers.worker import Work, Worker

__all__ = [
    "AllOf",
    "Aside",
    "Done",
    "Stream",
    "StreamEvent",
    "Streams",
    "TierAllocator",
    "TierTensor",
    "Transfer",
    "Uploader",
    "Work",
    "Worker",
    "record_event",
]
