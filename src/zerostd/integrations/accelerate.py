"""Accelerate: an Accelerator whose `prepare` passes model and optimizer to zerostd, and the rest to accelerate.

accelerator = Accelerator(zero={"stage": 3})
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
"""

from __future__ import annotations

import contextlib
import inspect
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
from zerostd.integrations import common

CALL = "zero={{'{}': ...}}"  # how an option of zerostd.prepare is written
PRECISIONS = ("no", "bf16")  # of accelerate: fp32, and autocast
OTHERS = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)


class PreparedOptimizer(AcceleratedOptimizer):
    """accelerate's wrapper around zerostd's optimizer, with the model that it was prepared with."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        super().__init__(optimizer, device_placement=False)
        self.model = model
        self._is_accelerate_prepared = True

    @property
    def step_was_skipped(self) -> bool:
        """Return whether gradients overflowed in the last step: precision='fp16' skips such a step."""
        norm = self.optimizer.grad_norm
        return self.optimizer.loss_scale is not None and norm is not None and not bool(torch.isfinite(norm))


class Accelerator(accelerate.Accelerator):
    """accelerate.Accelerator, with `zero`: the options of zerostd.prepare.

    `mixed_precision="bf16"` is autocast over weights as they are, as without zerostd. Weights of 16 bits with fp32
    masters are `zero={"precision": "bf16"}`, or "fp16".
    """

    _models: list[nn.Module]
    _optimizers: list[PreparedOptimizer]

    def __init__(self, *args: Any, zero: Mapping[str, Any] | None = None, **options: Any) -> None:
        given = inspect.signature(super().__init__).bind(*args, **options).arguments
        _check_zero(zero or {}, given.get("mixed_precision"))  # before accelerate asks for a GPU
        super().__init__(*args, **options)
        if self.ddp_handler is not None:
            raise zerostd.NotSupportedError(
                "DistributedDataParallelKwargs in kwargs_handlers: zerostd does not use DDP; leave it out"
            )
        self.set_up(zero or {})

    def set_up(self, zero: Mapping[str, Any]) -> None:
        """Take the options of zerostd, and refuse what accelerate was configured to do that clashes with them."""
        _check_zero(zero, self.mixed_precision)
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if started != self.num_processes:
            raise zerostd.PrepareError(
                f"the launcher started {started} processes, but accelerate sees {self.num_processes}: without "
                "accelerators, pass Accelerator(cpu=True) or TrainingArguments(use_cpu=True)"
            )
        if self.distributed_type in OTHERS or self.parallelism_config:
            raise zerostd.NotSupportedError(
                f"the Accelerator is set up for {self.parallelism_config or self.distributed_type.value}, which shards "
                "by itself: take it out of the script, the configuration and the environment (ACCELERATE_USE_...), or "
                "do without zerostd"
            )
        backend = self.state.dynamo_plugin.backend
        if backend != DynamoBackend.NO:
            raise zerostd.NotSupportedError(
                f"torch.compile of the whole model (dynamo backend {backend.value}) would see shards: compile its "
                "blocks with module.compile() before prepare, and leave the backend out"
            )
        self.zero = dict(zero)

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Prepare each model and its optimizer with zerostd, and loaders and schedulers with accelerate."""
        placements = device_placement or [None] * len(args)
        placement_of = dict(zip(map(id, args), placements, strict=True))
        prepared: dict[int, Any] = {}
        for model, optimizer in _pairs(args):
            prepared[id(model)] = model
            prepared[id(optimizer)] = self._prepare_pair(model, optimizer, placement_of[id(model)])
        for argument, placement in zip(args, placements, strict=True):
            if id(argument) not in prepared and isinstance(argument, nn.Module):  # frozen
                prepared[id(argument)] = self.prepare_model(argument, placement, evaluation_mode=True)
            elif id(argument) not in prepared:
                prepared[id(argument)] = super().prepare(argument, device_placement=[placement])
        result = tuple(prepared[id(argument)] for argument in args)
        return result if len(result) != 1 else result[0]

    def _prepare_pair(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, placement: bool | None
    ) -> PreparedOptimizer:
        if not isinstance(optimizer, PreparedOptimizer):
            if common.has_memory(model) and (self.device_placement if placement is None else placement):
                model.to(self.device)
            _, sharded = zerostd.prepare(model, optimizer, **self.zero)
            optimizer = PreparedOptimizer(sharded, model)
        super().prepare_model(model, device_placement=False, evaluation_mode=True)  # autocast, but no DDP
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        return optimizer

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare a model for evaluation. To train a model, pass it to `prepare` with its optimizer."""
        if not evaluation_mode:
            raise zerostd.MisuseError(ALONE.format("prepare_model()"))
        return super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Refuse an optimizer without its model."""
        raise zerostd.MisuseError(ALONE.format("prepare_optimizer()"))

    def optimizer_of(self, model: nn.Module) -> PreparedOptimizer | None:
        """Return the prepared optimizer of a model; None if the model was not prepared to train."""
        return next((optimizer for optimizer in self._optimizers if optimizer.model is model), None)

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Delay the reduction of the passes inside, if that saves communication; see `late_reduction`."""
        if self.optimizer_of(model) is None:
            return contextlib.nullcontext()
        return common.late_reduction(model, self.zero)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip to the norm over all shards, and return it. Every rank must call it."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        wanted = {parameter for parameter in parameters if parameter.requires_grad}
        for optimizer in self._optimizers:
            if wanted == _trained(optimizer):
                return optimizer.optimizer.clip_grad_norm_(max_norm, norm_type)
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return the whole state_dict on the main process, an empty one elsewhere. Every rank must call it."""
        if self.optimizer_of(model) is None:
            return super().get_state_dict(model, unwrap=unwrap)
        return zerostd.full_state_dict(model, rank=0)

    def save_state(self, *args: Any, **options: Any) -> Any:
        """Write accelerate's directory, with models and optimizers as zerostd checkpoints. Every rank must call it."""
        with self._without_prepared() as optimizers:
            location = super().save_state(*args, **options)
        for number, optimizer in enumerate(optimizers):
            self.save_shards(Path(location), optimizer, number=number)
        return location

    def load_state(self, *args: Any, **options: Any) -> None:
        """Load a directory of `save_state`, with any number of ranks, stage and placement. Every rank must call it."""
        with self._without_prepared() as optimizers:
            # accelerate calls the hook with the directory that it chose, before it loads anything itself
            hook = self.register_load_state_pre_hook(lambda _, folder: _load_shards(folder, optimizers))
            try:
                super().load_state(*args, **options)
            finally:
                hook.remove()

    def save_shards(self, folder: Path, optimizer: PreparedOptimizer, extra: Any = None, number: int = 0) -> None:
        """Write a zerostd checkpoint inside `folder`. An older one there is removed when this one is complete."""
        model = optimizer.model
        parent = _checkpoints_in(folder, number)
        path = parent / str(common.next_number(parent))
        self.wait_for_everyone()  # all have looked before one of them writes
        frozen = not hasattr(model, "peft_config")  # the base of an adapter is there before anything is loaded
        zerostd.save(path, model, optimizer.optimizer, extra, keep=1, frozen=frozen)

    @contextlib.contextmanager
    def _without_prepared(self) -> Iterator[list[PreparedOptimizer]]:
        """Hide what zerostd prepared while accelerate saves or loads."""
        models = self._models
        optimizers = self._optimizers
        self._models = [model for model in models if self.optimizer_of(model) is None]
        self._optimizers = []
        try:
            yield optimizers
        finally:
            self._models = models
            self._optimizers = optimizers


ALONE = (
    "{} of a model or an optimizer alone: zerostd shards both together, so pass them to one call, "
    "accelerator.prepare(model, optimizer, ...). For evaluation, call prepare_model(model, evaluation_mode=True)"
)


def _load_shards(folder: str, optimizers: Sequence[PreparedOptimizer]) -> None:
    paths = [common.newest_in(_checkpoints_in(Path(folder), number)) for number in range(len(optimizers))]
    for path, optimizer in zip(paths, optimizers, strict=True):
        zerostd.load(path, optimizer.model, optimizer.optimizer)


def _checkpoints_in(folder: Path, number: int) -> Path:
    """Return the directory for the checkpoints of model `number`."""
    return folder / (common.FOLDER if number == 0 else f"{common.FOLDER}-{number}")


def _check_zero(zero: Mapping[str, Any], mixed_precision: Any) -> None:
    common.check_options(zero, CALL, {})
    common.check_precision(zero, CALL, "no" if mixed_precision is None else str(mixed_precision), PRECISIONS)


def _trained(optimizer: torch.optim.Optimizer) -> set[nn.Parameter]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad}


def _pairs(objects: Sequence[Any]) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    """Return each model that trains with the optimizer that has its parameters; neither may be alone."""
    pairs = []
    optimizers = [item for item in objects if isinstance(item, torch.optim.Optimizer)]
    for model in (item for item in objects if isinstance(item, nn.Module)):
        parameters = {parameter for parameter in model.parameters() if parameter.requires_grad}
        own = [optimizer for optimizer in optimizers if parameters & _trained(optimizer)]
        if parameters and not own:
            raise zerostd.MisuseError(ALONE.format("prepare()"))
        if own:
            pairs.append((model, common.only_one(own, model)))
            optimizers.remove(own[0])
    if optimizers:
        raise zerostd.MisuseError(ALONE.format("prepare()"))
    return pairs
