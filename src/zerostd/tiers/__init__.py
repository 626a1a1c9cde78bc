"""Where bytes are kept and how they move: device, host and disk. Knows bytes, offsets and alignment, not their meaning.

transfer.py         work in flight, and how to wait for it
streams.py          streams of the device and their events
worker.py           a thread that does jobs, the most needed first
pages.py            whole pages, in which files are read and written
limits.py           what is free, and the refusal of what does not fit
host.py             pinned memory of exact size
scratch_files.py    files without a name, past the page cache
disk_threads.py     the threads that move blocks of them
disk.py             extents of scratch files
tier_tensor.py      numbers in a row that are kept in one tier
allocator.py        the tier tensors of one prepared model
pool.py             blocks that come and go
uploading.py        the way of a tier tensor to the device
debug.py            modes that make mistakes visible
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
