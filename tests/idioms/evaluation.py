"""Evaluation beside training."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from idioms.loop import Loop, idiom
from idioms.networks import Network


@idiom
def evaluate_under_no_grad(loop: Loop) -> Any:
    """Evaluate under `torch.no_grad()` after each step, with `model.eval()` and `model.train()`."""
    model, optimizer = loop.prepare(loop.convolutional())
    answers = []
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        model.eval()
        with torch.no_grad():
            answers.append(model(batch[0]).clone())
        model.train()
    return loop.outcome(model, answers=answers)


@idiom
def evaluate_under_inference_mode(loop: Loop) -> Any:
    """Evaluate under `torch.inference_mode()` after each step."""
    model, optimizer = loop.prepare(loop.network())
    answers = []
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        with torch.inference_mode():
            answers.append(model(batch[0]))
    return loop.outcome(model, answers=[answer.clone() for answer in answers])


@idiom
def evaluate_with_gradients_recorded(loop: Loop) -> Any:
    """Evaluate without `no_grad`: a graph is made and dropped."""
    model, optimizer = loop.prepare(loop.network())
    answers = []
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        answers.append(model(batch[0]).detach())
    return loop.outcome(model, answers=answers)


@idiom
def evaluate_between_backward_and_step(loop: Loop) -> Any:
    """Evaluate between `backward` and `step`: on the weights before the step."""
    model = loop.network()
    model, optimizer = loop.prepare(model, loop.adamw(model, lr=0.02))
    answers = []
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
        with torch.no_grad():
            answers.append(model(batch[0]).clone())
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model, answers=answers)


@idiom
def state_dict_between_backward_and_step(loop: Loop) -> Any:
    """Take `model.state_dict()` between `backward` and `step`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, loop.adamw(model, lr=0.02))
    states = []
    for batch in loop.batches(2):
        loop.loss(model, batch).backward()
        states.append(copy.deepcopy(model.state_dict()))
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model, states=states)


@idiom
def load_state_dict_between_backward_and_step(loop: Loop) -> Any:
    """Load other weights between `backward` and `step`; the gradient of the old ones is applied to them."""
    model = loop.network()
    other = {name: 0.5 * value for name, value in model.state_dict().items()}
    model, optimizer = loop.prepare(model)
    for batch in loop.batches(2):
        loop.loss(model, batch).backward()
        if loop.active:
            model.load_state_dict(other)
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def parameters_read_between_backward_and_step(loop: Loop) -> Any:
    """Read parameters between `backward` and `step`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, loop.adamw(model, lr=0.02))
    values = []
    for batch in loop.batches(2):
        loop.loss(model, batch).backward()
        values.append([p.detach().clone() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model, values=values)


@idiom
def best_weights_kept_and_restored(loop: Loop) -> Any:
    """Keep the best weights (`copy.deepcopy(model.state_dict())`) and load them at the end."""
    model, optimizer = loop.prepare(loop.network())
    best = None
    for index, batch in enumerate(loop.batches(3)):
        loop.step(model, optimizer, batch)
        if index == 0:
            best = copy.deepcopy(model.state_dict())
    model.load_state_dict(best)
    return loop.outcome(model)


@idiom
def state_dict_kept_without_a_copy(loop: Loop) -> Any:
    """Keep `model.state_dict()` without copying it: it changes with the model."""
    model, optimizer = loop.prepare(loop.network())
    kept = model.state_dict()
    loop.train(model, optimizer)
    return loop.outcome(model, kept=kept)


@idiom
def gradients_switched_off_for_evaluation(loop: Loop) -> Any:
    """Switch `requires_grad` off for an evaluation and on again."""
    model, optimizer = loop.prepare(loop.network())
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        model.requires_grad_(False)
        model(batch[0])
        model.requires_grad_(True)
    return loop.outcome(model)


@idiom
def evaluation_between_forward_and_backward(loop: Loop) -> Any:
    """Evaluate another batch between the forward and the backward of a step."""
    model, optimizer = loop.prepare(loop.network())
    answers = []
    for batch in loop.batches(3):
        loss = loop.loss(model, batch)
        with torch.no_grad():
            answers.append(model(batch[0] + 1).clone())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model, answers=answers)


@idiom
def evaluation_of_a_submodule(loop: Loop) -> Any:
    """Run a part of the model alone: `model.blocks[0](x)`."""
    model, optimizer = loop.prepare(loop.network())
    answers = []
    for batch in loop.batches(2):
        loop.step(model, optimizer, batch)
        with torch.no_grad():
            answers.append(model.blocks[0](torch.ones(2, 8)).clone())
    return loop.outcome(model, answers=answers)


@idiom
def greedy_generation(loop: Loop) -> Any:
    """Generate token by token between steps."""
    model, optimizer = loop.prepare(loop.language())
    for index in range(2):
        tokens = loop.tokens(index)
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    text = torch.zeros(1, 1, dtype=torch.long)
    with torch.no_grad():
        for _ in range(4):
            text = torch.cat([text, model(text)[:, -1:].argmax(-1)], dim=1)
    return {"text": text, "weights": loop.weights(model)}


class Dropped(Network):
    """A network with dropout in front of its head."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        return self.head(self.dropout(self.encode(x)))


@idiom
def dropout(loop: Loop) -> Any:
    """Train with dropout: the same random numbers as without zerostd."""
    model, optimizer = loop.prepare(loop.seeded(Dropped))
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


@idiom
def monte_carlo_dropout(loop: Loop) -> Any:
    """Keep dropout on in evaluation: `model.eval()`, then `dropout.train()`."""
    model, optimizer = loop.prepare(loop.seeded(Dropped))
    loop.train(model, optimizer)
    model.eval()
    model.dropout.train()
    with torch.no_grad():
        answers = torch.stack([model(loop.batch(5)[0]) for _ in range(3)])
    return loop.outcome(model, answers=answers)
