"""Native operations, each with a torch reference that gives the same bits.

The inputs are plain tensors, and results are written into a tensor of the caller. The native library serves contiguous
CPU tensors; everything else (other devices, strided tensors, no library) goes to `reference`. Called by `tiers`,
`communication`, `parameters`, `optimizers` and `checkpointing`. Knows torch, and nothing else of zerostd.
"""

from zerostd.kernels.blocks import coded_bytes, decode_blocks, encode_blocks
from zerostd.kernels.device_tiles import NUM_SLOTS, KernelCall, TileMoves, TileQueue, device_driver, stream_handle
from zerostd.kernels.moments import MOMENT_CODECS, Moment, column_bytes, decode_moments, encode_moments, moments_call
from zerostd.kernels.operations import copy_past_caches, crc32, crc32_pages, sum_slices, update
from zerostd.kernels.planes import join_planes, split_planes
from zerostd.kernels.rules import (
    Adagrad,
    Adam,
    Rule,
    Sgd,
    Split,
    UpdateArguments,
    adam_on,
    join,
    join_into,
    split,
    split_into,
)

__all__ = [
    "MOMENT_CODECS",
    "NUM_SLOTS",
    "Adagrad",
    "Adam",
    "KernelCall",
    "Moment",
    "Rule",
    "Sgd",
    "Split",
    "TileMoves",
    "TileQueue",
    "UpdateArguments",
    "adam_on",
    "coded_bytes",
    "column_bytes",
    "copy_past_caches",
    "crc32",
    "crc32_pages",
    "decode_blocks",
    "decode_moments",
    "device_driver",
    "encode_blocks",
    "encode_moments",
    "join",
    "join_into",
    "join_planes",
    "moments_call",
    "split",
    "split_into",
    "split_planes",
    "stream_handle",
    "sum_slices",
    "update",
]
