"""Operations that read or write every element of an array once: norm, checksum, cast, copy, first touch.

In come tensors (for `touch`, an address), out goes a number or the written tensor.
"""

import math

from torch import Tensor

from zerostd.kernels import native, reference


def square_norm(tensor: Tensor, num_threads: int = 1) -> tuple[float, bool]:
    """The sum of the squares of an fp32, bf16 or fp16 tensor, in double, and whether all elements are finite.

    The order of the sum is fixed: the same bits with any `num_threads`, native or not.
    """
    _check_dtypes(tensor)
    _check_threads(num_threads)
    total = native.square_norm(tensor, num_threads) if native.serves(tensor) else reference.square_norm(tensor)
    return total, math.isfinite(total)  # squares of fp32 numbers do not overflow in double


def crc32(tensor: Tensor, before: int = 0) -> int:
    """zlib's crc32 of the bytes of a contiguous tensor on the host, going on from that of what comes `before`."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"the checksum of a tensor on {tensor.device} with strides {tensor.stride()}; it must be "
            "contiguous and on the host"
        )
    if native.load() is not None:
        return native.crc32(tensor, before)
    return reference.crc32(tensor, before)


def cast(source: Tensor, target: Tensor, num_threads: int = 1) -> None:
    """Write `source` to `target` in its dtype, rounded to nearest even as `copy_` does; fp32, bf16 and fp16."""
    _check_dtypes(source, target)
    _check_threads(num_threads)
    _check_numel(source, target)
    if not native.apart(source, target):
        source = source.clone()
    if native.serves(source, target):
        native.cast(source, target, num_threads)
    else:
        reference.copy(source, target)


def copy(source: Tensor, target: Tensor, num_threads: int = 1) -> None:
    """Write `source` to `target`, of the same dtype, whichever it is."""
    _check_threads(num_threads)
    _check_numel(source, target)
    if source.dtype != target.dtype:
        raise ValueError(f"source is {source.dtype} and target {target.dtype}; cast between them")
    if not native.apart(source, target):
        source = source.clone()
    if native.serves(source, target):
        native.copy(source, target, num_threads)
    else:
        reference.copy(source, target)


def touch(address: int, num_bytes: int, num_threads: int) -> None:
    """Write one zero byte to every 4096-byte page of fresh memory, so that the system provides all of it now.

    The first byte of the range is written, and the first of every page that begins in it.
    """
    _check_threads(num_threads)
    if num_bytes < 0:
        raise ValueError(f"num_bytes={num_bytes}; at least 0 is needed")
    if native.load() is not None:
        native.touch(address, num_bytes, num_threads)
    else:
        reference.touch(address, num_bytes)


def _check_dtypes(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype not in native.DTYPES:
            raise ValueError(f"a tensor is {tensor.dtype}; taken are {', '.join(map(str, native.DTYPES))}")


def _check_threads(num_threads: int) -> None:
    if num_threads < 1:
        raise ValueError(f"num_threads={num_threads}; at least 1 is needed")


def _check_numel(source: Tensor, target: Tensor) -> None:
    if source.numel() != target.numel():
        raise ValueError(f"source has {source.numel()} elements and target {target.numel()}; they must agree")
