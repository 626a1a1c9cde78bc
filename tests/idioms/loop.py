"""What an idiom is given: a `Loop`, so that one text serves plain torch and every form of zerostd.

An idiom is a function of a loop that returns tensors, nested as it likes. Where it is about an effect, the lines that
have it stand under `if loop.active:`. A control run leaves them out: its outcome must differ from that of the whole
idiom, or the comparison could not see the effect being lost. The lines under `if loop.active:` are also those that may
be refused; an idiom without such lines may be refused anywhere but at `backward`, `step` and `outcome`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zerostd
from idioms.forms import Form
from idioms.halved import halve
from idioms.networks import FEATURES, VOCABULARY, Clip, Convolutional, Language, Network, adapted
from zerostd.engine.runtime import runtime_of

THEMES = [
    "edits",
    "averaging",
    "gradients",
    "clipping",
    "accumulation",
    "autograd",
    "functional",
    "optimizer_options",
    "optimizer_state",
    "schedulers",
    "evaluation",
    "inspection",
    "modules",
    "checkpoints",
    "precision",
    "memory",
    "wrappers",
    "surgery",
    "recipes",
    "nesting",
    "tools",
]
BATCH = 8


class Loop:
    """One run of one idiom: under plain torch, or in a form of zerostd."""

    def __init__(self, form: Form, directory: Path, *, is_active: bool = True) -> None:
        self.form = form
        self.directory = directory  # empty, and gone afterwards
        self.is_plain = form.is_plain
        self.has_control = False  # the idiom asked whether it is active
        self._is_active = is_active
        self._prepared: list[nn.Module] = []

    def close(self) -> None:
        """Close what prepared models hold open between ranks; no other rank needs to be there any more."""
        for model in self._prepared:
            with suppress(zerostd.MisuseError):  # released by the idiom itself
                runtime_of(model, "closing").world.close()

    @property
    def active(self) -> bool:
        """False in the control run, which leaves the idiom's own lines out."""
        self.has_control = True
        return self._is_active

    # -- models --

    def network(self, **options: Any) -> Network:
        """A small residual network, the same for the same options."""
        return self.seeded(lambda: Network(**options))

    def convolutional(self) -> Convolutional:
        """A small convolutional network with batch-norm."""
        return self.seeded(Convolutional)

    def language(self, **options: Any) -> Language:
        """A small language model whose head is its embedding."""
        return self.seeded(lambda: Language(**options))

    def clip(self) -> Clip:
        """Two small towers and a temperature."""
        return self.seeded(Clip)

    def adapted(self) -> Network:
        """A small network that trains low-rank additions to frozen blocks."""
        return self.seeded(adapted)

    def seeded(self, build: Callable[[], Any]) -> Any:
        """Build something with random values that are the same in every run."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            return build()

    # -- data: the same on all ranks --

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one step."""
        generator = torch.Generator("cpu").manual_seed(101 + index)
        x = torch.randn(BATCH, FEATURES, generator=generator, device="cpu").to(torch.get_default_device())
        y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin(), x[:, 3] - x[:, 4], x[:, 5].abs()], dim=1)
        return x, 2 * y

    def batches(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets of so many steps."""
        return (self.batch(index) for index in range(number))

    def tokens(self, index: int) -> Tensor:
        """Tokens of one step of a language model."""
        generator = torch.Generator("cpu").manual_seed(201 + index)
        tokens = torch.randint(VOCABULARY, (4, 6), generator=generator, device="cpu")
        return tokens.to(torch.get_default_device())

    # -- training --

    def adamw(self, model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
        """The optimizer of most idioms."""
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any
    ) -> tuple[Any, Any]:
        """The model and its optimizer, AdamW if none is given, prepared as the form says; `options` of an idiom that
        declares something, such as `accumulate`, win over those of the form."""
        if optimizer is None:
            optimizer = self.adamw(model)
        if self.is_plain:
            if "precision" in self.form.options:
                halve(model, optimizer)
            return model, optimizer
        prepared = zerostd.prepare(model, optimizer, **self._options(model) | options)
        self._prepared.append(model)
        return prepared

    def prepare_alone(self, model: nn.Module) -> Any:
        """A model without an optimizer, prepared as the form says."""
        if self.is_plain:
            return model
        prepared, _ = zerostd.prepare(model, **self._options(model))
        self._prepared.append(model)
        return prepared

    def _options(self, model: nn.Module) -> dict[str, Any]:
        options = {"groups": groups_of(model), **self.form.options}
        if self.form.on_disk:
            options["budget"] = zerostd.Budget(disk_path=str(self.directory))
        return options

    def loss(self, model: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of most idioms."""
        x, y = batch
        return F.mse_loss(model(x), y)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Tensor:
        """One ordinary step; returns its loss."""
        loss = self.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2, first: int = 0) -> None:
        """Some ordinary steps."""
        for index in range(first, first + steps):
            self.step(model, optimizer, self.batch(index))

    # -- zerostd's own calls, where plain torch needs none --

    def gathered(self, module: nn.Module, write: bool = False) -> Any:
        """`zerostd.gathered`."""
        return nullcontext(module) if self.is_plain else zerostd.gathered(module, write=write)

    def averaged(self, model: nn.Module, decay: float) -> Any:
        """`zerostd.averaged`, or an `AveragedModel`, which the idiom updates."""
        if self.is_plain:
            return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
        return zerostd.averaged(model, decay)

    def no_sync(self, model: nn.Module) -> Any:
        """`zerostd.no_sync`."""
        return nullcontext() if self.is_plain else zerostd.no_sync(model)

    def release(self, model: nn.Module) -> nn.Module:
        """`zerostd.release`."""
        return model if self.is_plain else zerostd.release(model)

    # -- outcomes --

    def weights(self, model: nn.Module) -> dict[str, Any]:
        """The whole model, as plain torch's `state_dict` gives it."""
        if self.is_plain:
            return {name: _copied(value) for name, value in model.state_dict().items()}
        return zerostd.full_state_dict(model)

    def outcome(self, model: nn.Module, **more: Any) -> dict[str, Any]:
        """What the model answers to a batch it has not seen, its weights, and what else the idiom has seen."""
        was_training = model.training
        with torch.no_grad():
            answer = model.eval()(self.batch(99)[0]).clone()
        model.train(was_training)
        return {"answer": answer, "weights": self.weights(model), **more}


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def groups_of(model: nn.Module) -> list[str] | None:
    """Names of modules, so that even a small model has several groups: its blocks, and the rest is the root's, as it is
    in large models; or its parts, if it has no blocks."""
    lists = [(name, child) for name, child in model.named_children() if isinstance(child, nn.ModuleList)]
    blocks = [(f"{name}.{key}", block) for name, child in lists for key, block in child.named_children()]
    names: list[str] = []
    seen: set[nn.Parameter] = set()
    for name, part in blocks or model.named_children():
        if any(parameter not in seen for parameter in part.parameters()):  # else it is tied to an earlier one
            names.append(name)
        seen.update(part.parameters())
    return names or None


# -- the registry --


@dataclass(frozen=True)
class Idiom:
    """One idiom, as `@idiom` has registered it."""

    run: Callable[[Loop], Any]
    theme: str
    exact: bool  # zerostd does the same arithmetic, in the same order

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def text(self) -> str:
        """Its line in the table."""
        return (inspect.getdoc(self.run) or "").strip()

    @property
    def path(self) -> str:
        return self.run.__code__.co_filename


REGISTRY: dict[str, Idiom] = {}


def idiom(run: Callable[[Loop], Any] | None = None, *, exact: bool = True) -> Any:
    """Register an idiom; `exact=False` if its own arithmetic may be done in another order than plain torch's."""
    if run is None:
        return lambda function: idiom(function, exact=exact)
    assert run.__name__ not in REGISTRY, f"two idioms are called {run.__name__}"
    REGISTRY[run.__name__] = Idiom(run, run.__module__.rsplit(".", 1)[-1], exact)
    return run


def idioms() -> dict[str, Idiom]:
    """All idioms by name, in the order of the table."""
    for theme in THEMES:
        importlib.import_module(f"idioms.{theme}")
    return REGISTRY
