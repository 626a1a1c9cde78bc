"""torch.func and other functional calls of a prepared model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, jacrev, jvp, vmap

from idioms.loop import Loop, idiom


@idiom
def call_with_own_parameters(loop: Loop) -> Any:
    """Call the model with its own parameters: `functional_call(model, dict(model.named_parameters()), x)`."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    with torch.no_grad():
        return functional_call(model, dict(model.named_parameters()), (loop.batch(9)[0],))


@idiom(exact=False)
def gradient_of_a_functional_call(loop: Loop) -> Any:
    """Take `torch.func.grad` of a loss as a function of the parameters."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    x, y = loop.batch(9)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return grad(lambda p: F.mse_loss(functional_call(model, p, (x,)), y))(parameters)


@idiom(exact=False)
def gradient_at_the_inputs_with_func(loop: Loop) -> Any:
    """Take `torch.func.grad` of the model's output at its inputs."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    slope = grad(lambda x: model(x).sum())(loop.batch(9)[0])
    loop.train(model, optimizer, first=2)
    return loop.outcome(model, slope=slope)


@idiom(exact=False)
def jacobian_with_func(loop: Loop) -> Any:
    """Take `torch.func.jacrev(model)` at an input."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    return jacrev(model)(loop.batch(9)[0][:2])


@idiom(exact=False)
def directional_derivative(loop: Loop) -> Any:
    """Take `torch.func.jvp` of the model at an input."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    x, _ = loop.batch(9)
    return jvp(model, (x,), (torch.ones_like(x),))


@idiom(exact=False)
def vectorized_forward(loop: Loop) -> Any:
    """Map the model over a dimension with `torch.func.vmap`."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    with torch.no_grad():
        return vmap(model)(loop.batch(9)[0].view(2, 4, 6))


@idiom(exact=False)
def gradients_of_each_sample(loop: Loop) -> Any:
    """Take the gradients of each sample with `vmap(grad(...))`, as differential privacy needs."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(p: Any, x: Any, y: Any) -> Any:
        return F.mse_loss(functional_call(model, p, (x.unsqueeze(0),)), y.unsqueeze(0))

    x, y = loop.batch(9)
    return vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x[:3], y[:3])


@idiom(exact=False)
def learn_to_learn(loop: Loop) -> Any:
    """MAML: adapt parameters in an inner step with `functional_call`, and call backward through it."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in loop.batches(2):
        parameters = dict(model.named_parameters())
        inner = F.mse_loss(functional_call(model, parameters, (x,)), y)
        slopes = torch.autograd.grad(inner, list(parameters.values()), create_graph=True)
        adapted = {name: p - 0.1 * slope for (name, p), slope in zip(parameters.items(), slopes, strict=True)}
        F.mse_loss(functional_call(model, adapted, (-x,)), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def model_as_a_function_in_map(loop: Loop) -> Any:
    """Run the model on samples one by one and stack the answers before one backward."""
    model, optimizer = loop.prepare(loop.network())
    for x, y in loop.batches(2):
        answers = torch.stack([model(sample) for sample in x[:3]])
        F.mse_loss(answers, y[:3]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)
