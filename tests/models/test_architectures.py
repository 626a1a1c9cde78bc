"""A sample of benchmarks/architectures.py: models of transformers train as under plain torch, bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SAMPLE = {
    "t5": "an encoder and a decoder that hand a position bias along",
    "mixtral": "experts that some tokens choose",
    "deepseek_v4": "attention over compressed keys",
    "falcon_mamba": "a state space",
    "rwkv": "a recurrence with parameters of its own dtype",
    "wav2vec2": "convolutions with normalized weights, masks from numpy",
    "segformer": "a hierarchy of stages",
    "longformer": "windows of attention",
}


@pytest.fixture(scope="module")
def architectures() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        sys.modules.pop("gpt", None)  # of examples/by_feature
        import architectures

        yield architectures
    for name in ("architectures", "gpt"):  # other tests have files of these names
        sys.modules.pop(name, None)


@pytest.mark.parametrize("kind", SAMPLE)
def test_architecture_trains_as_under_plain_torch(architectures: ModuleType, kind: str) -> None:
    model, batch, expected = architectures.reference(kind)
    forms = architectures.FORMS
    outcomes = {name: architectures.tried(model, batch, expected, form) for name, form in forms.items()}
    assert outcomes == dict.fromkeys(forms, "same")


def test_another_result_is_seen(architectures: ModuleType) -> None:
    model, batch, expected = architectures.reference("t5")
    name = next(iter(expected))
    other = expected | {name: expected[name] + 1e-6}
    assert architectures.tried(model, batch, other, {"stage": 3}).startswith("off by")
