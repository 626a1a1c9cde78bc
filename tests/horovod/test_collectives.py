"""Every collective against its definition, on one to three ranks; and what is refused."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostd.horovod as hvd
from horovod.scripts import session
from zerostd import MisuseError, NotSupportedError, PrepareError
from zerostd.horovod.collectives import REFUSED
from zerostd.horovod.world import backends_with


def value(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1, 6, shape, generator=generator).to(dtype)


def reductions(rank: int) -> None:
    size = hvd.size()
    for dtype in (torch.float32, torch.float64, torch.int64):
        everyone = torch.stack([value(number, 3, 2, dtype=dtype) for number in range(size)])
        mine = value(rank, 3, 2, dtype=dtype)
        total = everyone.sum(0)
        mean = total / size if dtype.is_floating_point else total // size
        for expected, options in (
            (mean, {}),
            (mean, {"average": True}),
            (total, {"average": False}),
            (total, {"op": hvd.Sum}),
            (everyone.amin(0), {"op": hvd.Min}),
            (everyone.amax(0), {"op": hvd.Max}),
            (everyone.prod(0), {"op": hvd.Product}),
            (total, {"op": hvd.Sum, "prescale_factor": 1.0, "process_set": None}),  # Horovod's defaults
        ):
            reduced = hvd.allreduce(mine, name="x", **options)
            torch.testing.assert_close(reduced, expected)
            torch.testing.assert_close(mine, value(rank, 3, 2, dtype=dtype))
            held = mine.clone().t()  # not contiguous
            assert hvd.allreduce_(held, **options) is held
            torch.testing.assert_close(held, expected.t())
    fine = torch.full((4,), 1.0 + rank / 1000)
    short = hvd.allreduce(fine, compression=hvd.Compression.fp16)
    assert short.dtype == torch.float32
    torch.testing.assert_close(short, torch.full((4,), 1.0 + (size - 1) / 2000), atol=2e-3, rtol=0)
    if size > 1:
        assert not torch.equal(short, hvd.allreduce(fine))


def gathers(rank: int) -> None:
    size = hvd.size()
    mine = value(rank, rank + 1, 2)  # another length on every rank
    torch.testing.assert_close(hvd.allgather(mine), torch.cat([value(n, n + 1, 2) for n in range(size)]))
    empty = value(rank, 2 if rank == 0 else 0, 2)
    torch.testing.assert_close(hvd.allgather(empty), value(0, 2, 2))
    flags = value(rank, 3, dtype=torch.int16) > 2
    torch.testing.assert_close(hvd.allgather(flags), torch.cat([value(n, 3) > 2 for n in range(size)]))
    assert hvd.allgather(value(rank, 0, 2)).shape == (0, 2)
    assert hvd.allgather_object({"rank": rank}) == [{"rank": number} for number in range(size)]


def broadcasts(rank: int) -> None:
    root = hvd.size() - 1
    for dtype in (torch.float32, torch.int64, torch.bool):
        mine = value(rank, 2, 3, dtype=dtype)
        torch.testing.assert_close(hvd.broadcast(mine, root), value(root, 2, 3, dtype=dtype))
        torch.testing.assert_close(mine, value(rank, 2, 3, dtype=dtype))
        held = mine.t()
        assert hvd.broadcast_(held, root_rank=root) is held
        torch.testing.assert_close(mine, value(root, 2, 3, dtype=dtype))
    assert hvd.broadcast_object({"of": rank}, root_rank=root) == {"of": root}


def places(rank: int) -> None:
    assert hvd.is_initialized() and hvd.rank() == rank
    assert (hvd.local_rank(), hvd.local_size()) == (rank, hvd.size())
    hvd.barrier()


def every(rank: int) -> str:
    with session():
        for check in (places, reductions, gathers, broadcasts):
            check(rank)
    return "done" if not hvd.is_initialized() else "still open"


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_are_what_they_are_called(ranks, world_size):
    assert ranks(world_size, every) == ["done"] * world_size


def test_collectives_in_a_world_of_one(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert every(0) == "done"


HOROVOD = {  # parameters of Horovod 0.28, in their order, up to those that have one accepted value
    "allreduce": "tensor average name compression op",
    "allreduce_": "tensor average name op",
    "allgather": "tensor name",
    "broadcast": "tensor root_rank name",
    "broadcast_": "tensor root_rank name",
    "join": "device",
    "broadcast_parameters": "params root_rank",
    "broadcast_optimizer_state": "optimizer root_rank model",
    "broadcast_object": "obj root_rank name",
    "allgather_object": "obj name",
    "DistributedOptimizer": "optimizer named_parameters compression backward_passes_per_step op",
}


@pytest.mark.parametrize("name", HOROVOD)
def test_arguments_are_in_horovods_order(name):
    parameters = inspect.signature(getattr(hvd, name)).parameters.values()
    ours = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert ours == HOROVOD[name].split()


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("Adasum", "hvd.Average or hvd.Sum"),
        ("global_process_set", "leave process_set out"),
        ("add_process_set", "leave process_set out"),
        ("ProcessSet", "leave process_set out"),
        ("allreduce_async_", "without _async"),
        ("grouped_allreduce", "one tensor at a time"),
        ("alltoall", "torch.distributed.all_to_all_single"),
        ("reducescatter", "torch.distributed.reduce_scatter_tensor"),
        ("cross_rank", r"hvd.local_size\(\)"),
        ("elastic", "examples/elastic.py"),
        ("sparse_allreduce", r"tensor.to_dense\(\)"),
        ("poll", "no _async functions"),
        ("start_timeline", "zerostd.record"),
        ("nccl_built", "torch.distributed.is_nccl_available"),
        ("SyncBatchNorm", "torch.nn.SyncBatchNorm"),
        ("nonsense", "has no attribute 'nonsense'"),
    ],
)
def test_names_that_do_not_exist_are_refused_with_the_remedy(name, remedy):
    with pytest.raises(AttributeError, match=remedy):
        getattr(hvd, name)


def test_documents_name_what_is_refused():
    page = (Path(__file__).parents[2] / "docs/how-to/from-horovod.md").read_text()
    refused = page.partition("Everything else is refused.")[2]
    patterns = [*hvd.REMEDIES, *REFUSED, *inspect.signature(hvd.init).parameters]
    assert [pattern for pattern in patterns if not re.search(rf"`[^`]*({pattern})[^`]*`.*\|.*\|$", refused, re.M)] == []


def make(**options: Any) -> Any:
    model = nn.Linear(4, 4)
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"op": hvd.Max}, NotSupportedError, "hvd.Average or hvd.Sum"),
        ({"gradient_predivide_factor": 2.0}, NotSupportedError, "leave it out"),
        ({"process_set": 0}, NotSupportedError, r"hvd.DistributedOptimizer\(process_set=0\).*new_group"),
        ({"backward_passes_per_step": 0}, PrepareError, "1 or more"),
        ({"compression": "fp16"}, NotSupportedError, "Compression.fp16"),
        ({"groups": 3}, NotSupportedError, "leave groups out"),
        ({"num_groups": 3}, NotSupportedError, "leave num_groups out"),
        ({"stage": 3}, NotSupportedError, "zerostd.prepare"),
        ({"stage": 7}, PrepareError, "stage=7"),
        ({"named_parameters": [("a", nn.Parameter(torch.ones(1)))]}, PrepareError, "lacks 2 of the optimizer's"),
        ({"named_parameters": [("a.b", None), ("a/b", None)]}, PrepareError, "1 names for 2"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options, error, message):
    with session(), pytest.raises(error, match=message):
        make(**options)


def test_what_is_refused_leaves_everything_as_it_was():
    with session():
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        with pytest.raises(PrepareError, match="stage=7"):
            hvd.DistributedOptimizer(optimizer, stage=7)
        assert len(optimizer.state) == 2 and optimizer.param_groups[0]["lr"] == 0.1
        model(torch.ones(1, 4)).sum().backward()
        wrapped = hvd.DistributedOptimizer(optimizer)  # and it can be wrapped afterwards
        with pytest.raises(PrepareError, match=r"call its release\(\) first"):
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        wrapped.release()
        with pytest.raises(MisuseError, match="released"):
            wrapped.step()
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def test_calls_that_make_no_sense_are_refused(monkeypatch):
    with pytest.raises(MisuseError, match=r"before hvd.init\(\)"):
        hvd.rank()
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with monkeypatch.context() as patch:
        patch.setenv("OMPI_COMM_WORLD_SIZE", "4")
        with pytest.raises(NotSupportedError, match="torchrun"):
            hvd.init()
    with pytest.raises(NotSupportedError, match="comm"):
        hvd.init([0, 1])
    with session():
        ones = torch.ones(3)
        trained = torch.ones(3, requires_grad=True)
        refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
            (MisuseError, "root_rank=5", lambda: hvd.broadcast(ones, 5)),
            (MisuseError, "leave average out", lambda: hvd.allreduce(ones, average=True, op=hvd.Sum)),
            (NotSupportedError, "hvd.Average", lambda: hvd.allreduce(ones, op="sum")),
            (NotSupportedError, "functional.all_reduce", lambda: hvd.allreduce(trained)),
            (NotSupportedError, "functional.all_gather", lambda: hvd.allgather(trained)),
            (NotSupportedError, r"tensor.detach\(\)", lambda: hvd.broadcast(trained, 0)),
            (NotSupportedError, r"hvd.allreduce_\(process_set=1\)", lambda: hvd.allreduce_(ones, process_set=1)),
            (NotSupportedError, "before the call", lambda: hvd.allreduce(ones, prescale_factor=2.0)),
            (NotSupportedError, "new_group", lambda: hvd.broadcast(ones, 0, process_set=1)),
            (NotSupportedError, "multiply the result", lambda: hvd.allreduce(ones, postscale_factor=2.0)),
            (MisuseError, "unsqueeze", lambda: hvd.allgather(torch.tensor(1.0))),
            (MisuseError, "broadcast_object", lambda: hvd.broadcast_parameters({"extra": "text"}, 0)),
            (NotSupportedError, "float32", lambda: _half()),
            (MisuseError, "laid out", lambda: make().add_param_group({"params": []})),
        ]
        for error, message, call in refused:
            with pytest.raises(error, match=message):
                call()
        assert hvd.join() == 0
        with torch.no_grad():
            assert torch.equal(hvd.allreduce(trained), ones)


def _half() -> Any:
    model = nn.Linear(4, 4).bfloat16()
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(("device", "backends"), [("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl")])
def test_processes_meet_over_the_backends_that_torch_has_for_the_accelerator(device: str, backends: str) -> None:
    assert backends_with(torch.device(device)) == backends
    assert backends_with(None) == "gloo"
