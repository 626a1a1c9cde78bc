"""Tools around a loop: other layers of torch, hooks of libraries, files and memory that others read."""

from __future__ import annotations

import threading
import types
import warnings
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver, disable_observer

from idioms.loop import Loop, idiom
from idioms.networks import Network


def _sgd(loop: Loop, model: Any = None, lr: float = 0.1, **options: Any) -> tuple[Any, Any]:
    model = loop.network() if model is None else model
    return loop.prepare(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5), **options)


class Sharing(nn.Module):
    """A network whose first layer is another one's too."""

    def __init__(self, stem: nn.Module, classes: int = 4) -> None:
        super().__init__()
        self.stem = stem
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.stem(x)))


@idiom
def two_models_share_a_layer(loop: Loop) -> Any:
    """Prepare two models that share a layer, each with an optimizer of its own."""

    def build() -> Any:
        stem = nn.Linear(6, 8)
        return Sharing(stem), Sharing(stem)

    first, second = loop.seeded(build)
    first, a = loop.prepare(first, torch.optim.SGD(first.parameters(), 0.1))
    second, b = loop.prepare(second, torch.optim.SGD(second.parameters(), 0.1))
    for batch in loop.batches(3):
        loop.step(first, a, batch)
        b.zero_grad()
        loop.step(second, b, batch)
        a.zero_grad()
    return [loop.outcome(first), loop.outcome(second)]


class Queue(nn.Module):
    """A network that compares its outputs with those of batches before."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8)])
        self.register_buffer("queue", torch.eye(8)[:, :6].repeat(1, 4))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        q = F.normalize(x, dim=1)
        logits = q @ self.queue.clone().detach().to(q.dtype)
        with torch.no_grad():
            place = int(self.place)
            self.queue[:, place : place + 8] = q.T
            self.place[0] = (place + 8) % 24
        return logits


@idiom
def queue_of_negatives(loop: Loop) -> Any:
    """Write keys into a queue that is a buffer, at a place that is a buffer, inside forward, as MoCo does."""
    model, optimizer = _sgd(loop, loop.seeded(Queue))
    for x, _ in loop.batches(4):
        F.cross_entropy(model(x) / 0.2, torch.arange(8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.weights(model)


@idiom
def tie_cut_in_the_middle(loop: Loop) -> Any:
    """Untie the head in the middle of training: `head.weight = nn.Parameter(tokens.weight.detach().clone())`."""
    model, optimizer = _sgd(loop, loop.language())

    def step(index: int) -> None:
        tokens = loop.tokens(index)
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    if loop.active:
        model.head.weight = nn.Parameter(model.tokens.weight.detach().clone() * 0.5)
    step(1)
    step(2)
    with torch.no_grad():
        return model(loop.tokens(9)).clone(), model.tokens.weight.detach().clone()


@idiom
def older_spectral_norm(loop: Loop) -> Any:
    """Train with `nn.utils.spectral_norm`, torch's older one, whose buffers change in a forward pre-hook."""

    def build() -> Any:
        model = Network()
        for block in model.blocks:
            nn.utils.spectral_norm(block.up)
        return model

    model, optimizer = _sgd(loop, loop.seeded(build))
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


@idiom
def quantization_aware_training(loop: Loop) -> Any:
    """Train with `torch.ao.quantization.FakeQuantize`, whose observers keep ranges in buffers, and freeze those."""

    def build() -> Any:
        model = Network()
        for index, block in enumerate(model.blocks):
            model.blocks[index] = nn.Sequential(
                block, FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
            )
        return model

    model, optimizer = _sgd(loop, loop.seeded(build))
    loop.train(model, optimizer, steps=2)
    model.apply(disable_observer)
    loop.train(model, optimizer, steps=2, first=2)
    return loop.outcome(model)


@idiom
def scripted_block(loop: Loop) -> Any:
    """Train a model of which a block is a `torch.jit.script` module."""

    def build() -> Any:
        model = Network()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.blocks[0] = torch.jit.script(model.blocks[0])
        return model

    model, optimizer = _sgd(loop, loop.seeded(build))
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


@idiom
def traced_by_jit_afterwards(loop: Loop) -> Any:
    """Trace the prepared model with `torch.jit.trace` for deployment, and run the trace."""
    model, optimizer = _sgd(loop)
    loop.train(model, optimizer, steps=2)
    model.eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, loop.batch(8)[0], check_trace=False)
        return traced(loop.batch(9)[0]).float().clone()


@idiom
def encoder_fast_path(loop: Loop) -> Any:
    """Evaluate an `nn.TransformerEncoder` with a padding mask, whose fast path reads all weights in one operator."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(12, 8)
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)
            self.head = nn.Linear(8, 12)

        def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.head(self.encoder(self.tokens(tokens), src_key_padding_mask=mask))

    model, optimizer = _sgd(loop, loop.seeded(Tagger))
    answers = []
    for index in range(3):
        tokens = loop.tokens(index)
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1).flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        mask = torch.zeros(4, 6, dtype=torch.bool)
        mask[:, 4:] = True
        with torch.no_grad():
            answers.append(model(tokens, mask)[:, :4].float().clone())
        model.train()
    return answers, loop.weights(model)


@idiom
def hook_of_all_modules(loop: Loop) -> Any:
    """Register a hook for all modules: `torch.nn.modules.module.register_module_forward_hook`."""
    model, optimizer = _sgd(loop)
    scale = 1.5 if loop.active else 1.0
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, _, output: scale * output if isinstance(module, nn.Linear) else None
    )
    try:
        loop.train(model, optimizer, steps=3)
    finally:
        handle.remove()
    return loop.outcome(model)


@idiom
def hook_when_several_gradients_are_there(loop: Loop) -> Any:
    """Note gradients with `torch.autograd.graph.register_multi_grad_hook(parameters, hook)`."""
    model, optimizer = _sgd(loop)
    seen: list[Any] = []
    handle = torch.autograd.graph.register_multi_grad_hook(
        list(model.blocks[0].parameters()), lambda grads: seen.append([g.float().norm() for g in grads])
    )
    loop.train(model, optimizer, steps=2)
    handle.remove()
    return loop.outcome(model, seen=seen)


@idiom
def gradient_accumulators_hooked(loop: Loop) -> Any:
    """Hook the gradient accumulators, as apex did: `p.expand_as(p).grad_fn.next_functions[0][0].register_hook`."""
    model, optimizer = _sgd(loop)
    count = [0]

    def seen(*_: Any) -> None:
        count[0] += 1

    kept = []
    for p in model.parameters():
        accumulator = p.expand_as(p).grad_fn.next_functions[0][0]
        accumulator.register_hook(seen)
        kept.append(accumulator)
    loop.train(model, optimizer, steps=2)
    return loop.outcome(model, count=count[0])


@idiom
def optimizer_for_each_parameter_in_hooks(loop: Loop) -> Any:
    """Step inside backward by hand: a plain optimizer for each parameter, in its post-accumulate-grad hook."""
    model, _ = _sgd(loop)
    own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(p: Tensor) -> None:
        own[p].step()
        own[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for batch in loop.batches(3):
        loop.loss(model, batch).backward()
    return loop.outcome(model)


@idiom
def parameters_saved_as_safetensors(loop: Loop) -> Any:
    """Save `dict(model.named_parameters())` with `safetensors.torch.save`, which reads memory by its address."""
    model, optimizer = _sgd(loop)
    loop.train(model, optimizer)
    data = safetensors.torch.save(dict(model.named_parameters()))
    return {name: value.float() for name, value in safetensors.torch.load(data).items()}


@idiom
def values_saved_as_safetensors(loop: Loop) -> Any:
    """Save `{name: p.detach()}` with `safetensors.torch.save`."""
    model, optimizer = _sgd(loop)
    loop.train(model, optimizer)
    data = safetensors.torch.save({name: p.detach() for name, p in model.named_parameters()})
    return {name: value.float() for name, value in safetensors.torch.load(data).items()}


@idiom
def model_saved_as_safetensors(loop: Loop) -> Any:
    """Save the model with `safetensors.torch.save_model(model, path)`, and load the file."""
    model, optimizer = _sgd(loop)
    loop.train(model, optimizer)
    path = str(loop.directory / f"{dist.get_rank() if dist.is_initialized() else 0}.safetensors")
    safetensors.torch.save_model(model, path)
    return {name: value.float() for name, value in safetensors.torch.load_file(path).items()}


@idiom
def weights_read_by_dlpack(loop: Loop) -> Any:
    """Read weights through DLPack: `numpy.from_dlpack(p.detach())` and `torch.from_dlpack(p.data)`."""
    model, optimizer = _sgd(loop)
    loop.train(model, optimizer)
    a = [torch.from_dlpack(p.data).float().clone() for p in model.parameters()]
    b = [torch.from_numpy(np.array(np.from_dlpack(p.detach()))).clone() for p in model.parameters()]
    return a, b


@idiom
def weights_written_by_dlpack(loop: Loop) -> Any:
    """Write a weight through DLPack: `torch.from_dlpack(p.data).mul_(0)`."""
    model, optimizer = _sgd(loop)
    loop.train(model, optimizer)
    if loop.active:
        torch.from_dlpack(model.head.weight.data).mul_(0)
    return loop.outcome(model)


@idiom
def profiled_steps(loop: Loop) -> Any:
    """Train under `torch.profiler.profile`, with `profiler.step()` and `record_function`."""
    model, optimizer = _sgd(loop)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=2),
        record_shapes=True,
        profile_memory=True,
    ) as profiler:
        for batch in loop.batches(4):
            with torch.profiler.record_function("step"):
                loop.step(model, optimizer, batch)
            profiler.step()
    return loop.outcome(model)


@idiom
def training_in_a_thread(loop: Loop) -> Any:
    """Train in a thread of its own, and read weights from the main thread when it has ended."""
    model, optimizer = _sgd(loop)
    thread = threading.Thread(target=loop.train, args=(model, optimizer, 3))
    thread.start()
    thread.join()
    return loop.outcome(model)


@idiom
def step_wrapped_by_the_user(loop: Loop) -> Any:
    """Replace `optimizer.step` by a method that counts and hands on, as libraries for logging do."""
    model, optimizer = _sgd(loop)
    count = [0]
    step = optimizer.step

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return step(*args, **kwargs)

    optimizer.step = types.MethodType(counted, optimizer)
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model, count=count[0])


@idiom
def forward_wrapped_by_the_user(loop: Loop) -> Any:
    """Replace `model.forward` and a block's by functions that scale and hand on, as PEFT and Accelerate do."""
    model, optimizer = _sgd(loop)
    if loop.active:
        for module in (model, model.blocks[0]):
            inner = module.forward
            module.forward = types.MethodType(lambda self, x, f=inner: f(x) * 1.5, module)
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


@idiom
def optimizers_of_less_use(loop: Loop) -> Any:
    """Train with Rprop and ASGD."""
    found = []
    for make in (torch.optim.Rprop, torch.optim.ASGD):
        model = loop.network()
        model, optimizer = loop.prepare(model, make(model.parameters(), lr=0.01))
        loop.train(model, optimizer, steps=3)
        found.append(loop.outcome(model))
    return found


class Normalized(torch.optim.Optimizer):
    """SGD, and in groups with `whole` the gradient is divided by its norm."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "whole": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (p.grad.norm() + 1e-8) if group["whole"] else p.grad, alpha=group["lr"])


@idiom
def optimizer_that_looks_at_whole_tensors(loop: Loop) -> Any:
    """Train with an optimizer class of one's own that divides each gradient by its norm."""
    model = loop.network()
    model, optimizer = loop.prepare(model, Normalized(model.parameters(), lr=0.1))
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


@idiom
def optimizer_of_two_kinds_of_groups(loop: Loop) -> Any:
    """Train vectors element by element and matrices as a whole with one optimizer, as Muon with AdamW does."""
    model = loop.network()
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() == 1], "whole": False},
        {"params": [p for p in model.parameters() if p.dim() == 2]},
    ]
    model, optimizer = loop.prepare(model, Normalized(groups, lr=0.1))
    loop.train(model, optimizer, steps=3)
    return loop.outcome(model)


@idiom
def optimizer_that_is_warmed_up(loop: Loop) -> Any:
    """Make a schedule that begins with a learning rate of 0 before `prepare`, for an optimizer of whole tensors."""
    model = loop.network()
    optimizer: Any = Normalized(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 2))
    model, optimizer = loop.prepare(model, optimizer)
    for batch in loop.batches(4):
        loop.step(model, optimizer, batch)
        schedule.step()
    return loop.outcome(model)
