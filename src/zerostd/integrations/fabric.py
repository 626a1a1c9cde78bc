"""Fabric of Lightning: a strategy that hands model and optimizer to zerostd, and the rest to Lightning's own.

fabric = Fabric(strategy=ZeroStrategy(stage=3))  # or strategy="zerostd"
model, optimizer = fabric.setup(model, optimizer)

What the Trainer's strategy needs, too, is here: the root, the options, and checkpoints as directories.
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
from zerostd.integrations.options import OPTIONS, late_reduction, numbers_in

__all__ = ["Root", "ZeroStrategy", "check_options", "check_precision", "newest_in", "save_shards"]

FOLDER = "zerostd"  # in a directory that Lightning is told to write: the checkpoints of zerostd
PRECISIONS = ("32-true", "bf16-mixed")  # of Lightning, that leave weights and gradients as they are
SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class Root(nn.Module):
    """What zerostd prepares in place of a module: it has the same parts by the same names, and calls the module.

    Lightning calls other methods than forward (`training_step`), and these call the module themselves. With a door of
    its own around each step, zerostd sees every step begin and end once.
    """

    module: nn.Module
    optimizer: Any  # what zerostd.prepare gave back

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise zerostd.NotSupportedError(
                f"{type(module).__name__} has a get_extra_state() of its own, which is not kept here: put it into one "
                "of its submodules"
            )
        for name in SHARED:
            self.__dict__[name] = module.__dict__[name]
        self.__dict__.update(module=module, optimizer=None)  # not as a submodule: names stay as they are

    @property
    def training(self) -> bool:
        """That of the module."""
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "module" in self.__dict__:
            self.module.training = mode

    def forward(self, *args: Any, **options: Any) -> Any:
        """Whatever the module's forward is now: Lightning puts its steps there."""
        return self.module(*args, **options)


class ZeroStrategy(DDPStrategy):
    """A strategy of Fabric with the options of zerostd.prepare; others are those of Fabric's DDPStrategy."""

    def __init__(self, **options: Any) -> None:
        self.zero = {name: options.pop(name) for name in OPTIONS & set(options)}
        check_options(options, DDPStrategy)
        super().__init__(**options)
        self._backward_sync_control = _Sync(self.zero)

    @property
    def precision(self) -> Any:
        """Lightning's plugin: fp32, or autocast in bf16 over weights as they are."""
        return super().precision

    @precision.setter
    def precision(self, plugin: Any) -> None:
        check_precision(plugin, self.zero)
        self._precision = plugin

    def _get_process_group_backend(self) -> str:
        return self._process_group_backend or backend_for(self.root_device)

    def _setup_distributed(self) -> None:
        """A world of one needs no process group."""
        if self.num_nodes * self.num_processes > 1:
            super()._setup_distributed()
        else:
            self._set_world_ranks()

    # -- setup --

    def setup_module(self, module: nn.Module) -> Root:
        """Without an optimizer, to evaluate: sharded all the same."""
        return prepare_root(module, None, self.zero)

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: Any, scheduler: Any = None) -> Any:
        """One optimizer for one model."""
        root = prepare_root(module, only_one(optimizers, module), self.zero)
        return root, [root.optimizer], scheduler

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Refused: an optimizer comes with its model."""
        raise zerostd.MisuseError(
            "an optimizer alone: zerostd shards it together with its model, so hand both to one call, "
            "fabric.setup(model, optimizer)"
        )

    def module_to_device(self, module: nn.Module) -> None:
        """A model without memory stays where it is until it is prepared."""
        to_device(module, self.root_device)

    # -- the loop --

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
                f"the gradients' norm of order {norm_type} is {float(norm)}: to clip all the same, say "
                "error_if_nonfinite=False"
            )
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        """Refused: gradients rest as shards."""
        raise zerostd.NotSupportedError(BY_VALUE.format(f"clip_gradients(clip_val={clip_val})", "max_norm"))

    # -- checkpoints --

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """A directory: each rank writes its shards, and one file has the rest. Without a model in it: as ever."""
        roots = {name: one for name, one in state.items() if isinstance(one, Root)}
        if not roots:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        for name in filter or {}:
            if name in roots or any(state[name] is root.optimizer for root in roots.values()):
                raise zerostd.NotSupportedError(
                    f"fabric.save(filter={{{name!r}: ...}}): shards are saved whole; choose from "
                    "zerostd.full_state_dict(model) instead"
                )
        inside = [name for name, one in state.items() if not _is_sharded(one, roots.values())]
        rest = self._convert_stateful_objects_in_state({name: state[name] for name in inside}, filter=filter or {})
        if len(roots) > 1:
            raise zerostd.NotSupportedError(
                f"fabric.save of {len(roots)} models at once ({', '.join(roots)}): give each a path of its own"
            )
        (root,) = roots.values()
        with_states = any(one is root.optimizer for one in state.values())
        save_shards(self, Path(self.broadcast(path)), root, rest, root.optimizer if with_states else None)

    def load_checkpoint(self, path: Any, state: Any = None, strict: bool = True, weights_only: Any = None) -> Any:
        """Go on from what `fabric.save` wrote, on any number of ranks, stage and placement; or an ordinary file."""
        if not Path(path).is_dir():
            return super().load_checkpoint(path, state, strict, weights_only)
        shards, rest = newest_in(Path(path))
        remainder = self.checkpoint_io.load_checkpoint(rest, weights_only=weights_only)
        if not state:
            return remainder
        objects = {"model": state} if isinstance(state, nn.Module) else dict(state)
        roots = [one for one in objects.values() if isinstance(one, Root)]
        wanted = {name for name, one in objects.items() if not _is_sharded(one, roots)}
        if strict and (missing := sorted(wanted - set(remainder))):
            raise zerostd.CheckpointError(f"{path} has no {missing[0]!r}; it has {sorted(remainder)}")
        for root in roots:
            with_states = any(one is root.optimizer for one in objects.values())
            zerostd.load(shards, root, root.optimizer if with_states else None)
        for name in wanted & set(remainder):
            value = remainder.pop(name)
            if hasattr(objects[name], "load_state_dict"):
                objects[name].load_state_dict(value)
            else:
                state[name] = value
        return remainder


class _Sync:
    """Which backward passes are reduced later."""

    def __init__(self, zero: Mapping[str, Any]) -> None:
        self.zero = zero

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        return late_reduction(module, self.zero) if enabled else contextlib.nullcontext()


BY_VALUE = "{}: gradients rest as shards, and zerostd clips them by their norm; use {}"


def prepare_root(module: nn.Module, optimizer: torch.optim.Optimizer | None, zero: Mapping[str, Any]) -> Root:
    """Shard a module; Lightning then calls the root."""
    root = Root(module)
    root.__dict__["optimizer"] = zerostd.prepare(root, optimizer, **zero)[1]
    return root


def only_one(optimizers: Any, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer, if there is one."""
    if len(optimizers) != 1:
        raise zerostd.NotSupportedError(
            f"{len(optimizers)} optimizers train one {type(module).__name__}: make them param_groups of one optimizer, "
            "or set models up one by one, each with its own"
        )
    optimizer: torch.optim.Optimizer = optimizers[0]
    return optimizer


def to_device(module: nn.Module, device: torch.device) -> None:
    """Move a module, unless it has no memory yet: zerostd.prepare fills it where it belongs."""
    if not any(parameter.is_meta for parameter in module.parameters()):
        module.to(device)


def backend_for(device: torch.device) -> str:
    """Small messages go over the CPU."""
    return "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"


def check_options(options: Mapping[str, Any], base: type) -> None:
    """Refuse what neither zerostd.prepare nor the strategy of Lightning knows. What DDP would be told is not."""
    of_ddp = ("ddp_", "model_averaging", "kwargs")
    known = {name for name in inspect.signature(base).parameters if not name.startswith(of_ddp)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise zerostd.PrepareError(
            f"ZeroStrategy({unknown[0]}=...): the options of zerostd.prepare are {sorted(OPTIONS)}, and those of "
            f"Lightning's strategies {sorted(known)}"
        )


def check_precision(plugin: Any, zero: Mapping[str, Any]) -> None:
    """Refuse plugins that scale or cast what is sharded, and a precision that is asked for twice."""
    told = "32-true" if plugin is None else plugin.precision
    if told not in PRECISIONS:
        raise zerostd.NotSupportedError(
            f"precision={told!r} of Lightning scales or casts what is sharded: take it out and say "
            "ZeroStrategy(precision='bf16'), which keeps fp32 masters, or 'fp16', which also scales the loss"
        )
    if told != "32-true" and zero.get("precision") is not None:
        raise zerostd.PrepareError(
            f"precision={told!r} (autocast) and ZeroStrategy(precision={zero['precision']!r}) (weights of that "
            "precision): use one of the two"
        )


# -- checkpoints --


def save_shards(strategy: Any, folder: Path, root: Root, rest: dict[str, Any], optimizer: Any) -> None:
    """The directory `folder`: shards in `zerostd/N`, and `rest` in the file N. What is older goes when N is complete,
    which it is with the shards."""
    if "://" in str(folder) or ":/" in str(folder)[1:]:
        raise zerostd.NotSupportedError(f"{folder}: each rank writes its shards to a file system; give a local path")
    if folder.is_file():
        raise zerostd.CheckpointError(f"{folder} is a file, and a checkpoint of several ranks is a directory")
    older = numbers_in(folder / FOLDER)
    number = max(older, default=0) + 1
    strategy.barrier()  # all have looked before one of them writes
    if strategy.is_global_zero:
        strategy.checkpoint_io.save_checkpoint(rest, _rest_of(folder, number))
    strategy.barrier()
    zerostd.save(folder / FOLDER / str(number), root, optimizer, keep=1)
    if strategy.is_global_zero:
        for one in older:
            _rest_of(folder, one).unlink(missing_ok=True)


def newest_in(folder: Path) -> tuple[str, Path]:
    """The newest complete shards in a directory that `save_shards` wrote, and the file with the rest."""
    shards = zerostd.latest(folder / FOLDER)
    if shards is None:
        raise zerostd.CheckpointError(
            f"{folder} has no complete checkpoint of zerostd: it was saved without zerostd, or never completed"
        )
    return shards, _rest_of(folder, int(Path(shards).name))


def _rest_of(folder: Path, number: int) -> Path:
    return folder / f"rest-{number}"


def _is_sharded(one: Any, roots: Any) -> bool:
    return isinstance(one, Root) or any(root.optimizer is not None and one is root.optimizer for root in roots)


STRATEGY_REGISTRY.register(
    "zerostd", ZeroStrategy, description="ZeroStrategy: zerostd plans what is sharded", override=True
)
