"""The collectives: each takes a tensor or an object from every rank. No gradients flow through them.

Names of operations are accepted and ignored: torch.distributed matches calls by their order.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from zerostd import MisuseError, NotSupportedError
from zerostd.horovod.world import session, size

ReduceOp = dist.ReduceOp.RedOpType
Average = dist.ReduceOp.AVG
Sum = dist.ReduceOp.SUM
Min = dist.ReduceOp.MIN
Max = dist.ReduceOp.MAX
Product = dist.ReduceOp.PRODUCT
Compression = types.SimpleNamespace(none=None, fp16=torch.float16)  # the dtype that floating-point values are sent in

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

REFUSED: dict[str, tuple[Any, str]] = {  # arguments of Horovod: the value that is accepted, and the remedy for others
    "process_set": (None, "all processes take part; for some use torch.distributed with new_group(ranks)"),
    "prescale_factor": (1.0, "multiply the tensor before the call"),
    "postscale_factor": (1.0, "multiply the result"),
    "gradient_predivide_factor": (1.0, "gradients are averaged in one operation; leave it out"),
    "num_groups": (0, "parameters are grouped by size, neighbours up to some MiB; leave num_groups out"),
    "groups": (None, "parameters are grouped by size, neighbours up to some MiB; leave groups out"),
}


def on_all_ranks(call: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a function refuse arguments in REFUSED, and calls in which ranks in join would not take part."""
    label = "hvd." + call.__qualname__.removesuffix(".__init__")

    @functools.wraps(call)
    def checked(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        _take_accepted(options, label)
        session().check_present(f"{label}()")
        return call(*args, **options)

    return checked


def _take_accepted(options: dict[str, Any], label: str) -> None:
    """Remove arguments in REFUSED that have the accepted value, which change nothing, and refuse other values."""
    for name, (accepted, remedy) in REFUSED.items():
        value = options.pop(name, accepted)
        if value != accepted:
            raise NotSupportedError(f"{label}({name}={value!r}): {remedy}")


@on_all_ranks
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: torch.dtype | None = Compression.none,
    op: ReduceOp | None = None,
) -> torch.Tensor:
    """Return the mean over all ranks, or the result of `op`; `average` is the older option."""
    _check_detached(tensor, "allreduce", "all_reduce")
    if op is not None and average is not None:
        raise MisuseError(f"op={op!r} and average={average!r} set the same option: leave average out")
    if op is None:
        op = Sum if average is False else Average
    if op not in (Average, Sum, Min, Max, Product):
        raise NotSupportedError(f"op={op!r} is not supported; use hvd.Average, Sum, Min, Max or Product")
    value = tensor.clone(memory_format=torch.contiguous_format)
    if compression is not None and tensor.is_floating_point():
        value = value.to(compression)
    if size() > 1:
        dist.all_reduce(value, Sum if op == Average else op)  # gloo has no average
    if op == Average:
        value = torch.div(value, size(), rounding_mode=None if value.is_floating_point() else "trunc")
    return value.to(tensor.dtype)


@on_all_ranks
@torch.no_grad()
def allreduce_(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None
) -> torch.Tensor:
    """Do the same in place."""
    return tensor.copy_(allreduce(tensor, average, op=op))


@on_all_ranks
def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated along the first dimension, which may differ in length."""
    _check_detached(tensor, "allgather", "all_gather")
    if tensor.dim() == 0:
        raise MisuseError("allgather works along the first dimension, and this tensor has none: pass x.unsqueeze(0)")
    if size() == 1:
        return tensor.clone()
    lengths = allgather_object(tensor.shape[0])
    padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    parts = [torch.empty_like(padded) for _ in lengths]
    # as bytes: gloo does not know every dtype
    dist.all_gather([part.view(torch.uint8) for part in parts], padded.view(torch.uint8))
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


@on_all_ranks
def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Return the tensor of rank `root_rank`."""
    _check_detached(tensor, "broadcast", "broadcast")
    return broadcast_(tensor.clone(), root_rank)


@on_all_ranks
@torch.no_grad()
def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Do the same in place."""
    _check_root(root_rank)
    value = tensor.detach().contiguous()
    if size() > 1:
        dist.broadcast(value, src=root_rank)
    return tensor if tensor.is_contiguous() else tensor.copy_(value)


@on_all_ranks
def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Return the object of rank `root_rank`, which can be anything that pickles."""
    _check_root(root_rank)
    objects = [obj]
    if size() > 1:
        dist.broadcast_object_list(objects, src=root_rank)
    return objects[0]


@on_all_ranks
def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks, by rank."""
    objects = [obj] * size()
    if size() > 1:
        dist.all_gather_object(objects, obj)
    return objects


@on_all_ranks
def barrier() -> None:
    """Wait until every rank has called it."""
    if size() > 1:
        dist.barrier()


def _check_root(root_rank: int) -> None:
    if root_rank not in range(size()):
        raise MisuseError(f"root_rank={root_rank!r}: there are {size()} ranks, so it must be from 0 to {size() - 1}")


def _check_detached(tensor: torch.Tensor, call: str, differentiable: str) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise NotSupportedError(
            f"hvd.{call}() of a tensor that requires grad: no gradient would flow back. Pass tensor.detach(), or call "
            f"torch.distributed.nn.functional.{differentiable}, which lets it flow"
        )
