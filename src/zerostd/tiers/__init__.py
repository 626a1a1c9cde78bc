"""Where bytes rest and how they move: device, host and disk; knows bytes, offsets and alignment, never what they mean.

transfer.py  something on its way            streams.py   ordered queues of device work
host.py      pinned memory of exact size     worker.py  a thread that does jobs in order
disk.py      files, read and written aside   column.py  numbers in a row that rest in one tier
limits.py    what is free, and what was asked  inbound.py a column's way to the device
pool.py      rooms that come and go          parcels.py bytes that leave the device and come back
"""

from zerostd.tiers.streams import Stream, StreamEvent, Streams, record_event
from zerostd.tiers.tier_tensor import TierAllocator, TierTensor
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
