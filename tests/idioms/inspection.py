"""Looking at parameters: counts, norms, histograms, prints."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from idioms.loop import Loop, idiom


def _trained(loop: Loop) -> Any:
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    return model


@idiom
def count_parameters(loop: Loop) -> Any:
    """Count parameters: `sum(p.numel() for p in model.parameters())`."""
    model = _trained(loop)
    return [sum(p.numel() for p in model.parameters()), sum(p.numel() for p in model.parameters() if p.requires_grad)]


@idiom
def names_and_shapes(loop: Loop) -> Any:
    """List names, shapes and devices of parameters."""
    model = _trained(loop)
    return [f"{name} {tuple(p.shape)} {p.device} {p.is_leaf}" for name, p in model.named_parameters()]


@idiom
def log_weight_norms(loop: Loop) -> Any:
    """Log the norm of each parameter: `p.norm()`."""
    return [p.detach().norm() for p in _trained(loop).parameters()]


@idiom
def log_a_single_value(loop: Loop) -> Any:
    """Log a single value of a parameter: `weight[0, 0].item()`."""
    return _trained(loop).head.weight[0, 0].item()


@idiom
def log_histograms(loop: Loop) -> Any:
    """Log histograms of parameters: `torch.histc(p)`."""
    return [torch.histc(p.detach().float(), bins=3, min=-2, max=2) for p in _trained(loop).parameters()]


@idiom
def weights_as_numpy(loop: Loop) -> Any:
    """Read weights as NumPy arrays: `p.detach().cpu().numpy()`."""
    return [torch.from_numpy(p.detach().cpu().float().numpy().copy()) for p in _trained(loop).parameters()]


@idiom
def weights_as_lists(loop: Loop) -> Any:
    """Read weights as lists: `p.tolist()`."""
    return [torch.tensor(p.tolist()) for p in _trained(loop).parameters()]


@idiom
def print_a_parameter(loop: Loop) -> Any:
    """Print a parameter; the output has no NaN."""
    return "nan" in str(_trained(loop).head.weight)


@idiom
def print_the_model(loop: Loop) -> Any:
    """Print the model and the optimizer."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    return [str(model), "AdamW" in str(optimizer)]


@idiom
def parameters_as_one_vector(loop: Loop) -> Any:
    """Read all parameters as one vector: `parameters_to_vector`."""
    return parameters_to_vector(_trained(loop).parameters())


@idiom
def one_vector_as_parameters(loop: Loop) -> Any:
    """Write all parameters from one vector: `vector_to_parameters`."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    if loop.active:
        vector_to_parameters(torch.linspace(-1, 1, sum(p.numel() for p in model.parameters())), model.parameters())
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def weights_compared_with_those_before(loop: Loop) -> Any:
    """Measure the distance of each parameter from an earlier clone."""
    model, optimizer = loop.prepare(loop.network())
    before = [p.detach().clone() for p in model.parameters()]
    loop.train(model, optimizer)
    moved = [(p.detach() - b).float().abs().max() for p, b in zip(model.parameters(), before, strict=True)]
    return [distance > 1e-3 for distance in moved] + [distance < 0.1 for distance in moved]


@idiom
def read_after_each_step(loop: Loop) -> Any:
    """Read a parameter right after each step, while updates may still be under way."""
    model = loop.network()
    model, optimizer = loop.prepare(model, loop.adamw(model, lr=0.05))
    values = []
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        values.append(model.blocks[1].down.weight.detach().clone())
    return values


@idiom
def memory_of_the_parameters(loop: Loop) -> Any:
    """Ask whether parameters share memory: `p.data_ptr()` of tied ones."""
    model, _ = loop.prepare(loop.language())
    model(loop.tokens(0))
    return model.head.weight.data_ptr() == model.tokens.weight.data_ptr()


@idiom
def parameters_as_keys(loop: Loop) -> Any:
    """Use parameters as keys of a dict that was made before `prepare`."""
    model = loop.network()
    names = {p: name for name, p in model.named_parameters()}
    model, optimizer = loop.prepare(model)
    loop.train(model, optimizer)
    return [names[p] for p in model.parameters()] + [names[p] for p in optimizer.param_groups[0]["params"]]


@idiom
def attributes_on_parameters(loop: Loop) -> Any:
    """Keep attributes on parameters, as Megatron does: `p.sequence_parallel = True`."""
    model = loop.network()
    for index, p in enumerate(model.parameters()):
        p.number = index
    model, optimizer = loop.prepare(model)
    loop.train(model, optimizer)
    return [p.number for p in model.parameters()]
