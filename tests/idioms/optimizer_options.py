"""Options of the optimizer, its groups, and which optimizer it is."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from idioms.loop import Loop, idiom


@idiom
def learning_rate_set_by_hand(loop: Loop) -> Any:
    """Set the learning rate by hand before each step, as nanoGPT does."""
    model, optimizer = loop.prepare(loop.network())
    for index, batch in enumerate(loop.batches(3)):
        if loop.active:
            for group in optimizer.param_groups:
                group["lr"] = 0.05 / (index + 1)
        loop.step(model, optimizer, batch)
    return loop.outcome(model)


@idiom
def learning_rate_set_between_backward_and_step(loop: Loop) -> Any:
    """Set the learning rate between `backward` and `step`."""
    model, optimizer = loop.prepare(loop.network())
    for index, batch in enumerate(loop.batches(3)):
        loop.loss(model, batch).backward()
        if loop.active:
            for group in optimizer.param_groups:
                group["lr"] = 0.05 / (index + 1)
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def weight_decay_and_betas_set_by_hand(loop: Loop) -> Any:
    """Change `weight_decay` and `betas` of a group between steps."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    if loop.active:
        optimizer.param_groups[0]["weight_decay"] = 20.0
        optimizer.param_groups[0]["betas"] = (0.5, 0.9)
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def no_decay_for_biases(loop: Loop) -> Any:
    """Give biases and norms a group without weight decay."""
    model = loop.network()
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": weights, "weight_decay": 5.0}, {"params": others, "weight_decay": 0.0}]
    model, optimizer = loop.prepare(model, torch.optim.AdamW(groups, lr=0.01))
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


@idiom
def layerwise_learning_rates(loop: Loop) -> Any:
    """Give each parameter a group and a learning rate of its own (layer-wise decay)."""
    model = loop.network()
    groups = [{"params": [p], "lr": 0.02 * 0.9**index} for index, p in enumerate(model.parameters())]
    model, optimizer = loop.prepare(model, torch.optim.AdamW(groups))
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


@idiom
def group_frozen_by_learning_rate(loop: Loop) -> Any:
    """Freeze a group for some steps with `lr = 0`, and train it again."""
    model = loop.network()
    rest = [p for name, p in model.named_parameters() if not name.startswith("head")]
    groups = [{"params": rest}, {"params": list(model.head.parameters())}]
    model, optimizer = loop.prepare(model, torch.optim.AdamW(groups, lr=0.02))
    if loop.active:
        optimizer.param_groups[1]["lr"] = 0.0
    loop.train(model, optimizer)
    optimizer.param_groups[1]["lr"] = 0.02
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def parameter_taken_out_of_its_group(loop: Loop) -> Any:
    """Stop training a parameter by taking it out of `param_groups`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, loop.adamw(model, lr=0.03))
    loop.train(model, optimizer)
    if loop.active:
        kept = [p for p in optimizer.param_groups[0]["params"] if p is not model.head.weight]
        optimizer.param_groups[0]["params"] = kept
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def group_split_in_two(loop: Loop) -> Any:
    """Split a group in the middle of training, to give some parameters another learning rate."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    if loop.active:
        group = optimizer.param_groups[0]
        head = {**group, "params": group["params"][-2:], "lr": 0.2}
        group["params"] = group["params"][:-2]
        optimizer.param_groups.append(head)
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def groups_replaced(loop: Loop) -> Any:
    """Replace all groups: `optimizer.param_groups = [...]`."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    if loop.active:
        optimizer.param_groups = [{**group, "lr": 0.2} for group in optimizer.param_groups]
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def group_removed(loop: Loop) -> Any:
    """Stop training a group: `del optimizer.param_groups[1]`."""
    model = loop.network()
    rest = [p for name, p in model.named_parameters() if not name.startswith("head")]
    groups = [{"params": rest}, {"params": list(model.head.parameters())}]
    model, optimizer = loop.prepare(model, torch.optim.AdamW(groups, lr=0.03))
    loop.train(model, optimizer)
    if loop.active:
        del optimizer.param_groups[1]
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def group_added_when_a_layer_is_thawed(loop: Loop) -> Any:
    """Unfreeze a layer in the middle of training and add it with `add_param_group`."""
    model = loop.network()
    model.stem.requires_grad_(False)
    model, optimizer = loop.prepare(model)
    loop.train(model, optimizer)
    if loop.active:
        model.stem.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.stem.parameters()), "lr": 0.05})
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def group_added_for_parameters_outside(loop: Loop) -> Any:
    """Add parameters that belong to no prepared model with `add_param_group`, such as a learned loss weight."""
    model, optimizer = loop.prepare(loop.network())
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer.add_param_group({"params": [weight], "lr": 0.1})
    for batch in loop.batches(3):
        (loop.loss(model, batch) * weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model, weight=weight)


@idiom
def groups_with_keys_of_their_own(loop: Loop) -> Any:
    """Keep keys of one's own in groups (`lr_scale`), and set learning rates from them, as timm does."""
    model = loop.network()
    groups = [{"params": [p], "lr_scale": 1.0 / (1 + index)} for index, p in enumerate(model.parameters())]
    model, optimizer = loop.prepare(model, torch.optim.AdamW(groups, lr=0.01))
    for batch in loop.batches(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * group["lr_scale"]
        loop.step(model, optimizer, batch)
    return loop.outcome(model, scales=[group["lr_scale"] for group in optimizer.param_groups])


def _train_with(loop: Loop, make: Any, steps: int = 3) -> Any:
    model = loop.network()
    model, optimizer = loop.prepare(model, make(model.parameters()))
    loop.train(model, optimizer, steps=steps)
    return loop.outcome(model)


@idiom
def sgd_with_nesterov_momentum(loop: Loop) -> Any:
    """Train with `SGD(momentum=0.9, nesterov=True, weight_decay=...)`."""
    return _train_with(loop, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01))


@idiom
def adam_with_amsgrad(loop: Loop) -> Any:
    """Train with `Adam(amsgrad=True)`."""
    return _train_with(loop, lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True))


@idiom
def fused_adamw(loop: Loop) -> Any:
    """Train with `AdamW(fused=True)`."""
    return _train_with(loop, lambda p: torch.optim.AdamW(p, lr=0.01, fused=True))


@idiom
def foreach_adamw(loop: Loop) -> Any:
    """Train with `AdamW(foreach=True)`."""
    return _train_with(loop, lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True))


@idiom
def maximizing(loop: Loop) -> Any:
    """Train with `maximize=True`."""
    return _train_with(loop, lambda p: torch.optim.SGD(p, lr=0.02, maximize=True))


@idiom(exact=False)  # off the device options are numbers of 64 bits
def learning_rate_as_a_tensor(loop: Loop) -> Any:
    """Pass the learning rate as a tensor and change it in place, as compiled optimizers need it."""
    model = loop.network()
    rate = torch.tensor(0.01)
    model, optimizer = loop.prepare(model, torch.optim.AdamW(model.parameters(), lr=rate, foreach=False))
    loop.train(model, optimizer)
    if loop.active:
        optimizer.param_groups[0]["lr"].fill_(0.2)
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def other_adaptive_optimizers(loop: Loop) -> Any:
    """Train with RMSprop, Adagrad, NAdam, RAdam, Adamax and Adadelta."""
    classes = [torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam]
    classes += [torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adadelta]
    return [_train_with(loop, lambda p, make=make: make(p, lr=0.003), steps=2) for make in classes]


@idiom
def lbfgs_with_a_closure(loop: Loop) -> Any:
    """Train with LBFGS, whose step calls the closure many times and looks at all parameters."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loop.loss(model, loop.batch(0))
        loss.backward()
        return loss

    optimizer.step(closure)
    return loop.outcome(model)


@idiom
def adafactor(loop: Loop) -> Any:
    """Train with Adafactor, whose states are rows and columns of a weight."""
    return _train_with(loop, lambda p: torch.optim.Adafactor(p, lr=0.05))


@idiom
def step_with_a_closure(loop: Loop) -> Any:
    """Pass a closure to `optimizer.step(closure)`."""
    model, optimizer = loop.prepare(loop.network())
    losses = []
    for batch in loop.batches(3):

        def closure(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loop.loss(model, batch)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).detach())
    return loop.outcome(model, losses=losses)


class Lion(torch.optim.Optimizer):
    """An optimizer of the user's own, element by element."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                p.add_(torch.sign(0.9 * state["momentum"] + 0.1 * p.grad), alpha=-group["lr"])
                state["momentum"].lerp_(p.grad, 0.01)


@idiom
def optimizer_of_ones_own(loop: Loop) -> Any:
    """Train with an optimizer class of one's own (Lion)."""
    return _train_with(loop, lambda p: Lion(p, lr=0.01), steps=2)


@idiom
def optimizer_from_before_prepare(loop: Loop) -> Any:
    """Continue with the optimizer that was passed to `prepare`, instead of the one it returned."""
    model = loop.network()
    original = loop.adamw(model)
    model, _ = loop.prepare(model, original)
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        original.step()
        original.zero_grad()
    return loop.outcome(model)


@idiom
def optimizer_made_after_prepare(loop: Loop) -> Any:
    """Prepare the model alone, and make the optimizer afterwards."""
    model = loop.prepare_alone(loop.network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


@idiom
def optimizer_made_anew(loop: Loop) -> Any:
    """Make a new optimizer on the prepared model in the middle of training."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    if loop.active:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def two_optimizers_for_one_model(loop: Loop) -> Any:
    """Train two parts of one model with two optimizers; `prepare` gets the first."""
    model = loop.network()
    rest = [p for name, p in model.named_parameters() if not name.startswith("head")]
    second = torch.optim.SGD(model.head.parameters(), lr=0.1)
    model, first = loop.prepare(model, torch.optim.AdamW(rest, lr=0.01))
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def second_optimizer_outside_the_model(loop: Loop) -> Any:
    """Train something outside the model, such as a loss weight, with an optimizer of its own."""
    model, optimizer = loop.prepare(loop.network())
    weight = torch.nn.Parameter(torch.ones(()))
    other = torch.optim.SGD([weight], lr=0.1)
    for batch in loop.batches(3):
        (loop.loss(model, batch) * weight).backward()
        optimizer.step()
        other.step()
        optimizer.zero_grad()
        other.zero_grad()
    return loop.outcome(model, weight=weight)


@idiom
def generator_and_discriminator(loop: Loop) -> Any:
    """Train a GAN: two models, two optimizers, two calls of `prepare`."""
    generator, first = loop.prepare(loop.network(classes=6))
    critic, second = loop.prepare(loop.network(classes=1))
    for x, _ in loop.batches(2):
        F.softplus(critic(generator(x).detach()) - critic(x)).mean().backward()
        second.step()
        second.zero_grad()
        F.softplus(-critic(generator(x))).mean().backward()
        first.step()
        first.zero_grad()
        second.zero_grad()
    return [loop.outcome(generator), loop.outcome(critic)]


@idiom
def frozen_discriminator_while_the_generator_trains(loop: Loop) -> Any:
    """Freeze the critic with `requires_grad_(False)` while the generator trains through it."""
    generator, first = loop.prepare(loop.network(classes=6))
    critic, second = loop.prepare(loop.network(classes=1))
    for x, _ in loop.batches(2):
        critic.requires_grad_(True)
        F.softplus(critic(generator(x).detach()) - critic(x)).mean().backward()
        second.step()
        second.zero_grad()
        critic.requires_grad_(False)
        F.softplus(-critic(generator(x))).mean().backward()
        first.step()
        first.zero_grad()
    return [loop.outcome(generator), loop.outcome(critic)]


@idiom
def step_hooks(loop: Loop) -> Any:
    """Count steps in hooks registered with `register_step_pre_hook` and `register_step_post_hook`."""
    model = loop.network()
    original = loop.adamw(model)
    calls: list[str] = []
    original.register_step_pre_hook(lambda *_: calls.append("before"))
    model, optimizer = loop.prepare(model, original)
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    loop.train(model, optimizer)
    return loop.outcome(model, calls=calls)


@idiom
def step_without_gradients(loop: Loop) -> Any:
    """Step without gradients: nothing happens."""
    model, optimizer = loop.prepare(loop.network())
    optimizer.step()
    loop.train(model, optimizer)
    optimizer.step()
    return loop.outcome(model)


@idiom
def gradients_zeroed_in_place(loop: Loop) -> Any:
    """Zero gradients in place with `zero_grad(set_to_none=False)`, so that momentum continues for unused layers."""
    model, optimizer = loop.prepare(loop.network())
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    return loop.outcome(model)


@idiom
def gradients_zeroed_by_the_model(loop: Loop) -> Any:
    """Zero gradients with `model.zero_grad()`."""
    model, optimizer = loop.prepare(loop.network())
    for batch in loop.batches(3):
        model.zero_grad()
        loop.loss(model, batch).backward()
        optimizer.step()
    return loop.outcome(model)


@idiom
def parameters_that_share_memory(loop: Loop) -> Any:
    """Train two parameters, of an early and a late layer, that are views of one base tensor."""
    model = loop.network()
    base = torch.linspace(-0.5, 0.5, 32 * 8).view(32, 8)
    model.blocks[0].up.weight = torch.nn.Parameter(base[:16])
    model.blocks[1].up.weight = torch.nn.Parameter(base[16:])
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


@idiom
def parameters_that_overlap(loop: Loop) -> Any:
    """Train two parameters whose views of one base tensor overlap."""
    model = loop.network()
    base = torch.linspace(-1, 1, 6 * 8).view(6, 8)
    model.head.weight = torch.nn.Parameter(base[:4])
    model.extra = torch.nn.Parameter(base[2:])
    model.head.register_forward_hook(lambda module, args, output: output + args[0] @ model.extra.T)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = loop.prepare(model, optimizer)
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


@idiom
def strided_parameters_that_overlap(loop: Loop) -> Any:
    """Train a parameter that is a strided view, and another that is the view's last row."""
    model = loop.network()
    base = torch.linspace(-1, 1, 4 * 16).view(4, 16)
    model.head.weight = torch.nn.Parameter(base[:, :8])
    model.extra = torch.nn.Parameter(base[3:, :8])
    model.head.register_forward_hook(lambda module, args, output: output + args[0] @ model.extra.T)
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)
