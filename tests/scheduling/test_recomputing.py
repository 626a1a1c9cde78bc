"""Forwards that are recomputed in backward: torch's numbers, whatever else a forward does, and memory that goes."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerostd
from support.compare import assert_bitwise
from zerostd import MisuseError
from zerostd.scheduling import recomputing

WIDTH = 16


class Block(nn.Module):
    """A block that does one thing more, given its input."""

    def __init__(self, more: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.more(self.first, x).tanh())


def gradients(more: Callable[[nn.Module, Tensor], Tensor], way: str, loss: Callable[[Tensor], None]) -> dict[str, Any]:
    """The gradients of two blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(more), Block(more))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, _ = zerostd.prepare(model, optimizer, placement={"activations": way}, groups=["*"])
    torch.manual_seed(1)
    loss(model(torch.randn(4, WIDTH)))
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def backward(output: Tensor) -> None:
    output.square().mean().backward()


def twice(output: Tensor) -> None:
    value = output.square().mean()
    value.backward(retain_graph=True)
    value.backward()


def for_the_input_first(output: Tensor) -> None:
    """A pass through a part of the graph leaves values that nobody takes."""
    value = output.square().mean()
    torch.autograd.grad(value, output, retain_graph=True)
    value.backward()


def plainly(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def with_dropout(layer: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.dropout(layer(x), 0.5)


def in_another_dtype(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x).float()


def in_checkpointing(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def with_a_gradient_of_its_own(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.enable_grad():
        probe = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(layer(probe).square().sum(), probe)
    return layer(x) + slope


@pytest.mark.parametrize("loss", [backward, twice, for_the_input_first])
@pytest.mark.parametrize(
    "more", [plainly, with_dropout, in_another_dtype, in_checkpointing, with_a_gradient_of_its_own]
)
def test_gradients_are_those_of_a_forward_that_keeps_everything(more: Any, loss: Any) -> None:
    assert_bitwise(gradients(more, "recompute", loss), gradients(more, "device", loss))


def test_autocast_around_the_loop_is_on_again() -> None:
    def loss(output: Tensor) -> None:
        with torch.autocast("cpu", enabled=False):  # backward runs where autocast is off
            backward(output.float())

    with torch.autocast("cpu", torch.bfloat16):
        assert_bitwise(gradients(plainly, "recompute", loss), gradients(plainly, "device", loss))


def test_random_numbers_go_on_as_if_nothing_had_been_recomputed() -> None:
    drawn = []
    for way in ("recompute", "device"):
        gradients(with_dropout, way, backward)
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


@pytest.mark.parametrize("what", ["more", "longer"])
def test_a_forward_that_differs_is_refused_with_the_group_and_the_remedy(what: str) -> None:
    calls = list[int]()

    def changing(layer: nn.Module, x: Tensor) -> Tensor:
        calls.append(1)
        if what == "more":  # than when it runs again
            return layer(x).exp().log() if len(calls) <= 2 else layer(x)
        return layer(torch.cat([x] * len(calls)))[: len(x)]

    with pytest.raises(MisuseError, match=r"group '1' is recomputed.*activations=\{'1': 'device'\}"):
        gradients(changing, "recompute", backward)


def test_values_go_with_the_graph_though_nobody_took_them(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = list[weakref.ref[Tensor]]()
    run = recomputing.RecomputedForward._again

    def running(self: recomputing.RecomputedForward, number: int) -> None:
        run(self, number)
        kept.extend(weakref.ref(value) for value in self._values.values())

    monkeypatch.setattr(recomputing.RecomputedForward, "_again", running)
    gradients(plainly, "recompute", for_the_input_first)
    gc.collect()
    assert kept and not any(value() is not None for value in kept)


def test_a_saved_tensor_takes_few_calls() -> None:
    """Where launches bound a step, work for each tensor that autograd saves is what recomputing costs."""

    def many(layer: nn.Module, x: Tensor) -> Tensor:
        for _ in range(NUM_MORE):
            x = x.sin()  # which saves its input
        return layer(x)

    def calls(way: str) -> int:
        counted = [0]

        def count(frame: FrameType, event: str, argument: Any) -> None:
            counted[0] += event in ("call", "c_call")

        def counting(output: Tensor) -> None:
            sys.setprofile(count)
            try:
                backward(output)
            finally:
                sys.setprofile(None)

        gradients(many, way, counting)
        return counted[0]

    NUM_MORE = 100
    at_all = calls("recompute") - calls("device")
    NUM_MORE = 200
    more = calls("recompute") - calls("device") - at_all
    assert more / 200 < 10, f"{more / 200} calls for each tensor that two blocks save"
