"""torch's private names: each does what we use it for, on the torch that is installed."""

from __future__ import annotations

import _thread
import queue
import threading
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from zerostd import compat


def test_callback_runs_once_after_the_whole_backward():
    seen = []
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: (compat.at_end_of_backward(lambda: seen.append("end")), seen.append("hook"))[0])
    x.register_hook(lambda grad: seen.append("leaf"))
    y.sum().backward()
    assert seen == ["hook", "leaf", "end"]


def test_a_thread_that_python_did_not_start_is_none():
    seen = queue.SimpleQueue()
    _thread.start_new_thread(lambda: seen.put(compat.python_thread()), ())
    assert seen.get(timeout=10) is None
    assert compat.python_thread() is threading.main_thread()


def test_storages_are_told_apart_without_their_memory():
    first = torch.zeros(4)
    second = torch.zeros(4)
    view = first[1:]
    before = compat.storage_of(first)
    for tensor in (first, second):
        tensor.untyped_storage().resize_(0)
    assert compat.storage_of(view) == before != compat.storage_of(second)


def test_in_backward_is_true_only_there():
    seen = []
    x = torch.ones(3, requires_grad=True)
    (x * 2).register_hook(lambda grad: seen.append(compat.in_backward()))
    y = x * 2
    y.register_hook(lambda grad: seen.append(compat.in_backward()))
    assert not compat.in_backward()
    y.sum().backward()
    assert seen == [True] and not compat.in_backward()


class Nested(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.other, self.seen = torch.nn.Identity(), []

    def forward(self, depth: int) -> None:
        self.seen.append((compat.calls_of(self), compat.calls_of(self.other)))
        if depth:
            self.other(self(depth - 1))


def test_calls_of_a_module_are_counted_with_and_without_hooks():
    module = Nested()
    module(2)
    module.register_forward_pre_hook(lambda module, args: None)
    module(1)
    assert module.seen == [(1, 0), (2, 0), (3, 0), (1, 0), (2, 0)] and compat.calls_of(module) == 0


def test_foreach_copies_and_adds_across_dtypes():
    targets = [torch.zeros(3), torch.zeros(2, 2)]
    compat.foreach_copy_(targets, [torch.ones(3, dtype=torch.bfloat16), torch.full((2, 2), 2.0)])
    compat.foreach_add_(targets, [torch.ones(3, dtype=torch.bfloat16), torch.ones(2, 2)])
    assert targets[0].tolist() == [2.0, 2.0, 2.0] and targets[1].tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_no_dynamo_functions_are_called_not_traced():
    seen = []

    @compat.no_dynamo
    def note(x):
        seen.append(torch.compiler.is_compiling())

    def function(x):
        note(x)
        return x + 1

    torch.compile(function, backend="eager")(torch.ones(2))
    assert seen == [False]


def test_the_default_store_is_that_of_the_process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        compat.default_store().set("key", "value")
        assert compat.default_store().get("key") == b"value"
    finally:
        dist.destroy_process_group()


def test_a_named_group_has_the_ranks_that_were_asked_for():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = compat.named_group([0], "gloo", timedelta(seconds=30), "mine/1")
        value = torch.ones(1)
        dist.all_reduce(value, group=group)
        assert dist.get_process_group_ranks(group) == [0]
        dist.destroy_process_group(group)
    finally:
        dist.destroy_process_group()


def test_fsspec_storage_reads_what_it_wrote():
    reader, writer = compat.fsspec_storage()
    dcp.save({"x": torch.arange(3)}, storage_writer=writer("memory://compat"), no_dist=True)
    state = {"x": torch.zeros(3, dtype=torch.int64)}
    dcp.load(state, storage_reader=reader("memory://compat"), no_dist=True)
    assert state["x"].tolist() == [0, 1, 2]


def test_a_running_profiler_is_seen():
    assert not compat.is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert compat.is_profiling()
    assert not compat.is_profiling()


def test_versions_count_changes_in_place_of_all_views():
    x = torch.zeros(4)
    alias, before = x.detach()[1:], compat.version_of(x)
    x.add_(1)
    assert compat.version_of(alias) == compat.version_of(x) == before + 1
    assert compat.versions_of([alias, torch.ones(1)]) == [before + 1, 0]


def test_foreach_norm_computes_each_norm_in_the_dtype_that_is_asked_for():
    tensors = [torch.full((4096,), 0.01, dtype=torch.bfloat16), torch.tensor([3.0, -4.0], dtype=torch.bfloat16)]
    for order in (1.0, 2.0, float("inf")):
        norms = compat.foreach_norm(tensors, order, torch.float32)
        assert [n.dtype for n in norms] == [torch.float32] * 2
        assert norms == [torch.linalg.vector_norm(t, order, dtype=torch.float32) for t in tensors]


def test_hooks_on_saved_tensors_are_seen():
    seen = []

    def note(x):
        seen.append(compat.has_saved_tensor_hooks())
        return x * 2

    assert not compat.has_saved_tensor_hooks()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        assert compat.has_saved_tensor_hooks()
    checkpoint(note, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert seen == [True] and not compat.has_saved_tensor_hooks()


def test_hooks_on_saved_tensors_are_given_to_whoever_looks_on():
    """A hook inside checkpointing hands what is saved on to it, and recomputing gives the same gradient."""
    counted = []

    def square(x):
        pack, unpack = compat.saved_tensor_hooks()

        def look(tensor):
            counted.append(tensor.numel())
            return pack(tensor)

        with torch.autograd.graph.saved_tensors_hooks(look, unpack):
            return x * x

    assert compat.saved_tensor_hooks() is None
    x = torch.arange(3.0, requires_grad=True)

    def first_only(x):
        return square(x) if not counted else x * x

    checkpoint(first_only, x, use_reentrant=False).sum().backward()
    assert counted and set(counted) == {3} and torch.equal(x.grad, 2 * x.detach())


def test_schedulers_know_of_steps_that_were_noted():
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    compat.note_step(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


def test_step_hooks_move_from_one_optimizer_to_another() -> None:
    calls: list[str] = []
    source, target = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]) for _ in range(2))
    source.register_step_pre_hook(lambda *_: calls.append("before"))
    source.register_step_post_hook(lambda *_: calls.append("after"))
    compat.move_step_hooks(source, target)
    source.step()
    assert calls == []
    target.step()
    assert calls == ["before", "after"]
    compat.move_step_hooks(target)
    target.step()
    assert len(calls) == 2


def test_plain_step_of_adagrad_takes_parameters_that_it_was_not_made_with():
    expected, given = (nn.Parameter(torch.linspace(-1, 1, 6)) for _ in range(2))
    whole = torch.optim.Adagrad([expected], lr=0.1, initial_accumulator_value=0.2)
    optimizer = torch.optim.Adagrad([nn.Parameter(torch.zeros(2))], lr=0.1, initial_accumulator_value=0.2)
    optimizer.param_groups[0]["params"] = [given]
    for parameter, by in ((expected, whole), (given, optimizer)):
        parameter.grad = torch.ones(6)
        compat.plain_step(by)
    assert torch.equal(expected, given)
    assert optimizer.state[given].keys() == whole.state[expected].keys()


def test_plain_step_calls_no_hooks():
    from torch.optim.optimizer import register_optimizer_step_post_hook

    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("its own"))
    handle = register_optimizer_step_post_hook(lambda *_: calls.append("on all"))
    compat.plain_step(optimizer)
    assert weight.tolist() == [0.5, 0.5] and calls == []
    optimizer.step()
    handle.remove()
    assert calls == ["its own", "on all"]


def test_hooks_on_states_are_shared_and_called_as_torch_does():
    source, target = (torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5) for _ in range(2))
    calls = []
    source.register_state_dict_pre_hook(lambda optimizer: calls.append(optimizer))
    compat.share_state_hooks(source, target)
    source.register_load_state_dict_pre_hook(lambda optimizer, state: {**state, "more": 1})
    assert compat.run_state_hooks(target, "state_dict_pre") is None and calls == [target]
    assert compat.run_state_hooks(target, "load_state_dict_pre", {"some": 0}) == {"some": 0, "more": 1}


def test_nothing_made_outside_transforms_is_an_inference_tensor():
    with torch.inference_mode(), compat.outside_transforms():
        assert not torch.ones(2).is_inference()


def test_tensors_with_weak_references_do_not_trade_places():
    import weakref

    first, second = torch.zeros(2), torch.ones(2)
    reference = weakref.ref(first)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(first, second)
    assert reference() is first


def test_views_know_their_base():
    x = torch.zeros(4)
    assert compat.base_of(x) is None and compat.base_of(x[1:]) is x


def test_negated_views_show_the_other_sign_of_the_same_memory():
    x = torch.ones(2)
    view = compat.negated(x)
    x.add_(1)
    assert view.is_neg() and view.tolist() == [-2, -2]


def test_arguments_say_which_one_is_written():
    add_, zeros = torch.ops.aten.add_.Tensor, torch.ops.aten.zeros.default
    written = [a.name for a in compat.arguments_of(add_) if a.alias_info and a.alias_info.is_write]
    assert written == ["self"] and "device" in [a.name for a in compat.arguments_of(zeros)]


def test_written_tensors_are_found_among_arguments_and_keywords():
    x, y = torch.zeros(2), torch.zeros(2)
    assert [t is x for t in compat.written_by(torch.ops.aten.add_.Tensor, (x, y), {})] == [True]
    assert [t is y for t in compat.written_by(torch.ops.aten.add.out, (x, x), {"out": y})] == [True]
    assert compat.written_by(torch.ops.aten.add.Tensor, (x, y), {}) == []
    assert compat.written_by(torch.ops.higher_order.cond, (True, x), {}) == []


def test_fake_tensors_have_a_shape_and_take_real_ones_beside_them():
    real = torch.ones(3)
    with compat.fake_mode():
        fake = torch.empty(2, 3) + real
    assert type(fake) is FakeTensor and fake.shape == (2, 3)


def test_no_dispatch_mode_is_active_inside():
    with FakeTensorMode():
        with compat.no_modes():
            assert type(torch.empty(1)) is torch.Tensor
        assert type(torch.empty(1)) is FakeTensor


def test_trunc_normal_is_replaced_inside_and_put_back():
    seen = []

    def note(plain, tensor, *args, **kwargs):
        seen.append(tensor)
        return plain(tensor, *args, **kwargs)

    x = torch.zeros(100)
    with compat.replaced_trunc_normal(note):
        torch.nn.init.trunc_normal_(x, std=1.0, a=-0.5, b=0.5)
    assert len(seen) == 1 and seen[0] is x and 0 < x.abs().max() <= 0.5
    torch.nn.init.trunc_normal_(x)
    assert len(seen) == 1


class Loud(torch.Tensor):
    """Raises wherever a function of torch is called with it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise ZeroDivisionError(func)


def test_no_torch_function_makes_plain_tensors_of_ours():
    tensor = torch.ones(2).as_subclass(Loud)
    with pytest.raises(ZeroDivisionError):
        tensor.sum()
    with compat.no_torch_function():
        assert tensor.sum() == 2.0


def test_metadata_are_functions_that_need_no_values():
    parameter = nn.Parameter(torch.ones(2, 3))
    asked = [func(parameter) for func in (torch.Tensor.size, torch.Tensor.numel, torch.Tensor.shape.__get__)]
    assert asked == [(2, 3), 6, (2, 3)]
    assert {torch.Tensor.size, torch.Tensor.grad.__get__, torch.Tensor.grad.__set__} <= compat.METADATA
    assert not {torch.Tensor.add_, torch.Tensor.detach, torch.Tensor.data.__get__, torch.add} & compat.METADATA


def test_traces_and_exports_are_noticed():
    class Noticing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(compat.is_traced())
            return x + 1

    seen: list[bool] = []
    model = Noticing()
    torch.jit.trace(model, torch.ones(2), check_trace=False)
    torch.export.export(model, (torch.ones(2),))
    model(torch.ones(2))
    assert seen[0] and seen[-2] and not seen[-1]


def test_transforms_are_noticed_and_can_be_left():
    seen = []

    def inside(x: torch.Tensor) -> torch.Tensor:
        seen.append(compat.in_transform())
        with compat.outside_transforms():
            seen.append(compat.in_transform())
        return x.square().sum()

    torch.func.grad(inside)(torch.ones(2))
    assert seen == [True, False] and not compat.in_transform()


def test_a_hook_moved_to_the_end_is_called_last():
    parameter = nn.Parameter(torch.ones(2))
    called = []
    first = parameter.register_post_accumulate_grad_hook(lambda _: called.append("first"))
    parameter.register_post_accumulate_grad_hook(lambda _: called.append("second"))
    compat.move_hook_to_end(parameter, first)
    parameter.sum().backward()
    assert called == ["second", "first"]


def test_a_checkpointed_forward_is_noticed():
    seen = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(compat.in_checkpoint())
        return x * 2

    forward(torch.ones(2))
    with torch.autograd.graph.save_on_cpu():
        forward(torch.ones(2))
    checkpoint(forward, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert seen == [False, False, True]


def test_a_dispatch_mode_is_below_autograd():
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(compat.is_below_autograd())
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2).add(1)
    with torch.no_grad():
        assert not compat.is_below_autograd()
    with torch.inference_mode():
        assert not compat.is_below_autograd()
    assert seen and all(seen)


def test_the_forward_of_ddp_is_noticed_by_what_it_wraps(tmp_path):
    inner = nn.Linear(2, 2)
    other = nn.Linear(2, 2)
    seen = []
    inner.register_forward_pre_hook(lambda *_: seen.append((compat.runs_in_ddp(inner), compat.runs_in_ddp(other))))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        nn.parallel.DistributedDataParallel(nn.Sequential(inner))(torch.ones(1, 2))
    finally:
        dist.destroy_process_group()
    inner(torch.ones(1, 2))
    assert seen == [(True, False), (False, False)]


def test_a_dtensor_has_local_values_at_offsets(ranks):
    assert ranks(2, _dtensor) == [((0, 0), 4.0), ((0, 2), 0.0)]


def _dtensor(rank: int) -> tuple[tuple[int, ...], float]:
    mesh = init_device_mesh("cpu", (2,))
    dtensor = distribute_tensor(torch.ones(2, 3), mesh, [Shard(1)])
    compat.set_local(dtensor, torch.zeros_like(compat.local_of(dtensor)) + (1 - rank))
    return compat.offsets_of(dtensor.shape, mesh, dtensor.placements), float(dtensor.to_local().sum())
