"""Numbers as small integers, in blocks of 64 with one fp32 scale each; they cross a wire instead of 16 or 32 bits.

The input is a flat tensor whose length is a multiple of `BLOCK`; the output is bytes, first the codes and then the
scales. The bits are the same on every device: fp32 division, rounding to nearest even and multiplication, as in
src/native/blocks.cpp. A block with a number that is not finite decodes to NaN. Called by `communication`.
"""

import functools
import warnings
from types import ModuleType

import torch
from torch import Tensor

from zerostd.kernels import native

BLOCK = 64
LARGEST = {8: 127, 4: 7}  # code, by bits
TILE = 1 << 22  # numbers coded at once by torch, whose temporaries are fp32


def coded_bytes(numel: int, bits: int) -> int:
    """Return the bytes of `numel` coded numbers: codes, then scales."""
    return numel * bits // 8 + numel // BLOCK * 4


@torch.no_grad()
def encode_blocks(values: Tensor, bits: int, coded: Tensor, *, num_threads: int = 1) -> None:
    """Write the codes and scales of `values` to `coded`.

    Args:
        values: A multiple of `BLOCK` numbers, in bf16, fp16 or fp32.
        bits: 8, or 4.
        coded: `coded_bytes(values.numel(), bits)` bytes.
        num_threads: Most CPU threads to use; the result does not depend on it.
    """
    _check(values, bits, coded, num_slices=1)
    if native.serves(values, coded):
        native.encode_blocks(values, bits, coded, num_threads=num_threads)
        return
    codes, scales = _parts(coded, values.numel(), bits)
    if on_device := _device_blocks(values.device.type):
        on_device.encode(values, bits, codes, scales, LARGEST[bits])
        return
    for start in range(0, values.numel(), TILE):
        numbers = values[start : start + TILE].float().view(-1, BLOCK)
        tile = slice(start * bits // 8, (start + numbers.numel()) * bits // 8)
        scales[start // BLOCK : start // BLOCK + len(numbers)] = _encode(numbers, bits, codes[tile])


def _encode(numbers: Tensor, bits: int, codes: Tensor) -> Tensor:
    """Write the codes of blocks, and return their scales."""
    most = LARGEST[bits]
    largest = numbers.abs().amax(1, keepdim=True)
    scales = largest / most
    scales.masked_fill_(~largest.isfinite(), float("nan"))
    quotients = numbers / scales.masked_fill(~(scales > 0), float("inf"))
    rounded = quotients.nan_to_num_(0.0).clamp_(-most, most).round_().to(torch.int8)
    if bits == 8:
        codes.copy_(rounded.view(-1).view(torch.uint8))
    else:
        pairs = rounded.add_(8).view(torch.uint8).view(-1, 2)
        codes.copy_(pairs[:, 0] | (pairs[:, 1] << 4))
    return scales.view(-1)


@torch.no_grad()
def decode_blocks(
    coded: Tensor, bits: int, out: Tensor, *, num_slices: int = 1, accumulate: bool = False, num_threads: int = 1
) -> None:
    """Write the mean of coded slices to `out`, or add it: summed in fp32 in their order and rounded once.

    Args:
        coded: `num_slices` slices one after another, each as `encode_blocks` wrote it.
        bits: Of the codes.
        out: As many numbers as one slice; fp32 to accumulate.
        num_slices: How many slices `coded` holds.
        accumulate: Add to `out` instead of overwriting it.
        num_threads: Most CPU threads to use; the result does not depend on it.
    """
    _check(out, bits, coded, num_slices=num_slices)
    if accumulate and out.dtype != torch.float32:
        raise ValueError(f"accumulate=True needs an fp32 out, not {out.dtype}, which would lose small addends")
    if native.serves(out, coded):
        native.decode_blocks(coded, bits, out, num_slices=num_slices, accumulate=accumulate, num_threads=num_threads)
        return
    if on_device := _device_blocks(out.device.type):
        on_device.decode(*_parts(coded.view(num_slices, -1), out.numel(), bits), bits, out, accumulate=accumulate)
        return
    slices = [_parts(part, out.numel(), bits) for part in coded.view(num_slices, -1)]
    for start in range(0, out.numel(), TILE):
        stop = min(start + TILE, out.numel())
        total = _decode(*slices[0], bits, start, stop)
        for codes, scales in slices[1:]:
            total += _decode(codes, scales, bits, start, stop)
        total *= 1.0 / num_slices
        if accumulate:
            out[start:stop] += total
        else:
            out[start:stop] = total


def _decode(codes: Tensor, scales: Tensor, bits: int, start: int, stop: int) -> Tensor:
    """Return numbers [start, stop) of a slice, in fp32."""
    tile = codes[start * bits // 8 : stop * bits // 8]
    if bits == 8:
        integers = tile.view(torch.int8)
    else:
        integers = torch.stack([tile & 15, tile >> 4], 1).view(torch.int8).view(-1) - 8
    numbers = integers.float().view(-1, BLOCK) * scales[start // BLOCK : stop // BLOCK].view(-1, 1)
    return numbers.view(-1)


def _parts(coded: Tensor, numel: int, bits: int) -> tuple[Tensor, Tensor]:
    num_codes = numel * bits // 8
    return coded[..., :num_codes], coded[..., num_codes:].view(torch.float32)


@functools.cache
def _device_blocks(device_type: str) -> ModuleType | None:
    """Return the operations of a device that has them, tried once. Without, torch's take several passes."""
    if device_type != "cuda":
        return None
    try:
        from zerostd.kernels import device_blocks

        values = torch.linspace(-3.0, 3.0, 40 * BLOCK, device=device_type)
        for bits, most in LARGEST.items():
            coded = torch.zeros(coded_bytes(values.numel(), bits), dtype=torch.uint8, device=device_type)
            codes, scales = _parts(coded.view(1, -1), values.numel(), bits)
            decoded = torch.empty_like(values)
            device_blocks.encode(values, bits, codes[0], scales[0], most)
            device_blocks.decode(codes, scales, bits, decoded, accumulate=False)
            if not torch.allclose(decoded, values, atol=3.0 / most):
                raise ArithmeticError("it gave wrong numbers")
        return device_blocks
    except Exception as error:  # of triton, of a compiler that is missing, of the driver
        warnings.warn(
            "numbers are coded by torch's operations, in several passes, because Triton failed "
            f"({type(error).__name__}: {error})",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _check(numbers: Tensor, bits: int, coded: Tensor, *, num_slices: int) -> None:
    if bits not in LARGEST:
        raise ValueError(f"bits={bits}; codes have 8 or 4")
    if numbers.dtype not in native.DTYPES or numbers.dim() != 1 or numbers.numel() % BLOCK:
        raise ValueError(
            f"a tensor of {tuple(numbers.shape)} in {numbers.dtype}; blocks take a row of a multiple of {BLOCK} "
            f"numbers in {', '.join(map(str, native.DTYPES))}"
        )
    needed = num_slices * coded_bytes(numbers.numel(), bits)
    if coded.dtype != torch.uint8 or coded.shape != (needed,) or coded.device != numbers.device:
        raise ValueError(
            f"coded is {tuple(coded.shape)} of {coded.dtype} on {coded.device}; {num_slices} slice(s) of "
            f"{numbers.numel()} numbers take ({needed},) of torch.uint8 on {numbers.device}"
        )
