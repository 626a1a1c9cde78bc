"""The same idioms under other libraries, on two ranks of CPUs: what they answer stands beside ours in the table.

`python -m idioms peers` runs them and keeps the outcomes in peers.json: same, different (silently), error with the
first line of what was raised, or "-" where the idiom is made of zerostd's own calls. The suite runs a sample.

A library gets every chance: optimizers follow parameters that it replaces, and sharded results are gathered before they
are compared.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from idioms.forms import BY_NAME
from idioms.loop import Loop, groups_of, idioms
from idioms.running import DIFFERENT, ERROR, SAME, Outcome, judge, plain_result, run_loop
from support.processes import RankPool

PEERS_FILE = Path(__file__).with_name("peers.json")
OURS = "-"  # the idiom is made of zerostd's own calls
OWN_CALLS = re.compile(r"zerostd\.|max_grad_norm=|loop\.(gathered|release|prepare_alone|averaged)\(")
TIMEOUT_S = 40.0

Cells = dict[str, dict[str, str]]  # by idiom and peer


class Fsdp2Loop(Loop):
    """FSDP2: each group and then the model is given to `fully_shard`."""

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any
    ) -> tuple[Any, Any]:
        names = {parameter: name for name, parameter in model.named_parameters()}
        optimizer = self.adamw(model) if optimizer is None else optimizer
        for name in groups_of(model) or []:
            fully_shard(model.get_submodule(name))
        fully_shard(model)
        sharded = dict(model.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [sharded[names[p]] if p in names else p for p in group["params"]]
        for parameter in list(optimizer.state):
            if parameter in names:
                optimizer.state[sharded[names[parameter]]] = optimizer.state.pop(parameter)
        return model, optimizer

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def weights(self, model: nn.Module) -> dict[str, Any]:
        return {name: whole(value) for name, value in model.state_dict().items()}


PEERS: Mapping[str, type[Loop]] = {"fsdp2": Fsdp2Loop}


def whole(value: Any) -> Any:
    """A sharded tensor as all ranks have it together."""
    return value.full_tensor().clone() if isinstance(value, DTensor) else value


def is_ours(name: str) -> bool:
    """Whether an idiom is made of zerostd's own calls."""
    lines = Path(idioms()[name].path).read_text(encoding="utf-8").splitlines()
    first = idioms()[name].run.__code__.co_firstlineno
    body = lines[first - 1 : first - 1 + 45]
    end = next((i for i, line in enumerate(body) if i > 1 and line.startswith(("@", "class ", "def _"))), len(body))
    return OWN_CALLS.search("\n".join(body[:end])) is not None


def try_peer(rank: int, name: str, peer: str) -> dict[str, Any]:
    """Run one idiom under another library, on this rank, and compare it with plain torch."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    form = BY_NAME["stage3"]
    try:
        result, _ = run_loop(idioms()[name], PEERS[peer], form, whole)
    except Exception as error:
        text = " ".join(str(error).split())[:160]
        return asdict(Outcome(ERROR, f"{type(error).__name__}: {text}"))
    return asdict(judge(result, plain_result(name), idioms()[name], form))


def run_peer(pool: RankPool, name: str, peer: str) -> Outcome:
    """Run one idiom under another library on two ranks; the worse outcome counts."""
    if is_ours(name):
        return Outcome(OURS)
    try:
        outcomes = [Outcome(**parts) for parts in pool.run(try_peer, name, peer, timeout=TIMEOUT_S)]
    except AssertionError as error:
        return Outcome(ERROR, f"hangs or dies: {str(error)[-120:]}")
    for kind in (DIFFERENT, ERROR):
        for outcome in outcomes:
            if outcome.outcome == kind:
                return outcome
    return outcomes[0]


def run_peers(names: list[str], peers: list[str]) -> Cells:
    """Run idioms that peers.json does not have yet, and keep what comes of them there."""
    cells = read_peers()
    with RankPool(2) as pool:
        for name in names:
            for peer in peers:
                if peer in cells.get(name, {}):
                    continue
                outcome = run_peer(pool, name, peer)
                if outcome.outcome == ERROR:
                    pool.close()  # ranks may be apart
                print(f"{name:50} {peer:10} {outcome.outcome} {outcome.detail[:150]}", flush=True)
                text = outcome.outcome if outcome.outcome in (SAME, OURS) else f"{outcome.outcome}: {outcome.detail}"
                cells.setdefault(name, {})[peer] = text
                write_peers(cells)
    return cells


def read_peers() -> Cells:
    """What was kept; empty if nothing was."""
    return json.loads(PEERS_FILE.read_text(encoding="utf-8")) if PEERS_FILE.exists() else {}


def write_peers(cells: Cells) -> None:
    """In the order of the table, a line for each idiom; idioms that are gone are left out."""
    lines = [f"  {json.dumps(name)}: {json.dumps(cells[name])}" for name in idioms() if name in cells]
    PEERS_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
