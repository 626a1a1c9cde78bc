"""The private names of torch and of Python that zerostd needs, all of them, each with a test.

They differ between torch releases and may move; nothing else in the library touches a name with a leading underscore.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call `function` once when the backward pass that is running now has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


RECOMPUTING = "zerostd.scheduling.recomputing"  # the module whose hooks on saved tensors recompute a forward


def in_backward() -> bool:
    """Return whether this thread runs inside a backward pass (recomputed forwards run there too)."""
    return bool(torch._C._current_graph_task_id() != -1)


# Returns a number for the backward pass that this thread runs; -1 outside of one. No function around it: autograd asks
# for each tensor that a recomputed forward has saved.
current_backward: Callable[[], int] = torch._C._current_graph_task_id


def runs_in_ddp(module: torch.nn.Module) -> bool:
    """Return whether the forward of a DistributedDataParallel around this module is running."""
    wrapper = DistributedDataParallel._active_ddp_module
    return wrapper is not None and any(inner is module for inner in wrapper.modules())


def python_thread() -> threading.Thread | None:
    """Return this thread; None for threads that Python did not start, such as autograd's device threads."""
    thread = threading.current_thread()
    return None if isinstance(thread, threading._DummyThread) else thread


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number that identifies a living storage, with or without memory."""
    return int(tensor.untyped_storage()._cdata)


def calls_of(module: torch.nn.Module, frame: FrameType | None = None) -> int:
    """Return how many nested calls of a module are running, in this thread or in that of a frame. Walks the stack."""
    code = torch.nn.Module._call_impl.__code__
    count = 0
    frame = frame or sys._getframe()
    while frame is not None:
        count += frame.f_code is code and frame.f_locals.get("self") is module
        frame = frame.f_back
    return count


def foreach_copy_(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy many tensors with one launch."""
    torch._foreach_copy_(targets, sources)


def foreach_add_(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Add many tensors with one launch."""
    torch._foreach_add_(targets, sources)


def foreach_norm(tensors: list[torch.Tensor], order: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the norm of each of many tensors, computed in `dtype`, with one launch."""
    return list(torch._foreach_norm(tensors, order, dtype))


def default_store() -> Any:
    """Return the key-value store of the default process group."""
    return torch.distributed.distributed_c10d._get_default_store()


def named_group(ranks: Sequence[int], backend: str, limit: timedelta, name: str) -> Any:
    """Make a process group of some of the ranks, all of which call it. A name must not be used twice with one store:
    `new_group(use_local_synchronization=True)` does so once groups were destroyed, and the next group hangs."""
    rank = ranks.index(torch.distributed.get_rank())
    make: Any = torch.distributed.distributed_c10d._new_process_group_helper  # its types differ between releases
    group, _ = make(len(ranks), rank, list(ranks), backend, default_store(), name, timeout=limit)
    mapping = {rank: number for number, rank in enumerate(ranks)}
    torch.distributed.distributed_c10d._world.pg_group_ranks[group] = mapping
    return group


def local_of(dtensor: Any) -> torch.Tensor:
    """Return the local tensor of a DTensor, once it has arrived."""
    local: Any = dtensor._local_tensor
    return local.wait() if hasattr(local, "wait") else local  # type: ignore[no-any-return]


def set_local(dtensor: Any, local: torch.Tensor) -> None:
    """Let a DTensor have other local values of the same shape and dtype."""
    dtensor._local_tensor = local


def offsets_of(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> tuple[int, ...]:
    """Return where the local tensor of a DTensor begins in the whole one, by dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    return tuple(int(offset) for offset in offsets)


def fsspec_storage() -> tuple[Any, Any]:
    """Return the reader and the writer of torch.distributed.checkpoint for URLs that fsspec knows."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    return FsspecReader, FsspecWriter


def is_profiling() -> bool:
    """Return whether torch's profiler is running."""
    return bool(torch._C._autograd._profiler_enabled())


def no_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a hook so that torch.compile calls it instead of tracing into it."""
    disabled: Callable[..., Any] = torch._dynamo.disable(function, recursive=True)
    return disabled


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Note that a step was taken without its own `step`; otherwise its schedulers would warn."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def plain_step(optimizer: torch.optim.Optimizer) -> None:
    """Run an optimizer's step without hooks, its own and those on all optimizers: it is a part of a step."""
    if isinstance(optimizer, torch.optim.Adagrad):
        _make_adagrad_states(optimizer)
    step: Any = type(optimizer).step
    if "step" in optimizer.__dict__ or not getattr(step, "hooked", False):
        optimizer.step()
    else:
        step.__wrapped__(optimizer)


def _make_adagrad_states(optimizer: torch.optim.Adagrad) -> None:
    """Make states for parameters that were added later: before torch 2.13, Adagrad's step does not."""
    initial = optimizer.defaults["initial_accumulator_value"]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and not optimizer.state[parameter]:
                value = complex(initial, initial) if parameter.is_complex() else initial
                place = parameter.device if group["fused"] else "cpu"
                step = torch.zeros((), dtype=torch.float32, device=place)
                optimizer.state[parameter] = {"step": step, "sum": torch.full_like(parameter, value)}


def share_state_hooks(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Let two optimizers share the hooks on saving and loading their states, including those registered later."""
    for name in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
        setattr(target, f"_optimizer_{name}_hooks", getattr(source, f"_optimizer_{name}_hooks"))


def run_state_hooks(optimizer: torch.optim.Optimizer, moment: str, *states: dict[str, Any]) -> Any:
    """Call the hooks of a moment, such as "load_state_dict_pre", with the states; returns those that they leave."""
    for hook in getattr(optimizer, f"_optimizer_{moment}_hooks").values():
        result = hook(optimizer, *states)
        states = states if result is None else (result,)
    return states[0] if states else None


def move_step_hooks(source: torch.optim.Optimizer, target: torch.optim.Optimizer | None = None) -> None:
    """Leave an optimizer without hooks around its step; `target` gets them."""
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if target is not None:
            setattr(target, name, getattr(source, name))
        setattr(source, name, OrderedDict())


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor, or another tensor with the same memory, was changed in place."""
    return int(tensor._version)


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the same for many, without a call for each."""
    with no_torch_function():
        return [tensor._version for tensor in tensors]


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that this one is a view of, as autograd knows it; None if it is no view."""
    return tensor._base


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor that shows its values with the other sign, as `tensor.conj().imag` does."""
    return torch._neg_view(tensor)


def arguments_of(operator: Any) -> list[Any]:
    """Return the arguments of an operator: their names, and in `alias_info` whether it writes to them."""
    return list(operator._schema.arguments)


def written_by(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call of an operator writes to. Higher-order operators do not say, and write to none."""
    if not hasattr(operator, "_schema"):
        return []
    written = []
    for position, argument in enumerate(arguments_of(operator)):
        if argument.alias_info and argument.alias_info.is_write:
            written.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor)]


def fake_mode() -> FakeTensorMode:
    """Return a mode in which tensors have a device and a shape, and no memory. No public module of torch has it."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def no_modes() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which no dispatch mode is active."""
    return _disable_current_modes()


@contextlib.contextmanager
def replaced_trunc_normal(function: Callable[..., Any]) -> Iterator[None]:
    """Let `torch.nn.init.trunc_normal_` call `function(plain, tensor, ...)` inside, where `plain` is torch's own."""
    init: Any = torch.nn.init
    plain = init._no_grad_trunc_normal_

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return function(plain, *args, **kwargs)

    init._no_grad_trunc_normal_ = replaced
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = plain


def has_saved_tensor_hooks() -> bool:
    """Return whether a hook packs what autograd saves now, as checkpointing does."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """Return the functions that pack and unpack what autograd saves now; None: there are none."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def in_checkpoint() -> bool:
    """Return whether a forward runs inside torch.utils.checkpoint or inside our own, which recompute it."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) in (checkpoint.__name__, RECOMPUTING)


def persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers in a module's own state_dict, by name, without those of its children."""
    skipped = module._non_persistent_buffers_set
    return {name: buffer for name, buffer in module._buffers.items() if buffer is not None and name not in skipped}


# Returns a context in which tensors of our own classes are plain ones; a class, since hooks enter it for each gradient.
no_torch_function: Callable[[], contextlib.AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass


def is_below_autograd() -> bool:
    """Return whether a dispatch mode of torch handles a call now, which looks at tensors below autograd."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.ADInplaceOrView))


def is_traced() -> bool:
    """Return whether torch.jit.trace or torch.export records a forward now."""
    return torch._C._get_tracing_state() is not None or torch.compiler.is_exporting()


def in_transform() -> bool:
    """Return whether a transform of torch.func, such as grad or vmap, runs now."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@contextlib.contextmanager
def outside_transforms() -> Iterator[None]:
    """Return a context that torch.func's transforms do not see, in which new tensors are no inference tensors."""
    with temporarily_clear_interpreter_stack(), torch.inference_mode(False):
        yield


def move_hook_to_end(parameter: torch.Tensor, handle: Any) -> None:
    """Let a post-accumulate-grad hook be called after all others of its parameter."""
    hooks = parameter._post_accumulate_grad_hooks
    if hooks is not None and handle.id in hooks:
        hooks[handle.id] = hooks.pop(handle.id)


def _metadata() -> frozenset[Any]:
    """Return functions of torch that read or change anything of a tensor but its values."""
    attributes = """
        shape dtype device layout requires_grad grad grad_fn is_leaf ndim itemsize nbytes names output_nr retains_grad
        is_cuda is_cpu is_meta is_sparse is_sparse_csr is_quantized is_nested is_mkldnn is_xla is_mps is_xpu
        _version _backward_hooks _post_accumulate_grad_hooks grad_dtype
    """
    methods = """
        size dim numel nelement ndimension element_size is_floating_point is_complex is_signed is_inference get_device
        is_same_size has_names register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad
        __len__ __hash__
    """
    descriptors = [getattr(torch.Tensor, name, None) for name in attributes.split()]
    functions: set[Any] = {
        getattr(descriptor, verb, None) for descriptor in descriptors for verb in ("__get__", "__set__", "__delete__")
    }
    functions |= {getattr(torch.Tensor, name, None) for name in methods.split()}
    functions |= {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size, torch.is_signed}
    return frozenset(functions - {None})


METADATA = _metadata()
OF_THE_GRAPH = frozenset({torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward})  # not of values
