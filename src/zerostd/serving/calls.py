"""The calls of a worker to the parameter servers, and the state that a worker keeps: buffers and random states.

`begin_role` is called when a model is prepared. `ServedSteps` sends a step when `optimizer.step()` has been called; the
new parameters are expected by then. The other functions are the public ones: on a worker they send a method of `Server`
with its arguments. Every worker calls them; the arguments of the first worker are used.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from zerostd.checkpointing.full_state import check_rank, full_state, release_model
from zerostd.checkpointing.generators import other_states, restore_others
from zerostd.checkpointing.loading import load_checkpoint
from zerostd.checkpointing.storage.remote import AnyPath
from zerostd.communication.link import Message, ServerLink
from zerostd.compat import no_torch_function
from zerostd.engine.runtime import Runtime
from zerostd.errors import CheckpointError, MisuseError, ZerostdError, check_flag
from zerostd.optimizers.optimizer import ZeroOptimizer
from zerostd.optimizers.spans import snapshot
from zerostd.parameters.blueprints import buffers_of
from zerostd.parameters.observing import StepObserver
from zerostd.parameters.prepared import GRAD
from zerostd.serving.server import Server
from zerostd.tiers import Done

WORKERS = "zerostd.workers"  # in the extra of a checkpoint: the random states of workers


def begin_role(runtime: Runtime, optimizer: ZeroOptimizer) -> None:
    """Let a worker tell the servers of its steps. A server serves here, and its process ends when the workers have."""
    if runtime.world.is_worker:
        runtime.observers.append(ServedSteps(runtime))
    elif runtime.world.link is not None:
        Server(runtime, optimizer).serve()
        runtime.world.close()
        raise SystemExit(0)  # what follows in the script is the workers'


class ServedSteps(StepObserver):
    """Tells the servers of every step."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        flats = runtime.trained_flats
        self._numbers = {flat: number for number, flat in enumerate(flats)}

    def after_step(self) -> None:
        """Ask for the new parameters."""
        runtime = self.runtime
        assert runtime.optimizer is not None
        with no_torch_function():
            used = [GRAD.__get__(trained.parameter) is not None for trained in runtime.backward.trained]
        order = [self._numbers[flat] for group in runtime.update_order() for flat in group.trainable]
        request = partial(Server.step, options=snapshot(runtime.optimizer.param_groups), used=used, order=order)
        link_of(runtime).ask(Message.STEP, request, "the step of the servers")


def link_of(runtime: Runtime) -> ServerLink:
    """Return the link to the servers."""
    assert runtime.world.link is not None
    return runtime.world.link


def _call(runtime: Runtime, request: partial[None], what: str) -> Any:
    """Return the servers' answer, when this worker's model is up to date; raise what they raised."""
    if runtime.backward.passes.num_done and request.func is not Server.state:
        raise MisuseError(f"{what} between a backward pass and optimizer.step(): with servers, call it after the step")
    runtime.gatherer.control.confirm(what)
    runtime.gatherer.wait_all()
    answer = link_of(runtime).call(request, what)
    if isinstance(answer, ZerostdError):
        raise answer
    return answer


def save_by_servers(
    runtime: Runtime,
    optimizer: ZeroOptimizer | None,
    path: AnyPath,
    extra: Any,
    keep: int | None,
    *,
    frozen: bool,
    wait: bool,
) -> Done:
    """Save from a worker: the servers write, with the buffers of the first worker and the random states of all, and it
    waits for them."""
    check_flag("wait", wait, CheckpointError)
    check_flag("frozen", frozen, CheckpointError)
    random_states = {"torch": torch.get_rng_state(), **other_states()}
    extra = {WORKERS: runtime.gatherer.control.collect(random_states, "zerostd.save()"), "extra": extra}
    buffers = {name: buffer.detach().cpu() for name, buffer in buffers_of(runtime.model).items()}
    request = partial(Server.save, path=path, extra=extra, keep=keep, frozen=frozen)
    _call(runtime, partial(request, has_optimizer=optimizer is not None, buffers=buffers), "zerostd.save()")
    return Done()


@torch.no_grad()
def load_model(runtime: Runtime, optimizer: ZeroOptimizer | None, path: AnyPath) -> Any:
    """Load a checkpoint and return its extra; on a worker the servers load it, and parameters come from there."""
    if not runtime.world.is_worker:
        return _own_extra(load_checkpoint(runtime, optimizer, path), runtime.world.rank, runtime.world.size)
    has_optimizer = optimizer is not None
    request = partial(Server.load, path=path, has_optimizer=has_optimizer)
    extra, buffers, options, num_steps = _call(runtime, request, "zerostd.load()")
    for group in runtime.groups:
        if group.trainable:
            runtime.gatherer.renew(group)
    for name, buffer in buffers_of(runtime.model).items():
        buffer.copy_(buffers[name])
    if has_optimizer and runtime.optimizer is not None:
        for mine, theirs in zip(runtime.optimizer.param_groups, options, strict=True):
            mine.update(theirs)
    runtime.backward.passes.num_steps = num_steps
    runtime.gatherer.wait_all()
    return _own_extra(extra, runtime.world.rank, runtime.world.size)


def _own_extra(extra: Any, rank: int, size: int) -> Any:
    """Return the extra of a checkpoint that servers wrote, or of another one. Random states are restored if the number
    of workers is the same as when saving."""
    if not isinstance(extra, dict) or WORKERS not in extra:
        return extra
    states = extra[WORKERS]
    if len(states) == size:
        torch.set_rng_state(states[rank]["torch"])
        for restore in restore_others(states[rank]):
            restore()
    return extra["extra"]


def full_state_of(runtime: Runtime, rank: int | None) -> dict[str, Any]:
    """Return an ordinary state_dict: on a worker, the servers' masters and its own buffers. With `rank`, only there."""
    if not runtime.world.is_worker:
        return full_state(runtime, rank)
    check_rank(rank, runtime.world)
    state: dict[str, Any] = _call(runtime, partial(Server.state), "zerostd.full_state_dict()")
    if rank is not None and rank != runtime.world.rank:
        return {}
    return state | {name: buffer.detach().to("cpu", copy=True) for name, buffer in buffers_of(runtime.model).items()}


def release_any(runtime: Runtime) -> None:
    """Make the model an ordinary one again; on a worker with the servers' values, and the servers end."""
    if not runtime.world.is_worker:
        release_model(runtime)
        return
    state = full_state_of(runtime, None)
    release_model(runtime)
    with torch.no_grad():
        for name, parameter in runtime.model.named_parameters():
            parameter.copy_(state[name])
