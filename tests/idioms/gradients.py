"""Gradients, read and changed between backward and step, and hooks on the way."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from idioms.loop import Loop, idiom


@idiom(exact=False)
def log_gradient_norms(loop: Loop) -> Any:
    """Log the norm of each gradient: `p.grad.norm()`."""
    model, optimizer = loop.prepare(loop.network())
    norms = []
    for batch in loop.batches(2):
        loop.loss(model, batch).backward()
        norms.append([p.grad.norm() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return norms


@idiom(exact=False)
def total_norm_by_hand(loop: Loop) -> Any:
    """Compute the global norm by hand: `torch.stack([p.grad.norm() for ...]).norm()`."""
    model, optimizer = loop.prepare(loop.network())
    loop.loss(model, loop.batch(0)).backward()
    total = torch.stack([p.grad.detach().norm(2) for p in model.parameters()]).norm(2)
    optimizer.step()
    return loop.outcome(model, total=total)


@idiom
def read_gradient_values(loop: Loop) -> Any:
    """Read the values of gradients: `p.grad.clone()`."""
    model, optimizer = loop.prepare(loop.network())
    loop.loss(model, loop.batch(0)).backward()
    values = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    return loop.outcome(model, values=values)


@idiom(exact=False)
def log_gradient_statistics(loop: Loop) -> Any:
    """Log statistics of gradients: `p.grad.abs().mean()` and `p.grad.max()`."""
    model, optimizer = loop.prepare(loop.network())
    loop.loss(model, loop.batch(0)).backward()
    statistics = [(p.grad.abs().mean(), p.grad.max()) for p in model.parameters()]
    optimizer.step()
    return loop.outcome(model, statistics=statistics)


@idiom
def check_gradients_are_finite(loop: Loop) -> Any:
    """Skip a step whose gradients are not finite: `torch.isfinite(p.grad).all()`."""
    model, optimizer = loop.prepare(loop.network())
    for index, (x, y) in enumerate(loop.batches(3)):
        loss = F.mse_loss(model(x * (float("inf") if index == 1 else 1.0)), y)
        loss.backward()
        if all(torch.isfinite(p.grad).all() for p in model.parameters()):
            optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def which_gradients_are_there(loop: Loop) -> Any:
    """Ask which parameters have a gradient, `p.grad is not None`: before and after backward, and after `zero_grad`."""
    model, optimizer = loop.prepare(loop.network())
    seen = [[p.grad is None for p in model.parameters()]]
    loop.loss(model, loop.batch(0)).backward()
    seen.append([p.grad is None for p in model.parameters()])
    optimizer.step()
    optimizer.zero_grad()
    seen.append([p.grad is None for p in model.parameters()])
    return seen


@idiom
def clamp_gradients(loop: Loop) -> Any:
    """Clamp gradients in place: `p.grad.clamp_(-0.01, 0.01)`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        if loop.active:
            for p in model.parameters():
                p.grad.clamp_(-0.01, 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def scale_gradients(loop: Loop) -> Any:
    """Scale gradients in place: `p.grad.mul_(0.1)`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        if loop.active:
            for p in model.parameters():
                p.grad.mul_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def divide_gradients(loop: Loop) -> Any:
    """Divide gradients in place, by the number of tokens: `p.grad /= 8`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        if loop.active:
            for p in model.parameters():
                p.grad /= 8
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def add_noise_to_gradients(loop: Loop) -> Any:
    """Add noise to gradients: `p.grad.add_(noise)`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        if loop.active:
            for p in model.parameters():
                p.grad.add_(torch.randn(p.shape, dtype=p.dtype))
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def replace_infinities_in_gradients(loop: Loop) -> Any:
    """Replace NaN and infinities in gradients: `p.grad.nan_to_num_(0, 0, 0)`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))
    for x, y in loop.batches(2):
        (F.mse_loss(model(x), y) * float("inf")).backward()
        if loop.active:
            for p in model.parameters():
                p.grad.nan_to_num_(nan=0.0, posinf=0.1, neginf=-0.1)
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def take_signs_of_gradients(loop: Loop) -> Any:
    """Step by the signs of gradients: `p.grad.sign_()`, as signSGD does."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02))
    for batch in loop.batches(2):
        loop.loss(model, batch).backward()
        if loop.active:
            for p in model.parameters():
                p.grad.sign_()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom(exact=False)
def center_gradients(loop: Loop) -> Any:
    """Subtract the mean of each row from the gradients of weights (gradient centralization)."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        if loop.active:
            for p in model.parameters():
                if p.dim() > 1:
                    p.grad.sub_(p.grad.mean(dim=1, keepdim=True))
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def drop_some_gradients(loop: Loop) -> Any:
    """Drop the gradients of a block, so that the step does not change it: `p.grad = None`."""
    model, optimizer = loop.prepare(loop.network())
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        if loop.active:
            for p in model.blocks[1].parameters():
                p.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def zero_some_gradients(loop: Loop) -> Any:
    """Zero the gradients of a layer in place: `p.grad.zero_()`."""
    model, optimizer = loop.prepare(loop.network())
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        if loop.active:
            for p in model.head.parameters():
                p.grad.zero_()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def zero_rows_of_a_gradient(loop: Loop) -> Any:
    """Zero some rows of a gradient, so that old tokens do not change: `weight.grad[:6] = 0`."""
    model = loop.language(tied=False)
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=4.0))
    for index in range(3):
        tokens = loop.tokens(index)
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        if loop.active:
            model.tokens.weight.grad[:6] = 0
        optimizer.step()
        optimizer.zero_grad()
    return loop.weights(model)


@idiom
def assign_gradients(loop: Loop) -> Any:
    """Assign gradients that were made by hand: `p.grad = estimate`, as evolution strategies do."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        if loop.active:
            for p in model.parameters():
                p.grad = torch.randn(p.shape, dtype=p.dtype)
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def keep_gradients_and_put_them_back(loop: Loop) -> Any:
    """Keep gradients in a list, drop them, and put them back before the step."""
    model, optimizer = loop.prepare(loop.network())
    for batch in loop.batches(2):
        loop.loss(model, batch).backward()
        kept = [p.grad for p in model.parameters()]
        optimizer.zero_grad()
        for p, gradient in zip(model.parameters(), kept, strict=True):
            p.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom(exact=False)
def project_conflicting_gradients(loop: Loop) -> Any:
    """Project the gradients of two losses on each other before adding them (gradient surgery)."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))
    for x, y in loop.batches(2):
        F.mse_loss(model(x), y).backward()
        first = [p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad()
        F.mse_loss(model(-x), y).backward()
        for p, g in zip(model.parameters(), first, strict=True):
            overlap = (p.grad * g).sum().clamp(max=0)
            p.grad.add_(g - overlap * g / g.square().sum())
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom(exact=False)
def sharpness_aware_minimization(loop: Loop) -> Any:
    """SAM: climb to the worst weights near by, take the gradient there, come back and step."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        if loop.active:
            with torch.no_grad():
                norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
                climbs = [p.grad * (0.5 / norm) for p in model.parameters()]
                for p, climb in zip(model.parameters(), climbs, strict=True):
                    p.add_(climb)
            optimizer.zero_grad()
            loop.loss(model, batch).backward()
            with torch.no_grad():
                for p, climb in zip(model.parameters(), climbs, strict=True):
                    p.sub_(climb)
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom(exact=False)
def average_gradients_over_ranks_by_hand(loop: Loop) -> Any:
    """Average gradients over ranks by hand (`dist.all_reduce(p.grad)`), as before DDP."""
    model, optimizer = loop.prepare(loop.network())
    for batch in loop.batches(2):
        loop.loss(model, batch).backward()
        if dist.is_initialized() and not loop.is_plain:
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def tensor_hook_registered_before(loop: Loop) -> Any:
    """Scale the gradient of a parameter in a tensor hook registered before `prepare`."""
    model = loop.network()
    if loop.active:
        model.head.weight.register_hook(lambda gradient: gradient * 0.1)
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))
    loop.train(model, optimizer)
    return loop.outcome(model)


@idiom
def tensor_hook_registered_after(loop: Loop) -> Any:
    """Scale the gradient of a parameter in a tensor hook registered after `prepare`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))
    if loop.active:
        model.head.weight.register_hook(lambda gradient: gradient * 0.1)
    loop.train(model, optimizer)
    return loop.outcome(model)


def shrink(p: nn.Parameter) -> None:
    """Change the gradient that has just been accumulated."""
    p.grad.mul_(0.1)


@idiom
def post_accumulate_hook_registered_before(loop: Loop) -> Any:
    """Scale `p.grad` in a post-accumulate-grad hook registered before `prepare`."""
    model = loop.network()
    if loop.active:
        for p in model.head.parameters():
            p.register_post_accumulate_grad_hook(shrink)
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))
    loop.train(model, optimizer)
    return loop.outcome(model)


@idiom
def post_accumulate_hook_registered_after(loop: Loop) -> Any:
    """Scale `p.grad` in a post-accumulate-grad hook registered after `prepare`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))
    if loop.active:
        for p in model.head.parameters():
            p.register_post_accumulate_grad_hook(shrink)
    loop.train(model, optimizer)
    return loop.outcome(model)


@idiom
def log_gradients_in_a_post_accumulate_hook(loop: Loop) -> Any:
    """Record which gradients exist in a post-accumulate-grad hook registered after `prepare`."""
    model, optimizer = loop.prepare(loop.network())
    there: dict[str, bool] = {}
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: there.update({name: p.grad is not None}))
    loop.train(model, optimizer)
    return loop.outcome(model, there=sorted(there.items()))


@idiom
def hook_on_an_activation(loop: Loop) -> Any:
    """Change the gradient of an activation with `h.register_hook` in a forward hook."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))

    def attach(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * 0.1)

    if loop.active:
        model.blocks[0].register_forward_hook(attach)
    loop.train(model, optimizer)
    return loop.outcome(model)


@idiom
def retain_the_gradient_of_an_activation(loop: Loop) -> Any:
    """Read the gradient of an activation after `h.retain_grad()`, as saliency maps do."""
    model, _ = loop.prepare(loop.network())
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    handle = model.norm.register_forward_hook(keep)
    loop.loss(model, loop.batch(0)).backward()
    handle.remove()
    return [kept[0].grad]


@idiom
def full_backward_hook(loop: Loop) -> Any:
    """Change the gradient of a module's input in a full backward hook."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))
    if loop.active:
        model.head.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.1,))
    loop.train(model, optimizer)
    return loop.outcome(model)


@idiom
def step_twice_on_one_gradient(loop: Loop) -> Any:
    """Step twice on the same gradient."""
    model, optimizer = loop.prepare(loop.network())
    for batch in loop.batches(2):
        loop.loss(model, batch).backward()
        optimizer.step()
        if loop.active:
            optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)
