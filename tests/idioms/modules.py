"""Modules that are called, shared, hooked, frozen and built in unusual ways."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from idioms.loop import Loop, idiom
from idioms.networks import Block, Network


@idiom
def method_other_than_forward(loop: Loop) -> Any:
    """Call a method other than forward for evaluation: `model.encode(x)`."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    with torch.no_grad():
        encoded = model.encode(loop.batch(0)[0]).clone()
    loop.train(model, optimizer, first=2)
    return loop.outcome(model, encoded=encoded)


@idiom
def training_through_another_method(loop: Loop) -> Any:
    """Train through a method other than forward: `model.encode(x)` and backward."""
    model, optimizer = loop.prepare(loop.network())
    for x, _ in loop.batches(3):
        model.encode(x).abs().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def forward_called_directly(loop: Loop) -> Any:
    """Call `model.forward(x)` instead of `model(x)`."""
    model, optimizer = loop.prepare(loop.network())
    for x, y in loop.batches(2):
        F.mse_loss(model.forward(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def blocks_called_one_by_one(loop: Loop) -> Any:
    """Run the model's parts one by one from the loop instead of its forward."""
    model, optimizer = loop.prepare(loop.network())
    for x, y in loop.batches(2):
        h = F.gelu(model.stem(x))
        for block in model.blocks:
            h = block(h)
        F.mse_loss(model.head(model.norm(h)), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def weight_used_outside_its_module(loop: Loop) -> Any:
    """Use a weight of the model in the loop: `F.linear(features, model.head.weight)`."""
    model, optimizer = loop.prepare(loop.network())
    for x, y in loop.batches(2):
        answer = model(x) + F.linear(torch.ones(len(x), 8), model.head.weight)
        F.mse_loss(answer, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def tied_weights(loop: Loop) -> Any:
    """Train a language model whose head is its embedding."""
    model, optimizer = loop.prepare(loop.language())
    for index in range(3):
        tokens = loop.tokens(index)
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"answer": model(loop.tokens(9)), "weights": loop.weights(model)}


@idiom
def weights_tied_after_prepare(loop: Loop) -> Any:
    """Tie two weights after `prepare`: `head.weight = tokens.weight`."""
    model, optimizer = loop.prepare(loop.language(tied=False))
    if loop.active:
        model.head.weight = model.tokens.weight
    for index in range(2):
        tokens = loop.tokens(index)
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model(loop.tokens(9))


@idiom
def one_block_used_twice(loop: Loop) -> Any:
    """Use one block at two places of the model, as ALBERT does."""

    def build() -> Network:
        network = Network()
        network.blocks[1] = network.blocks[0]
        return network

    model, optimizer = loop.prepare(loop.seeded(build))
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


@idiom
def low_rank_additions(loop: Loop) -> Any:
    """Train low-rank additions to frozen blocks (LoRA)."""
    model = loop.adapted()
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = loop.prepare(model, torch.optim.SGD(trained, lr=0.1))
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


@idiom
def low_rank_additions_in_a_siamese_model(loop: Loop) -> Any:
    """Train low-rank additions in a model that runs twice before one backward."""
    model, optimizer = loop.prepare(loop.adapted())
    for x, y in loop.batches(3):
        F.mse_loss(model(x) - model(-x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def low_rank_additions_in_a_recurrent_model(loop: Loop) -> Any:
    """Train low-rank additions in a model that is applied to its own output."""
    model = loop.adapted()
    model.stem = loop.seeded(lambda: nn.Linear(4, 8))
    model, optimizer = loop.prepare(model)
    for x, y in loop.batches(3):
        F.mse_loss(model(model(x[:, :4])), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.weights(model)


@idiom
def frozen_backbone(loop: Loop) -> Any:
    """Freeze the backbone before `prepare` and train the head."""
    model = loop.network()
    model.blocks.requires_grad_(False)
    model, optimizer = loop.prepare(model)
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


@idiom
def freeze_between_steps(loop: Loop) -> Any:
    """Freeze a layer between steps: `layer.requires_grad_(False)`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, loop.adamw(model, lr=0.03))
    loop.train(model, optimizer)
    if loop.active:
        model.head.requires_grad_(False)
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def thaw_between_steps(loop: Loop) -> Any:
    """Unfreeze a layer that the optimizer had from the start, frozen by `requires_grad_(False)` before."""
    model = loop.network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    model.head.requires_grad_(False)
    model, optimizer = loop.prepare(model, optimizer)
    loop.train(model, optimizer)
    if loop.active:
        model.head.requires_grad_(True)
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def freeze_for_a_while(loop: Loop) -> Any:
    """Freeze a layer after `prepare` and unfreeze it some steps later."""
    model = loop.network()
    model, optimizer = loop.prepare(model, loop.adamw(model, lr=0.03))
    if loop.active:
        model.head.requires_grad_(False)
    loop.train(model, optimizer)
    if loop.active:
        model.head.requires_grad_(True)
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def freeze_between_forward_and_backward(loop: Loop) -> Any:
    """Freeze a layer between the forward and the backward of a step."""
    model = loop.network()
    model, optimizer = loop.prepare(model, loop.adamw(model, lr=0.03))
    loss = loop.loss(model, loop.batch(0))
    model.head.requires_grad_(False)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def forward_hooks(loop: Loop) -> Any:
    """Change outputs in a forward hook registered after `prepare`."""
    model, optimizer = loop.prepare(loop.network())
    if loop.active:
        model.blocks[0].register_forward_hook(lambda module, args, output: 2 * output)
    loop.train(model, optimizer)
    return loop.outcome(model)


@idiom
def features_by_hooks(loop: Loop) -> Any:
    """Collect features of all layers with forward hooks."""
    model, optimizer = loop.prepare(loop.network())
    features: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, args, output: features.append(output.detach().clone()))
    loop.train(model, optimizer, steps=1)
    return features[:6]


@idiom
def parameter_read_in_a_forward_hook(loop: Loop) -> Any:
    """Read a weight in a forward hook of its module, as loggers do."""
    model, optimizer = loop.prepare(loop.network())
    norms: list[Tensor] = []

    def log(module: nn.Linear, args: Any, output: Tensor) -> None:
        norms.append(module.weight.detach().abs().sum())

    handle = model.blocks[0].up.register_forward_hook(log)
    loop.train(model, optimizer)
    handle.remove()
    return norms[:1]


@idiom
def spectral_normalization(loop: Loop) -> Any:
    """Train with `parametrizations.spectral_norm`, whose buffers change in forward."""
    model = loop.network()
    loop.seeded(lambda: parametrizations.spectral_norm(model.blocks[0].up))
    model, optimizer = loop.prepare(model)
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


@idiom
def weight_normalization(loop: Loop) -> Any:
    """Train with `parametrizations.weight_norm`."""
    model = loop.network()
    parametrizations.weight_norm(model.blocks[0].up)
    model, optimizer = loop.prepare(model)
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


@idiom
def weight_normalization_removed_after_training(loop: Loop) -> Any:
    """Fold a parametrization into the weight after training: `remove_parametrizations`."""
    model = loop.network()
    parametrizations.weight_norm(model.blocks[0].up)
    model, optimizer = loop.prepare(model)
    loop.train(model, optimizer)
    nn.utils.parametrize.remove_parametrizations(model.blocks[0].up, "weight")
    return loop.outcome(model)


@idiom
def pruning_before_prepare(loop: Loop) -> Any:
    """Prune a weight with `torch.nn.utils.prune` before `prepare`."""
    model = loop.network()
    prune.l1_unstructured(model.blocks[0].up, "weight", amount=0.5)
    model, optimizer = loop.prepare(model)
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


@idiom
def pruning_in_the_middle_of_training(loop: Loop) -> Any:
    """Prune a weight with `torch.nn.utils.prune` in the middle of training."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    if loop.active:
        prune.l1_unstructured(model.head, "weight", amount=0.5)
    loop.train(model, optimizer, first=2)
    with torch.no_grad():
        return model(loop.batch(9)[0])


@idiom
def layer_added_in_the_middle_of_training(loop: Loop) -> Any:
    """Append a block to the model in the middle of training; the optimizer does not train it."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    if loop.active:
        model.blocks.append(loop.seeded(Block))
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


@idiom
def layer_replaced_in_the_middle_of_training(loop: Loop) -> Any:
    """Replace the head in the middle of training; the optimizer does not train the new one."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    if loop.active:
        model.head = loop.seeded(lambda: nn.Linear(8, 4))
    loop.train(model, optimizer, first=2)
    return loop.outcome(model)


class Counted(Network):
    """A network with buffers that are not floating point."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([True, True, False, True]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int16))
        self.register_buffer("levels", torch.arange(4, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.mask + self.levels


@idiom
def buffers_of_small_integers(loop: Loop) -> Any:
    """Train with buffers of bool and of small integers."""
    model, optimizer = loop.prepare(loop.seeded(Counted))
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


@idiom
def batch_norm(loop: Loop) -> Any:
    """Train with batch-norm, whose running statistics change in forward."""
    model, optimizer = loop.prepare(loop.convolutional())
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


@idiom
def batch_norm_frozen(loop: Loop) -> Any:
    """Keep batch-norm in evaluation mode while the rest trains."""
    model, optimizer = loop.prepare(loop.convolutional())
    if loop.active:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


class Stochastic(Network):
    """A network that leaves out blocks at random, the same on all ranks."""

    def encode(self, x: Tensor) -> Tensor:
        x = F.gelu(self.stem(x))
        for block in self.blocks:
            if torch.rand(()) < 0.5:
                x = block(x)
        return self.norm(x)


@idiom
def stochastic_depth(loop: Loop) -> Any:
    """Skip blocks at random, so that some parameters get no gradient."""
    model, optimizer = loop.prepare(loop.seeded(Stochastic))
    torch.manual_seed(3)
    loop.train(model, optimizer, steps=4)
    return loop.weights(model)


class Scaled(Network):
    """A network with parameters in a ParameterList and a ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(2))
        self.shifts = nn.ParameterDict({"first": nn.Parameter(torch.zeros(4))})

    def forward(self, x: Tensor) -> Tensor:
        answer = super().forward(x)
        for scale in self.scales:
            answer = answer * scale
        return answer + self.shifts["first"]


@idiom
def lists_of_parameters(loop: Loop) -> Any:
    """Keep parameters in a `ParameterList` and a `ParameterDict`."""
    model, optimizer = loop.prepare(loop.seeded(Scaled))
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


@idiom
def compiled_model(loop: Loop) -> Any:
    """Train `torch.compile(model)` of the prepared model (backend "eager")."""
    model, optimizer = loop.prepare(loop.network(depth=1))
    compiled = torch.compile(model, backend="eager")
    for batch in loop.batches(2):
        loop.step(compiled, optimizer, batch)
    torch.compiler.reset()
    return loop.outcome(model)


@idiom
def recurrent_layer(loop: Loop) -> Any:
    """Train an `nn.LSTM`, which keeps flat weights of its own."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 8, batch_first=True)
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x.view(len(x), 2, 3))[0][:, -1])

    model, optimizer = loop.prepare(loop.seeded(Recurrent))
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


@idiom
def attention_layer(loop: Loop) -> Any:
    """Train an `nn.TransformerEncoderLayer`, whose attention reads weights of its parts."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(1, 8)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
            )
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x.unsqueeze(-1))
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean(1))

    model = loop.seeded(Attending)
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loop.train(model, optimizer)
    return loop.outcome(model)
