"""Whatever a model does in its forward, and however a loop calls it, two ranks train it as plain torch would.

Each scene is one peculiarity. Most are compared with plain torch by `support/side_by_side.py`; a few need DDP, two
models or a look at the memory, and have functions of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zerostd
from support.agreement import agree
from support.compare import assert_bitwise, worst_error
from support.processes import doing
from support.side_by_side import LIMIT, Scene, adamw, data, differences, seeded, sgd, train_prepared

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inlet = nn.Linear(WIDTH, 2 * WIDTH)
        self.outlet = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outlet(F.gelu(self.inlet(self.norm(x))))


class Stack(nn.Module):
    """Blocks between an inlet and an outlet, which belong to the root."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.inlet = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.outlet = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


def fit(model: nn.Module, number: int, rank: int, make_input: Any = None) -> Tensor:
    x = data(6, 8, number=number, rank=rank) if make_input is None else make_input(number, rank)
    return (model(x) - data(6, 4, number=number + 500, rank=rank)).square().mean()


BLOCKS = ["blocks.*"]
SCENES: dict[str, Scene] = {"blocks": Scene(Stack, fit, BLOCKS)}


# -- which parameters there are, and who uses them --


class Tied(Stack):
    """The first and the last block share a weight; the embedding is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].inlet.weight = self.blocks[0].inlet.weight
        self.tokens = nn.Embedding(8, WIDTH)
        self.head = nn.Linear(WIDTH, 8)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def classify(model: nn.Module, number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(77 * number + rank)
    tokens = torch.randint(8, (6, 5), generator=generator)
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


SCENES["tied weights over groups"] = Scene(Tied, classify, [*BLOCKS, "tokens", "head"])


def frozen(*names: str, make: Any = Stack) -> nn.Module:
    model = make()
    for name, parameter in model.named_parameters():
        if any(name.startswith(start) for start in names):
            parameter.requires_grad_(False)
    return model


SCENES["frozen inlet and block"] = Scene(partial(frozen, "inlet", "blocks.1"), fit, BLOCKS)
SCENES["frozen after the first trained"] = Scene(partial(frozen, "blocks.2", "outlet"), fit, BLOCKS)


class Adapted(nn.Module):
    """A linear layer with a trained correction of low rank."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__()
        self.base = nn.Linear(size_in, size_out)
        self.base.requires_grad_(False)
        self.down = nn.Parameter(0.3 * torch.randn(2, size_in))
        self.up = nn.Parameter(0.1 * torch.randn(size_out, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class AdaptedStack(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.inlet.requires_grad_(False)
        for block in self.blocks:
            block.norm.requires_grad_(False)
            block.inlet, block.outlet = Adapted(WIDTH, 2 * WIDTH), Adapted(2 * WIDTH, WIDTH)


SCENES["blocks frozen but for an adapter"] = Scene(AdaptedStack, fit, BLOCKS)


class Functional(Stack):
    """The root and a block use weights of modules that are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.lent = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(F.linear(x, self.lent.weight, self.lent.bias))
        return F.linear(x, self.outlet.weight, self.outlet.bias)


class AllLent(nn.Module):
    """The root has no parameters of its own and calls none of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.a.weight, self.a.bias).tanh(), self.b.weight, self.b.bias)


SCENES["weights read by the root"] = Scene(Functional, fit, [*BLOCKS, "lent", "outlet"])
SCENES["weights read by a root without a group"] = Scene(AllLent, fit, ["a", "b"])


class Attention(nn.Module):
    """nn.MultiheadAttention reads its out_proj's weight and never calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(8, WIDTH)
        self.mix = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.outlet = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)[None]
        return self.outlet((x + self.mix(x, x, x, need_weights=False)[0])[0])


SCENES["attention in a group"] = Scene(Attention, fit, ["mix"])
SCENES["attention's projection in a group of its own"] = Scene(Attention, fit, ["mix.out_proj"])
SCENES["attention over groups without a root's"] = Scene(Attention, fit, ["inlet", "mix.out_proj", "outlet"])


class WeightNormed(Stack):
    """torch's older weight norm computes the weight in a hook that was there before ours."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.blocks[0].inlet)
        nn.utils.parametrizations.weight_norm(self.lone)

    @property
    def lone(self) -> nn.Module:
        return self.outlet


SCENES["parametrized weights"] = Scene(WeightNormed, fit, [*BLOCKS, "outlet"])


class HookReads(Stack):
    """A hook of the user's own, from before prepare, reads the weight of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.outlet.register_forward_pre_hook(lambda module, args: (args[0] * module.weight.square().mean(),))
        inside = self.blocks[1].norm.weight
        self.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] * inside,))


SCENES["a user's hook reads weights"] = Scene(HookReads, fit, [*BLOCKS, "outlet"])


class Unused(Stack):
    """One block rests always, one on rank 1, one on rank 0 in odd steps."""

    def __init__(self) -> None:
        super().__init__(depth=5)
        self.who = (0, 0)

    def forward(self, x: Tensor) -> Tensor:
        number, rank = self.who
        x = self.inlet(x)
        for index, block in enumerate(self.blocks):
            if index == 1 or (index == 2 and rank == 1) or (index == 3 and rank == 0 and number % 2):
                continue
            x = block(x)
        return self.outlet(x)


def fit_unused(model: nn.Module, number: int, rank: int) -> Tensor:
    model.who = (number, rank)
    return fit(model, number, rank)


SCENES["parameters unused on some ranks"] = Scene(Unused, fit_unused, ["blocks"])  # one group: ranks may differ inside


class Scaled(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.odd = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature + self.odd.sum() + self.nothing.sum()


SCENES["scalar and empty parameters"] = Scene(Scaled, fit, BLOCKS)
SCENES["sparse embedding"] = Scene(
    lambda: nn.Sequential(nn.Embedding(8, WIDTH, sparse=True), Block(), nn.Linear(WIDTH, 8)),
    classify,
    ["0", "1"],
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
)
SCENES["whole-number inputs"] = Scene(
    lambda: nn.Sequential(nn.Embedding(8, WIDTH), Block(), Block(), nn.Linear(WIDTH, 8)), classify, ["0", "1", "2"]
)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(8, WIDTH, num_layers=2, batch_first=True)
        self.outlet = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.outlet(self.cell(x[None])[0][0])


SCENES["nn.LSTM"] = Scene(Recurrent, fit, ["cell"])


# -- what modules hand on --


class Pair(NamedTuple):
    value: Tensor
    nothing: None


@dataclasses.dataclass
class Record:
    value: Tensor
    extra: dict[str, Any]


class Plain:
    """Not a container that anyone knows."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Wrapping(Block):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Any) -> Any:
        return self.wrap(super().forward(unwrap(x)))


WRAPS: dict[str, Any] = {
    "tuple": lambda x: (x, None, 3),
    "list": lambda x: [None, x],
    "dict": lambda x: {"text": "a", "value": x},
    "NamedTuple": lambda x: Pair(x, None),
    "dataclass": lambda x: Record(x, {"flags": [True]}),
    "nested": lambda x: {"rows": [(Record(x, {}),)]},
}


def unwrap(value: Any) -> Tensor:
    """The first tensor inside."""
    if isinstance(value, Tensor):
        return value
    parts = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (list, tuple))
        else vars(value).values()
    )
    return next(
        found for part in parts if not isinstance(part, (str, int, bool, type(None))) for found in [unwrap(part)]
    )


class WrappingStack(Stack):
    """Blocks and the root itself return something else than a tensor."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wrapping(wrap) for _ in range(3))
        self.wrap = wrap

    def forward(self, x: Any) -> Any:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.wrap(self.outlet(unwrap(x)))


def fit_wrapped(model: nn.Module, number: int, rank: int) -> Tensor:
    return fit(lambda x: unwrap(model(x)), number, rank)


for kind, wrap in WRAPS.items():
    SCENES[f"modules return a {kind}"] = Scene(partial(WrappingStack, wrap), fit_wrapped, BLOCKS)
SCENES["modules return an object of a class of the user's"] = Scene(partial(WrappingStack, Plain), fit_wrapped, BLOCKS)


class Aside(Block):
    """Leaves a second loss on itself, made after its output."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.aside = self.gate(torch.tanh(self.inlet(self.norm(y.detach())))[:, :WIDTH]).square().mean()
        return y


class AsideStack(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Aside() for _ in range(3))


def fit_aside(model: nn.Module, number: int, rank: int) -> Tensor:
    return fit(model, number, rank) + sum(block.aside for block in model.blocks)


SCENES["a loss left on the module beside its output"] = Scene(AsideStack, fit_aside, BLOCKS)


class Detached(Block):
    """A frozen use of a trained weight, whose backward runs when its gradient is there already."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.outlet.weight.detach()[:, :WIDTH])
        return super().forward(x)


class DetachedStack(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Detached() for _ in range(3))


SCENES["a weight used detached too"] = Scene(DetachedStack, fit, BLOCKS)


class InPlace(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
            x *= 0.5
        return self.outlet(x)


def fit_in_place(model: nn.Module, number: int, rank: int) -> Tensor:
    y = model(data(6, 8, number=number, rank=rank))
    y *= 2.0
    return (y - data(6, 4, number=number + 500, rank=rank)).square().mean()


SCENES["outputs changed in place"] = Scene(InPlace, fit_in_place, BLOCKS)


# -- when forwards and backwards run --


class Checkpointed(Stack):
    """Blocks recompute their forward in backward, `span` of them at a time."""

    def __init__(self, span: int, reentrant: bool, depth: int = 4) -> None:
        super().__init__(depth)
        self.span, self.reentrant = span, reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for first in range(0, len(self.blocks), self.span):
            run = nn.Sequential(*self.blocks[first : first + self.span])
            x = checkpoint(lambda y, run=run: run(y), x, use_reentrant=self.reentrant)
        return self.outlet(x)


class CheckpointedTied(Checkpointed):
    """One weight in two segments: nested backward passes bring it twice."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(2, reentrant)
        self.blocks[3].inlet.weight = self.blocks[0].inlet.weight
        self.blocks[2] = self.blocks[1]


for reentrant in (False, True):
    for span in (1, 2):
        label = f"checkpoint of {span}, {'reentrant' if reentrant else 'not reentrant'}"
        SCENES[label] = Scene(partial(Checkpointed, span, reentrant), fit, BLOCKS)
    label = f"weight in two checkpoints, {'reentrant' if reentrant else 'not reentrant'}"
    SCENES[label] = Scene(partial(CheckpointedTied, reentrant), fit, BLOCKS)


class Twice(Stack):
    """The same modules called twice: weights shared by calling."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.outlet(x)


SCENES["modules called twice"] = Scene(Twice, fit, BLOCKS)


class Recursive(Stack):
    """A tree: the root calls itself for its children, and has work left when they return."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x: Tensor, height: int = 2) -> Tensor:
        below = [self(part, height - 1) for part in (x / 2, x + 1)] if height else []
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x) + self.weight * sum(below)


SCENES["root that calls itself"] = Scene(Recursive, fit, BLOCKS)


class Shuffled(Stack):
    """The order of the blocks, and which of them run, changes from step to step, alike on all ranks."""

    def __init__(self) -> None:
        super().__init__(depth=5)
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        generator = torch.Generator().manual_seed(self.number)
        for index in torch.randperm(5, generator=generator)[: 3 + self.number % 3].tolist():
            x = self.blocks[index](x)
        return self.outlet(x)


def fit_shuffled(model: nn.Module, number: int, rank: int) -> Tensor:
    model.number = number
    return fit(model, number, rank)


SCENES["order that changes between steps"] = Scene(Shuffled, fit_shuffled, BLOCKS, steps=6)


def siamese(model: nn.Module, number: int, rank: int) -> Tensor:
    a, b = (model(data(6, 8, number=number + 100 * side, rank=rank)) for side in (1, 2))
    return (a - b - 1.0).square().mean() + (a.mean() - 0.5).square()


SCENES["several forwards before one backward"] = Scene(Stack, siamese, BLOCKS)


def look_in_between(model: nn.Module, number: int, rank: int) -> Tensor:
    """No-grad and eval forwards before the forward, and between it and its backward."""
    with torch.no_grad():
        model(data(3, 8, number=900))
    loss = fit(model, number, rank)
    model.eval()
    with torch.no_grad():
        model(data(3, 8, number=901))
    with torch.inference_mode():
        model(data(3, 8, number=902))
    model.train()
    return loss


def two_backwards(model: nn.Module, loss: Any, step: int, rank: int, share: float) -> None:
    for micro in range(2):
        (loss(model, 2 * step + micro, rank) * share / 2).backward()


def late_backwards(model: nn.Module, loss: Any, step: int, rank: int, share: float) -> None:
    """All forwards first, their backwards in the same order."""
    for found in [loss(model, 3 * step + micro, rank) * share for micro in range(3)]:
        found.backward()


def backward_twice(model: nn.Module, loss: Any, step: int, rank: int, share: float) -> None:
    found = loss(model, step, rank) * share
    found.backward(retain_graph=True)
    (2.0 * found).backward()


def without_sync(model: nn.Module, loss: Any, step: int, rank: int, share: float) -> None:
    for micro in range(3):
        is_prepared = "_zerostd" in model.__dict__
        with zerostd.no_sync(model) if is_prepared and micro < 2 else contextlib.nullcontext():
            (loss(model, 3 * step + micro, rank) * share).backward()


def dropped_without_sync(model: nn.Module, loss: Any, step: int, rank: int, share: float) -> None:
    """A pass under no_sync whose gradients the user throws away."""
    if "_zerostd" in model.__dict__:
        with zerostd.no_sync(model):
            loss(model, 70 + step, rank).backward()
        model.__dict__["_zerostd"].optimizer.zero_grad()
    (loss(model, step, rank) * share).backward()


def input_gradient(model: nn.Module, loss: Any, step: int, rank: int, share: float) -> None:
    """One step along the gradient of the input, as adversarial training takes; parameters must not notice."""
    x = data(6, 8, number=step, rank=rank).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().mean(), x)
    ((model(x.detach() + 5 * slope) - 1.0).square().mean() * share).backward()


SCENES["no-grad forwards in between"] = Scene(Stack, look_in_between, BLOCKS)
SCENES["two backwards before one step"] = Scene(Stack, fit, BLOCKS, gradients=two_backwards)
SCENES["three forwards, then three backwards"] = Scene(Stack, fit, BLOCKS, gradients=late_backwards)
SCENES["one graph, two backwards"] = Scene(Stack, fit, BLOCKS, gradients=backward_twice)
SCENES["no_sync"] = Scene(Stack, fit, BLOCKS, gradients=without_sync)
SCENES["no_sync, thrown away"] = Scene(Stack, fit, BLOCKS, gradients=dropped_without_sync)
SCENES["gradient of an input"] = Scene(Stack, fit, BLOCKS, gradients=input_gradient)
SCENES["no_sync with parameters unused"] = Scene(Unused, fit_unused, ["blocks"], gradients=without_sync, optimizer=sgd)


class Interrupted(Stack):
    stops = False

    def forward(self, x: Tensor) -> Tensor:
        if self.stops:
            raise KeyboardInterrupt
        return super().forward(x)


def interrupt(model: nn.Module, loss: Any, step: int, rank: int, share: float) -> None:
    """The keyboard ends a forward, of which torch tells no hook, and the user goes on."""
    model.stops = step % 2 == 1
    with contextlib.suppress(KeyboardInterrupt):
        loss(model, step, rank)
    model.stops = False
    (loss(model, step, rank) * share).backward()


SCENES["forwards that are interrupted"] = Scene(Interrupted, fit, BLOCKS, gradients=interrupt)


def compare(rank: int, name: str, stages: tuple[int, ...]) -> list[str]:
    doing(name)
    return differences(SCENES[name], rank, stages)


@pytest.mark.parametrize("name", SCENES)
def test_two_ranks_train_as_plain_torch(ranks, name):
    agree(ranks(2, compare, name, (2, 3), timeout=90))


@pytest.mark.parametrize(
    "name",
    [name for name in SCENES if "no_sync" in name],
)
def test_a_world_of_one_trains_as_plain_torch(name):
    agree([compare(0, name, (0, 3))])


def test_a_root_that_calls_itself_scales_its_loss_once():
    norms = []
    for precision in ("fp32", "fp16"):
        model = seeded(Recursive)
        model, optimizer = zerostd.prepare(model, sgd(model), stage=0, precision=precision)
        if optimizer.loss_scale is not None:
            optimizer.loss_scale.value = 64.0
        fit(model, 0, 0).backward()
        norms.append(optimizer.clip_grad_norm_(1.0).float())
        zerostd.release(model)
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-2, atol=0.0)


# -- unused everywhere --


def leaves_no_trace(rank: int, stage: int) -> list[str]:
    """A block that no rank uses: the same bits, no state, no gradient."""
    scene = SCENES["parameters unused on some ranks"]
    model = seeded(scene.make)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if name.startswith("blocks.1.")}
    model, optimizer = zerostd.prepare(model, adamw(model), stage=stage, groups=["blocks"])
    failures = []
    for step in range(2):
        scene.loss(model, step, rank).backward()
        optimizer.step()
        failures += [
            f"{name} has a gradient" for name, p in model.named_parameters() if name in before and p.grad is not None
        ]
        optimizer.zero_grad()
    numbers = {p: number for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    states = optimizer.state_dict()["state"]
    failures += [
        f"{name} has a state" for name, p in model.named_parameters() if name in before and numbers[p] in states
    ]
    after = zerostd.full_state_dict(model)
    assert_bitwise({name: after[name] for name in before}, before, "unused parameters")
    zerostd.release(model)
    return failures


class TwoDtypes(nn.Module):
    """Two layers of one dtype each, and the cast between them."""

    def __init__(self, first: torch.dtype, second: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=first)
        self.second = nn.Linear(WIDTH, WIDTH, dtype=second)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).to(self.second.weight.dtype))


@pytest.mark.parametrize(
    ("first", "second", "returned"),
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.float16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),  # as some of it was before
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    ],
)
def test_a_root_casts_inputs_of_all_dtypes_that_its_parameters_had(
    first: torch.dtype, second: torch.dtype, returned: torch.dtype
) -> None:
    model = seeded(lambda: TwoDtypes(first, second))
    model, optimizer = zerostd.prepare(model, sgd(model), precision="bf16", placement=zerostd.Placement())
    for dtype in (first, second):
        output = model(torch.ones(2, WIDTH, dtype=dtype))
        assert output.dtype == returned
        output.sum().backward()
    optimizer.step()
    other = torch.float64 if first != torch.float64 and second != torch.float64 else torch.float16
    with pytest.raises(RuntimeError, match="dtype"):  # as in torch
        model(torch.ones(2, WIDTH, dtype=other))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_that_no_rank_uses_are_left_alone(ranks, stage):
    agree(ranks(2, leaves_no_trace, stage, timeout=90))


# -- buffers --


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(8, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.outlet = nn.Linear(WIDTH, 4)
        self.register_buffer("mask", torch.rand(WIDTH) > 0.2)
        self.register_buffer("turn", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("coarse", torch.ones(3, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return self.outlet(F.gelu(self.norm(self.inlet(x))) * self.mask) * self.turn.real


def buffers_follow_ddp(rank: int, with_no_sync: bool) -> list[str]:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, quiet: Any) -> None:
        for step in range(4):
            with quiet() if with_no_sync else contextlib.nullcontext():
                fit(model, 2 * step, rank).backward()
            fit(model, 2 * step + 1, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                fit(model, 70 + step, rank)

    plain = seeded(Normed)
    ddp = DistributedDataParallel(plain)
    train(ddp, adamw(plain), ddp.no_sync)
    failures = []
    for stage in (0, 2, 3):
        model = seeded(Normed)
        model, optimizer = zerostd.prepare(model, adamw(model), stage=stage, groups=["inlet", "outlet"])
        train(model, optimizer, partial(zerostd.no_sync, model))
        worst = worst_error(zerostd.full_state_dict(model), plain.state_dict())
        zerostd.release(model)
        if not worst.error <= LIMIT:
            failures.append(f"stage {stage}, rank {rank}: {worst.name} is off by {worst.error:.1e}")
    return failures


@pytest.mark.parametrize("with_no_sync", [False, True])
def test_buffers_follow_the_rule_of_ddp(ranks, with_no_sync):
    agree(ranks(2, buffers_follow_ddp, with_no_sync, timeout=90))


# -- memory of released groups --


def held_by_groups(rank: int, name: str) -> list[str]:
    """Between forward and backward, and after backward, gathered memory is given back, frozen groups' too; but that of
    the two groups at most that forward ends and backward begins with, once their order is known."""
    scene = SCENES[name]
    model = seeded(scene.make)
    model, optimizer = zerostd.prepare(model, scene.optimizer(model), stage=3, groups=scene.groups)
    runtime = model.__dict__["_zerostd"]
    failures = []

    def look(when: str, num_kept: int = 0) -> None:
        sizes = {g.name: f.full.untyped_storage().nbytes() for g in runtime.groups for f in g.flats}
        held = [f"{when}: group {group} holds {size} bytes" for group, size in sizes.items() if size]
        failures.extend(held if len(held) > num_kept else [])

    for step, num_kept in enumerate((0, 2)):
        look(f"before forward {step}")
        loss = scene.loss(model, step, rank)
        look(f"after forward {step}", num_kept)
        loss.backward()
        look(f"after backward {step}")
        optimizer.step()
        optimizer.zero_grad()
    zerostd.release(model)
    return failures


@pytest.mark.parametrize(
    "name", ["blocks", "blocks frozen but for an adapter", "frozen inlet and block", "checkpoint of 2, reentrant"]
)
def test_released_groups_hold_no_memory(ranks, name):
    agree(ranks(2, held_by_groups, name, timeout=90))


def frozen_groups_in_backward(rank: int) -> list[str]:
    """While backward runs, a frozen group that it has passed is released: at most two blocks are gathered at once."""
    model = seeded(partial(frozen, "blocks.1", "blocks.2", "blocks.3", make=partial(Stack, depth=6)))
    model, optimizer = zerostd.prepare(model, adamw(model), stage=3, groups=BLOCKS)
    runtime = model.__dict__["_zerostd"]
    gathered: list[int] = []

    def look(grad: Tensor) -> None:
        gathered.append(sum(any(f.full.untyped_storage().nbytes() for f in g.flats) for g in runtime.groups[1:]))

    for step in range(2):
        handles = [
            block.register_forward_pre_hook(lambda _, args: args[0].register_hook(look) and None)
            for block in model.blocks
        ]
        fit(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        for handle in handles:
            handle.remove()
    zerostd.release(model)
    assert len(gathered) == 12
    return [] if max(gathered) <= 3 else [f"rank {rank}: {gathered} blocks were gathered at once"]


def test_frozen_groups_are_released_while_backward_runs(ranks):
    agree(ranks(2, frozen_groups_in_backward, timeout=90))


# -- things that go wrong and on --


class Stumbling(Stack):
    fails: str = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1 and self.fails == "forward":
                raise KeyError("on purpose")
            if index == 1 and self.fails == "backward":
                x.register_hook(_raise)
        return self.outlet(x)


def _raise(grad: Tensor) -> None:
    raise KeyError("on purpose")


def goes_on(rank: int, where: str) -> list[str]:
    def prepared(model: nn.Module, loss: Any, step: int, rank: int, share: float) -> None:
        if step in (1, 2) and "_zerostd" in model.__dict__:
            model.fails = where
            with contextlib.suppress(KeyError):
                loss(model, 40, rank).backward()
            model.fails = ""
            model.__dict__["_zerostd"].optimizer.zero_grad()
        (loss(model, step, rank) * share).backward()

    return differences(Scene(Stumbling, fit, BLOCKS, gradients=prepared), rank, (0, 2, 3))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_training_goes_on_after_an_exception_in(ranks, where):
    agree(ranks(2, goes_on, where, timeout=90))


# -- two models --


def adversaries(rank: int, stage: int | None) -> dict[str, Tensor]:
    """A generator and a discriminator, each prepared; `stage` None is plain torch on all ranks' data."""
    maker, judge = seeded(Stack, 1), seeded(lambda: nn.Sequential(nn.Linear(4, 8), Stack(2), nn.Linear(4, 1)), 2)
    optimizers = [sgd(maker), sgd(judge)]
    if stage is not None:
        maker, optimizers[0] = zerostd.prepare(maker, optimizers[0], stage=stage, groups=BLOCKS)
        judge, optimizers[1] = zerostd.prepare(judge, optimizers[1], stage=stage, groups=["1.blocks.*"])
    everyone, share = ([rank], 1.0) if stage is not None else ([0, 1], 0.5)
    for step in range(4):
        for who in everyone:
            real, fake = data(6, 4, number=step, rank=who), maker(data(6, 8, number=step + 50, rank=who))
            loss = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
            (share * loss).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        for who in everyone:
            loss = F.softplus(-judge(maker(data(6, 8, number=step + 90, rank=who)))).mean()
            (share * loss).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        optimizers[1].zero_grad()
    take = zerostd.full_state_dict if stage is not None else nn.Module.state_dict
    state = {
        f"{who}.{name}": t.clone() for who, m in (("maker", maker), ("judge", judge)) for name, t in take(m).items()
    }
    if stage is not None:
        zerostd.release(maker)
        zerostd.release(judge)
    return state


def compare_adversaries(rank: int) -> list[str]:
    reference = adversaries(rank, None)
    found = {stage: worst_error(adversaries(rank, stage), reference) for stage in (1, 2, 3)}
    return [
        f"stage {s}, rank {rank}: {w.name} is off by {w.error:.1e}" for s, w in found.items() if not w.error <= LIMIT
    ]


def test_two_prepared_models_train_each_other(ranks):
    agree(ranks(2, compare_adversaries, timeout=90))


# -- torch.compile --


def compare_compiled(rank: int, backend: str, stages: tuple[int, ...]) -> list[str]:
    torch._dynamo.reset()

    def make() -> nn.Module:
        model = Stack(2)
        for block in model.blocks:
            block.compile(backend=backend)
        return model

    scene, eager = Scene(make, fit, BLOCKS, steps=3), Scene(partial(Stack, 2), fit, BLOCKS, steps=3)
    failures = []
    for stage in stages:
        doing(f"{backend}, stage {stage}")
        worst = worst_error(train_prepared(scene, rank, stage), train_prepared(eager, rank, stage))
        if not worst.error <= LIMIT:
            failures.append(f"{backend}, stage {stage}, rank {rank}: {worst.name} is off by {worst.error:.1e}")
    return failures


@pytest.mark.parametrize(("backend", "stages"), [("aot_eager", (2, 3)), ("inductor", (3,))])
def test_compiled_blocks_train_as_eager_ones(ranks, backend, stages):
    agree(ranks(2, compare_compiled, backend, stages, timeout=120))
