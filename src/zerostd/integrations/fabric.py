"""Fabric of Lightning: a strategy that passes model and optimizer to zerostd, and the rest to Lightning's own.

fabric = Fabric(strategy=ZeroStrategy(stage=3))  # or strategy="zerostd"
model, optimizer = fabric.setup(model, optimizer)

The Trainer's strategy uses the Root, the checks and the checkpoint directories of this file.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
from torch import nn

import zerostd
from zerostd.integrations import common

CALL = "ZeroStrategy({}=...)"  # how an option of zerostd.prepare is written
PRECISIONS = ("32-true", "bf16-mixed")  # of Lightning: fp32, and autocast
BY_VALUE = "{}: gradients are sharded, and zerostd clips them by their norm; use {}"
SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class Root(nn.Module):
    """A sharded module for Lightning to call: it has the parts of the user's module by the same names, and calls it.

    Lightning calls other methods than forward (`training_step`), and these call the module themselves. Around all of
    them the root is called once a step, so zerostd sees each step begin and end once.
    """

    module: nn.Module
    optimizer: Any  # what zerostd.prepare gave back

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None, zero: Mapping[str, Any]) -> None:
        super().__init__()
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise zerostd.NotSupportedError(
                f"{type(module).__name__} defines get_extra_state(), which would be lost: move it to a submodule"
            )
        for name in SHARED:
            self.__dict__[name] = module.__dict__[name]
        self.__dict__["module"] = module  # not as a submodule: names stay as they are
        self.__dict__["optimizer"] = zerostd.prepare(self, optimizer, **zero)[1]

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "module" in self.__dict__:
            self.module.training = mode

    def forward(self, *args: Any, **options: Any) -> Any:
        """Call the module's forward, where Lightning puts its steps."""
        return self.module(*args, **options)


class ZeroStrategy(DDPStrategy):
    """A strategy of Fabric with the options of zerostd.prepare; others are those of Fabric's DDPStrategy."""

    def __init__(self, **options: Any) -> None:
        self.zero = take_zero(options, DDPStrategy)
        super().__init__(**options)
        self._backward_sync_control = self

    def _configure_launcher(self) -> None:
        """Refuse a precision that cannot be honoured: Fabric has set it by now, and started nothing."""
        common.check_precision(self.zero, CALL, self.precision.precision, PRECISIONS)
        super()._configure_launcher()

    def _get_process_group_backend(self) -> str:
        return self._process_group_backend or with_gloo(super()._get_process_group_backend(), self.root_device)

    def _setup_distributed(self) -> None:
        if self.num_nodes * self.num_processes > 1:  # a world of one needs no process group
            super()._setup_distributed()

    def setup_module(self, module: nn.Module) -> Root:
        """Shard a module without an optimizer, to evaluate."""
        return Root(module, None, self.zero)

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: Any, scheduler: Any = None) -> Any:
        """Shard a module with its one optimizer."""
        root = Root(module, common.only_one(optimizers, module), self.zero)
        return root, [root.optimizer], scheduler

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Refuse an optimizer without its model."""
        raise zerostd.MisuseError(
            "an optimizer alone: zerostd shards it together with its model, so pass both to one call, "
            "fabric.setup(model, optimizer)"
        )

    def module_to_device(self, module: nn.Module) -> None:
        """Move a module, unless it has no memory yet."""
        if common.has_memory(module):
            module.to(self.root_device)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip to the norm over all shards, and return it. Every rank must call it."""
        norm: torch.Tensor = optimizer.clip_grad_norm_(max_norm, norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(
                f"the gradient norm of order {norm_type} is {float(norm)}: to clip anyway, pass "
                "error_if_nonfinite=False"
            )
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        """Refuse to clip by value: gradients are sharded."""
        raise zerostd.NotSupportedError(BY_VALUE.format(f"clip_gradients(clip_val={clip_val})", "max_norm"))

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """Reduce the passes inside later: this strategy is its own control of `fabric.no_backward_sync`."""
        if not enabled:
            return contextlib.nullcontext()
        return common.late_reduction(module, self.zero)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a directory with each rank's shards and a file for the rest. Without a model: an ordinary file."""
        root, optimizer, rest = _split(state)
        if root is None:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        filters = filter or {}
        for name in set(filters) & set(state) - set(rest):
            raise zerostd.NotSupportedError(
                f"fabric.save(filter={{{name!r}: ...}}): shards are saved whole; choose from "
                "zerostd.full_state_dict(model) instead"
            )
        rest = self._convert_stateful_objects_in_state(rest, filter=filters)
        save_shards(self, Path(self.broadcast(path)), root, rest, optimizer)

    def load_checkpoint(self, path: Any, state: Any = None, strict: bool = True, weights_only: Any = None) -> Any:
        """Load a directory of `fabric.save`, with any number of ranks, stage and placement; or an ordinary file."""
        if not Path(path).is_dir():
            return super().load_checkpoint(path, state, strict, weights_only)
        shards, rest_path = newest_shards(Path(path))
        remainder = self.checkpoint_io.load_checkpoint(rest_path, weights_only=weights_only)
        if not state:
            return remainder
        root, optimizer, rest = _split({"model": state} if isinstance(state, nn.Module) else state)
        missing = sorted(set(rest) - set(remainder))
        if strict and missing:
            raise zerostd.CheckpointError(f"{path} has no {missing[0]!r}; it has {sorted(remainder)}")
        if root is not None:
            zerostd.load(shards, root, optimizer)
        for name in set(rest) & set(remainder):
            value = remainder.pop(name)
            if hasattr(rest[name], "load_state_dict"):
                rest[name].load_state_dict(value)
            else:
                state[name] = value
        return remainder


def _split(objects: Mapping[str, Any]) -> tuple[Root | None, Any, dict[str, Any]]:
    """Return the model, its optimizer if there is one, and everything that is not sharded."""
    roots = [value for value in objects.values() if isinstance(value, Root)]
    if len(roots) > 1:
        raise zerostd.NotSupportedError(f"a checkpoint of {len(roots)} models: save each model to its own path")
    optimizer = None
    rest = {}
    for name, value in objects.items():
        if value is not None and roots and value is roots[0].optimizer:
            optimizer = value
        elif not isinstance(value, Root):
            rest[name] = value
    return roots[0] if roots else None, optimizer, rest


def with_gloo(backend: str, device: torch.device) -> str:
    """Return the backends of a process group: that of the device, and one for small messages over the CPU."""
    return backend if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}"


def take_zero(options: dict[str, Any], base: type) -> dict[str, Any]:
    """Take the options of zerostd.prepare out of `options`. Refuse what the strategy `base` does not know, either, or
    would only tell DDP."""
    zero = {name: options.pop(name) for name in common.OPTIONS & set(options)}
    of_ddp = ("ddp_", "model_averaging", "kwargs")
    known = {name for name in inspect.signature(base).parameters if not name.startswith(of_ddp)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise zerostd.PrepareError(
            f"{CALL.format(unknown[0])}: the options of zerostd.prepare are {sorted(common.OPTIONS)}, and those of "
            f"Lightning's strategies are {sorted(known)}"
        )
    return zero


def save_shards(strategy: Any, folder: Path, root: Root, rest: dict[str, Any], optimizer: Any) -> None:
    """Write the directory `folder`: shards in `zerostd/N`, and `rest` in the file `rest-N`. Older ones are removed when
    N is complete, which it is with the shards."""
    if "://" in str(folder) or ":/" in str(folder)[1:]:
        raise zerostd.NotSupportedError(f"{folder}: ranks write shards to a file system only; give a local path")
    if folder.is_file():
        raise zerostd.CheckpointError(f"{folder} is a file, but a checkpoint is a directory: give another path")
    number = common.next_number(folder / common.FOLDER)
    rest_path = folder / f"rest-{number}"
    strategy.barrier()  # all have looked before one of them writes
    if strategy.is_global_zero:
        strategy.checkpoint_io.save_checkpoint(rest, rest_path)
    strategy.barrier()
    zerostd.save(folder / common.FOLDER / str(number), root, optimizer, keep=1)
    if strategy.is_global_zero:
        for path in folder.glob("rest-*"):
            if path != rest_path:
                path.unlink()


def newest_shards(folder: Path) -> tuple[str, Path]:
    """Return the newest complete shards in a directory that `save_shards` wrote, and the file with the rest."""
    shards = common.newest_in(folder / common.FOLDER)
    return shards, folder / f"rest-{Path(shards).name}"


STRATEGY_REGISTRY.register("zerostd", ZeroStrategy, description="zerostd plans what is sharded", override=True)
