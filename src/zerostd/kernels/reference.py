"""The native operations in torch, on any device: their definition, and the fallback where they are missing.

Same operations in the same order as the C++, so that both give the same bits on a CPU. Arguments come checked from
`zerostd.kernels`.
"""

import zlib
from typing import Any

import torch
from torch import Tensor

from zerostd.kernels.rules import Adagrad, Adam, Sgd, Split, UpdateArguments, join, split


@torch.no_grad()
def sum_slices(received: Tensor, num_slices: int, factor: float, out: Tensor, *, accumulate: bool = False) -> None:
    """See `zerostd.kernels.sum_slices`."""
    slices = received.reshape(num_slices, out.numel())
    wide = torch.promote_types(received.dtype, torch.float32)
    total = slices[0].to(wide, copy=True)
    for index in range(1, num_slices):
        total += slices[index].to(wide)
    total *= factor
    if accumulate:
        out += total.view(out.shape)
    else:
        out.copy_(total.view(out.shape))


@torch.no_grad()
def update(step: UpdateArguments) -> None:
    """See `zerostd.kernels.update`."""
    gradient = step.gradient.to(torch.float32)
    if step.factor != 1:
        gradient = gradient * step.factor
    if step.rule.maximize:
        gradient = -gradient
    arrays = [_written(source, target) for source, target in zip(step.source, step.target, strict=True)]
    match step.rule:
        case Adam():
            _adam(step.rule, gradient, *arrays)
        case Sgd():
            _sgd(step.rule, gradient, *arrays)
        case Adagrad():
            _adagrad(step.rule, gradient, *arrays)
    if isinstance(step.target[0], Split):
        for target, half in zip(step.target[0], split(arrays[0]), strict=True):
            target.copy_(half)
    if step.weight is not None:
        step.weight.copy_(arrays[0])


def _written(source: Tensor | Split, target: Tensor | Split) -> Tensor:
    """Return the fp32 tensor that the rule changes: the target with the source's numbers, or the joined master."""
    if isinstance(source, Split) or isinstance(target, Split):
        assert isinstance(source, Split)
        return join(source)
    if target is not source:
        target.copy_(source)
    return target


def _adam(rule: Adam, gradient: Tensor, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    """Update as torch/optim/adam.py does in _single_tensor_adam."""
    if rule.weight_decay != 0:
        if rule.decoupled:
            master.mul_(1 - rule.lr * rule.weight_decay)
        else:
            gradient = gradient.add(master, alpha=rule.weight_decay)
    exp_avg.lerp_(gradient, 1 - rule.beta1)
    exp_avg_sq.mul_(rule.beta2).addcmul_(gradient, gradient, value=1 - rule.beta2)
    divisor = (_root(exp_avg_sq, exact=rule.exact_root) / rule.correction).add_(rule.eps)
    master.addcdiv_(exp_avg, divisor, value=-rule.rate)


def _sgd(rule: Sgd, gradient: Tensor, master: Tensor, momentum_buffer: Tensor | None = None) -> None:
    """Update as torch/optim/sgd.py does in _single_tensor_sgd."""
    if rule.weight_decay != 0:
        gradient = gradient.add(master, alpha=rule.weight_decay)
    if momentum_buffer is not None:
        if rule.is_first:
            momentum_buffer.copy_(gradient)
        else:
            momentum_buffer.mul_(rule.momentum).add_(gradient, alpha=1 - rule.dampening)
        gradient = gradient.add(momentum_buffer, alpha=rule.momentum) if rule.nesterov else momentum_buffer
    master.add_(gradient, alpha=-rule.lr)


def _adagrad(rule: Adagrad, gradient: Tensor, master: Tensor, total: Tensor) -> None:
    """Update as torch/optim/adagrad.py does in _single_tensor_adagrad."""
    if rule.weight_decay != 0:
        gradient = gradient.add(master, alpha=rule.weight_decay)
    total.addcmul_(gradient, gradient, value=1)
    divisor = _root(total, exact=rule.exact_root).add_(rule.eps)
    master.addcdiv_(gradient, divisor, value=-rule.rate)


def _root(squares: Tensor, *, exact: bool) -> Tensor:
    return squares.double().sqrt().float() if exact else squares.sqrt()  # a root in double rounds to the nearest fp32


def crc32(tensor: Tensor, before: int) -> int:
    """See `zerostd.kernels.crc32`."""
    data: Any = tensor.detach().view(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return zlib.crc32(data, before)


def crc32_pages(tensor: Tensor, page_bytes: int, out: Tensor) -> None:
    """See `zerostd.kernels.crc32_pages`."""
    pages = tensor.view(-1).view(torch.uint8).split(page_bytes)
    out.view(torch.uint32).copy_(torch.tensor([crc32(page, 0) for page in pages], dtype=torch.uint32))
