"""torch.compile on prepared models: equal blocks share a graph, and results are those of plain compiled torch.

Hooks are outside the compiled regions. Where groups move, `torch.compile(model)` therefore compiles block by block, and
what the root does between them runs eagerly; where nothing moves, the whole model is one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerostd
from zerostd import Placement

NUM_BLOCKS = 24
MOST_GRAPHS = 2
STEPS = 3
WIDTH = 8

ALL_HOST = Placement(parameters="host", gradients="host", optimizer_states="host")
FORMS: dict[str, dict[str, Any]] = {
    "device": {"placement": Placement()},
    "host": {"placement": Placement(optimizer_states="host")},
    "early": {"placement": Placement(optimizer_states="host"), "accumulate": 1},
    "all_host": {"placement": ALL_HOST},
    "recompute": {"placement": Placement(activations="recompute")},
    "offload": {"placement": Placement(activations="host")},
    "bf16": {"placement": ALL_HOST, "precision": "bf16"},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.stem = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Counting:
    """A backend that notes each graph's number of operations, and how often it runs."""

    def __init__(self) -> None:
        self.graphs: list[list[int]] = []

    def __call__(self, graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        entry = [sum(node.op.startswith("call") for node in graph.graph.nodes), 0]
        self.graphs.append(entry)
        compiled = torch._dynamo.lookup_backend("aot_eager")(graph, examples)

        def run(*args: Any) -> Any:
            entry[1] += 1
            return compiled(*args)

        return run


def compile_blocks(model: Stack, backend: Counting) -> nn.Module:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def wrap_blocks(model: Stack, backend: Counting) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=backend)
    return model


def wrap_model(model: Stack, backend: Counting) -> nn.Module:
    return torch.compile(model, backend=backend)


def compile_model(model: Stack, backend: Counting) -> nn.Module:
    model.compile(backend=backend)
    return model


WAYS = {way.__name__: way for way in (compile_blocks, wrap_blocks, wrap_model, compile_model)}


def train(
    way: str, options: dict[str, Any] | None, *, before: bool = False, num_blocks: int = NUM_BLOCKS
) -> tuple[dict[str, Tensor], Counting]:
    """Train, then evaluate without gradients; returns weights and the answer, and the graphs of the steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Stack(num_blocks)
    backend = Counting()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    names = [name for name, _ in model.named_parameters()]
    called: nn.Module = model
    if before:
        called = WAYS[way](model, backend)
    if options is not None:
        _, optimizer = zerostd.prepare(model, optimizer, groups=["blocks.*"], **options)
    if not before:
        called = WAYS[way](model, backend)
    for step in range(STEPS):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        called(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = [list(graph) for graph in backend.graphs]
    with torch.no_grad():
        answer = called(x)
    state = zerostd.full_state_dict(model) if options is not None else model.state_dict()
    backend.graphs = trained
    torch._dynamo.reset()
    values = dict(zip(names, (value.clone() for value in state.values()), strict=True))
    if options is not None:
        zerostd.release(model)
    return {**values, "answer": answer}, backend


@pytest.fixture(scope="module")
def plain() -> dict[str, dict[str, Tensor]]:
    """What plain compiled torch makes of it, by way."""
    return {way: train(way, None)[0] for way in ("compile_blocks", "wrap_model")}


CASES = [(way, form, before) for way in WAYS for form in FORMS for before in (False, True)]
SAMPLE = [(list(WAYS)[index % len(WAYS)], form, index % 3 == 0) for index, form in enumerate(FORMS)]


def check(plain: dict[str, dict[str, Tensor]], way: str, form: str, before: bool) -> None:
    values, backend = train(way, FORMS[form], before=before)
    graphs = backend.graphs
    assert 1 <= len(graphs) <= MOST_GRAPHS, graphs
    calls = sum(count for _, count in graphs)
    is_whole = way in ("wrap_model", "compile_model") and form == "device"
    assert calls >= STEPS * (1 if is_whole else NUM_BLOCKS), graphs
    expected = plain["wrap_model" if way in ("wrap_model", "compile_model") else "compile_blocks"]
    for name, value in expected.items():
        if form == "bf16":
            torch.testing.assert_close(values[name], value, rtol=0.1, atol=0.1, msg=name)
        else:
            torch.testing.assert_close(values[name], value, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize(("way", "form", "before"), SAMPLE)
def test_equal_blocks_share_a_graph(plain: Any, way: str, form: str, before: bool) -> None:
    check(plain, way, form, before)


@pytest.mark.full
@pytest.mark.parametrize(("way", "form", "before"), [case for case in CASES if case not in SAMPLE])
def test_equal_blocks_share_a_graph_in_all_forms(plain: Any, way: str, form: str, before: bool) -> None:
    check(plain, way, form, before)


def train_on_ranks(rank: int, way: str, stage: int) -> tuple[dict[str, Tensor], list[list[int]]]:
    values, backend = train(way, {"placement": Placement(), "stage": stage})
    return values, backend.graphs


@pytest.mark.parametrize(("way", "stage"), [("compile_blocks", 3), ("wrap_model", 3), ("wrap_model", 2)])
def test_equal_blocks_share_a_graph_on_two_ranks(ranks: Any, plain: Any, way: str, stage: int) -> None:
    for values, graphs in ranks(2, train_on_ranks, way, stage, timeout=90):
        assert 1 <= len(graphs) <= MOST_GRAPHS, graphs
        assert sum(count for _, count in graphs) >= STEPS * NUM_BLOCKS
        for name, value in plain[way].items():
            torch.testing.assert_close(values[name], value, rtol=1e-5, atol=1e-6, msg=name)
