"""Ten times as many parameters and groups take ten times as many lines of ours, whatever is done with them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import zerostd
from zerostd import Placement

SOURCES = str(Path(zerostd.__file__).parent)
FEW = 10
MANY = 10 * FEW
WIDTH = 4
ELSEWHERE = Placement(parameters="host", gradients="host", optimizer_states="host")
FORMS: dict[str, dict[str, Any]] = {
    "one group": {},
    "a group for each block": {"placement": ELSEWHERE, "groups": ["blocks.*"]},
}
Lines = Counter[tuple[str, int]]


class Model(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def count(call: Callable[[], Any]) -> Lines:
    """Count how often each line of the library is run by a call, in this thread."""
    lines: Lines = Counter()

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            lines[frame.f_code.co_filename.removeprefix(SOURCES), frame.f_lineno] += 1
        return on_line

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        return on_line if frame.f_code.co_filename.startswith(SOURCES) else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


def run_all(depth: int, form: dict[str, Any], folder: Path) -> dict[str, Lines]:
    """Do everything once, and count each."""
    model = Model(depth)
    inner = torch.optim.AdamW(model.parameters())
    prepared: list[Any] = []
    counts = {"prepare": count(lambda: prepared.extend(zerostd.prepare(model, inner, stage=0, **form)))}
    optimizer = prepared[1]
    path = folder / str(depth)

    def step() -> None:
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def rewrite_states() -> None:
        for parameter in model.parameters():
            assert parameter in optimizer.state
            optimizer.state[parameter] = {name: value + 0 for name, value in optimizer.state[parameter].items()}

    def touch_gradients() -> None:
        model(torch.ones(2, WIDTH)).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(2.0)
        optimizer.clip_grad_norm_(1.0)
        optimizer.zero_grad()

    calls: dict[str, Callable[[], Any]] = {
        "the first step": step,
        "a step": step,
        "save": lambda: zerostd.save(path, model, optimizer),
        "load": lambda: zerostd.load(path, model, optimizer),
        "optimizer.state_dict": lambda: optimizer.load_state_dict(optimizer.state_dict()),
        "full_state_dict": lambda: model.load_state_dict(zerostd.full_state_dict(model)),
        "p.grad": touch_gradients,
        "optimizer.state": rewrite_states,
        "a step with states of their own": step,
        "release": lambda: zerostd.release(model),
    }
    return counts | {name: count(call) for name, call in calls.items()}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_nothing_grows_with_the_square_of_parameters_or_groups(form: dict[str, Any], tmp_path: Path) -> None:
    """A line that does would be run 100 times as often."""
    few = run_all(FEW, form, tmp_path)
    many = run_all(MANY, form, tmp_path)
    steep = [
        f"{name}: {file}:{number} {few[name][file, number]} -> {times}"
        for name, lines in many.items()
        for (file, number), times in lines.items()
        if times > 20 * few[name][file, number] + 10 * MANY
    ]
    assert not steep
    for name, lines in many.items():
        assert lines.total() <= 12 * few[name].total(), name


# Calls of functions of ours, for each parameter.
MOST_CALLS = {"prepare": 82.5, "a step": 4.3, "a clipped step": 21.3}


def count_calls(call: Callable[[], Any]) -> int:
    """Count the calls of functions of the library, in this thread."""
    num_calls = 0

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        nonlocal num_calls
        num_calls += event == "call" and frame.f_code.co_filename.startswith(SOURCES)

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        call()
    finally:
        sys.setprofile(before)
    return num_calls


def calls_for_each_parameter(depth: int) -> dict[str, float]:
    """Count what prepare and steps of a model of `depth` blocks call."""
    model = Model(depth)
    prepared: list[Any] = []
    inner = torch.optim.AdamW(model.parameters())
    counts = {"prepare": count_calls(lambda: prepared.extend(zerostd.prepare(model, inner, stage=0)))}
    optimizer = prepared[1]

    def step(max_norm: float | None) -> None:
        model(torch.ones(2, WIDTH)).square().mean().backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()

    step(1.0)
    counts |= {"a step": count_calls(lambda: step(None)), "a clipped step": count_calls(lambda: step(1.0))}
    return {name: count / (4 * depth) for name, count in counts.items()}


def test_prepare_and_steps_call_few_functions_for_each_parameter_however_many_there_are() -> None:
    few = calls_for_each_parameter(50)
    many = calls_for_each_parameter(500)
    for name, most in MOST_CALLS.items():
        assert many[name] <= most, name
        assert many[name] <= 1.01 * few[name], name
