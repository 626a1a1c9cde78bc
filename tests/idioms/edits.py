"""Values of parameters that the loop changes by itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idioms.loop import Loop, idiom
from idioms.networks import Block, Network


@idiom
def clamp_data_after_each_step(loop: Loop) -> Any:
    """Clamp every parameter after each step with `p.data.clamp_()`, as a WGAN's critic does."""
    model, optimizer = loop.prepare(loop.network())
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        if loop.active:
            for p in model.parameters():
                p.data.clamp_(-0.1, 0.1)
    return loop.outcome(model)


@idiom
def clamp_under_no_grad(loop: Loop) -> Any:
    """Clamp every parameter under `torch.no_grad()`."""
    model, optimizer = loop.prepare(loop.network())
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        if loop.active:
            with torch.no_grad():
                for p in model.parameters():
                    p.clamp_(-0.1, 0.1)
    return loop.outcome(model)


@idiom
def decay_weights_by_hand(loop: Loop) -> Any:
    """Decay weights by hand: `p.mul_(0.9)` under `torch.no_grad()`."""
    model, optimizer = loop.prepare(loop.network())
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        if loop.active:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.9)
    return loop.outcome(model)


@idiom
def decay_all_weights_at_once(loop: Loop) -> Any:
    """Decay all weights with one call: `torch._foreach_mul_(list(model.parameters()), 0.9)`."""
    model, optimizer = loop.prepare(loop.network())
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        if loop.active:
            with torch.no_grad():
                torch._foreach_mul_(list(model.parameters()), 0.9)
    return loop.outcome(model)


@idiom
def add_noise_to_weights(loop: Loop) -> Any:
    """Add noise to weights after each step, as SGLD does."""
    model, optimizer = loop.prepare(loop.network())
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        if loop.active:
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(torch.randn(p.shape), alpha=0.1)
    return loop.outcome(model)


@idiom
def initialize_a_layer_again(loop: Loop) -> Any:
    """Initialize a layer again in the middle of training with `nn.init`."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    if loop.active:
        nn.init.xavier_uniform_(model.head.weight)
        nn.init.zeros_(model.head.bias)
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def reset_parameters_of_a_layer(loop: Loop) -> Any:
    """Reset a layer with its own `reset_parameters()`."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    if loop.active:
        model.blocks[1].up.reset_parameters()
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def initialize_with_apply(loop: Loop) -> Any:
    """Initialize the prepared model with `model.apply(function)`."""
    model, optimizer = loop.prepare(loop.network())

    def initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.5)
            nn.init.constant_(module.bias, 0.3)

    if loop.active:
        model.apply(initialize)
    loop.train(model, optimizer)
    return loop.outcome(model)


@idiom
def clamp_a_temperature(loop: Loop) -> Any:
    """Clamp CLIP's `logit_scale` after each step: `model.logit_scale.clamp_(0, 2)`."""
    model = loop.clip()
    model, optimizer = loop.prepare(model, loop.adamw(model, lr=0.1))
    for x, _ in loop.batches(3):
        F.cross_entropy(model(x, x.flip(1)), torch.arange(len(x))).backward()
        optimizer.step()
        optimizer.zero_grad()
        if loop.active:
            with torch.no_grad():
                model.logit_scale.clamp_(0, 2)
    x, _ = loop.batch(9)
    return {"weights": loop.weights(model), "answer": model(x, x)}


@idiom
def copy_values_into_a_parameter(loop: Loop) -> Any:
    """Copy other values into a parameter: `p.copy_(values)` under `torch.no_grad()`."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    if loop.active:
        with torch.no_grad():
            model.blocks[0].up.weight.copy_(torch.randn(16, 8))
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def assign_other_data(loop: Loop) -> Any:
    """Give a parameter another tensor: `p.data = values`."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    if loop.active:
        model.blocks[0].up.weight.data = torch.randn(16, 8)
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def assign_a_new_parameter(loop: Loop) -> Any:
    """Replace a parameter of a module: `layer.bias = nn.Parameter(values)`; the optimizer does not know it."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    if loop.active:
        model.head.bias = nn.Parameter(torch.ones(4))
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def set_rows_by_index(loop: Loop) -> Any:
    """Set some rows of a weight: `weight[:2] = 0` under `torch.no_grad()`."""
    model, optimizer = loop.prepare(loop.network())
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        if loop.active:
            with torch.no_grad():
                model.head.weight[:2] = 0
    return loop.outcome(model)


@idiom
def set_elements_by_mask(loop: Loop) -> Any:
    """Set the elements of a mask to zero after each step, as magnitude pruning by hand does."""
    model, optimizer = loop.prepare(loop.network())
    mask = torch.arange(16 * 8).view(16, 8) % 3 == 0
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        if loop.active:
            model.blocks[0].up.weight.data[mask] = 0
    return loop.outcome(model)


@idiom
def normalize_rows_after_each_step(loop: Loop) -> Any:
    """Normalize the rows of a weight after each step, which reads and writes it."""
    model, optimizer = loop.prepare(loop.network())
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        if loop.active:
            with torch.no_grad():
                model.head.weight.div_(model.head.weight.norm(dim=1, keepdim=True))
    return loop.outcome(model)


@idiom
def pull_towards_the_start(loop: Loop) -> Any:
    """Move weights half way back to their first values: `p.lerp_(start, 0.5)`."""
    model = loop.network()
    start = [p.detach().clone() for p in model.parameters()]
    model, optimizer = loop.prepare(model, loop.adamw(model, lr=0.1))
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        if loop.active:
            with torch.no_grad():
                for p, before in zip(model.parameters(), start, strict=True):
                    p.lerp_(before, 0.5)
    return loop.outcome(model)


@idiom
def edit_through_a_kept_list(loop: Loop) -> Any:
    """Change parameters through a list that was made before `prepare`."""
    model = loop.network()
    kept = list(model.parameters())
    model, optimizer = loop.prepare(model)
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        if loop.active:
            with torch.no_grad():
                for p in kept:
                    p.mul_(0.9)
    return loop.outcome(model)


@idiom
def edit_before_the_first_step(loop: Loop) -> Any:
    """Change parameters after `prepare` and before the first forward."""
    model, optimizer = loop.prepare(loop.network())
    if loop.active:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
    loop.train(model, optimizer)
    return loop.outcome(model)


@idiom
def edit_between_backward_and_step(loop: Loop) -> Any:
    """Change parameters between `backward` and `step`."""
    model, optimizer = loop.prepare(loop.network())
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        if loop.active:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.9)
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def embedding_with_max_norm(loop: Loop) -> Any:
    """Train `nn.Embedding(max_norm=)`, which renormalizes the rows it looks up inside forward."""
    model, optimizer = loop.prepare(loop.language(tied=False, max_norm=1.0 if loop.active else None))
    for index in range(3):
        tokens = loop.tokens(index)
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"answer": model(loop.tokens(9)), "weights": loop.weights(model)}


class Clamping(Block):
    """A block that clamps its own weight whenever it runs."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@idiom
def edit_inside_forward(loop: Loop) -> Any:
    """Change a weight inside the forward of its module, under `torch.no_grad()`."""

    def build() -> Network:
        network = Network()
        network.blocks[1] = Clamping() if loop.active else Block()
        return network

    model, optimizer = loop.prepare(loop.seeded(build))
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


@idiom(exact=False)  # recomputing runs the hook again, on what it has normalized
def edit_in_a_forward_pre_hook(loop: Loop) -> Any:
    """Change a weight in a forward pre-hook of its module."""
    model, optimizer = loop.prepare(loop.network())

    def normalize(module: nn.Linear, args: Any) -> None:
        with torch.no_grad():
            module.weight.div_(module.weight.norm())

    if loop.active:
        model.blocks[0].up.register_forward_pre_hook(normalize)
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


@idiom
def edit_while_gathered(loop: Loop) -> Any:
    """Change parameters under `zerostd.gathered(model, write=True)`, as refusals advise."""
    model, optimizer = loop.prepare(loop.network())
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        if loop.active:
            with loop.gathered(model, write=True), torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.9)
    return loop.outcome(model)


@idiom
def edit_a_buffer(loop: Loop) -> Any:
    """Change a buffer in place between steps."""
    model = loop.convolutional()
    model, optimizer = loop.prepare(model)
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        if loop.active:
            model.blocks[0][1].running_mean.fill_(2.0)
    return loop.outcome(model)
