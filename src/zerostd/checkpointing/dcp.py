"""Save a prepared model as a torch.distributed.checkpoint, and open one, such as FSDP2 programs write.

A DCP checkpoint holds parameters, buffers, states and options under torch's own names. What torch has no name for stays
out: random states, the loss scale and gradients of an incomplete step. `storage/dcp_files.py` has the format.
"""

from __future__ import annotations

import json
import logging
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from zerostd.checkpointing.loading import load_from
from zerostd.checkpointing.saving import add_save, check_call, extra_states, finish_saves, records_of
from zerostd.checkpointing.storage import PendingSave
from zerostd.checkpointing.storage.dcp_files import (
    AVERAGES,
    FAILURES,
    MODEL,
    OPTIMIZER,
    OURS,
    TENSORS_OF_OURS,
    DcpCheckpoint,
    SavePlanner,
    ShardedValue,
    first_failure,
    writer,
)
from zerostd.checkpointing.storage.manifest import encode_value
from zerostd.checkpointing.storage.writing import end_process
from zerostd.engine.averaging import averages_of
from zerostd.engine.intervals import SavedInterval, scalar_states
from zerostd.engine.runtime import Runtime
from zerostd.errors import CheckpointError, MisuseError, check_flag
from zerostd.optimizers.optimizer import ZeroOptimizer
from zerostd.parameters.blueprints import named_tensors

log = logging.getLogger("zerostd")


class DcpSaving(PendingSave):
    """A checkpoint that a thread of torch writes from copies. The process waits for it at its end."""

    def __init__(self, path: str, future: Future[Any]) -> None:
        self._path = path
        self._future = future
        super().__init__()
        future.add_done_callback(self._on_done)

    def finish(self) -> None:
        wait([self._future])

    def wait(self) -> None:
        try:
            self._future.result()
        except FAILURES as error:
            self.forget_exit()
            raise CheckpointError(f"{self._path} cannot be written: {first_failure(error)}") from error

    def is_done(self) -> bool:
        """Return whether `wait` would return, or raise, at once."""
        return self._future.done()

    def _on_done(self, future: Future[Any]) -> None:
        error = future.exception()
        if error is None:
            self.forget_exit()
        else:
            log.error("the checkpoint %s was not saved: %s", self._path, first_failure(error))

    def _at_exit(self) -> None:
        if self._future.exception() is not None:
            end_process()


@torch.no_grad()
def save_dcp(runtime: Runtime, optimizer: ZeroOptimizer | None, path: str, extra: Any, *, wait: bool) -> DcpSaving:
    """Save. All ranks call it. Without `wait`, this rank's part is copied to host memory first, and a thread writes."""
    check_flag("wait", wait, CheckpointError)
    check_call(runtime, optimizer, "save_dcp")
    if runtime.backward.passes.num_done:
        raise MisuseError(
            f"zerostd.save_dcp after {runtime.backward.passes.num_done} backward pass(es) of an incomplete "
            "step: this format cannot hold gradients. Call it after optimizer.step(), or use zerostd.save"
        )
    for earlier in finish_saves(runtime):  # one at a time: they share a process group
        earlier.forget_exit()
    describe = partial(_describe, runtime, optimizer, extra)
    control = runtime.gatherer.control
    state = control.on_all_ranks(describe, "zerostd.save_dcp()", CheckpointError, "; nothing was saved")
    group = runtime.world.checkpoint_group()
    call = partial(save if wait else async_save, state, planner=SavePlanner(), no_dist=group is None)
    future: Future[Any] = Future()
    try:
        result = call(storage_writer=writer(path), process_group=group)
    except FAILURES as error:
        raise CheckpointError(f"{path} cannot be written: {first_failure(error)}") from error
    if not wait:
        future = result if isinstance(result, Future) else result.upload_completion
    else:
        future.set_result(result)
    saving = DcpSaving(path, future)
    add_save(runtime, saving)
    return saving


def _describe(runtime: Runtime, optimizer: ZeroOptimizer | None, extra: Any) -> dict[str, Any]:
    """Return what this rank saves, under torch's names."""
    state: dict[str, Any] = {MODEL: {}, **_ours(runtime, extra)}
    by_tensor: dict[tuple[str, str], list[SavedInterval]] = {}
    of_averages: dict[tuple[str, str], list[SavedInterval]] = {}
    for record in records_of(runtime, optimizer, frozen=True):
        if record.kind in ("parameter", "state"):
            by_tensor.setdefault((record.of, record.state), []).append(record)
        elif record.kind == "average":
            of_averages.setdefault((record.state, record.of), []).append(record)
    values = {identity: ShardedValue(records) for identity, records in by_tensor.items()}
    names: dict[object, str] = {p: interval.name for _, p, interval in runtime.parameters()}
    for name, tensor, owner in named_tensors(runtime.model):
        if owner is not tensor:
            state[MODEL][name] = tensor.detach()
        elif (names[tensor], "") in values:
            state[MODEL][name] = values[names[tensor], ""]
    if optimizer is not None:
        state[OPTIMIZER] = _optimizer_state(runtime, optimizer, values)
    state[AVERAGES] = {}
    for average in averages_of(runtime):
        state[AVERAGES][average.name] = dict(average.buffers) if average.num_averaged else {}
    for (name, of), records in of_averages.items():
        state[AVERAGES][name][of] = ShardedValue(records)
    return state


def _ours(runtime: Runtime, extra: Any) -> dict[str, Any]:
    """Return what other programs do not have: `extra` and the extra states of modules, both rank 0's."""
    tensors: dict[str, torch.Tensor] = {}

    def store(tensor: torch.Tensor) -> int:
        tensors[str(len(tensors))] = tensor
        return len(tensors) - 1

    if runtime.world.rank != 0:
        return {}
    modules = extra_states(runtime.model, store)
    step = runtime.backward.passes.num_steps
    counts = {average.name: average.counts() for average in averages_of(runtime)}
    encoded = encode_value(extra, store, "extra")
    text = json.dumps({"extra": encoded, "modules": modules, "step": step, "averages": counts})
    return {OURS: text, TENSORS_OF_OURS: tensors}


def _optimizer_state(
    runtime: Runtime, optimizer: ZeroOptimizer, values: dict[tuple[str, str], ShardedValue]
) -> dict[str, Any]:
    states: dict[str, dict[str, Any]] = {}
    for (name, state), value in values.items():
        if state:
            states.setdefault(name, {})[state] = value
    for name, scalars in scalar_states(optimizer.updater, runtime.world.shard_rank).items():
        states.setdefault(name, {}).update(scalars)
    names = {parameter: interval.name for _, parameter, interval in runtime.parameters()}
    groups = [
        {**group, "params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    return {"state": states, "param_groups": groups}


def load_dcp(runtime: Runtime, optimizer: ZeroOptimizer | None, path: str) -> Any:
    """Load, and return what `extra` was. All ranks call it, and each reads what it keeps."""
    names: dict[str, tuple[str, ...]] = {}
    first: dict[object, str] = {}
    for name, tensor, owner in named_tensors(runtime.model):
        if owner in first:
            names[first[owner]] += (name,)
        else:
            first[owner] = name
            names[name] = ("parameter" if owner is tensor else "buffer",)
    long_states = () if optimizer is None else optimizer.updater.states
    optimizer_class = "" if optimizer is None else type(optimizer.inner).__name__
    return load_from(runtime, optimizer, lambda: DcpCheckpoint(path, names, optimizer_class, long_states))
