"""The collectives: each takes a tensor of every rank and gives every rank one. Gradients flow back through them.

Names that Horovod gives to operations are taken and not needed: torch.distributed matches calls by their order.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerostd import MisuseError, NotSupportedError
from zerostd.horovod.world import (
    SESSION,
    ProcessSet,
    check_process_set,
    check_rank,
    global_process_set,
    rank,
    size,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Max",
    "Min",
    "Op",
    "Product",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "everyones",
    "reducescatter",
]


class Op(enum.Enum):
    """How the values of all ranks become one."""

    AVERAGE = "Average"
    SUM = "Sum"
    ADASUM = "Adasum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"


Average, Sum, Adasum, Min, Max, Product = Op.AVERAGE, Op.SUM, Op.ADASUM, Op.MIN, Op.MAX, Op.PRODUCT

REDUCE_OPS = {
    Average: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}


class Compression(enum.Enum):
    """What floating-point numbers travel in."""

    none = None
    fp16 = torch.float16

    def applied(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as it travels."""
        return tensor if self.value is None or not tensor.is_floating_point() else tensor.to(self.value)


Scale = tuple[float, float]  # before and after the sum


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compression = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The mean over all ranks, or what `op` says. The tensor itself stays as it is."""
    _check("allreduce", process_set)
    chosen = _choose(op, average, tensor)
    scale = (prescale_factor, postscale_factor)

    def reduce(value: torch.Tensor) -> torch.Tensor:
        return _reduced(value, chosen, scale, compression)

    return _with_gradient(tensor, reduce, reduce)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The same in place."""
    _check("allreduce_", process_set)
    reduced = _reduced(tensor, _choose(op, average, None), (prescale_factor, postscale_factor), Compression.none)
    return _write(tensor, reduced)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensors of all ranks, one behind the other along the first dimension, which may differ in length."""
    _check("allgather", process_set)
    lengths = [int(length) for length in everyones(_length(tensor, "allgather"))]
    begin = sum(lengths[: rank()])

    def gather(value: torch.Tensor) -> torch.Tensor:
        if size() == 1:
            return value.detach().clone()
        padded = value.detach().new_zeros((max(lengths), *value.shape[1:]))
        padded[: value.shape[0]] = value.detach()
        everyone = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(everyone, padded)
        return torch.cat([part[:length] for part, length in zip(everyone, lengths, strict=True)])

    def scatter(grad: torch.Tensor) -> torch.Tensor:
        return _reduced(grad, Average)[begin : begin + lengths[rank()]]

    return _with_gradient(tensor, gather, scatter)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The root's tensor, on all ranks."""
    _check("broadcast", process_set)
    check_rank(root_rank)

    def spread(value: torch.Tensor) -> torch.Tensor:
        return broadcast_(value.detach().clone(), root_rank)

    def collect(grad: torch.Tensor) -> torch.Tensor:
        reduced = _reduced(grad, Average)
        return reduced if rank() == root_rank else torch.zeros_like(reduced)

    return _with_gradient(tensor, spread, collect)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The same in place."""
    _check("broadcast_", process_set)
    check_rank(root_rank)
    if size() == 1:
        return tensor
    value = tensor.detach()
    passing = value if value.is_contiguous() else value.contiguous()
    dist.broadcast(passing, src=root_rank)
    return tensor if passing is value else _write(tensor, passing)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compression = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's rows of the mean over all ranks. Rows that are left over go to the first ranks, one each."""
    _check("reducescatter", process_set)
    chosen = _choose(op, None, tensor)
    rows, left_over = divmod(_length(tensor, "reducescatter"), size())
    begin = rank() * rows + min(rank(), left_over)
    end = begin + rows + (rank() < left_over)

    def scatter(value: torch.Tensor) -> torch.Tensor:
        return _reduced(value, chosen, (prescale_factor, postscale_factor), compression)[begin:end].clone()

    def gather(grad: torch.Tensor) -> torch.Tensor:
        return allgather(grad * (prescale_factor * postscale_factor * (size() if chosen is Sum else 1)))

    return _with_gradient(tensor, scatter, gather)


def alltoall(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Rows to every rank, and from every rank; `splits` says how many rows go where, or all get as many.

    Returns:
        The rows that came, in rank order; with `splits` also how many came from each rank.
    """
    _check("alltoall", process_set)
    sent = _splits(tensor, splits)
    received = [int(row[rank()]) for row in everyones(sent)]
    moved = _with_gradient(
        tensor, lambda value: _exchanged(value, sent, received), lambda grad: _exchanged(grad, received, sent)
    )
    if splits is None:
        return moved
    return moved, torch.tensor(received, dtype=splits.dtype if isinstance(splits, torch.Tensor) else torch.int32)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's object, on all ranks; anything that can be pickled."""
    _check("broadcast_object", process_set)
    check_rank(root_rank)
    if size() == 1:
        return obj
    held = [obj if rank() == root_rank else None]
    dist.broadcast_object_list(held, src=root_rank)
    return obj if rank() == root_rank else held[0]


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Everyone's object, by rank."""
    _check("allgather_object", global_process_set)
    return everyones(obj)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank is here."""
    _check("barrier", process_set)
    if size() > 1:
        dist.barrier()


def everyones(obj: Any) -> list[Any]:
    """The same for a call that ranks in join follow."""
    if size() == 1:
        return [obj]
    everyone: list[Any] = [None] * size()
    dist.all_gather_object(everyone, obj)
    return everyone


def _check(call: str, process_set: ProcessSet) -> None:
    """Refuse what not all ranks would take part in."""
    check_process_set(process_set)
    for optimizer in SESSION.optimizers:
        if optimizer.num_joined:
            raise NotSupportedError(
                f"hvd.{call}() while {optimizer.num_joined} rank(s) are in hvd.join(): they take part in steps of the "
                "optimizer and in nothing else. Call it after hvd.join()"
            )


class _Carried(torch.autograd.Function):
    """A collective, and the one that brings its gradient back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, there: Callable[..., Any], back: Callable[..., Any]) -> Any:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.back(grads[0]), None, None


def _with_gradient(
    tensor: torch.Tensor, there: Callable[[torch.Tensor], torch.Tensor], back: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    carried: torch.Tensor = _Carried.apply(tensor, there, back)  # type: ignore[no-untyped-call]
    return carried


def _choose(op: Op | None, average: bool | None, differentiated: torch.Tensor | None) -> Op:
    """What is meant by `op` and by `average`, the older way to say it."""
    if op is not None and average is not None:
        raise MisuseError(f"op={op!r} and average={average!r} say the same thing: leave average out")
    if op is None:
        op = Sum if average is False else Average
    if op not in REDUCE_OPS:
        raise NotSupportedError(f"op={op!r} is not supported; use hvd.Average, Sum, Min, Max or Product")
    if op in (Min, Max, Product) and differentiated is not None and differentiated.requires_grad:
        raise NotSupportedError(f"op={op!r} on a tensor that requires grad: detach it, or use hvd.Average or hvd.Sum")
    return op


@torch.no_grad()
def _reduced(
    tensor: torch.Tensor, op: Op, scale: Scale = (1.0, 1.0), compression: Compression = Compression.none
) -> torch.Tensor:
    value = compression.applied(tensor.detach() if scale[0] == 1.0 else _scaled(tensor.detach(), scale[0]))
    value = value.clone(memory_format=torch.contiguous_format)
    if size() > 1:
        dist.all_reduce(value, REDUCE_OPS[op])
    if op is Average:
        value = value / size() if value.is_floating_point() else torch.div(value, size(), rounding_mode="trunc")
    value = value.to(tensor.dtype)
    return value if scale[1] == 1.0 else _scaled(value, scale[1])


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return (tensor * factor).to(tensor.dtype)


def _exchanged(tensor: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    """Rows over the wire as bytes: gloo has no exchange for every dtype, but it has one for bytes."""
    value = tensor.detach().contiguous()
    out = value.new_empty((sum(received), *value.shape[1:]))
    if size() == 1:
        return value.clone()
    width = math.prod(value.shape[1:]) * value.element_size()
    dist.all_to_all_single(
        out.reshape(-1).view(torch.uint8),
        value.reshape(-1).view(torch.uint8),
        [rows * width for rows in received],
        [rows * width for rows in sent],
    )
    return out


def _splits(tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None) -> list[int]:
    length = _length(tensor, "alltoall")
    if splits is None:
        if length % size():
            raise MisuseError(
                f"alltoall: {length} rows cannot be divided evenly among {size()} ranks; pass splits=[...]"
            )
        return [length // size()] * size()
    rows = [int(count) for count in splits]
    if len(rows) != size() or sum(rows) != length or min(rows) < 0:
        raise MisuseError(f"alltoall: splits={rows} must be {size()} numbers of rows that sum to {length}")
    return rows


def _length(tensor: torch.Tensor, call: str) -> int:
    if tensor.dim() == 0:
        raise MisuseError(f"{call} works along the first dimension, and this tensor has none: pass x.unsqueeze(0)")
    return tensor.shape[0]


@torch.no_grad()
def _write(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    tensor.copy_(value)
    return tensor
