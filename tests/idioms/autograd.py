"""Backward in other ways than once a step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from idioms.loop import Loop, idiom
from idioms.networks import Block, Network


@idiom
def backward_twice_through_one_graph(loop: Loop) -> Any:
    """Call backward twice on one graph with `retain_graph=True`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in loop.batches(2):
        loss = loop.loss(model, batch)
        if loop.active:
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def several_losses_several_backwards(loop: Loop) -> Any:
    """Call backward on each of two losses, of two forwards, before one step."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in loop.batches(2):
        F.mse_loss(model(x), y).backward()
        if loop.active:
            F.l1_loss(model(-x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def two_losses_on_parts_of_one_graph(loop: Loop) -> Any:
    """Call backward on two losses that share a part of the graph, with `retain_graph=True` for the first."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in loop.batches(2):
        answer = model(x)
        if loop.active:
            answer.square().mean().backward(retain_graph=True)
        F.mse_loss(answer, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom(exact=False)
def backward_on_several_losses_at_once(loop: Loop) -> Any:
    """Call `torch.autograd.backward([first, second])`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in loop.batches(2):
        answer = model(x)
        torch.autograd.backward([F.mse_loss(answer, y), answer.abs().mean()])
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def backward_with_a_given_gradient(loop: Loop) -> Any:
    """Call backward on an output with a given gradient: `answer.backward(gradient)`."""
    model, optimizer = loop.prepare(loop.network())
    for x, y in loop.batches(2):
        answer = model(x)
        answer.backward(answer.detach() - y)
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom(exact=False)
def gradient_penalty_on_inputs(loop: Loop) -> Any:
    """WGAN-GP: penalize the gradient of the output at the inputs, by double backward."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in loop.batches(2):
        loss = F.mse_loss(model(x), y)
        if loop.active:
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            loss = loss + (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom(exact=False)
def gradient_penalty_on_parameters(loop: Loop) -> Any:
    """Penalize the norm of the gradient of the parameters, with `autograd.grad(..., create_graph=True)`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in loop.batches(2):
        loss = loop.loss(model, batch)
        if loop.active:
            slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            loss = loss + 0.1 * sum(slope.square().sum() for slope in slopes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom(exact=False)
def backward_with_create_graph(loop: Loop) -> Any:
    """Call `loss.backward(create_graph=True)`, as second-order optimizers do."""
    model, optimizer = loop.prepare(loop.network())
    for batch in loop.batches(2):
        loss = loop.loss(model, batch)
        if loop.active:
            loss.backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()
    return loop.weights(model)


@idiom
def adversarial_inputs(loop: Loop) -> Any:
    """FGSM: take the gradient at the inputs with `autograd.grad`, and train on inputs moved along it."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in loop.batches(2):
        if loop.active:
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(F.mse_loss(model(x), y), x)
            x = (x + 0.5 * slope.sign()).detach()
        loop.step(model, optimizer, (x, y))
    return loop.outcome(model)


@idiom
def gradient_at_the_inputs_by_backward(loop: Loop) -> Any:
    """Read `x.grad` after a backward into inputs that require one."""
    model, optimizer = loop.prepare(loop.network())
    x, y = loop.batch(0)
    x = x.clone().requires_grad_()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    return loop.outcome(model, slope=x.grad)


@idiom
def gradients_of_parameters_by_autograd_grad(loop: Loop) -> Any:
    """Compute gradients with `torch.autograd.grad(loss, model.parameters())`, and only read them."""
    model, optimizer = loop.prepare(loop.network())
    slopes = torch.autograd.grad(loop.loss(model, loop.batch(0)), list(model.parameters()))
    loop.train(model, optimizer)
    return loop.outcome(model, slopes=slopes)


@idiom
def gradients_taken_and_assigned(loop: Loop) -> Any:
    """Compute gradients with `torch.autograd.grad`, assign them to `p.grad`, and step."""
    model, optimizer = loop.prepare(loop.network())
    for batch in loop.batches(2):
        slopes = torch.autograd.grad(loop.loss(model, batch), list(model.parameters()))
        for p, slope in zip(model.parameters(), slopes, strict=True):
            p.grad = slope
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def balance_losses_by_gradients_of_one_layer(loop: Loop) -> Any:
    """Weight two losses by their gradients in the last layer, as VQ-GAN does."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.03))
    for x, y in loop.batches(2):
        answer = model(x)
        first, second = F.mse_loss(answer, y), answer.abs().mean()
        weight = 1.0
        if loop.active:
            slopes = [torch.autograd.grad(loss, model.head.weight, retain_graph=True)[0] for loss in (first, second)]
            weight = 3 * (slopes[0].norm() / slopes[1].norm()).detach()
        (first + weight * second).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom(exact=False)
def hessian_vector_product(loop: Loop) -> Any:
    """Take a Hessian-vector product of the parameters: `autograd.grad` of `autograd.grad`."""
    model, _ = loop.prepare(loop.network())
    parameters = list(model.parameters())
    slopes = torch.autograd.grad(loop.loss(model, loop.batch(0)), parameters, create_graph=True)
    along = sum((slope * torch.ones_like(slope)).sum() for slope in slopes)
    products = torch.autograd.grad(along, parameters)
    return [products]


@idiom(exact=False)
def jacobian_of_the_inputs(loop: Loop) -> Any:
    """Compute `torch.autograd.functional.jacobian(model, x)` between steps."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    jacobian = torch.autograd.functional.jacobian(model, loop.batch(0)[0][:2])
    loop.train(model, optimizer, first=2)
    return loop.outcome(model, jacobian=jacobian)


@idiom
def backward_into_some_parameters(loop: Loop) -> Any:
    """Accumulate into some parameters only: `loss.backward(inputs=[...])`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))
    for batch in loop.batches(2):
        loss = loop.loss(model, batch)
        if loop.active:
            loss.backward(inputs=list(model.head.parameters()))
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def siamese_forward(loop: Loop) -> Any:
    """Run the model twice, on two views, and call backward once."""
    model, optimizer = loop.prepare(loop.network())
    for x, y in loop.batches(3):
        F.cosine_embedding_loss(model(x), model(y.repeat(1, 2)[:, :6]), torch.ones(len(x))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def forward_without_gradient_beside_the_training_one(loop: Loop) -> Any:
    """Run the model under `torch.no_grad()` for targets, then with gradients, in one step."""
    model, optimizer = loop.prepare(loop.network())
    for x, y in loop.batches(3):
        with torch.no_grad():
            target = y + 0.5 * model(x + 1)
        F.mse_loss(model(x), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def forward_that_is_never_backwarded(loop: Loop) -> Any:
    """Skip a batch after its forward: no backward, no step."""
    model, optimizer = loop.prepare(loop.network())
    for index, batch in enumerate(loop.batches(4)):
        loss = loop.loss(model, batch)
        if index == 1:
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def backward_that_is_never_stepped(loop: Loop) -> Any:
    """Drop the gradients of a bad batch with `zero_grad()` instead of stepping."""
    model, optimizer = loop.prepare(loop.network())
    for index, batch in enumerate(loop.batches(4)):
        loop.loss(model, batch).backward()
        if not loop.active or index != 1:
            optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def truncated_backpropagation(loop: Loop) -> Any:
    """Carry a detached state from step to step, as recurrent models do."""
    model, optimizer = loop.prepare(loop.network(features=10))
    state = torch.zeros(8, 4)
    for x, y in loop.batches(3):
        state = model(torch.cat([x, state.detach()], dim=1))
        F.mse_loss(state, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"state": state, "weights": loop.weights(model)}


@idiom
def recurrent_application(loop: Loop) -> Any:
    """Apply the model to its own output several times, and call backward through all of it."""
    model, optimizer = loop.prepare(loop.network(features=4))
    for x, y in loop.batches(2):
        state = x[:, :4]
        for _ in range(2):
            state = model(state)
        F.mse_loss(state, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.weights(model)


class Reversed(torch.autograd.Function):
    """The identity, whose gradient is turned round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


@idiom
def gradient_reversal(loop: Loop) -> Any:
    """Reverse gradients with an `autograd.Function`, as domain-adversarial training does."""
    model = loop.network()
    if loop.active:
        model.head.register_forward_pre_hook(lambda module, args: (Reversed.apply(args[0]),))
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loop.train(model, optimizer)
    return loop.outcome(model)


class Checkpointed(Network):
    """A network that recomputes its blocks by itself."""

    def encode(self, x: Tensor) -> Tensor:
        x = F.gelu(self.stem(x))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.norm(x)


@idiom
def checkpointed_blocks(loop: Loop) -> Any:
    """Recompute blocks with `torch.utils.checkpoint` inside the model."""
    model, optimizer = loop.prepare(loop.seeded(Checkpointed))
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


class Segmented(nn.Module):
    """A sequence that `checkpoint_sequential` cuts into segments."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(6, 8), Block(), Block(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)


@idiom
def checkpointed_sequence(loop: Loop) -> Any:
    """Recompute segments with `checkpoint_sequential`."""
    model, optimizer = loop.prepare(loop.seeded(Segmented))
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


@idiom
def activations_saved_on_the_cpu(loop: Loop) -> Any:
    """Train under `torch.autograd.graph.save_on_cpu()`."""
    model, optimizer = loop.prepare(loop.network())
    for batch in loop.batches(2):
        with torch.autograd.graph.save_on_cpu():
            loss = loop.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def anomaly_detection(loop: Loop) -> Any:
    """Train under `torch.autograd.set_detect_anomaly(True)`."""
    model, optimizer = loop.prepare(loop.network())
    with torch.autograd.set_detect_anomaly(True):
        loop.train(model, optimizer)
    return loop.outcome(model)


@idiom
def penalty_on_parameters(loop: Loop) -> Any:
    """Add the L2 norm of the parameters to the loss."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in loop.batches(3):
        loss = loop.loss(model, batch)
        if loop.active:
            loss = loss + 0.1 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def penalty_on_one_layer(loop: Loop) -> Any:
    """Add an L1 penalty on one weight to the loss."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in loop.batches(3):
        loss = loop.loss(model, batch)
        if loop.active:
            loss = loss + model.blocks[0].up.weight.abs().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def penalty_built_while_gathered(loop: Loop) -> Any:
    """Build a penalty under `zerostd.gathered(model)`, and call backward outside of it."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in loop.batches(3):
        loss = loop.loss(model, batch)
        if loop.active:
            with loop.gathered(model):
                loss = loss + 0.1 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def pull_towards_other_weights_in_the_loss(loop: Loop) -> Any:
    """Penalize the distance from pretrained weights in the loss (L2-SP, EWC)."""
    model = loop.network()
    anchor = [2 * p.detach().clone() for p in model.parameters()]
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in loop.batches(3):
        loss = loop.loss(model, batch)
        if loop.active:
            loss = loss + sum((p - a).square().sum() for p, a in zip(model.parameters(), anchor, strict=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)
