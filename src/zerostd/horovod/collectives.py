"""The collectives: each takes a tensor or an object from every rank, and gradients flow back as in Horovod.

Names of operations are accepted and ignored: torch.distributed matches calls by their order.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerostd import MisuseError, NotSupportedError
from zerostd.horovod.world import agreement, rank, size

ReduceOp = dist.ReduceOp.RedOpType
Average = dist.ReduceOp.AVG
Sum = dist.ReduceOp.SUM
Min = dist.ReduceOp.MIN
Max = dist.ReduceOp.MAX
Product = dist.ReduceOp.PRODUCT

Verb = Callable[[torch.Tensor], torch.Tensor]


class Compression(enum.Enum):
    """The dtype that floating-point values are sent in; None is their own."""

    none = None
    fp16 = torch.float16


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compression = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return the mean over all ranks, or what `op` says. The input is unchanged."""
    _check_present("allreduce")
    op = _choose(op, average, tensor)

    def reduce(value: torch.Tensor) -> torch.Tensor:
        return _reduced(value, op, compression, before=prescale_factor, after=postscale_factor)

    return _differentiable(tensor, reduce, reduce)


@torch.no_grad()
def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Do the same in place."""
    _check_present("allreduce_")
    reduced = _reduced(tensor, _choose(op, average), before=prescale_factor, after=postscale_factor)
    return tensor.copy_(reduced)


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated along the first dimension, which may differ in length."""
    _check_present("allgather")
    lengths: list[int] = gather_objects(_length(tensor, "allgather"))
    begin = sum(lengths[: rank()])

    def gather(value: torch.Tensor) -> torch.Tensor:
        copies = torch.cat([value.detach()] * size())  # the same rows to every rank
        return _exchanged(copies, [value.shape[0]] * size(), lengths)

    def scatter(grad: torch.Tensor) -> torch.Tensor:
        return _reduced(grad)[begin : begin + lengths[rank()]]

    return _differentiable(tensor, gather, scatter)


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Return the tensor of rank `root_rank`."""
    _check_present("broadcast")

    def send(value: torch.Tensor) -> torch.Tensor:
        return broadcast_(value.detach().clone(), root_rank)

    def collect(grad: torch.Tensor) -> torch.Tensor:
        reduced = _reduced(grad)
        return reduced if rank() == root_rank else torch.zeros_like(reduced)

    return _differentiable(tensor, send, collect)


@torch.no_grad()
def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Do the same in place."""
    _check_present("broadcast_")
    check_root(root_rank)
    if size() == 1:
        return tensor
    value = tensor.detach().contiguous()
    dist.broadcast(value, src=root_rank)
    return tensor if tensor.is_contiguous() else tensor.copy_(value)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compression = Compression.none,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the mean over all ranks. Of rows left over, the first ranks get one each."""
    _check_present("reducescatter")
    op = _choose(op, None, tensor)
    num_rows, left_over = divmod(_length(tensor, "reducescatter"), size())
    begin = rank() * num_rows + min(rank(), left_over)
    end = begin + num_rows + (rank() < left_over)
    factor = prescale_factor * postscale_factor * (size() if op == Sum else 1)

    def scatter(value: torch.Tensor) -> torch.Tensor:
        return _reduced(value, op, compression, before=prescale_factor, after=postscale_factor)[begin:end].clone()

    def gather(grad: torch.Tensor) -> torch.Tensor:
        return allgather(grad * factor)

    return _differentiable(tensor, scatter, gather)


def alltoall(tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None = None, name: str | None = None) -> Any:
    """Send rows to every rank and receive rows from every rank.

    Args:
        tensor: Its rows go to the ranks in rank order.
        splits: The number of rows for each rank; without it all get the same number.

    Returns:
        The received rows in rank order; with `splits` also how many came from each rank.
    """
    _check_present("alltoall")
    sent = _split_rows(_length(tensor, "alltoall"), splits)
    received = [int(rows[rank()]) for rows in gather_objects(sent)]
    rows = _differentiable(
        tensor, lambda value: _exchanged(value, sent, received), lambda grad: _exchanged(grad, received, sent)
    )
    if splits is None:
        return rows
    return rows, torch.tensor(received, dtype=splits.dtype if isinstance(splits, torch.Tensor) else torch.int32)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Return the object of rank `root_rank`, which can be anything that pickles."""
    _check_present("broadcast_object")
    check_root(root_rank)
    objects = [obj]
    if size() > 1:
        dist.broadcast_object_list(objects, src=root_rank)
    return obj if rank() == root_rank else objects[0]


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks, by rank."""
    _check_present("allgather_object")
    return gather_objects(obj)


def barrier() -> None:
    """Return when every rank is here."""
    _check_present("barrier")
    if size() > 1:
        dist.barrier()


def gather_objects(obj: Any) -> list[Any]:
    """Do what allgather_object does, also while ranks are in join."""
    if size() == 1:
        return [obj]
    objects: list[Any] = [None] * size()
    dist.all_gather_object(objects, obj)
    return objects


def check_root(root_rank: int) -> None:
    """Refuse a root that does not exist."""
    if isinstance(root_rank, bool) or not isinstance(root_rank, int) or not 0 <= root_rank < size():
        raise MisuseError(f"root_rank={root_rank!r}: there are {size()} ranks, so it must be from 0 to {size() - 1}")


def _check_present(call: str) -> None:
    """Refuse a collective that ranks in join would not take part in."""
    num_joined = agreement().num_joined
    if num_joined:
        raise NotSupportedError(
            f"hvd.{call}() while {num_joined} rank(s) are in hvd.join(): they take part in steps of the optimizer and "
            "in nothing else. Call it after hvd.join()"
        )


def _choose(op: ReduceOp | None, average: bool | None, differentiated: torch.Tensor | None = None) -> ReduceOp:
    """Return the operation that is meant by `op`, or by `average`, the older way to say it."""
    if op is None:
        return Sum if average is False else Average
    if average is not None:
        raise MisuseError(f"op={op!r} and average={average!r} say the same thing: leave average out")
    if op not in (Average, Sum, Min, Max, Product):
        raise NotSupportedError(f"op={op!r} is not supported; use hvd.Average, Sum, Min, Max or Product")
    if differentiated is not None and differentiated.requires_grad and op not in (Average, Sum):
        raise NotSupportedError(f"op={op!r} on a tensor that requires grad: detach it, or use hvd.Average or hvd.Sum")
    return op


class _Collective(torch.autograd.Function):
    """A collective, and the collective that brings its gradient back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forth: Verb, back: Verb) -> torch.Tensor:
        ctx.back = back
        return forth(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.back(grads[0]), None, None


def _differentiable(tensor: torch.Tensor, forth: Verb, back: Verb) -> torch.Tensor:
    result: torch.Tensor = _Collective.apply(tensor, forth, back)  # type: ignore[no-untyped-call]
    return result


@torch.no_grad()
def _reduced(
    tensor: torch.Tensor,
    op: ReduceOp = Average,
    compression: Compression = Compression.none,
    *,
    before: float = 1.0,
    after: float = 1.0,
) -> torch.Tensor:
    value = _scaled(tensor.detach(), before)
    if compression.value is not None and value.is_floating_point():
        value = value.to(compression.value)
    value = value.clone(memory_format=torch.contiguous_format)
    if size() > 1:
        dist.all_reduce(value, Sum if op == Average else op)  # gloo has no average
    if op == Average:
        value = value / size() if value.is_floating_point() else torch.div(value, size(), rounding_mode="trunc")
    return _scaled(value.to(tensor.dtype), after)


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor if factor == 1.0 else (tensor * factor).to(tensor.dtype)


def _exchanged(tensor: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    """Send `sent[r]` rows to rank r and receive `received[r]` from it, as bytes: gloo cannot exchange every dtype."""
    value = tensor.detach().contiguous()
    if size() == 1:
        return value.clone()
    rows = value.new_empty((sum(received), *value.shape[1:]))
    row_bytes = math.prod(value.shape[1:]) * value.element_size()
    dist.all_to_all_single(
        rows.reshape(-1).view(torch.uint8),
        value.reshape(-1).view(torch.uint8),
        [count * row_bytes for count in received],
        [count * row_bytes for count in sent],
    )
    return rows


def _split_rows(num_rows: int, splits: Sequence[int] | torch.Tensor | None) -> list[int]:
    if splits is None and num_rows % size():
        raise MisuseError(f"alltoall: {num_rows} rows cannot be divided evenly by {size()} ranks; pass splits=[...]")
    counts = [num_rows // size()] * size() if splits is None else [int(count) for count in splits]
    if len(counts) != size() or sum(counts) != num_rows or min(counts) < 0:
        raise MisuseError(f"alltoall: splits={counts} must be {size()} numbers of rows that sum to {num_rows}")
    return counts


def _length(tensor: torch.Tensor, call: str) -> int:
    if tensor.dim() == 0:
        raise MisuseError(f"{call} works along the first dimension, and this tensor has none: pass x.unsqueeze(0)")
    return tensor.shape[0]
