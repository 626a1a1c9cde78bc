"""Models that change while they train, and tricks that perturb weights and put them back."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, Dataset

from idioms.loop import Loop, idiom
from idioms.networks import Network


class Symmetric(nn.Module):
    """A parametrization: the symmetric part of a square weight."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Answers(Dataset[Tensor]):
    """A dataset that holds the model, and asks it for something that is no tensor."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(self.model.head.out_features * index))


@idiom
def parametrization_registered_after_prepare(loop: Loop) -> Any:
    """Register a parametrization on a layer of the prepared model."""
    model, _ = loop.prepare(loop.network(classes=8))
    if loop.active:
        parametrize.register_parametrization(model.head, "weight", Symmetric())
    answers = [model(loop.batch(index)[0]).detach().clone() for index in range(2)]
    return answers


@idiom
def parametrizations_cached(loop: Loop) -> Any:
    """Run a parametrized model twice under `parametrize.cached()`, then call backward."""
    model = loop.network(classes=8)
    parametrize.register_parametrization(model.head, "weight", Symmetric())
    model, optimizer = loop.prepare(model)
    for index in range(3):
        with parametrize.cached():
            loss = model(loop.batch(index)[0]).square().mean() + model(loop.batch(index + 5)[0]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value for name, value in loop.weights(model).items() if "head" in name}


@idiom
def weight_normalization_removed_between_steps(loop: Loop) -> Any:
    """Remove a parametrization in the middle of training; the optimizer does not know the new weight."""
    model = loop.network()
    nn.utils.parametrizations.weight_norm(model.head)
    model, optimizer = loop.prepare(model)
    loop.train(model, optimizer)
    parametrize.remove_parametrizations(model.head, "weight")
    loop.train(model, optimizer, first=2)
    return model(loop.batch(9)[0]).detach()


@idiom(exact=False)
def low_rank_addition_merged_and_unmerged(loop: Loop) -> Any:
    """Merge low-rank additions into their frozen weights for an evaluation, and take them out again."""
    model, optimizer = loop.prepare(loop.adapted())
    loop.train(model, optimizer)
    layer = model.blocks[0].up
    with torch.no_grad():
        addition = layer.up.weight @ layer.down.weight
        if loop.active:
            layer.base.weight.data += 5 * addition
        merged = model.eval()(loop.batch(9)[0]).clone()
        if loop.active:
            layer.base.weight.data -= 5 * addition
    model.train()
    loop.train(model, optimizer, first=2)
    return [merged, model(loop.batch(9)[0]).detach()]


@idiom
def layer_wrapped_after_prepare(loop: Loop) -> Any:
    """Wrap a layer of the prepared model: `model.head = nn.Sequential(model.head, nn.Tanh())`."""
    model, optimizer = loop.prepare(loop.network())
    if loop.active:
        model.head = nn.Sequential(model.head, nn.Tanh())
    loop.train(model, optimizer)
    return model(loop.batch(9)[0]).detach()


@idiom
def block_left_out_after_prepare(loop: Loop) -> Any:
    """Cut the last block off in the middle of training: `model.blocks = model.blocks[:1]`."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    if loop.active:
        model.blocks = model.blocks[:1]
    loop.train(model, optimizer, first=2)
    return model(loop.batch(9)[0]).detach()


@idiom
def blocks_in_another_order(loop: Loop) -> Any:
    """Reverse the order of the blocks in the middle of training."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    if loop.active:
        model.blocks = nn.ModuleList([model.blocks[1], model.blocks[0]])
    loop.train(model, optimizer, first=2)
    return model(loop.batch(9)[0]).detach()


@idiom
def shallow_copy_of_the_model(loop: Loop) -> Any:
    """Train on through `copy.copy(model)`, which has the same parameters."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    shallow = copy.copy(model)
    loop.train(shallow, optimizer, first=2)
    return loop.outcome(model)


@idiom
def buffer_registered_after_prepare(loop: Loop) -> Any:
    """Register a buffer on the prepared model, and use it in a hook."""
    model, optimizer = loop.prepare(loop.network())
    model.register_buffer("gain", torch.tensor(0.25))
    if loop.active:
        model.head.register_forward_hook(lambda module, inputs, output: output * model.gain)
    loop.train(model, optimizer)
    return loop.outcome(model)


@idiom
def parameter_registered_after_prepare(loop: Loop) -> Any:
    """Register a parameter on the prepared model; the optimizer does not train it."""
    model, optimizer = loop.prepare(loop.network())
    model.gain = nn.Parameter(torch.tensor(0.25))
    if loop.active:
        model.head.register_forward_hook(lambda module, inputs, output: output * model.gain.to(output))
    loop.train(model, optimizer)
    return model(loop.batch(9)[0]).detach()


@idiom
def all_gradients_switched_off_and_on(loop: Loop) -> Any:
    """Switch gradients of the whole model off and on between steps with `model.requires_grad_()`."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    model.requires_grad_(False)
    answer = model(loop.batch(9)[0])
    model.requires_grad_(True)
    loop.train(model, optimizer, first=2)
    return loop.outcome(model, answer=answer, recorded=answer.requires_grad)


@idiom
def workers_that_hold_the_model(loop: Loop) -> Any:
    """Load data in a worker process whose dataset holds the model."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    data = DataLoader(Answers(model), batch_size=2, num_workers=1, multiprocessing_context="fork")
    seen = [batch.clone() for batch in data]
    loop.train(model, optimizer, first=2)
    return loop.outcome(model, seen=seen)


@idiom
def embedding_perturbed_for_a_second_pass(loop: Loop) -> Any:
    """FGM: add the direction of its gradient to the embedding, call backward again, and restore it."""
    model = loop.language()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3))
    for index in range(3):
        tokens = loop.tokens(index)
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1).flatten()).backward()
        if loop.active:
            weight = model.tokens.weight
            kept = weight.data.clone()
            weight.data.add_(3 * weight.grad / weight.grad.norm().clamp_min(1e-8))
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1).flatten()).backward()
            weight.data = kept
        optimizer.step()
        optimizer.zero_grad()
    return loop.weights(model)


@idiom
def zeroth_order_steps(loop: Loop) -> Any:
    """MeZO: perturb weights by a seed, compare two losses without gradients, and step along the perturbation."""
    model, _ = loop.prepare(loop.network())

    def perturb(scale: float) -> None:
        generator = torch.Generator().manual_seed(3)
        for p in model.parameters():
            p.data.add_(torch.randn(p.shape, generator=generator).to(p), alpha=scale)

    if loop.active:
        with torch.no_grad():
            for batch in loop.batches(2):
                perturb(0.01)
                above = loop.loss(model, batch)
                perturb(-0.02)
                below = loop.loss(model, batch)
                perturb(0.01)
                perturb(-0.05 * float(torch.sign(above - below)))
    return loop.outcome(model)


@idiom
def recomputed_by_hand(loop: Loop) -> Any:
    """Recompute by hand: a forward under `no_grad`, then again with gradients, and `backward(gradient)`."""
    model, optimizer = loop.prepare(loop.network())
    for batch in loop.batches(3):
        x, y = batch
        with torch.no_grad():
            answer = model(x)
        answer = answer.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(F.mse_loss(answer, y), answer)
        model(x).backward(gradient)
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def contrastive_gradients_cached(loop: Loop) -> Any:
    """GradCache: embed parts of a batch without gradients, take the loss over all, and backward part by part."""
    model, optimizer = loop.prepare(loop.network())
    x, _ = loop.batch(0)
    for _ in range(2):
        with torch.no_grad():
            embedded = torch.cat([model(part) for part in x.split(4)])
        embedded = embedded.clone().requires_grad_()
        (gradient,) = torch.autograd.grad((embedded @ embedded.T).logsumexp(1).mean(), embedded)
        for part, its_gradient in zip(x.split(4), gradient.split(4), strict=True):
            (model(part) * its_gradient).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def compiled_loss(loop: Loop) -> Any:
    """Compile the loss function and not the model: `torch.compile(loss, backend="eager")`."""
    model, optimizer = loop.prepare(loop.network())
    compiled = torch.compile(F.mse_loss, backend="eager")
    for x, y in loop.batches(3):
        compiled(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.outcome(model)


@idiom
def hooks_before_and_after_loading(loop: Loop) -> Any:
    """Rename keys in `register_load_state_dict_pre_hook`, and count in a post-hook."""
    model, optimizer = loop.prepare(loop.network())
    other = loop.seeded(lambda: Network()).state_dict()
    renamed = {f"old.{name}": 0.5 * value for name, value in other.items()}
    seen: list[int] = []

    def rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in [name for name in state if name.startswith("old.")]:
            state[name.removeprefix("old.")] = state.pop(name)

    model.register_load_state_dict_pre_hook(rename)
    model.register_load_state_dict_post_hook(lambda *_: seen.append(1))
    if loop.active:
        model.load_state_dict(renamed)
    loop.train(model, optimizer)
    return loop.outcome(model)


@idiom
def hook_before_state_dict(loop: Loop) -> Any:
    """Count calls in `model.register_state_dict_pre_hook`."""
    model, optimizer = loop.prepare(loop.network())
    seen: list[str] = []
    model.register_state_dict_pre_hook(lambda module, prefix, keep_vars: seen.append(prefix))
    loop.train(model, optimizer)
    return loop.outcome(model, seen=len(seen) > 0)


@idiom
def gradient_hook_removed_in_the_middle(loop: Loop) -> Any:
    """Remove a hook of a parameter in the middle of training: `handle.remove()`."""
    model = loop.network()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    handle = model.head.weight.register_hook(lambda grad: 20 * grad)
    loop.train(model, optimizer)
    if loop.active:
        handle.remove()
    loop.train(model, optimizer, first=2, steps=4)
    return loop.outcome(model)


@idiom
def statistics_updated_for_averaged_weights(loop: Loop) -> Any:
    """Call `update_bn(loader, model)` on the prepared model itself."""
    model, optimizer = loop.prepare(loop.convolutional())
    loop.train(model, optimizer)
    if loop.active:
        update_bn([loop.batch(index)[0] for index in range(3)], model)
    return loop.outcome(model)


@idiom
def averaged_model_with_buffers(loop: Loop) -> Any:
    """Average parameters and buffers with `AveragedModel(use_buffers=True)`, made before `prepare`, and `SWALR`."""
    model = loop.convolutional()
    average = AveragedModel(model, use_buffers=True)
    model, optimizer = loop.prepare(model)
    schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for batch in loop.batches(4):
        loop.step(model, optimizer, batch)
        average.update_parameters(model)
        schedule.step()
    return loop.outcome(model, average=average.module.state_dict())


@idiom
def moving_average_of_a_part(loop: Loop) -> Any:
    """Average one part of the model: `AveragedModel(model.head)` made before `prepare`."""
    model = loop.network()
    average = AveragedModel(model.head, avg_fn=lambda old, new, count: 0.5 * old + 0.5 * new)
    model, optimizer = loop.prepare(model)
    for batch in loop.batches(3):
        loop.step(model, optimizer, batch)
        average.update_parameters(model.head)
    return loop.outcome(model, average=average.module.state_dict())


@idiom(exact=False)
def norms_of_all_parameters_at_once(loop: Loop) -> Any:
    """Log norms with one call: `torch._foreach_norm(list(model.parameters()))` and `get_total_norm`."""
    model, optimizer = loop.prepare(loop.network())
    loop.train(model, optimizer)
    with torch.no_grad():
        norms = torch._foreach_norm(list(model.parameters()))
        total = nn.utils.get_total_norm(list(model.parameters()))
    return [norms, total]
