"""Step time in a world of one: zerostd against plain torch with the same precision.

    python benchmarks/one_gpu.py --size 1.3b --micro 8 --seq 1024 --steps 10

Both train the same GPT: bf16 weights, fp32 masters and moments, fused AdamW, gradients clipped to norm 1. `plain` does
that by hand, `zerostd` by one call. Each run is a process of its own, and the two take turns. On a machine without a
GPU, `--size tiny` shows that it works; its times mean little.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpt import GPT, RESULTS, Shape, draw, machine
from torch import Tensor, nn

import zerostd

SIZES = {"tiny": (256, 4, 4), "0.4b": (1024, 24, 16), "1.3b": (2048, 24, 16), "3.6b": (3072, 30, 24)}
VOCABULARY = 32000
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
MAX_NORM = 1.0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MARK = "RESULT "  # what a run prints in front of its JSON

TrainOne = Callable[[Tensor, Tensor], Tensor]


def plain(model: nn.Module) -> TrainOne:
    """Masters by hand, as one would write it without zerostd."""
    weights = list(model.parameters())
    masters = [nn.Parameter(weight.detach().float()) for weight in weights]
    optimizer = torch.optim.AdamW(masters, **ADAMW)

    def train_one(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        for master, weight in zip(masters, weights, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(masters, MAX_NORM, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_copy_([weight.data for weight in weights], [master.data for master in masters])
        return loss

    return train_one


def with_zerostd(model: nn.Module) -> TrainOne:
    """The same by one call."""
    model, optimizer = zerostd.prepare(
        model,
        torch.optim.AdamW(model.parameters(), **ADAMW),
        stage=3,
        precision="bf16",
        accumulate=1,
        max_grad_norm=MAX_NORM,
    )

    def train_one(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_one


SYSTEMS = {"plain": plain, "zerostd": with_zerostd}


def main() -> None:
    arguments = parse()
    if arguments.run is not None:
        print(MARK + json.dumps(run(arguments)), flush=True)
        return
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in SYSTEMS}
    for _ in range(arguments.rounds):
        for name, found in results.items():
            found.append(start(name))
            print(f"{name:<8} {median(found[-1]['times']):.4f} s a step", file=sys.stderr, flush=True)
    lines = report(results, arguments)
    print("\n".join(lines))
    if arguments.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "one-gpu.md").write_text("\n".join(lines) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1.3b")
    parser.add_argument("--micro", type=int, default=8, help="sequences in a step")
    parser.add_argument("--seq", type=int, default=1024, help="tokens in a sequence")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of a run")
    parser.add_argument("--warm", type=int, default=3, help="steps before them")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each system")
    parser.add_argument("--compile", action="store_true", help="compile the blocks of both: block.compile()")
    parser.add_argument("--profile", action="store_true", help="write profiler tables to $OUT, or print them")
    parser.add_argument("--write", action="store_true", help="write results/one-gpu.md")
    parser.add_argument("--run", choices=SYSTEMS, help="one run of one system in this process")
    return parser.parse_args()


def start(name: str) -> dict[str, Any]:
    """One run in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--run", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    *printed, last = done.stdout.splitlines()
    print("\n".join(printed), end="\n" if printed else "")
    return json.loads(last.removeprefix(MARK))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Build one system and train it."""
    torch.manual_seed(0)
    shape = Shape(*SIZES[arguments.size], vocabulary=VOCABULARY, length=arguments.seq)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model = GPT(shape)
    torch.set_default_dtype(torch.float32)
    size = sum(parameter.numel() for parameter in model.parameters())
    if arguments.compile:
        for block in model.blocks:
            block.compile()
    train_one = SYSTEMS[arguments.run](model)
    data = torch.Generator(DEVICE).manual_seed(1)
    times, losses = [], []
    for _ in range(arguments.warm + arguments.steps):
        batch = draw(data, arguments.micro, arguments.seq)
        synchronize()
        begin = time.perf_counter()
        losses.append(train_one(*batch).item())
        synchronize()
        times.append(time.perf_counter() - begin)
    peak = peak_bytes()
    if arguments.profile:
        profile(arguments, lambda: train_one(*batch))
    return {"times": times[arguments.warm :], "losses": losses, "peak_bytes": peak, "size": size}


def peak_bytes() -> int:
    """Of the device's memory; without one, of this process."""
    if DEVICE == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def profile(arguments: argparse.Namespace, train_one: Callable[[], Tensor]) -> None:
    """Two steps under torch's profiler: the operations that take longest, on the device and on the processor."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if DEVICE == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as watch:
        for _ in range(2):
            train_one()
        synchronize()
    found = watch.key_averages()
    orders = ["self_cuda_time_total"] if DEVICE == "cuda" else []
    tables = [
        found.table(sort_by=order, row_limit=40, max_name_column_width=80) for order in (*orders, "self_cpu_time_total")
    ]
    if "OUT" in os.environ:
        Path(os.environ["OUT"], f"one-gpu-{arguments.run}.txt").write_text("\n".join(tables))
    else:
        print("\n".join(tables))


def report(results: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> list[str]:
    """Markdown."""
    rows = []
    for name, runs in results.items():
        times = [median(run["times"]) for run in runs]
        fastest = min(min(run["times"]) for run in runs)
        peak = max(run["peak_bytes"] for run in runs) / 2**30
        losses = [runs[0]["losses"][0], runs[0]["losses"][-1]]
        by_run = ", ".join(f"{value:.4f}" for value in times)
        cells = [name, f"{median(times):.4f}", by_run, f"{fastest:.4f}", f"{peak:.2f}", *(f"{x:.4f}" for x in losses)]
        rows.append("| " + " | ".join(cells) + " |")
    pairs = list(zip(results["zerostd"], results["plain"], strict=True))
    ratios = [median(ours["times"]) / median(theirs["times"]) for ours, theirs in pairs]
    apart = max(abs(a - b) for ours, theirs in pairs for a, b in zip(ours["losses"], theirs["losses"], strict=True))
    return [
        "# One device, world of one",
        "",
        f"GPT of {pairs[0][0]['size'] / 1e9:.2f} B parameters, {arguments.micro} x {arguments.seq} tokens a step, bf16 "
        f"weights, fp32 masters, AdamW(fused=True), norm clipped to {MAX_NORM:g}"
        f"{', blocks compiled' if arguments.compile else ''}.",
        f"{arguments.rounds} runs of each, taking turns; {arguments.steps} steps after {arguments.warm} to warm up.",
        "",
        f"- machine: {machine()}",
        f"- command: `python benchmarks/{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`",
        f"- date: {date.today()}",
        "",
        "| system | step s | by run | fastest s | peak GiB | first loss | last loss |",
        "|---|--:|---|--:|--:|--:|--:|",
        *rows,
        "",
        f"zerostd / plain: {median(ratios):.4f} (by pair of runs: {', '.join(f'{ratio:.4f}' for ratio in ratios)}). "
        f"Largest difference of a loss: {apart:.1e}.",
    ]


if __name__ == "__main__":
    main()
