"""Where bytes rest and how they move: device, host and disk; knows bytes, offsets and alignment, never what they mean.

transfer.py  something on its way            lanes.py   ordered queues of device work
host.py      pinned memory of exact size     worker.py  a thread that does jobs in order
disk.py      files, read and written aside   column.py  numbers in a row that rest in one tier
limits.py    what is free, and what was asked  inbound.py a column's way to the device
pool.py      rooms that come and go          parcels.py bytes that leave the device and come back
"""

from zerostd.tiers.column import Column, Stores
from zerostd.tiers.inbound import Inbound
from zerostd.tiers.lanes import Lane, Lanes, mark_here, synchronize
from zerostd.tiers.transfer import Done, Relay, Several, Transfer, Work
from zerostd.tiers.worker import Worker

__all__ = [
    "Column",
    "Done",
    "Inbound",
    "Lane",
    "Lanes",
    "Relay",
    "Several",
    "Stores",
    "Transfer",
    "Work",
    "Worker",
    "mark_here",
    "synchronize",
]
