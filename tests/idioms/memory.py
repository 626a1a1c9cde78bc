"""Memory that the loop shares with parameters: views, arrays and tensors that it keeps."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from idioms.loop import Loop, idiom


@idiom
def tensor_written_after_it_was_assigned(loop: Loop) -> Any:
    """Assign `p.data = other`, and write to `other` later: in torch they share memory."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    if loop.active:
        other = torch.full_like(model.head.weight, 0.5)
        model.head.weight.data = other
        other.mul_(-1)
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def data_written_as_an_array(loop: Loop) -> Any:
    """Write to a weight through NumPy: `p.data.numpy()[...] = 0`."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    if loop.active:
        model.head.weight.data.numpy()[...] = 0.0
    return loop.outcome(model)


@idiom
def detached_weight_written_as_an_array(loop: Loop) -> Any:
    """Write to a weight through NumPy: `p.detach().numpy()[:2] *= 3`."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    if loop.active:
        model.head.weight.detach().numpy()[:2] *= 3.0
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def array_made_by_numpy(loop: Loop) -> Any:
    """Read weights with `numpy.asarray(p.detach())` after each step."""
    model, optimizer = loop.prepare(loop.network())
    values = []
    for batch in loop.batches(2):
        loop.step(model, optimizer, batch)
        values.append(torch.tensor(numpy.asarray(model.blocks[0].up.weight.detach().float())))
    return values


@idiom
def view_of_data_read_later(loop: Loop) -> Any:
    """Keep a view, `row = p.data[0]`, and read it after training: it follows the parameter."""
    model, optimizer = loop.prepare(loop.network())
    row = model.blocks[0].up.weight.data[0]
    loop.train(model, optimizer)
    return loop.outcome(model, row=row.clone())


@idiom
def view_of_data_written_later(loop: Loop) -> Any:
    """Keep a view, `row = p.data[0]`, and write to it after some steps."""
    model, optimizer = loop.prepare(loop.network())
    row = model.head.weight.data[0]
    loop.train(model, optimizer)
    if loop.active:
        row.fill_(1.0)
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def detached_weight_read_later(loop: Loop) -> Any:
    """Keep `p.detach()` and read it after training: it follows the parameter."""
    model, optimizer = loop.prepare(loop.network())
    kept = [p.detach() for p in model.parameters()]
    loop.train(model, optimizer)
    return loop.outcome(model, kept=[values.clone() for values in kept])


@idiom
def flattened_weight_written(loop: Loop) -> Any:
    """Write through `p.view(-1)` under `torch.no_grad()`."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    if loop.active:
        with torch.no_grad():
            model.head.weight.view(-1)[::3] = 1.0
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def transposed_weight_written(loop: Loop) -> Any:
    """Write through `p.t()` and `p.unbind()` under `torch.no_grad()`."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    if loop.active:
        with torch.no_grad():
            model.head.weight.t()[0] = 1.0
            model.stem.weight.unbind(0)[1].zero_()
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def memory_set_by_torch(loop: Loop) -> Any:
    """Give a parameter other memory with `p.set_(tensor)` under `torch.no_grad()`."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    if loop.active:
        with torch.no_grad():
            model.head.weight.set_(torch.full((4, 8), 0.5))
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def parameters_traded(loop: Loop) -> Any:
    """Exchange two parameters in place: `torch.utils.swap_tensors(p, q)`."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    if loop.active:
        torch.utils.swap_tensors(model.blocks[0].up.bias, model.blocks[1].up.bias)
    return loop.outcome(model)


@idiom
def gradient_vector_written_back(loop: Loop) -> Any:
    """Read gradients as one vector, change it, and copy its parts back into `p.grad`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for batch in loop.batches(2):
        loop.loss(model, batch).backward()
        if loop.active:
            vector = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).clamp(-0.02, 0.02)
            parts = vector.split([p.numel() for p in model.parameters()])
            for p, part in zip(model.parameters(), parts, strict=True):
                p.grad.copy_(part.view_as(p))
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def parameters_read_under_inference_mode(loop: Loop) -> Any:
    """Read parameters under `torch.inference_mode()`: `p.cpu()`, `p.data.clone()` and `p + 0`."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    with torch.inference_mode():
        values = [[p.cpu(), p.data.clone(), p + 0] for p in model.parameters()]
    same = [torch.equal(p, value) for p, read in zip(model.parameters(), values, strict=True) for value in read]
    loop.train(model, optimizer, first=2)
    return loop.outcome(model, same=same)


@idiom
def parameters_written_under_inference_mode(loop: Loop) -> Any:
    """Write parameters under `torch.inference_mode()`: `p.data.mul_(0.5)`."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    if loop.active:
        with torch.inference_mode():
            for p in model.parameters():
                p.data.mul_(0.5)
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)
