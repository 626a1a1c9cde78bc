"""Gradients inside gradients: meta-learning, passes inside a backward, weights that are made by a network."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from idioms.loop import Loop, idiom


def _sgd(loop: Loop, model: Any = None, lr: float = 0.1, **options: Any) -> tuple[Any, Any]:
    model = loop.network() if model is None else model
    return loop.prepare(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5), **options)


def _assign(module: nn.Module, name: str, value: Tensor) -> None:
    *path, last = name.split(".")
    for part in path:
        module = getattr(module, part)
    module._parameters[last] = value


@idiom
def parameters_replaced_for_an_inner_step(loop: Loop) -> Any:
    """learn2learn: put adapted weights into `module._parameters`, call the model, and put the old ones back."""
    model, optimizer = _sgd(loop)
    for index in range(3):
        before = dict(model.named_parameters())
        loss = loop.loss(model, loop.batch(index))
        gradients = torch.autograd.grad(loss, before.values(), create_graph=True)
        for (name, p), g in zip(before.items(), gradients, strict=True):
            _assign(model, name, p - 0.1 * g)
        loss = loop.loss(model, loop.batch(index + 10))
        for name, p in before.items():
            _assign(model, name, p)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def head_adapted_in_an_inner_loop(loop: Loop) -> Any:
    """ANIL: adapt the head alone for two inner steps, and call backward through them into the whole model."""
    model, optimizer = _sgd(loop)
    for index in range(3):
        (x, y), (x2, y2) = loop.batch(index), loop.batch(index + 10)
        names = ["head.weight", "head.bias"]
        head = [model.get_parameter(name) for name in names]
        for _ in range(2):
            loss = F.mse_loss(functional_call(model, dict(zip(names, head, strict=True)), (x,)), y)
            head = [h - 0.1 * g for h, g in zip(head, torch.autograd.grad(loss, head, create_graph=True), strict=True)]
        F.mse_loss(functional_call(model, dict(zip(names, head, strict=True)), (x2,)), y2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def weights_of_losses_learned_from_gradients(loop: Loop) -> Any:
    """GradNorm: learn the weights of two losses from the norms of their gradients in a shared layer."""
    model, optimizer = _sgd(loop)
    weights = torch.ones(2, requires_grad=True)
    for x, y in loop.batches(3):
        out = model(x)
        losses = torch.stack([F.mse_loss(out[:, :2], y[:, :2]), F.l1_loss(out[:, 2:], y[:, 2:])])
        shared = model.blocks[1].down.weight
        norms = torch.stack(
            [
                torch.autograd.grad(w * loss, shared, create_graph=True)[0].norm()
                for w, loss in zip(weights, losses, strict=True)
            ]
        )
        (slope,) = torch.autograd.grad((norms - norms.mean().detach()).abs().sum(), weights, retain_graph=True)
        (weights.detach() * losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            weights -= 0.1 * slope
    return loop.outcome(model, weights=weights.detach())


@idiom
def forward_gradients(loop: Loop) -> Any:
    """Train by forward gradients: `torch.func.jvp` along a random direction, written into `p.grad`."""
    model, optimizer = _sgd(loop, lr=0.01)
    for x, y in loop.batches(3):
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        tangents = {name: torch.randn(p.shape).to(p.dtype) for name, p in parameters.items()}
        _, slope = torch.func.jvp(
            lambda p, x=x, y=y: F.mse_loss(functional_call(model, p, (x,)), y), (parameters,), (tangents,)
        )
        for name, p in model.named_parameters():
            p.grad = (slope * tangents[name]).to(p.dtype)
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def curvature_by_hutchinson(loop: Loop) -> Any:
    """Sophia: estimate the diagonal of the Hessian by `autograd.grad` of gradients times random signs."""
    model, _ = _sgd(loop)
    diagonal = [torch.zeros_like(p) for p in model.parameters()]
    for batch in loop.batches(2):
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loop.loss(model, batch), parameters, create_graph=True)
        signs = [torch.randint_like(p, 2) * 2 - 1 for p in parameters]
        again = torch.autograd.grad(gradients, parameters, signs)
        for d, s, h in zip(diagonal, signs, again, strict=True):
            d.mul_(0.5).add_(s * h)
        with torch.no_grad():
            for p, g, d in zip(parameters, gradients, diagonal, strict=True):
                p.sub_((g / d.abs().clamp_min(0.1)).clamp(-1, 1), alpha=0.05)
    return loop.outcome(model)


@idiom
def virtual_adversarial_training(loop: Loop) -> Any:
    """VAT: find the worst direction by backward into it, drop what that left in the model, and train on it."""
    model, optimizer = _sgd(loop)
    for x, y in loop.batches(3):
        with torch.no_grad():
            clean = model(x).clone()
        direction = torch.ones_like(x).requires_grad_()
        F.mse_loss(model(x + 0.1 * direction), clean).backward()
        push = F.normalize(direction.grad, dim=1).detach()
        model.zero_grad()
        (F.mse_loss(model(x), y) + F.mse_loss(model(x + push), clean)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


class Equilibrium(nn.Module):
    """A network whose features are the fixed point of a cell."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 8)
        self.cell = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.3 * self.cell(z) + x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(5):
                z = self.step(z, x)
        z = self.step(z, x)
        if torch.is_grad_enabled():
            at = z.clone().detach().requires_grad_()
            again = self.step(at, x.detach())

            def solve(grad: Tensor) -> Tensor:
                g = grad
                for _ in range(3):
                    g = torch.autograd.grad(again, at, g, retain_graph=True)[0] + grad
                return g

            z.register_hook(solve)
        return self.head(z)


@idiom
def deep_equilibrium(loop: Loop) -> Any:
    """Train a deep equilibrium model: a fixed point, and `autograd.grad` inside a hook of backward."""
    model, optimizer = _sgd(loop, loop.seeded(Equilibrium))
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


class Adjoint(torch.autograd.Function):
    """Three steps of an ODE, whose gradients are found by going back in time."""

    @staticmethod
    def forward(ctx: Any, cell: nn.Module, z: Tensor, *parameters: Tensor) -> Tensor:
        ctx.cell = cell
        with torch.no_grad():
            for _ in range(3):
                z = z + 0.3 * torch.tanh(cell(z))
        ctx.save_for_backward(z, *parameters)
        return z.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        z, *parameters = ctx.saved_tensors
        total = [torch.zeros_like(p) for p in parameters]
        for _ in range(3):
            with torch.enable_grad():
                at = z.detach().requires_grad_()
                rate = torch.tanh(ctx.cell(at))
                found = torch.autograd.grad(rate, (at, *parameters), grad)
            z = z - 0.3 * rate.detach()
            grad = grad + 0.3 * found[0]
            total = [t + 0.3 * g for t, g in zip(total, found[1:], strict=True)]
        return None, grad, *total


class Flow(nn.Module):
    """A network with an ODE in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 8)
        self.cell = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Adjoint.apply(self.cell, self.inlet(x), *self.cell.parameters()))


@idiom
def adjoint_of_an_ode(loop: Loop) -> Any:
    """Train a neural ODE by its adjoint, an `autograd.Function` that is given the parameters."""
    model, optimizer = _sgd(loop, loop.seeded(Flow))
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


class Reverse(torch.autograd.Function):
    """A block of two residual parts, which needs no saved inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: nn.Module, g: nn.Module) -> Tensor:
        a, b = x.chunk(2, -1)
        with torch.no_grad():
            a = a + f(b)
            b = b + g(a)
        ctx.f, ctx.g, ctx.y = f, g, torch.cat([a, b], -1).detach()
        return ctx.y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b = ctx.y.chunk(2, -1)
        da, db = grad.chunk(2, -1)
        with torch.enable_grad():
            a = a.detach().requires_grad_()
            ga = ctx.g(a)
            ga.backward(db)
        da = da + a.grad
        with torch.enable_grad():
            b = (b - ga).detach().requires_grad_()
            fb = ctx.f(b)
            fb.backward(da)
        return torch.cat([da, db + b.grad], -1), None, None


class Reversible(nn.Module):
    """A network of reversible blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2))
            for _ in range(2)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for f, g in self.blocks:
            x = Reverse.apply(x, f, g)
        return self.head(x)


@idiom
def reversible_blocks(loop: Loop) -> Any:
    """Train reversible blocks: an `autograd.Function` that calls `backward` inside its backward."""
    model, optimizer = _sgd(loop, loop.seeded(Reversible))
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


class Feedback(torch.autograd.Function):
    """A product whose gradient goes back through another weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, other)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, other = ctx.saved_tensors
        return grad @ other.to(grad.dtype), grad.T @ x + 0.01 * weight, None


class Aligned(nn.Module):
    """Two layers with fixed weights for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False)])
        self.register_buffer("back0", torch.randn(8, 6))
        self.register_buffer("back1", torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(Feedback.apply(x, self.blocks[0].weight, self.back0))
        return Feedback.apply(x, self.blocks[1].weight, self.back1)


@idiom
def feedback_alignment(loop: Loop) -> Any:
    """Feedback alignment: an `autograd.Function` that saves a weight of a module that is never called."""
    model, optimizer = _sgd(loop, loop.seeded(Aligned))
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


@idiom
def network_that_makes_weights(loop: Loop) -> Any:
    """A hypernetwork: the prepared model's answers are the weights of another one, called with `functional_call`."""
    inner = loop.seeded(lambda: nn.Linear(6, 4, bias=False))
    model, optimizer = _sgd(loop, loop.network(classes=24))
    for x, y in loop.batches(3):
        weight = model(x).mean(0).view(4, 6)
        F.mse_loss(functional_call(inner, {"weight": weight.to(x.dtype)}, x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.weights(model)


@idiom
def weights_times_learned_masks(loop: Loop) -> Any:
    """Train scores outside the model: `functional_call(model, {name: p * score.sigmoid()})`, edge-popup style."""
    model, optimizer = _sgd(loop)
    scores = {name: torch.zeros_like(p, requires_grad=True) for name, p in model.named_parameters()}
    own = torch.optim.SGD(scores.values(), lr=1.0)
    for x, y in loop.batches(3):
        edited = {name: p * scores[name].sigmoid() * 2 for name, p in model.named_parameters()}
        F.mse_loss(functional_call(model, edited, (x,)), y).backward()
        for one in (optimizer, own):
            one.step()
            one.zero_grad()
    return loop.outcome(model, scores=[s.detach() for s in scores.values()])


@idiom
def ensemble_by_vmap(loop: Loop) -> Any:
    """Evaluate two prepared models as one with `torch.func.stack_module_state` and `vmap`."""
    models = []
    for index in range(2):
        model, optimizer = _sgd(loop)
        loop.train(model, optimizer, steps=2, first=10 * index)
        models.append(model.eval())
    parameters, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(loop.network()).to("meta")
    x = loop.batch(9)[0].to(parameters["head.weight"].dtype)
    with torch.no_grad():
        return torch.vmap(lambda p, b: functional_call(base, (p, b), (x,)))(parameters, buffers).float()


@idiom
def actor_through_a_frozen_critic(loop: Loop) -> Any:
    """SAC: the actor's loss goes through the critic, whose parameters are frozen for that backward."""
    actor, critic = loop.network(classes=6), loop.network()
    actor, actor_optimizer = _sgd(loop, actor)
    critic, critic_optimizer = _sgd(loop, critic)
    log_alpha = torch.zeros(1, requires_grad=True)
    alpha_optimizer = torch.optim.SGD([log_alpha], lr=0.1)
    for x, y in loop.batches(3):
        action = actor(x).tanh()
        loop.loss(critic, (action.detach(), y)).backward()
        critic_optimizer.step()
        critic_optimizer.zero_grad()
        for p in critic.parameters():
            p.requires_grad = False
        (log_alpha.exp().detach() * action.square().mean() - critic(action).mean()).backward()
        actor_optimizer.step()
        actor_optimizer.zero_grad()
        for p in critic.parameters():
            p.requires_grad = True
        (-log_alpha * (action.detach().square().mean() - 0.5)).sum().backward()
        alpha_optimizer.step()
        alpha_optimizer.zero_grad()
    return [loop.outcome(actor), loop.outcome(critic), log_alpha.detach()]
