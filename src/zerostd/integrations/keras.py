"""Keras 3 on torch: `model.fit` with a torch optimizer, and its states, gradients and weights sharded.

model.compile(optimizer=Optimizer(torch.optim.AdamW, learning_rate=1e-3), loss="mse")
prepare(model, stage=3)
model.fit(x, y)

Keras's own optimizers hold and update whole variables, so they cannot be sharded; any element-wise one of torch can.
Keras calls `model.call` and `layer.call`. Both go through a small tree of modules here, which zerostd prepares.
"""

from __future__ import annotations

import functools
import mmap
import os
import pkgutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import torch
from torch import nn

import zerostd
from zerostd.integrations import common

if keras.backend.backend() != "torch":
    raise ImportError(
        f"Keras runs on {keras.backend.backend()!r}: set the environment variable KERAS_BACKEND=torch before keras is "
        "imported"
    )

ROOT = "_zerostd_root"  # attribute of a prepared model
SHARDS = ".zerostd"  # what is added to the name of a file of weights: the directory with the optimizer's states
WHOLE = {"get_weights": False, "set_weights": True, "save": False}  # calls on whole weights; True: they change them
REFUSED = {  # arguments of Keras's optimizers, with the remedy
    "clipnorm": "it clips each variable separately: use global_clipnorm, the norm over all variables",
    "clipvalue": "gradients are sharded: use global_clipnorm, the norm over all variables",
    "use_ema": "averages of the weights are not kept: leave it out",
    "loss_scale_factor": "losses are not scaled: leave it out",
    "gradient_accumulation_steps": "train_step drops gradients before each backward: use a larger batch_size",
}
SETTINGS = {  # options of zerostd.prepare, with what Keras has for them
    "max_grad_norm": "Optimizer(global_clipnorm=...)",
    "accumulate": "a larger batch_size",
    "precision": "keras.mixed_precision.set_global_policy('mixed_bfloat16')",
}


@keras.saving.register_keras_serializable(package="zerostd")
class Optimizer(keras.optimizers.Optimizer):
    """Wraps a torch optimizer for `model.compile`. Schedules and callbacks set its learning_rate as usual.

    Args:
        make: A torch class such as torch.optim.AdamW, or a function called like one: make(parameters, lr=..., ...).
        learning_rate: A number, or a schedule of Keras.
        global_clipnorm: Clip gradients to this norm, over all variables and ranks.
        options: Further arguments for `make`, such as weight_decay=0.1.
    """

    def __init__(
        self,
        make: Callable[..., torch.optim.Optimizer] | str,
        learning_rate: Any = 1e-3,
        global_clipnorm: float | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        for option, value in options.items():
            if option in REFUSED and value:
                raise zerostd.NotSupportedError(f"Optimizer({option}={value!r}): {REFUSED[option]}")
        super().__init__(learning_rate=learning_rate, global_clipnorm=global_clipnorm, name=name)
        self.make: Any = pkgutil.resolve_name(make) if isinstance(make, str) else make
        self.options = dict(options)
        self.__dict__["inner"] = None  # the optimizer that zerostd.prepare returned

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Update this rank's shards, with the gradients that zerostd holds instead of `grads`."""
        if self.inner is None:
            raise zerostd.MisuseError(
                "fit of a model that was not prepared: call zerostd.integrations.keras.prepare(model) after compile()"
            )
        rate = float(self.learning_rate)
        for group in self.inner.param_groups:
            group["lr"] = rate
        self.inner.step()
        self.iterations.assign_add(1)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make an equal optimizer."""
        config = super().get_config()
        own = {name: config[name] for name in ("name", "learning_rate", "global_clipnorm")}
        return {**own, "make": f"{self.make.__module__}.{self.make.__qualname__}", **self.options}


class ShardedLayer(nn.Module):
    """The weights of a layer that train, and the layer's call."""

    layer: Any
    layer_call: Callable[..., Any]  # before it was prepared

    def __init__(self, layer: Any, weights: list[nn.Parameter]) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not as a submodule: Keras has its own names
        self.__dict__["layer_call"] = layer.call
        for number, weight in enumerate(weights):
            self.register_parameter(f"weight{number}", weight)

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.layer_call(*args, **options)


def prepare(model: keras.Model, *, groups: Sequence[str] | None = None, **zero: Any) -> keras.Model:
    """Shard a model that was compiled with an `Optimizer`, in place; options are those of zerostd.prepare.

    What does not train (moving averages, seeds, frozen layers) is whole on every rank, and rank 0's is saved. Each rank
    fits on the data it is given: pass `fit` a DataLoader with a DistributedSampler.
    """
    optimizer = _check(model, zero)
    root = _tree(model)
    if not list(root.parameters()):
        raise zerostd.PrepareError("the model has no trainable weights: call model.build(input_shape) or the model")
    inner = optimizer.make(root.parameters(), lr=float(optimizer.learning_rate), **optimizer.options)
    if groups is None and len(list(root.children())) > 1:
        groups = ["*"]  # each layer
    norm = optimizer.global_clipnorm
    _, optimizer.__dict__["inner"] = zerostd.prepare(root, inner, max_grad_norm=norm, groups=groups, **zero)
    model.__dict__[ROOT] = root
    for sharded in _sharded_layers(root):
        call = functools.partial(_call, sharded)
        sharded.layer.__dict__["call"] = functools.update_wrapper(call, sharded.layer_call)
    for name, changes in WHOLE.items():
        model.__dict__[name] = functools.partial(_on_whole, model, name, changes)
    model.__dict__["save_weights"] = functools.partial(_save_weights, model)
    model.__dict__["load_weights"] = functools.partial(_load_weights, model)
    return model


def release(model: keras.Model) -> keras.Model:
    """Undo prepare: return an ordinary model. Every rank must call it."""
    root = root_of(model)
    zerostd.release(root)
    for sharded in _sharded_layers(root):
        del sharded.layer.__dict__["call"]
    for name in (*WHOLE, "save_weights", "load_weights", ROOT):
        del model.__dict__[name]
    model.optimizer.__dict__["inner"] = None
    return model


def root_of(model: keras.Model) -> nn.Module:
    """Return the module that zerostd prepared, for zerostd.memory, zerostd.gathered, zerostd.record."""
    root = model.__dict__.get(ROOT)
    if not isinstance(root, nn.Module):
        raise zerostd.MisuseError(f"{model.name!r} was not prepared: call zerostd.integrations.keras.prepare(model)")
    return root


def _check(model: Any, zero: dict[str, Any]) -> Optimizer:
    """Refuse options that cannot be honoured, before anything changes."""
    if not isinstance(model, keras.Model):
        raise zerostd.PrepareError(f"prepare needs a keras.Model, got {type(model).__name__}")
    if ROOT in model.__dict__:
        raise zerostd.PrepareError(f"{model.name!r} is already prepared; release it first")
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, Optimizer):
        raise zerostd.NotSupportedError(
            f"{model.name!r} is compiled with {type(optimizer).__name__}, which updates whole variables: compile with "
            "zerostd.integrations.keras.Optimizer(torch.optim.AdamW, learning_rate=...), or another class of torch"
        )
    if model.jit_compile:
        raise zerostd.NotSupportedError("compile(jit_compile=True) cannot compile a step over shards; leave it out")
    common.check_options(zero, "prepare({}=...)", SETTINGS)
    return optimizer


def _tree(model: keras.Model) -> ShardedLayer:
    """Return a module with a child for each layer that trains, in the order of the model, and the other weights."""
    seen: set[nn.Parameter] = set()
    modules = []
    for layer in (*_layers(model), model):
        weights = [variable.value for variable in layer.trainable_variables if variable.value not in seen]
        seen.update(weights)
        if weights or layer is model:
            modules.append(ShardedLayer(layer, weights))
    root = modules.pop()
    for number, module in enumerate(modules):
        root.add_module(f"layer{number}", module)
    return root


def _sharded_layers(root: nn.Module) -> list[ShardedLayer]:
    return [module for module in root.modules() if isinstance(module, ShardedLayer)]


def _layers(model: keras.Model) -> Iterator[Any]:
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from _layers(layer)
        else:
            yield layer


def _call(sharded: ShardedLayer, *args: Any, **options: Any) -> Any:
    """Call a layer or a model. Keras also calls them without data, to learn shapes."""
    tensors = [leaf for leaf in keras.tree.flatten((args, options)) if isinstance(leaf, torch.Tensor)]
    if not tensors or any(tensor.is_meta for tensor in tensors):
        return sharded.layer_call(*args, **options)
    return sharded(*args, **options)


# -- whole weights --


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _on_whole(model: Any, name: str, changes: bool, *args: Any, **options: Any) -> Any:
    """Make a call of Keras with whole weights in place. Every rank must make it; one writes."""
    with zerostd.gathered(root_of(model), write=changes), torch.no_grad():
        if name.startswith("save") and not _is_first():
            return None
        return getattr(type(model), name)(model, *args, **options)


def _save_weights(model: Any, filepath: Any, *args: Any, **options: Any) -> None:
    """Write Keras's file and, beside it, a directory where each rank writes its shards of the optimizer states."""
    _on_whole(model, "save_weights", False, filepath, *args, **options)
    folder = Path(f"{filepath}{SHARDS}")
    number = common.next_number(folder)
    checksum = folder / f"{number}.crc"
    if _is_first():
        folder.mkdir(exist_ok=True)
        checksum.write_text(_checksum(filepath))
    zerostd.save(folder / str(number), root_of(model), model.optimizer.inner, keep=1)
    if _is_first():
        for path in folder.glob("*.crc"):
            if path != checksum:
                path.unlink()


def _load_weights(model: Any, filepath: Any, *args: Any, **options: Any) -> None:
    """Load Keras's file, and the optimizer's states if they are beside it."""
    folder = Path(f"{filepath}{SHARDS}")
    shards = zerostd.latest(folder) if folder.exists() else None
    if shards is not None and Path(f"{shards}.crc").read_text() != _checksum(filepath):
        raise zerostd.CheckpointError(
            f"{shards} does not belong to {filepath}, which was written later: remove {folder} to start with a "
            "new optimizer"
        )
    _on_whole(model, "load_weights", True, filepath, *args, **options)
    if shards is not None:
        zerostd.load(shards, root_of(model), model.optimizer.inner)


def _checksum(path: Any) -> str:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return f"{zlib.crc32(content):08x}"
