"""Where bytes are kept and how they move: device, host and disk. Knows bytes, offsets and alignment, not their meaning.

transfer.py     work in flight, and how to wait for it    streams.py      streams of the device and their events
host.py         pinned memory of exact size               worker.py       a thread that does jobs in order
disk.py         extents, read and written by threads      tier_tensor.py  numbers in a row that are kept in one tier
limits.py       what is free, and what was asked for      allocator.py    tier tensors of one prepared model
pool.py         blocks that come and go                   uploading.py    the way of a tier tensor to the device
"""

from zerostd.tiers.allocator import TierAllocator
from zerostd.tiers.streams import Stream, StreamEvent, Streams, record_event
from zerostd.tiers.tier_tensor import TierTensor
from zerostd.tiers.transfer import AllOf, Done, QueuedTransfer, Transfer, Work
from zerostd.tiers.uploading import Uploader
from zerostd.tiers.worker import Worker

__all__ = [
    "AllOf",
    "Done",
    "QueuedTransfer",
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
