"""Step time on several gloo ranks: zerostd's stages against DDP, DDP + ZeroRedundancyOptimizer and FSDP2.

    python benchmarks/ranks.py --ranks 2 --steps 6

All systems train the same fp32 GPT on the same data with AdamW(fused=True), in the same processes. A peer and the
stages that are compared with it take turns of a few steps each, in rounds of rotating order, and are freed before the
next match. Times differ from minute to minute on a shared machine, so read the ratios: the median over rounds of one
system's time to its peer's in the same round.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import itertools
import os
import pstats
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpt import GPT, RESULTS, Shape, draw, machine
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import zerostd

SHAPE = Shape(width=512, depth=12, heads=8, vocabulary=12288, length=128)
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
KINDS = ("parameters", "gradients", "optimizer_states")
MATCHES = [["DDP", "stage 0"], ["DDP + ZeRO-1", "stage 1", "stage 2"], ["FSDP2", "stage 3"]]  # the peer is the first
PEERS = {name: match[0] for match in MATCHES for name in match[1:]}

Pair = tuple[nn.Module, torch.optim.Optimizer]


def ddp(model: nn.Module) -> Pair:
    """Every rank holds everything."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, torch.optim.AdamW(wrapped.parameters(), **ADAMW)


def ddp_zero(model: nn.Module) -> Pair:
    """Every rank holds the optimizer states of some of the parameters."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **ADAMW
    )
    return wrapped, optimizer


def fsdp2(model: nn.Module) -> Pair:
    """Everything sharded, a block at a time."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), **ADAMW)


def ours(stage: int) -> Callable[[nn.Module], Pair]:
    """One of zerostd's stages."""
    return lambda model: zerostd.prepare(model, torch.optim.AdamW(model.parameters(), **ADAMW), stage=stage)


SYSTEMS: dict[str, Callable[[nn.Module], Pair]] = {
    "DDP": ddp,
    "stage 0": ours(0),
    "DDP + ZeRO-1": ddp_zero,
    "stage 1": ours(1),
    "stage 2": ours(2),
    "FSDP2": fsdp2,
    "stage 3": ours(3),
}


@dataclass(frozen=True)
class Step:
    """One step of one rank, in seconds."""

    forward: float
    backward: float
    step: float
    cpu: float  # processor time of all of the rank's threads

    @property
    def whole(self) -> float:
        return self.forward + self.backward + self.step


@dataclass
class Measured:
    """What one rank saw of one system."""

    rounds: list[list[Step]] = field(default_factory=list)
    loss: float = 0.0  # mean over ranks, in the last step
    bytes: dict[str, int] = field(default_factory=dict)  # model state of this rank, by kind

    def median_s(self, part: str = "whole") -> float:
        """Over all steps of all rounds."""
        return median(getattr(step, part) for steps in self.rounds for step in steps)

    def fastest_s(self) -> float:
        """Of all steps of all rounds."""
        return min(step.whole for steps in self.rounds for step in steps)

    def ratio_to(self, peer: Measured) -> float:
        """Median over rounds of this system's median step to the peer's."""
        return median(
            median(step.whole for step in mine) / median(step.whole for step in theirs)
            for mine, theirs in zip(self.rounds, peer.rounds, strict=True)
        )


def main() -> None:
    arguments = parse()
    if "RANK" in os.environ:  # torchrun has started us
        run_rank(int(os.environ["RANK"]), arguments)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = str(arguments.ranks)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    mp.spawn(run_rank, (arguments,), nprocs=arguments.ranks)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="under torchrun, what it was told counts")
    parser.add_argument("--steps", type=int, default=6, help="steps of a turn, the first of which is not measured")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each system, after one to warm up")
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank")
    parser.add_argument("--match", type=int, nargs="+", choices=range(len(MATCHES)), default=range(len(MATCHES)))
    parser.add_argument("--profile", action="store_true", help="show the phases of a step, and cProfile of rank 0")
    parser.add_argument("--write", action="store_true", help="write results/ranks-cpu.md")
    return parser.parse_args()


def run_rank(rank: int, arguments: argparse.Namespace) -> None:
    """Everything one rank does."""
    os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo")
    arguments.ranks = dist.get_world_size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // arguments.ranks))
    results: dict[str, Measured] = {}
    for number in arguments.match:
        results |= play(MATCHES[number], arguments)
    if rank == 0:
        publish(results, arguments)
    if arguments.profile:
        for name in results:
            profile(name, arguments)
    dist.destroy_process_group()


def play(names: list[str], arguments: argparse.Namespace) -> dict[str, Measured]:
    """One match. The first step of a turn is not counted: it shares the machine with what the last system has still
    under way, as stages 1 and 2 have after their step."""
    results = {name: Measured() for name in names}
    with ExitStack() as stack:
        turns = {name: Turn(*stack.enter_context(built(name)), arguments.batch) for name in names}
        for turn in turns.values():
            turn.take(2)
        for number in range(arguments.rounds):
            for shift in range(len(names)):
                name = names[(number + shift) % len(names)]
                steps = turns[name].take(arguments.steps)[1:]
                results[name].rounds.append(steps)
                if dist.get_rank() == 0:
                    last = median(step.whole for step in steps)
                    print(f"round {number}: {name:<14}{last:.3f} s a step", file=sys.stderr, flush=True)
        for name, turn in turns.items():
            results[name].loss = turn.mean_loss()
            results[name].bytes = state_bytes(turn.model, turn.optimizer)
        del turns, turn
    return results


class Turn:
    """A system in training, a few steps at a time."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> None:
        self.model = model
        self.optimizer = optimizer
        self.batch = batch
        self.data = torch.Generator().manual_seed(1 + dist.get_rank())
        self.loss = torch.zeros(())

    def take(self, num_steps: int) -> list[Step]:
        return [self._train_one(*draw(self.data, self.batch, SHAPE.length)) for _ in range(num_steps)]

    def mean_loss(self) -> float:
        """Of the last step, over ranks."""
        dist.all_reduce(self.loss)
        return self.loss.item() / dist.get_world_size()

    def _train_one(self, tokens: Tensor, targets: Tensor) -> Step:
        """The loop's body, with a clock. Gradients are dropped at its beginning, so that they can be counted later."""
        cpu = time.process_time()
        marks = [time.perf_counter()]
        self.optimizer.zero_grad()
        loss = self.model(tokens, targets)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        self.optimizer.step()
        marks.append(time.perf_counter())
        self.loss = loss.detach()
        parts = [stop - start for start, stop in itertools.pairwise(marks)]
        return Step(*parts, cpu=time.process_time() - cpu)


@contextmanager
def built(name: str) -> Iterator[Pair]:
    """A system on a new model with the same first values as every other."""
    torch.manual_seed(0)
    model, optimizer = SYSTEMS[name](GPT(SHAPE))
    yield model, optimizer
    if name.startswith("stage"):
        zerostd.release(model)
    del model, optimizer
    gc.collect()


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of this rank by kind: the ledger's for zerostd, what the tensors hold for the others."""
    if isinstance(optimizer, zerostd.optimizers.ZeroOptimizer):
        now = zerostd.memory(model).now["device"]
        return {kind: now[kind] for kind in KINDS}
    states = getattr(optimizer, "optim", optimizer).state.values()  # ZeroRedundancyOptimizer keeps it inside
    held: dict[str, list[Tensor | None]] = {
        "parameters": list(model.parameters()),
        "gradients": [parameter.grad for parameter in model.parameters()],
        "optimizer_states": [value for state in states for value in state.values() if isinstance(value, Tensor)],
    }
    return {
        kind: sum(local_bytes(tensor) for tensor in tensors if tensor is not None) for kind, tensors in held.items()
    }


def local_bytes(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def profile(name: str, arguments: argparse.Namespace) -> None:
    """Where rank 0's Python spends its time, in a run of its own."""
    with built(name) as system:
        turn = Turn(*system, arguments.batch)
        turn.take(2)
        watch = cProfile.Profile()
        watch.enable()
        turn.take(arguments.steps)
        watch.disable()
        del turn, system
    if dist.get_rank() == 0:
        print(f"\n{name}: {arguments.steps} steps on rank 0")
        pstats.Stats(watch).strip_dirs().sort_stats("tottime").print_stats(16)


def publish(results: dict[str, Measured], arguments: argparse.Namespace) -> None:
    """Print what rank 0 saw; write it where that was asked for."""
    lines = [*header(arguments), *table(results)]
    if arguments.profile:
        lines += ["", *phases(results)]
    print("\n".join(lines))
    if arguments.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "ranks-cpu.md").write_text("\n".join(lines) + "\n")


def header(arguments: argparse.Namespace) -> list[str]:
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in GPT(SHAPE).parameters())
    return [
        f"# {arguments.ranks} gloo ranks",
        "",
        f"GPT of {size / 1e6:.1f} M parameters, fp32, {arguments.batch} x {SHAPE.length} tokens a rank, "
        "AdamW(fused=True) in every system (torch's default on the CPU is several times slower).",
        f"{arguments.rounds} rounds of rotating order; a turn is {arguments.steps} steps, the first is not measured.",
        "Ratio: the median over rounds of a system's median step to its peer's in the same round; fastest ratio: of "
        "the fastest steps of all, which other work on the machine disturbs least. Below 1 zerostd is faster.",
        "Model-state bytes of rank 0 while it holds gradients; zerostd's are its ledger's.",
        "",
        f"- machine: {machine()}, {torch.get_num_threads()} thread(s) a rank",
        f"- command: `python benchmarks/{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`",
        f"- date: {date.today()}",
        "",
    ]


def table(results: dict[str, Measured]) -> list[str]:
    rows = [
        "| system | step s | fastest s | peer | ratio | fastest ratio | loss | parameters MB | gradients MB "
        "| optimizer states MB | total MB |",
        "|---|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, result in results.items():
        peer = results.get(PEERS.get(name, ""))
        ratios = ["", "", ""]
        if peer is not None:
            fastest = result.fastest_s() / peer.fastest_s()
            ratios = [PEERS[name], f"{result.ratio_to(peer):.3f}", f"{fastest:.3f}"]
        sizes = [result.bytes[kind] / 1e6 for kind in KINDS]
        cells = [name, f"{result.median_s():.3f}", f"{result.fastest_s():.3f}", *ratios, f"{result.loss:.6f}"]
        rows.append("| " + " | ".join([*cells, *(f"{size:.1f}" for size in [*sizes, sum(sizes)])]) + " |")
    return rows


def phases(results: dict[str, Measured]) -> list[str]:
    rows = ["| system | forward s | backward s | step s | processor s |", "|---|--:|--:|--:|--:|"]
    for name, result in results.items():
        cells = [f"{result.median_s(part):.3f}" for part in ("forward", "backward", "step", "cpu")]
        rows.append("| " + " | ".join([name, *cells]) + " |")
    return rows


if __name__ == "__main__":
    main()
