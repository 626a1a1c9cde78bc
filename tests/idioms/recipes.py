"""What trainers of real projects do: fairseq, detectron2, timm, Lightning, RL and meta-learning libraries."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.fusion import fuse_linear_bn_eval
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, LambdaLR, MultiplicativeLR, PolynomialLR

from idioms.loop import Loop, idiom


def _trained(loop: Loop, **options: Any) -> tuple[Any, Any]:
    model = loop.network(**options)
    return loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))


@idiom
def clip_after_each_pass(loop: Loop) -> Any:
    """Clip after every pass of a step, so that the next pass adds to clipped gradients."""
    model, optimizer = _trained(loop)
    for index, batch in enumerate(loop.batches(4)):
        loop.loss(model, batch).backward()
        if loop.active:
            clip_grad_norm_(model.parameters(), 0.1)
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    return loop.outcome(model)


@idiom(exact=False)  # a norm is multiplied by the factor, not taken again
def gradients_scaled_and_read(loop: Loop) -> Any:
    """Multiply all gradients by one tensor, as fairseq does with `p.grad.data.mul_(c)`, and read them."""
    model, optimizer = _trained(loop)
    norms = []
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        factor = torch.tensor(0.1)
        if loop.active:
            for p in model.parameters():
                p.grad.data.mul_(factor)
        norms += [p.grad.norm() for p in model.parameters()]
        norms.append(model.head.weight.grad.clone())
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model, norms=norms)


@idiom
def half_of_the_gradients_scaled(loop: Loop) -> Any:
    """Multiply the gradients of the blocks by one tensor, change that tensor, and multiply the head's by it."""
    model, optimizer = _trained(loop)
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        factor = torch.tensor(0.1)
        if loop.active:
            for p in model.blocks.parameters():
                p.grad.mul_(factor)
            factor.mul_(30)
            for p in model.head.parameters():
                p.grad.mul_(factor)
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def gradients_scaled_twice(loop: Loop) -> Any:
    """Multiply each gradient twice by the same tensor before going on to the next."""
    model, optimizer = _trained(loop)
    factor = torch.tensor(0.3)
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        if loop.active:
            for p in model.parameters():
                p.grad.mul_(factor).mul_(factor)
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom(exact=False)
def layerwise_trust_ratios(loop: Loop) -> Any:
    """LARS: multiply each gradient by the norm of its weight over its own."""
    model, optimizer = _trained(loop)
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        if loop.active:
            for p in model.parameters():
                p.grad.mul_(0.1 * p.detach().norm() / (p.grad.norm() + 1e-3))
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def decay_added_to_gradients(loop: Loop) -> Any:
    """Add weight decay by hand: `p.grad.add_(p.data, alpha=0.5)`."""
    model, optimizer = _trained(loop)
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        if loop.active:
            for p in model.parameters():
                p.grad.add_(p.data, alpha=0.5)
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def gradients_multiplied_out_of_place(loop: Loop) -> Any:
    """Assign a product: `p.grad = p.grad * 3`."""
    model, optimizer = _trained(loop)
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        if loop.active:
            for p in model.parameters():
                p.grad = p.grad * 3
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def gradients_detached_and_zeroed(loop: Loop) -> Any:
    """Zero gradients as loops did before `set_to_none`: `p.grad.detach_(); p.grad.zero_()`."""
    model, optimizer = _trained(loop)
    for batch in loop.batches(3):
        if loop.active:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.detach_()
                    p.grad.zero_()
        loop.loss(model, batch).backward()
        optimizer.step()
    return loop.outcome(model)


@idiom
def gradients_summed_in_own_buffers(loop: Loop) -> Any:
    """Sum gradients of several passes in the loop's own tensors, and put the sums into `p.grad` before the step."""
    model, optimizer = _trained(loop)
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for batch in loop.batches(4):
        loop.loss(model, batch).backward()
        for total, p in zip(sums, model.parameters(), strict=True):
            total.mul_(0.5).add_(p.grad)
            p.grad = None
        for total, p in zip(sums, model.parameters(), strict=True):
            p.grad = total.clone()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom(exact=False)
def squared_norms_by_dot_products(loop: Loop) -> Any:
    """Log squared norms as dot products: `torch.dot(p.grad.flatten(), p.grad.flatten())`."""
    model, optimizer = _trained(loop)
    squares = []
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        squares += [torch.dot(p.grad.flatten(), p.grad.flatten()) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model, squares=squares)


@idiom
def zero_grad_between_forward_and_backward(loop: Loop) -> Any:
    """Call `optimizer.zero_grad()` after the forward and before `backward`, as PyTorch's tutorials do."""
    model, optimizer = _trained(loop)
    for batch in loop.batches(3):
        loss = loop.loss(model, batch)
        if loop.active:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loop.outcome(model)


@idiom
def forward_that_fails_is_skipped(loop: Loop) -> Any:
    """Catch an error of forward and continue with the next batch, as fairseq does when memory runs out."""
    model, optimizer = _trained(loop)
    failing = [False]

    def fail(*_: Any) -> None:
        if failing[0]:
            raise RuntimeError("out of memory")

    model.blocks[1].register_forward_pre_hook(fail)
    for index, batch in enumerate(loop.batches(4)):
        failing[0] = index == 1
        try:
            loss = loop.loss(model, batch)
        except RuntimeError:
            optimizer.zero_grad()
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def backward_that_fails_is_skipped(loop: Loop) -> Any:
    """Catch an error inside backward, drop the gradients and continue with the next batch."""
    model, optimizer = _trained(loop)
    failing = [False]

    def fail(*_: Any) -> None:
        if failing[0]:
            raise ValueError("a bad gradient")

    model.blocks[0].register_full_backward_hook(fail)
    for index, batch in enumerate(loop.batches(4)):
        failing[0] = index == 1
        loss = loop.loss(model, batch)
        try:
            loss.backward()
        except ValueError:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def two_models_in_one_loss(loop: Loop) -> Any:
    """Train two prepared models through one loss and one `backward`, as an actor and a world model are."""
    first, first_optimizer = _trained(loop, classes=6)
    second, second_optimizer = _trained(loop)
    for x, y in loop.batches(3):
        F.mse_loss(second(first(x).tanh()), y).backward()
        for optimizer in (first_optimizer, second_optimizer):
            optimizer.step()
            optimizer.zero_grad()
    return [loop.outcome(first), loop.outcome(second)]


@idiom
def parameters_toggled_for_each_loss(loop: Loop) -> Any:
    """Switch `requires_grad` of one half of the model off for each loss in turn, as Lightning's `toggle_optimizer`."""
    model, optimizer = _trained(loop)
    for index, batch in enumerate(loop.batches(4)):
        frozen = model.blocks if index % 2 else model.head
        if loop.active:
            frozen.requires_grad_(False)
        loop.loss(model, batch).backward()
        frozen.requires_grad_(True)
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def proximal_policy_epochs(loop: Loop) -> Any:
    """PPO: several steps on one batch, with a clipped ratio to the old outputs and an entropy term."""
    model, optimizer = _trained(loop)
    for x, _ in loop.batches(2):
        with torch.no_grad():
            old = model(x).log_softmax(-1).clone()
        for _ in range(3):
            new = model(x).log_softmax(-1)
            ratio = (new - old).exp()
            (ratio.clamp(0.8, 1.2) - ratio * new.exp() * new).mean().mul(20).backward()
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def reptile(loop: Loop) -> Any:
    """Reptile: some inner steps, then move weights half way back to their start, in fused calls."""
    model, optimizer = _trained(loop)
    for task in range(2):
        start = [p.detach().clone() for p in model.parameters()]
        loop.train(model, optimizer, steps=2, first=10 * task)
        if loop.active:
            with torch.no_grad():
                torch._foreach_lerp_(start, list(model.parameters()), 0.5)
                torch._foreach_copy_(list(model.parameters()), start)
    return loop.outcome(model)


@idiom
def fused_moving_average(loop: Loop) -> Any:
    """Keep an average with `torch._foreach_mul_` and `torch._foreach_add_` over lists of parameters."""
    model, optimizer = _trained(loop)
    average = [p.detach().clone() for p in model.parameters()]
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        torch._foreach_mul_(average, 0.5)
        torch._foreach_add_(average, [p.detach() for p in model.parameters()], alpha=0.5)
    return loop.outcome(model, average=average)


@idiom
def adam_written_by_hand(loop: Loop) -> Any:
    """Write Adam by hand over `p.grad`: `m.lerp_(p.grad, 0.1)`, `p.addcdiv_(m, v.sqrt(), value=-0.01)`."""
    model, _ = _trained(loop)
    states = [(torch.zeros_like(p), torch.ones_like(p)) for p in model.parameters()]
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        if loop.active:
            with torch.no_grad():
                for p, (m, v) in zip(model.parameters(), states, strict=True):
                    m.lerp_(p.grad, 0.5)
                    v.mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
                    p.addcdiv_(m, v.sqrt(), value=-0.5)
        model.zero_grad()
    return loop.outcome(model)


@idiom
def resumed_in_the_middle_of_a_step(loop: Loop) -> Any:
    """Save weights, states and gradients between two passes of a step, train on, restore all and finish the step."""
    model, optimizer = _trained(loop)
    loop.train(model, optimizer, steps=1)
    loop.loss(model, loop.batch(1)).backward()
    weights = [p.detach().clone() for p in model.parameters()]
    gradients = [p.grad.clone() for p in model.parameters()]
    states = copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    optimizer.zero_grad()
    loop.train(model, optimizer, steps=2, first=5)
    optimizer.load_state_dict(states)
    with torch.no_grad():
        for p, w, g in zip(model.parameters(), weights, gradients, strict=True):
            p.copy_(w)
            p.grad = g
    loop.loss(model, loop.batch(2)).backward()
    optimizer.step()
    return loop.outcome(model)


@idiom
def several_schedules_at_once(loop: Loop) -> Any:
    """Chain schedules over two groups: `LambdaLR`, `MultiplicativeLR`, `PolynomialLR` and `ConstantLR`."""
    model = loop.network()
    groups = [{"params": model.blocks.parameters()}, {"params": model.head.parameters(), "lr": 0.5}]
    model, optimizer = loop.prepare(model, torch.optim.SGD(groups, lr=0.1))
    schedules = [
        LambdaLR(optimizer, [lambda step: 1 / (1 + step), lambda step: 0.5**step]),
        MultiplicativeLR(optimizer, lambda step: 0.9),
        PolynomialLR(optimizer, total_iters=8),
        ConstantLR(optimizer, factor=0.5, total_iters=2),
    ]
    chained = ChainedScheduler(schedules, optimizer=optimizer)
    rates = []
    for batch in loop.batches(4):
        loop.step(model, optimizer, batch)
        if loop.active:
            chained.step()
        rates += [torch.tensor(float(group["lr"])) for group in optimizer.param_groups]
    return loop.outcome(model, rates=rates)


@idiom
def layers_fused_for_evaluation(loop: Loop) -> Any:
    """Fuse a layer with its batch-norm after training: `fuse_linear_bn_eval(layer, norm)`, which copies the layer."""
    model = loop.seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    model, optimizer = loop.prepare(model)
    loop.train(model, optimizer, steps=3)
    model.eval()
    fused = fuse_linear_bn_eval(model[0], model[1])
    with torch.no_grad():
        return fused(loop.batch(9)[0]).clone()


@idiom
def hook_before_the_backward_of_a_module(loop: Loop) -> Any:
    """Scale gradients in `module.register_full_backward_pre_hook`."""
    model, optimizer = _trained(loop)
    if loop.active:
        model.blocks[1].register_full_backward_pre_hook(lambda _, grads: tuple(4 * g for g in grads))
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


@idiom
def gradients_exchanged(loop: Loop) -> Any:
    """Exchange the gradients of two layers: `a.grad, b.grad = b.grad, a.grad`."""
    model, optimizer = _trained(loop)
    first = model.blocks[0].up.weight
    second = model.blocks[1].up.weight
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        if loop.active:
            first.grad, second.grad = second.grad, first.grad
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def kept_gradients_are_zeroed(loop: Loop) -> Any:
    """Keep `p.grad` in a list across `zero_grad(set_to_none=False)`: they hold zeros, then the next gradients."""
    model, optimizer = _trained(loop)
    loop.loss(model, loop.batch(0)).backward()
    kept = [p.grad for p in model.parameters()]
    optimizer.zero_grad(set_to_none=False)
    zeros = [g.clone() for g in kept]
    loop.loss(model, loop.batch(1)).backward()
    sums = [g.clone() for g in kept]
    optimizer.step()
    return loop.outcome(model, zeros=zeros, sums=sums)


@idiom
def gradients_changed_at_once(loop: Loop) -> Any:
    """Scale gradients and add decay with `torch._foreach_mul_` and `torch._foreach_add_` over lists of `p.grad`."""
    model, optimizer = _trained(loop)
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        if loop.active:
            gradients = [p.grad for p in model.parameters()]
            torch._foreach_mul_(gradients, 0.5)
            torch._foreach_add_(gradients, [p.detach() for p in model.parameters()], alpha=0.5)
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def weights_exchanged_through_a_copy(loop: Loop) -> Any:
    """Exchange the weights of two blocks with a copy between, and read both."""
    model, optimizer = _trained(loop)
    loop.train(model, optimizer, steps=1)
    first = model.blocks[0].up.weight
    second = model.blocks[1].up.weight
    if loop.active:
        kept = first.data.clone()
        first.data.copy_(second.data)
        second.data.copy_(kept)
    seen = [first.detach().clone(), second.detach().clone(), (first - second).detach().clone()]
    loop.train(model, optimizer, steps=1, first=5)
    return loop.outcome(model, seen=seen)


@idiom
def results_written_into_parameters(loop: Loop) -> Any:
    """Write results into parameters with `out=`: `torch.mul(p, 0.5, out=p)` under `torch.no_grad()`."""
    model, optimizer = _trained(loop)
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        if loop.active:
            with torch.no_grad():
                for p in model.parameters():
                    torch.mul(p, 0.5, out=p)
    return loop.outcome(model)


@idiom
def prepared_target_network(loop: Loop) -> Any:
    """Move a second prepared model towards the first, `target.lerp_(online, 0.3)`, and evaluate it."""
    model, optimizer = _trained(loop)
    target = loop.prepare_alone(loop.network(classes=4).requires_grad_(False))
    answers = []
    for batch in loop.batches(3):
        with torch.no_grad():
            answers.append(target(batch[0]).clone())
        loop.loss(model, (batch[0], answers[-1] + batch[1])).backward()
        optimizer.step()
        optimizer.zero_grad()
        if loop.active:
            with torch.no_grad():
                for slow, p in zip(target.parameters(), model.parameters(), strict=True):
                    slow.lerp_(p, 0.3)
    return loop.outcome(model, answers=answers)


@idiom
def parameters_written_in_one_call_and_read(loop: Loop) -> Any:
    """Write all parameters in one call, `torch._foreach_copy_(list(model.parameters()), values)`, and read one."""
    model, optimizer = _trained(loop)
    loop.train(model, optimizer, steps=1)
    values = [0.5 * p.detach().clone() for p in model.parameters()]
    if loop.active:
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), values)
    return loop.outcome(model, first=model.stem.weight.detach().clone())


@idiom
def weights_read_before_and_after_loading(loop: Loop) -> Any:
    """Read a weight, call `load_state_dict`, and read it again."""
    model, optimizer = _trained(loop)
    values = {name: 0.5 * value for name, value in loop.weights(model).items()}
    loop.train(model, optimizer, steps=1)
    seen = [model.head.weight.detach().clone()]
    if loop.active:
        model.load_state_dict(values)
    seen.append(model.head.weight.detach().clone())
    return loop.outcome(model, seen=seen)


@idiom
def weights_read_before_and_after_gathered(loop: Loop) -> Any:
    """Read a weight, change it under `zerostd.gathered(model, write=True)`, and read it again."""
    model, optimizer = _trained(loop)
    loop.train(model, optimizer, steps=1)
    seen = [model.head.weight.detach().clone()]
    if loop.active:
        with loop.gathered(model, write=True), torch.no_grad():
            model.head.weight.mul_(0.5)
    seen.append(model.head.weight.detach().clone())
    return loop.outcome(model, seen=seen)
