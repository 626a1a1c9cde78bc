"""The models of benchmarks/zoo.py can be made and trained with the packages that are installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def zoo() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("zoo")
    sys.modules.pop("zoo", None)


@pytest.mark.parametrize("name", ["unet", "bert", "llama", "gpt2", "t5", "mixture", "lstm", "gru"])
def test_small_models_of_the_zoo_have_losses_and_gradients(zoo: ModuleType, name: str) -> None:
    torch.manual_seed(0)
    model, batch = zoo.ZOO[name](True)
    zoo.loss_of(zoo.call(model, batch)).backward()
    assert any(parameter.grad is not None for parameter in model.parameters())
