"""The arithmetic off the device: native rules and clones give torch's own bits and leave the user's optimizer alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from offload.jobs import Drift
from zerostd import kernels
from zerostd.errors import MisuseError
from zerostd.kernels import Adagrad, Adam, Sgd, native
from zerostd.optimizers.elementwise import clone_optimizer, native_rule, next_scalars, update_by_clone
from zerostd.optimizers.spans import StepOptions, snapshot
from zerostd.parameters.state_shard import MASTER

NUMEL = 100
STEPS = 3
NATIVE: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "adam, coupled decay": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, maximize=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1),
}
CLONED: dict[str, Any] = {
    **NATIVE,
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "the user's own": lambda p: Drift(p, lr=5e-3, pace=0.7),
}


def start() -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, NUMEL).sin()


def gradient(step: int) -> torch.Tensor:
    return (torch.arange(float(NUMEL)) * (step + 1)).cos()


def by_torch(make: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    parameter = nn.Parameter(start())
    optimizer = make([parameter])
    for step in range(STEPS):
        parameter.grad = gradient(step)
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]


def span(scalars: dict[str, Any] | None) -> Any:
    return SimpleNamespace(param_group=0, scalars=scalars)


def inner_of(make: Any) -> torch.optim.Optimizer:
    return make([nn.Parameter(torch.zeros(3))])


@pytest.mark.skipif(not native.LIBRARY.exists(), reason="the native library is not built")
@pytest.mark.parametrize("name", NATIVE)
def test_native_rule_trains_with_torchs_bits_and_counts_with_it(name):
    expected, states = by_torch(NATIVE[name])
    inner = inner_of(NATIVE[name])
    master = start()
    scalars = None
    long_states: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        rule = native_rule(inner, inner.param_groups[0], scalars, exact_root=False)
        assert rule is not None
        for state in rule.state_names:
            long_states.setdefault(state, torch.zeros(NUMEL))
        tensors = (master, *(long_states[state] for state in rule.state_names))
        kernels.update(rule, gradient(step), tensors, None, factor=1.0, weight=None, num_threads=1)
        scalars = next_scalars(rule, scalars)
    assert torch.equal(master, expected)
    assert all(torch.equal(long_states[state], states[state]) for state in long_states)
    assert scalars == {key: value for key, value in states.items() if key == "step"}


@pytest.mark.parametrize(
    ("make", "kind"),
    [(NATIVE["adamw"], Adam), (NATIVE["sgd"], Sgd), (NATIVE["adagrad"], Adagrad)],
    ids=["adamw", "sgd", "adagrad"],
)
def test_native_rule_reads_the_options_given_and_not_the_optimizers(make, kind):
    inner = inner_of(make)
    rule = native_rule(inner, {**inner.param_groups[0], "lr": 0.25, "weight_decay": 0.5}, None, exact_root=True)
    assert isinstance(rule, kind)
    assert (rule.lr, rule.weight_decay) == (0.25, 0.5)


@pytest.mark.parametrize("name", sorted(set(CLONED) - set(NATIVE)))
def test_no_native_rule_for_what_the_kernels_do_not_have(name):
    inner = inner_of(CLONED[name])
    assert native_rule(inner, inner.param_groups[0], None, exact_root=False) is None


def test_no_native_rule_for_a_subclass_or_a_differentiable_step():
    class Mine(torch.optim.AdamW):
        pass

    inner = Mine([nn.Parameter(torch.zeros(3))])
    assert native_rule(inner, inner.param_groups[0], None, exact_root=False) is None
    adamw = inner_of(NATIVE["adamw"])
    options = {**adamw.param_groups[0], "differentiable": True}
    assert native_rule(adamw, options, None, exact_root=False) is None


@pytest.mark.parametrize("name", CLONED)
@torch.no_grad()
def test_clone_trains_in_tiles_with_the_bits_of_the_users_optimizer(name):
    with torch.enable_grad():
        expected, states = by_torch(CLONED[name])
    inner = inner_of(CLONED[name])
    untouched = str(inner.state_dict())
    names = [key for key, value in states.items() if isinstance(value, torch.Tensor) and value.dim()]
    clone = clone_optimizer(inner)
    master = start()
    long_states = {state: torch.full((NUMEL,), torch.nan) for state in names}
    scalars = None
    for step in range(STEPS):
        options = StepOptions(snapshot(inner.param_groups))
        after = None
        for tile in (slice(0, 37), slice(37, NUMEL)):  # both count from the same step
            part = {state: tensor[tile] for state, tensor in long_states.items()}
            part[MASTER] = master[tile]
            after = update_by_clone(clone, options, span(scalars), part, gradient(step)[tile].clone())
        scalars = after
    assert torch.equal(master, expected)
    assert all(torch.equal(long_states[state], states[state]) for state in names)
    assert scalars == {key: value for key, value in states.items() if key not in names}
    assert str(inner.state_dict()) == untouched


def test_clone_has_the_attributes_of_a_subclass_and_no_hooks():
    inner = Drift([nn.Parameter(torch.zeros(3))], pace=0.25)
    inner.register_step_pre_hook(lambda *_: pytest.fail("a clone called the user's hook"))
    clone = clone_optimizer(inner)
    assert isinstance(clone, Drift) and clone.pace == 0.25
    clone.step()
    clone.param_groups = []
    assert len(inner.param_groups) == 1


def test_clone_reports_what_it_wrote_into_its_options():
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1

    inner = Counting([nn.Parameter(torch.zeros(3))], lr=0.1)
    options = StepOptions(snapshot(inner.param_groups))
    update_by_clone(clone_optimizer(inner), options, span(None), {MASTER: torch.zeros(3)}, torch.ones(3))
    assert options.written[0]["count"] == 1
    assert "count" not in inner.param_groups[0] and "count" not in options.param_groups[0]


def test_a_state_that_was_not_seen_at_prepare_is_refused():
    clone = clone_optimizer(inner_of(NATIVE["adamw"]))
    options = StepOptions(snapshot(clone.param_groups))
    states = {MASTER: torch.zeros(3), "exp_avg": torch.zeros(3)}
    with pytest.raises(MisuseError, match="'exp_avg_sq' that it did not make in its trial at prepare"):
        update_by_clone(clone, options, span(None), states, torch.ones(3))
