"""Accelerate: an Accelerator whose `prepare` hands model and optimizer to zerostd, and the rest to accelerate.

accelerator = Accelerator(zero={"stage": 3})
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn

import zerostd
from zerostd.integrations.options import check_known, late_reduction, numbers_in

__all__ = ["Accelerator", "PreparedOptimizer", "check_options", "newest_in"]

FOLDER = "zerostd"  # in a directory that accelerate or Trainer writes: the checkpoints of zerostd
OTHERS = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)


class PreparedOptimizer(AcceleratedOptimizer):
    """accelerate's wrapper around zerostd's optimizer; knows the model that it was prepared with."""

    model: nn.Module

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        super().__init__(optimizer, device_placement=False)
        self.model = model
        self._is_accelerate_prepared = True

    @property
    def step_was_skipped(self) -> bool:
        """Whether gradients overflowed in the last step: precision='fp16' leaves such a step out."""
        norm = self.optimizer.grad_norm
        return self.optimizer.loss_scale is not None and norm is not None and not bool(torch.isfinite(norm))


class Accelerator(accelerate.Accelerator):
    """accelerate.Accelerator, with `zero`: the options of zerostd.prepare.

    `mixed_precision="bf16"` is autocast over weights as they are, as without zerostd. Weights of 16 bits with fp32
    masters are `zero={"precision": "bf16"}`, or "fp16".
    """

    zero: dict[str, Any]
    _models: list[nn.Module]
    _optimizers: list[PreparedOptimizer]

    def __init__(self, *args: Any, zero: Mapping[str, Any] | None = None, **options: Any) -> None:
        check_options(zero or {}, options.get("mixed_precision"))
        super().__init__(*args, **options)
        if self.ddp_handler is not None:
            raise zerostd.NotSupportedError(
                "DistributedDataParallelKwargs in kwargs_handlers: there is no DDP that would heed it; leave it out"
            )
        self._begin(zero or {})

    @classmethod
    def take_over(cls, accelerator: accelerate.Accelerator, zero: Mapping[str, Any]) -> Accelerator:
        """Make a plain Accelerator one of these: for libraries that make it themselves and hold on to it."""
        accelerator.__class__ = cls
        assert isinstance(accelerator, cls)
        accelerator._begin(zero)
        return accelerator

    def _begin(self, zero: Mapping[str, Any]) -> None:
        check_options(zero, self.mixed_precision)
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if started != self.num_processes:
            raise zerostd.PrepareError(
                f"the launcher started {started} processes, and accelerate takes this one for one of "
                f"{self.num_processes}: without accelerators say so, Accelerator(cpu=True) or "
                "TrainingArguments(use_cpu=True)"
            )
        if self.distributed_type in OTHERS or self.parallelism_config:
            raise zerostd.NotSupportedError(
                f"the Accelerator is set up for {self.parallelism_config or self.distributed_type.value}, which shards "
                "by itself: take it out of the script, the configuration and the environment (ACCELERATE_USE_...), or "
                "do without zerostd"
            )
        if self.state.dynamo_plugin.backend != DynamoBackend.NO:
            raise zerostd.NotSupportedError(
                f"torch.compile of the whole model (dynamo backend {self.state.dynamo_plugin.backend.value}) would see "
                "shards: compile its blocks with module.compile() before prepare, and leave the backend out"
            )
        self.zero = dict(zero)

    # -- prepare --

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Each model together with its optimizer goes to zerostd; loaders and schedulers go to accelerate."""
        places = [None] * len(args) if device_placement is None else list(device_placement)
        place_of = {id(one): place for one, place in zip(args, places, strict=True)}
        done: dict[int, Any] = {}
        for model, optimizer in _pairs(args):
            done[id(model)] = model
            done[id(optimizer)] = self._prepare_pair(model, optimizer, place_of[id(model)])
        for one in args:
            if id(one) not in done and isinstance(one, nn.Module):  # frozen
                done[id(one)] = self.prepare_model(one, place_of[id(one)], evaluation_mode=True)
            elif id(one) not in done:
                done[id(one)] = super().prepare(one, device_placement=[place_of[id(one)]])
        result = tuple(done[id(one)] for one in args)
        return result if len(result) != 1 else result[0]

    def _prepare_pair(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, place: bool | None
    ) -> PreparedOptimizer:
        if not isinstance(optimizer, PreparedOptimizer):
            is_there = all(not parameter.is_meta for parameter in model.parameters())
            if is_there and (self.device_placement if place is None else place):
                model.to(self.device)
            _, own = zerostd.prepare(model, optimizer, **self.zero)
            optimizer = PreparedOptimizer(own, model)
        super().prepare_model(model, device_placement=False, evaluation_mode=True)  # autocast, but no DDP
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        return optimizer

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """For evaluation, as accelerate does it. A model that trains comes to `prepare` with its optimizer."""
        if not evaluation_mode:
            raise zerostd.MisuseError(ALONE.format("prepare_model()"))
        return super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Refused: an optimizer comes to `prepare` with its model."""
        raise zerostd.MisuseError(ALONE.format("prepare_optimizer()"))

    def optimizer_of(self, model: nn.Module) -> PreparedOptimizer | None:
        """What `prepare` gave back for this model's optimizer; None if the model was not prepared to train."""
        return next((one for one in self._optimizers if one.model is model), None)

    # -- the loop --

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Passes inside are reduced later, where that saves anything; see `late_reduction`."""
        is_ours = self.optimizer_of(model) is not None
        with late_reduction(model, self.zero) if is_ours else contextlib.nullcontext():
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip to the norm over all shards, and return it. Every rank must call it."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        wanted = {parameter for parameter in parameters if parameter.requires_grad}
        for optimizer in self._optimizers:
            if wanted == set(_trained(optimizer)):
                return optimizer.optimizer.clip_grad_norm_(max_norm, norm_type)
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    # -- saving --

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """The whole state_dict in host memory, on the main process; elsewhere an empty one. Every rank must call it."""
        if self.optimizer_of(model) is None:
            return super().get_state_dict(model, unwrap=unwrap)
        return zerostd.full_state_dict(model, rank=0)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> Any:
        """accelerate's directory, with models and optimizers as checkpoints of zerostd. Every rank must call it."""
        with self._without_prepared() as optimizers:
            location = super().save_state(output_dir, safe_serialization=safe_serialization, **options)
        for number, optimizer in enumerate(optimizers):
            self.save_shards(Path(location), optimizer.model, number=number)
        return location

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Go on from what `save_state` wrote, on any number of ranks, stage and placement. Every rank must call it."""
        with self._without_prepared() as optimizers:
            # accelerate calls it with the directory that it has chosen, before it loads anything itself
            hook = self.register_load_state_pre_hook(lambda _, folder: _load_shards(folder, optimizers))
            try:
                super().load_state(input_dir, load_kwargs, **options)
            finally:
                hook.remove()

    def save_shards(self, folder: Path, model: nn.Module, extra: Any = None, number: int = 0) -> None:
        """A checkpoint of zerostd inside `folder`. An older one there goes when this one is complete."""
        optimizer = self.optimizer_of(model)
        assert optimizer is not None
        parent = _place(folder, number)
        path = parent / str(max(numbers_in(parent), default=0) + 1)
        self.wait_for_everyone()  # all have looked before one of them writes
        frozen = not hasattr(model, "peft_config")  # the base of an adapter is there before anything is loaded
        zerostd.save(path, model, optimizer.optimizer, extra, keep=1, frozen=frozen)

    @contextlib.contextmanager
    def _without_prepared(self) -> Iterator[list[PreparedOptimizer]]:
        """While accelerate saves or loads: it sees none of what zerostd holds."""
        models, optimizers = self._models, self._optimizers
        mine = [optimizer.model for optimizer in optimizers]
        self._models, self._optimizers = [one for one in models if not any(one is own for own in mine)], []
        try:
            yield optimizers
        finally:
            self._models, self._optimizers = models, optimizers


ALONE = (
    "{} of a model or an optimizer alone: zerostd shards both at once, so hand them to one call, "
    "accelerator.prepare(model, optimizer, ...). For evaluation: prepare_model(model, evaluation_mode=True)"
)


def newest_in(folder: str | os.PathLike[str], number: int = 0) -> str | None:
    """The path of zerostd's checkpoint in a directory that accelerate or Trainer wrote; None if there is none."""
    return zerostd.latest(_place(Path(folder), number))


def _load_shards(folder: str, optimizers: Sequence[PreparedOptimizer]) -> None:
    paths = [newest_in(folder, number) for number in range(len(optimizers))]
    for number, path in enumerate(paths):
        if path is None:
            raise zerostd.CheckpointError(
                f"{folder} has no checkpoint of zerostd for model {number}: it was saved without zerostd, or never "
                "completed"
            )
    for path, optimizer in zip(paths, optimizers, strict=True):
        zerostd.load(str(path), optimizer.model, optimizer.optimizer)


def _place(folder: Path, number: int) -> Path:
    return folder / (FOLDER if number == 0 else f"{FOLDER}-{number}")


def check_options(zero: Mapping[str, Any], mixed_precision: Any) -> None:
    """Refuse what zerostd.prepare does not know, and what is asked for twice."""
    check_known(zero, "zero={{'{}': ...}}")
    mixed = "no" if mixed_precision is None else str(mixed_precision)
    if mixed not in ("no", "bf16"):
        raise zerostd.NotSupportedError(
            f"mixed precision {mixed!r} of accelerate scales or casts what is sharded: take it out and say "
            "zero={'precision': 'fp16'}, which scales the loss by itself, or 'bf16'"
        )
    if mixed != "no" and zero.get("precision") is not None:
        raise zerostd.PrepareError(
            f"mixed precision {mixed!r} (autocast) and zero={{'precision': {zero['precision']!r}}} (weights of that "
            "precision): use one of the two"
        )


def _trained(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (one for group in optimizer.param_groups for one in group["params"] if one.requires_grad)


def _pairs(objects: Sequence[Any]) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    """Each model that trains with the optimizer that holds its parameters; neither may be alone."""
    pairs, left = [], [one for one in objects if isinstance(one, torch.optim.Optimizer)]
    for model in (one for one in objects if isinstance(one, nn.Module)):
        inside = {parameter for parameter in model.parameters() if parameter.requires_grad}
        own = [one for one in left if any(parameter in inside for parameter in _trained(one))]
        if len(own) > 1:
            raise zerostd.NotSupportedError(
                f"{len(own)} optimizers train one {type(model).__name__}: make them param_groups of one optimizer"
            )
        if inside and not own:
            raise zerostd.MisuseError(ALONE.format("prepare()"))
        pairs += [(model, one) for one in own]
        left = [one for one in left if one not in own]
    if left:
        raise zerostd.MisuseError(ALONE.format("prepare()"))
    return pairs
