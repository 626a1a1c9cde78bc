"""Place a model for inference: `zerostd.dispatch`.

model or its files -> plan (what fits stays on the device) -> groups, without masters, gradients and states -> hooks

Weights in files are read once, block by block, to where they are kept; nothing is initialised before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerostd.checkpointing.importing import check_files, import_model, is_model
from zerostd.compat import persistent_buffers
from zerostd.engine.settings import Settings
from zerostd.errors import CheckpointError, PrepareError
from zerostd.measuring.identity import choose_device, parse_device
from zerostd.monitoring.decoding import path_of
from zerostd.parameters.blueprints import MARK
from zerostd.parameters.replaying import is_deferred
from zerostd.planning import Plan
from zerostd.policy import Budget, Precision
from zerostd.preparing.building import build
from zerostd.preparing.options import check_budget, check_settings

THEIR_NAMES = {"cpu": "host", "disk": "disk"}  # tiers in accelerate's max_memory; a number is a device


def dispatch(
    model: nn.Module,
    weights: str | os.PathLike[str] | None = None,
    *,
    budget: Budget | Mapping[Any, Any] | int | str | None = None,
    device: torch.device | str | None = None,
    precision: str | Precision | None = None,
    groups: Sequence[str] | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
) -> nn.Module:
    """Place a model for inference, in place: groups that fit stay on the device, the others are streamed through it.

    Parameters are frozen and kept once, in their compute dtype. Call the model under `torch.inference_mode()` or
    `torch.no_grad()`, as `generate` of transformers does: the next groups are then transferred while one computes.

    Args:
        model: Any module: on the host, on the device, or built under `zerostd.empty_init()`.
        weights: A Hugging Face directory, a safetensors file or the file of a state_dict. Each weight is read once,
            straight into its tier. None: the model has its values already.
        budget: Limit of each tier for parameters and buffers, and the path of the disk. A size limits the device.
            accelerate's max_memory works too: {0: '20GiB', 'cpu': '60GiB'}. None: the free memory, less a margin.
        device: The device that computes. None: the accelerator, or the CPU if there is none.
        precision: 'fp32', 'bf16' or 'fp16'. None keeps each parameter's dtype.
        groups: Globs of module names whose parameters travel together, such as ['model.layers.*'].
        plan: A plan from `zerostd.plan`, or the path of a saved plan.

    Returns:
        The same module.

    Raises:
        PrepareError: The model does not fit; the message has the numbers. Nothing was changed.
        CheckpointError: The files do not match the model; nothing was changed.
    """
    settings = Settings(
        precision=Precision.parse(precision),
        budget=parse_budget(budget),
        globs=groups,
        plan=plan if plan is None or isinstance(plan, Plan) else Plan.load(plan),
        device=choose_device(None if device is None else parse_device(device)),
    )
    settings = check_settings(settings, model, None)
    check_budget(settings.budget)
    path = None
    if weights is not None:
        path = path_of(weights, "weights", CheckpointError)
        if not is_model(path):
            raise CheckpointError(
                f"{path} is not a model: name a Hugging Face directory, a *.safetensors file or a state_dict's file. "
                "To load a zerostd checkpoint, call zerostd.load after zerostd.dispatch"
            )
        check_files(model, path)
        _check_buffers(model)
    runtime = _build_frozen(model, settings, path)
    object.__setattr__(model, MARK, runtime)
    if path is not None:
        import_model(runtime, None, path)
    return model


def _build_frozen(model: nn.Module, settings: Settings, path: Path | None) -> Any:
    """Build with frozen parameters; if that fails, restore them."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        return build(model, None, settings, has_values=path is None)
    except BaseException:
        for parameter in trained:
            parameter.requires_grad_(True)
        raise


def _check_buffers(model: nn.Module) -> None:
    """Refuse a buffer that has no values, here or in a file."""
    for name, module in model.named_modules():
        for short in module._buffers.keys() - persistent_buffers(module).keys():
            buffer = module._buffers[short]
            if buffer is not None and buffer.is_meta and not is_deferred(buffer):
                raise PrepareError(
                    f"buffer {f'{name}.{short}'.lstrip('.')!r} is on the meta device, but no file has it: build "
                    "the model under zerostd.empty_init() instead of torch.device('meta')"
                )


def parse_budget(value: Budget | Mapping[Any, Any] | int | str | None) -> Budget:
    """Return a budget, also from accelerate's max_memory."""
    if not isinstance(value, Mapping) or not any(isinstance(key, int) or key == "cpu" for key in value):
        return Budget.parse(value)
    devices = [key for key in value if isinstance(key, int)]
    unknown = [key for key in value if not isinstance(key, int) and key not in THEIR_NAMES]
    if unknown:
        raise PrepareError(
            f"budget={dict(value)!r}: {unknown[0]!r} is not a key of max_memory; use device numbers, 'cpu' and "
            "'disk', or the fields of a Budget: device, host, disk and disk_path"
        )
    if len(devices) > 1:
        raise PrepareError(
            f"budget={dict(value)!r} names devices {devices}, but a process uses one device: name one, or start a "
            "process for each with torchrun; they then share the parameters"
        )
    sizes = {("device" if isinstance(key, int) else THEIR_NAMES[key]): size for key, size in value.items()}
    return Budget.parse(sizes)
