"""LossScale grows and shrinks as torch's GradScaler does; gradients are scaled on their way back only."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from zerostd.optimizers.loss_scale import LossScale, scale_gradient


@given(st.lists(st.booleans(), max_size=30))
def test_scale_follows_torchs_own_rule(overflows):
    ours = LossScale(value=1024.0, growth_interval=3)
    scale = torch.tensor(1024.0)
    growth = torch.tensor(0, dtype=torch.int32)
    for overflowed in overflows:
        ours.update(overflowed=overflowed)
        torch._amp_update_scale_(scale, growth, torch.tensor(float(overflowed)), 2.0, 0.5, 3)
        assert (ours.value, ours.steps_since_overflow) == (scale.item(), growth.item())
    assert ours.num_skipped == sum(overflows)


def test_gradient_is_scaled_and_the_tensor_is_not():
    tensor = torch.tensor([1.0, 2.0], requires_grad=True)
    scaled = scale_gradient(tensor, 4.0)
    assert torch.equal(scaled, tensor)
    (scaled.sum() + tensor.sum()).backward()
    assert torch.equal(tensor.grad, torch.tensor([5.0, 5.0]))


def test_a_tensor_without_gradient_is_returned_as_it_is():
    plain = torch.ones(2)
    assert scale_gradient(plain, 4.0) is plain
    tensor = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert scale_gradient(tensor, 4.0) is tensor
