"""Operations that read every element of an array once: the sum of received slices, and the checksum.

In come tensors, out goes the written tensor or a number.
"""

import torch
from torch import Tensor

from zerostd.kernels import native, reference


def crc32(tensor: Tensor, before: int = 0) -> int:
    """Return zlib's crc32 of a contiguous tensor on the host, going on from that of what comes `before`."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"the checksum of a tensor on {tensor.device} with strides {tensor.stride()}; it must be "
            "contiguous and on the host"
        )
    if native.load() is not None:
        return native.crc32(tensor, before)
    return reference.crc32(tensor, before)


def sum_slices(
    received: Tensor,
    num_slices: int,
    factor: float,
    out: Tensor,
    *,
    accumulate: bool = False,
    num_threads: int = 1,
) -> None:
    """Sum the equally long slices of a receive buffer in their order: `out = factor * (s0 + s1 + ...)`.

    The sum runs in fp32 from slice 0 to the last, is multiplied by `factor` and rounded once when it is written, so
    the result is the same bits on every rank, with any `num_threads`, native or not. Slices in fp64 are summed in fp64,
    by torch, into an `out` in fp64.

    Args:
        received: `num_slices` slices one after another; bf16, fp16, fp32 or fp64.
        num_slices: How many slices `received` holds.
        factor: Multiplies the sum, as fp32; `1 / world_size` for a mean.
        out: Takes the result, in its own dtype (bf16, fp16 or fp32); as many elements as one slice.
        accumulate: Add the result to `out`, which then must be fp32 or fp64, instead of overwriting it.
        num_threads: Most CPU threads to use.

    Raises:
        ValueError: The arguments do not fit each other; says which and how.
    """
    _check(received, num_slices, out, accumulate=accumulate, num_threads=num_threads)
    if received.dtype in native.DTYPES and native.serves(received, out) and native.apart(received, out):
        native.sum_slices(received, num_slices, factor, out, accumulate=accumulate, num_threads=num_threads)
    else:
        reference.sum_slices(received, num_slices, factor, out, accumulate=accumulate)


def _check(received: Tensor, num_slices: int, out: Tensor, *, accumulate: bool, num_threads: int) -> None:
    is_double = received.dtype == out.dtype == torch.float64
    for name, tensor in (("received", received), ("out", out)):
        if tensor.dtype not in native.DTYPES and not is_double:
            raise ValueError(f"{name} is {tensor.dtype}; sum_slices takes {', '.join(map(str, native.DTYPES))}")
    if received.device != out.device:
        raise ValueError(f"received is on {received.device} and out on {out.device}; they must share a device")
    if num_slices < 1 or received.numel() != num_slices * out.numel():
        raise ValueError(
            f"received has {received.numel()} elements, which are not num_slices={num_slices} slices of "
            f"out's {out.numel()} elements"
        )
    if accumulate and out.dtype != torch.float32 and not is_double:
        raise ValueError(f"accumulate=True needs an fp32 out, not {out.dtype}: adding in less loses small sums")
    if num_threads < 1:
        raise ValueError(f"num_threads={num_threads}; at least 1 is needed")
