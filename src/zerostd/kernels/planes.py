"""Numbers as planes of bytes, so that a coder sees exponents by themselves.

Each number is rotated left by one bit: its sign becomes the last bit, and the exponent of a bf16 or fp32 number fills
the first byte. Planes go from that byte to the lowest. Nothing is lost. Called by `tiers`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zerostd.kernels import native

INTEGERS = {2: torch.int16, 4: torch.int32}  # by bytes of a number


def split_planes(values: Tensor, planes: Sequence[Tensor]) -> None:
    """Write the bytes of numbers to planes.

    Args:
        values: Bytes of numbers that have as many bytes as there are planes: 2, or 4.
        planes: Bytes, one for each number.
    """
    _check(values, planes)
    if native.serves(values, *planes):
        native.split_planes(values, planes)
        return
    numbers = values.view(INTEGERS[len(planes)])
    last = 8 * len(planes) - 1
    turned = (numbers << 1) | ((numbers >> last) & 1)
    for index, plane in enumerate(planes):
        plane.copy_(((turned >> (8 * (len(planes) - 1 - index))) & 0xFF).to(torch.uint8))


def join_planes(planes: Sequence[Tensor], values: Tensor) -> None:
    """Write the numbers that `split_planes` made planes of."""
    _check(values, planes)
    if native.serves(values, *planes):
        native.join_planes(planes, values)
        return
    dtype = INTEGERS[len(planes)]
    last = 8 * len(planes) - 1
    turned = torch.zeros(len(planes[0]), dtype=dtype, device=values.device)
    for plane in planes:
        turned = (turned << 8) | plane.to(dtype)
    rest = (turned >> 1) & ~(-1 << last)  # a shift to the right copies the first bit
    values.view(dtype).copy_(rest | (turned << last))


def _check(values: Tensor, planes: Sequence[Tensor]) -> None:
    if len(planes) not in INTEGERS:
        raise ValueError(f"{len(planes)} planes: numbers of {sorted(INTEGERS)} bytes can be split")
    if any(tensor.dtype != torch.uint8 or tensor.dim() != 1 for tensor in (values, *planes)):
        raise ValueError("values and planes must be flat tensors of torch.uint8")
    if any(len(plane) * len(planes) != len(values) for plane in planes):
        raise ValueError(f"{len(values)} bytes have planes of {len(values) / len(planes):g}, not {len(planes[0])}")
