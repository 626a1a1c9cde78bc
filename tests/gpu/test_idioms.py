"""The idioms of tests/idioms on a GPU: what plain torch gives there, or a refusal with a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from idioms.forms import BY_NAME, PLAIN, Form
from idioms.loop import idioms
from idioms.running import REFUSED, SAME, judge, judge_raised, run_idiom
from zerostd import Placement

pytestmark = pytest.mark.gpu

CLOSE = 1e-4  # the CPU takes exact roots, and atomic additions have no order
STREAMED = Form(
    "streamed",
    "optimizer states on the host, updated by the device",
    {"placement": Placement(optimizer_states="host", cpu_share=0.0)},
)
FORMS = [
    replace(form, tolerance=CLOSE)
    for form in (*(BY_NAME[name] for name in ("device", "host", "early", "all_host")), STREAMED)
]


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("name", list(idioms()))
def test_idiom(name: str) -> None:
    idiom = idioms()[name]
    try:
        expected, _ = run_idiom(idiom, PLAIN)
    except (RuntimeError, TypeError, ValueError, AssertionError, BufferError) as error:
        pytest.skip(f"plain torch on a GPU: {error}")
    complaints = []
    for form in FORMS:
        try:
            result, _ = run_idiom(idiom, form)
        except Exception as error:
            outcome = judge_raised(idiom, error)
        else:
            outcome = judge(result, expected, idiom, form)
        if outcome.outcome not in (SAME, REFUSED):
            complaints.append(f"{form.name}: {outcome.outcome}: {outcome.detail} | {outcome.source}")
    assert not complaints, "\n".join(complaints)
