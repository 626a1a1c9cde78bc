"""What prepare tells the user when it is done."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from torch import nn

import zerostd
from support import warm
from zerostd.engine.runtime import runtime_of
from zerostd.errors import PrepareError
from zerostd.preparing.announcing import warn_of_idle_accelerator


def prepared(**options: object) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    return zerostd.prepare(model, torch.optim.AdamW(model.parameters()), **options)[0]


def test_one_line_says_what_was_planned(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "zerostd"):
        prepared(stage=2, placement={"optimizer_states": {"device": 0.4, "host": 0.6}}, precision="bf16")
    (line,) = caplog.messages
    assert line == (
        "stage 2 on 1 rank (cpu), bf16; parameters, gradients on the device; optimizer states on device 40 %, host 60 %"
    )
    caplog.clear()
    with caplog.at_level(logging.INFO, "zerostd"):
        prepared()
    assert "planned 195" in caplog.messages[-1] and caplog.messages[-1].endswith("KiB device")


def test_the_line_goes_to_stderr_where_logging_is_not_configured() -> None:
    script = (
        "import logging, sys, torch, zerostd\n"
        "if sys.argv[1:]: logging.getLogger('zerostd').setLevel('WARNING')\n"
        "model = torch.nn.Linear(4, 4)\n"
        "zerostd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
    )
    ends = [warm.run(script, *words) for words in ([], ["quiet"])]
    assert [end.returncode for end in ends] == [0, 0]
    said = [end.stderr for end in ends]
    assert said[0].startswith("zerostd: stage 3 on 1 rank (cpu)") and said[0].count("\n") == 1
    assert said[1] == ""


def test_a_model_on_the_cpu_beside_an_accelerator_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = runtime_of(prepared(placement={}), "a test")
    asked_for = runtime_of(prepared(placement={}, device="cpu"), "a test")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    with pytest.warns(UserWarning, match="pass device='cuda' to prepare to use it, or device='cpu'"):
        warn_of_idle_accelerator(runtime.settings, runtime.world)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_idle_accelerator(asked_for.settings, asked_for.world)


def test_device_is_one_of_torch() -> None:
    with pytest.raises(PrepareError, match="device='bogus' is not a torch device"):
        prepared(device="bogus")
    assert next(prepared(device="cpu").parameters()).device.type == "cpu"
