"""The Trainer of Lightning: a strategy with the options of zerostd.prepare.

trainer = Trainer(strategy=ZeroStrategy(stage=3))  # or, when this was imported, strategy="zerostd"

    setup                     model and optimizer go to zerostd; there is no DDP
    training_step, ...        Lightning's own, through the root that zerostd sees
    block_backward_sync       passes that accumulate
    save_checkpoint,
    load_checkpoint           a directory, where each rank writes and reads its shards; weights alone are one file
    precision_plugin          clips to the norm over all shards; what casts or scales is refused
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from safetensors import safe_open

import zerostd
from zerostd.integrations.fabric import (
    BY_VALUE,
    Root,
    backend_for,
    check_options,
    check_precision,
    newest_in,
    only_one,
    prepare_root,
    save_shards,
    to_device,
)
from zerostd.integrations.options import OPTIONS, late_reduction

__all__ = ["ZeroStrategy", "merge"]

ROOT = "_zerostd_root"  # attribute of a module that was set up: its root
INSTEAD = {"max_grad_norm": "gradient_clip_val"}  # of Trainer
COPYING: tuple[type[Callback], ...] = (StochasticWeightAveraging, WeightAveraging)  # callbacks


class ZeroStrategy(DDPStrategy):
    """A strategy of the Trainer with the options of zerostd.prepare; others are those of Lightning's DDPStrategy.

    `Trainer(precision="bf16-mixed")` is autocast over weights as they are. Weights of 16 bits with fp32 masters are
    `ZeroStrategy(precision="bf16")`, or "fp16".
    """

    def __init__(self, **options: Any) -> None:
        self.zero = {name: options.pop(name) for name in OPTIONS & set(options)}
        check_options(options, DDPStrategy)
        for name, instead in INSTEAD.items():
            if self.zero.get(name) is not None:
                raise zerostd.PrepareError(
                    f"ZeroStrategy({name}={self.zero[name]!r}): Trainer has a setting for that, Trainer({instead}=...)"
                )
        self._loading: str | None = None  # shards of the checkpoint that Lightning is loading
        super().__init__(**options)

    @property
    def precision_plugin(self) -> Any:
        """Lightning's plugin: fp32, or autocast in bf16 over weights as they are."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        check_precision(plugin, self.zero)
        if plugin is not None:
            plugin.clip_grad_by_norm = _clip_norm
            plugin.clip_grad_by_value = _clip_value
        self._precision_plugin = plugin

    def _get_process_group_backend(self) -> str:
        return self._process_group_backend or backend_for(self.root_device)

    def setup_distributed(self) -> None:
        """A world of one needs no process group."""
        if self.num_nodes * self.num_processes > 1:
            super().setup_distributed()
        else:
            reset_seed()
            self.set_world_ranks()

    # -- setup --

    def setup(self, trainer: Trainer) -> None:
        """To fit, with the optimizer of configure_optimizers; otherwise without, sharded all the same."""
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
            to_device(module, self.root_device)
            root = self._shard(trainer, module, is_fitting)
        self.model = root

    def _shard(self, trainer: Trainer, module: LightningModule, is_fitting: bool) -> Root:
        self._reset_optimizers_and_schedulers()
        optimizer = None
        if is_fitting:
            self.setup_optimizers(trainer)
            optimizer = only_one(self._optimizers, module)
        has_parameters = optimizer is not None and bool(optimizer.param_groups)  # configure_optimizers may give None
        root = prepare_root(module, optimizer if has_parameters else None, self.zero)
        module.__dict__[ROOT] = root
        if has_parameters:
            self.optimizers = [root.optimizer]
        return root

    def _check(self, trainer: Trainer, module: LightningModule) -> None:
        """Refuse what cannot be honoured, before anything changes."""
        for callback in trainer.callbacks:
            if isinstance(callback, COPYING):
                raise zerostd.NotSupportedError(f"{type(callback).__name__} copies the model, which is sharded")
        if getattr(module, "_compiler_ctx", None) is not None:
            raise zerostd.NotSupportedError(
                "torch.compile of the whole LightningModule would see shards: compile its blocks with module.compile()"
            )
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
            raise zerostd.NotSupportedError(BY_VALUE.format("gradient_clip_algorithm='value'", "'norm'"))
        told = self.zero.get("accumulate")
        if told is not None and told != trainer.accumulate_grad_batches:
            raise zerostd.PrepareError(
                f"ZeroStrategy(accumulate={told!r}) and Trainer(accumulate_grad_batches="
                f"{trainer.accumulate_grad_batches}): say the same, or leave accumulate out"
            )

    def teardown(self) -> None:
        """The model stays as it is, sharded: `trainer.test` goes on with it, and zerostd.release makes it whole."""
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- the loop --

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Around passes that accumulate."""
        assert self.model is not None
        with late_reduction(self.model, self.zero):
            yield

    # -- checkpoints --

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: weights are written by `save_checkpoint`, on all ranks."""
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Nothing: states are written by `save_checkpoint`, on all ranks."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """A directory with shards; of weights alone an ordinary file. Every rank must call it."""
        root = self.model
        assert isinstance(root, Root)
        if "optimizer_states" not in checkpoint:
            checkpoint["state_dict"] = zerostd.full_state_dict(root, rank=0)
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise zerostd.NotSupportedError("save_checkpoint(storage_options=...): shards go to files; leave it out")
        rest = {name: value for name, value in checkpoint.items() if name not in ("state_dict", "optimizer_states")}
        save_shards(self, Path(self.broadcast(filepath)), root, rest, root.optimizer)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Shards are loaded once there are shards."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """States come with the weights."""
        return False

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """What is not in shards; those come with `load_model_state_dict`, which Lightning calls next."""
        self._loading, path = None, checkpoint_path
        if Path(checkpoint_path).is_dir():
            self._loading, path = newest_in(Path(checkpoint_path))
        checkpoint: dict[str, Any] = super().load_checkpoint(path, weights_only)
        if self._loading is None and self.optimizers and any(checkpoint.get("optimizer_states", ())):
            raise zerostd.CheckpointError(
                f"{checkpoint_path} has optimizer states that were saved without zerostd: start from its weights with "
                "load_from_checkpoint, or go on without zerostd"
            )
        checkpoint.setdefault("state_dict", {})
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Shards, with the states if there is an optimizer; or the weights of an ordinary file."""
        root = self.model
        assert isinstance(root, Root)
        if self._loading is None:
            root.load_state_dict(checkpoint["state_dict"], strict=strict)
        else:
            zerostd.load(self._loading, root, root.optimizer if self.optimizers else None)


def merge(checkpoint: str | os.PathLike[str], file: str | os.PathLike[str]) -> None:
    """Make an ordinary checkpoint of Lightning, for `load_from_checkpoint`, of a directory that training wrote.

    One process does it, and holds the whole weights in host memory; states of the optimizer are left out.
    """
    shards, rest = newest_in(Path(checkpoint))
    whole = torch.load(rest, map_location="cpu", weights_only=False)
    with tempfile.TemporaryDirectory(dir=Path(file).parent) as folder:
        (weights,) = zerostd.merge(shards, f"{folder}/model", max_shard_size=sys.maxsize)
        with safe_open(weights, framework="pt") as tensors:
            state = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
            others = tensors.metadata()  # further names of tied ones
    whole["state_dict"] = state | {name: state[of] for name, of in others.items() if of in state}
    torch.save(whole, file)


def _clip_norm(optimizer: Any, clip_val: float) -> None:
    optimizer.clip_grad_norm_(clip_val)


def _clip_value(optimizer: Any, clip_val: float) -> None:
    raise zerostd.NotSupportedError(BY_VALUE.format("clipping by value", "gradient_clip_algorithm='norm'"))


StrategyRegistry.register(
    "zerostd", ZeroStrategy, description="ZeroStrategy: zerostd plans what is sharded", override=True
)
