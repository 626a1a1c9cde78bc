"""Complex parameters, and packed frozen ones, on a device: the cases of tests/models and tests/offload."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.test_complex import FORMS, compare_form
from offload.test_lossless import CODEC, train

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("form", FORMS)
def test_complex_parameters_train_as_in_plain_torch(form: str, tmp_path: Path) -> None:
    compare_form(form, tmp_path, "cuda")


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_packed_parameters_give_the_same_bits(tmp_path: Path, precision: str) -> None:
    pytest.importorskip("zstandard")
    expected, _, values = train(str(tmp_path), {}, "cuda", precision=precision)
    losses, packed, packed_values = train(str(tmp_path), CODEC, "cuda", precision=precision)
    assert losses == expected and packed.coded
    assert all(torch.equal(values[name], packed_values[name]) for name in values)
