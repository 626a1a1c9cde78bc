"""The native operations in torch, on any device: what they mean, and what serves where they are missing.

Same operations in the same order as the C++, so that both give the same bits on a CPU. Arguments come checked from
`zerostd.kernels`.
"""

import torch


@torch.no_grad()
def sum_slices(
    received: torch.Tensor, num_slices: int, factor: float, out: torch.Tensor, *, accumulate: bool = False
) -> None:
    """See `zerostd.kernels.sum_slices`."""
    slices = received.reshape(num_slices, out.numel())
    total = slices[0].to(torch.float32, copy=True)
    for index in range(1, num_slices):
        total += slices[index].to(torch.float32)
    total *= factor
    if accumulate:
        out += total.view(out.shape)
    else:
        out.copy_(total.view(out.shape))
