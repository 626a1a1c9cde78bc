"""The Trainer of Lightning: a strategy with the options of zerostd.prepare.

trainer = Trainer(strategy=ZeroStrategy(stage=3))  # or, when this was imported, strategy="zerostd"

The Trainer calls the root that zerostd prepared, without DDP. Checkpoints are directories, where each rank has its
shards; weights alone are one file. Precision plugins that cast or scale are refused.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from safetensors import safe_open

import zerostd
from zerostd.integrations import common, fabric
from zerostd.integrations.fabric import CALL, Root

ROOT = "_zerostd_root"  # attribute of a module that was set up: its root
SETTINGS = {"max_grad_norm": "Trainer(gradient_clip_val=...)"}  # for options of zerostd.prepare
COPYING: tuple[type[Callback], ...] = (StochasticWeightAveraging, WeightAveraging)  # callbacks


class ZeroStrategy(DDPStrategy):
    """A strategy of the Trainer with the options of zerostd.prepare; others are those of Lightning's DDPStrategy.

    `Trainer(precision="bf16-mixed")` is autocast over weights as they are. Weights of 16 bits with fp32 masters are
    `ZeroStrategy(precision="bf16")`, or "fp16".
    """

    def __init__(self, **options: Any) -> None:
        self.zero = fabric.take_zero(options, DDPStrategy)
        common.check_options(self.zero, CALL, SETTINGS)
        self._loading: str | None = None  # shards of the checkpoint that Lightning is loading
        super().__init__(**options)

    def _configure_launcher(self) -> None:
        """Refuse a precision that cannot be honoured: the Trainer has set it by now, and started nothing."""
        plugin = self.precision_plugin
        common.check_precision(self.zero, CALL, plugin.precision, fabric.PRECISIONS)
        plugin.clip_grad_by_norm = _clip_norm
        plugin.clip_grad_by_value = _clip_value
        super()._configure_launcher()

    def _get_process_group_backend(self) -> str:
        return self._process_group_backend or fabric.with_gloo(super()._get_process_group_backend(), self.root_device)

    def setup_distributed(self) -> None:
        """Make a process group, but not for a world of one."""
        if self.num_nodes * self.num_processes > 1:
            super().setup_distributed()
        else:
            reset_seed()

    def setup(self, trainer: Trainer) -> None:
        """Shard the module: to fit, with the optimizer of configure_optimizers, otherwise without."""
        module = self.lightning_module
        assert module is not None and self.accelerator is not None
        self._check(trainer, module)
        self.accelerator.setup(trainer)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        root = module.__dict__.get(ROOT)
        if root is None or is_fitting:
            if root is not None:
                zerostd.release(module.__dict__.pop(ROOT))
            if is_fitting and self._layer_sync:
                self._layer_sync.apply(module)
            if common.has_memory(module):
                module.to(self.root_device)
            root = self._shard(trainer, module, is_fitting)
        self.model = root

    def _shard(self, trainer: Trainer, module: LightningModule, is_fitting: bool) -> Root:
        self._reset_optimizers_and_schedulers()
        optimizer = None
        if is_fitting:
            self.setup_optimizers(trainer)
            optimizer = common.only_one(self._optimizers, module)
        has_parameters = optimizer is not None and bool(optimizer.param_groups)  # configure_optimizers may give None
        zero = {**_known_of_steps(trainer, module), **self.zero} if has_parameters else self.zero
        root = Root(module, optimizer if has_parameters else None, zero)
        module.__dict__[ROOT] = root
        if has_parameters:
            self.optimizers = [root.optimizer]
        return root

    def _check(self, trainer: Trainer, module: LightningModule) -> None:
        """Refuse options that cannot be honoured, before anything changes."""
        for callback in trainer.callbacks:
            if isinstance(callback, COPYING):
                raise zerostd.NotSupportedError(f"{type(callback).__name__} would copy a sharded model: leave it out")
        if getattr(module, "_compiler_ctx", None) is not None:
            raise zerostd.NotSupportedError(
                "torch.compile of the whole LightningModule would see shards: compile its blocks with module.compile()"
            )
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
            raise zerostd.NotSupportedError(fabric.BY_VALUE.format("gradient_clip_algorithm='value'", "'norm'"))
        accumulate = self.zero.get("accumulate")
        if accumulate is not None and accumulate != trainer.accumulate_grad_batches:
            raise zerostd.PrepareError(
                f"ZeroStrategy(accumulate={accumulate!r}) and Trainer(accumulate_grad_batches="
                f"{trainer.accumulate_grad_batches}): make them equal, or leave accumulate out"
            )

    def teardown(self) -> None:
        """Leave the model sharded: `trainer.test` can use it, and zerostd.release makes it whole."""
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def block_backward_sync(self) -> contextlib.AbstractContextManager[None]:
        """Reduce passes that accumulate later; see `late_reduction`."""
        assert self.model is not None
        return common.late_reduction(self.model, self.zero)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: `save_checkpoint` writes the weights, on all ranks."""
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return nothing, likewise."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a directory with shards, or an ordinary file of weights only. Every rank must call it."""
        root = self.model
        assert isinstance(root, Root)
        if "optimizer_states" not in checkpoint:
            checkpoint["state_dict"] = zerostd.full_state_dict(root, rank=0)
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise zerostd.NotSupportedError("save_checkpoint(storage_options=...) is not supported: leave it out")
        rest = {name: value for name, value in checkpoint.items() if name not in ("state_dict", "optimizer_states")}
        fabric.save_shards(self, Path(self.broadcast(filepath)), root, rest, root.optimizer)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether Lightning sets up first: shards are loaded once there are shards."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning loads optimizer states: they are loaded with the weights."""
        return False

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load everything but the shards, which Lightning then loads with `load_model_state_dict`."""
        path = checkpoint_path
        self._loading = None
        if Path(checkpoint_path).is_dir():
            self._loading, path = fabric.newest_shards(Path(checkpoint_path))
        checkpoint: dict[str, Any] = super().load_checkpoint(path, weights_only)
        if self._loading is None and self.optimizers and any(checkpoint.get("optimizer_states", ())):
            raise zerostd.CheckpointError(
                f"{checkpoint_path} has optimizer states that were saved without zerostd: start from its weights with "
                "load_from_checkpoint, or continue without zerostd"
            )
        checkpoint.setdefault("state_dict", {})
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load shards, with the states if there is an optimizer; or the weights of an ordinary file."""
        root = self.model
        assert isinstance(root, Root)
        if self._loading is None:
            root.load_state_dict(checkpoint["state_dict"], strict=strict)
        else:
            zerostd.load(self._loading, root, root.optimizer if self.optimizers else None)


def merge(checkpoint: str | os.PathLike[str], file: str | os.PathLike[str], *, weights_only: bool = True) -> None:
    """Convert a directory that training wrote to an ordinary Lightning checkpoint, for `load_from_checkpoint`.

    Call it in one process, which needs host memory for the whole weights. Optimizer states are left out.

    Args:
        checkpoint: The directory.
        file: Where the ordinary checkpoint goes.
        weights_only: As in torch.load. False runs code that the checkpoint names, which hyperparameters and callbacks
            of your own classes may need: only for checkpoints that you trust.
    """
    shards, rest_path = fabric.newest_shards(Path(checkpoint))
    try:
        whole = torch.load(rest_path, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise zerostd.CheckpointError(
            f"{rest_path} holds more than tensors and plain values ({str(error).strip().splitlines()[0]:.200}). If you "
            "trust it, call merge(..., weights_only=False), which lets it run code"
        ) from error
    with tempfile.TemporaryDirectory(dir=Path(file).parent) as folder:
        (weights,) = zerostd.merge(shards, f"{folder}/model", max_shard_size=sys.maxsize)
        with safe_open(weights, framework="pt") as tensors:
            state = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
            tied = tensors.metadata()  # further names of tied weights
    whole["state_dict"] = state | {name: state[first] for name, first in tied.items() if first in state}
    torch.save(whole, file)


def _known_of_steps(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Return the options of zerostd.prepare that the Trainer has settings for. They hold for all steps only where
    Lightning makes the steps itself, and clips and accumulates as the Trainer was told."""
    clips = is_overridden("configure_gradient_clipping", module)
    varies = any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks)
    if not module.automatic_optimization or clips or varies:
        return {}
    return {"accumulate": trainer.accumulate_grad_batches, "max_grad_norm": trainer.gradient_clip_val or None}


def _clip_norm(optimizer: Any, clip_val: float) -> None:
    optimizer.clip_grad_norm_(clip_val)


def _clip_value(optimizer: Any, clip_val: float) -> None:
    raise zerostd.NotSupportedError(fabric.BY_VALUE.format("clipping by value", "gradient_clip_algorithm='norm'"))


StrategyRegistry.register("zerostd", ZeroStrategy, description="zerostd plans what is sharded", override=True)
