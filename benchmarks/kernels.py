"""One AdamW step over flat arrays on the CPU: zerostd's one-pass kernel against torch's, with the casts it replaces.

    python benchmarks/kernels.py --numel 33554432 --threads 2

All ways take turns in rounds of rotating order. Times differ from minute to minute on a shared machine, so read the
ratios: of the fastest turns, which other work on the machine disturbs least.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from statistics import median

import torch
from gpt import RESULTS, machine
from torch import Tensor

from zerostd.kernels import MOMENT_CODECS, Adam, native, split, update

ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-8}
RULE = Adam(3e-4, 0.1, False, beta1=0.9, beta2=0.95, eps=1e-8, decoupled=True, step=10)
EXACT = Adam(3e-4, 0.1, False, beta1=0.9, beta2=0.95, eps=1e-8, decoupled=True, step=10, exact_root=True)
PEER = "torch fused AdamW, fp32, and both casts"
STEP = 28  # bytes a parameter: fp32 master and states in and out, a bf16 gradient in, a bf16 weight out
SPLIT = "zerostd, split master"
CODED = {codec: f"{SPLIT}, {codec} moments" for codec in MOMENT_CODECS}
STEPS = {SPLIT: 26, CODED["int8"]: 14.25, CODED["bf16"]: 18}  # of which the weight is the upper half of the master
HEADER = """# AdamW on the CPU, one step

{numel:,} parameters, {threads} threads, {rounds} rounds of rotating order, instructions {instructions} (1 AVX2,
2 AVX-512). bf16 gradient in, fp32 master and states in place, bf16 weight out. zerostd in one pass: with torch's square
root (MKL's) the bits of torch's default AdamW, with the exact one the processor's own. GB/s counts the bytes that a
step needs at least ({step} a parameter, 26 with a split master, then 14.25 with int8 moments and 18 with bf16). Ratio:
the time of "{peer}" to that of the way, both fastest; above 1 is faster than it.

- machine: {machine}
- command: `python benchmarks/kernels.py --numel {numel} --threads {threads} --rounds {rounds}`
- date: {date}

| way | fastest ns/parameter | median | GB/s | ratio |
|---|--:|--:|--:|--:|"""

Way = Callable[[], object]


def torch_way(numel: int, gradient: Tensor, weight: Tensor, **options: bool) -> Way:
    """torch's AdamW on fp32, with a cast before and one after."""
    master = torch.nn.Parameter(torch.randn(numel))
    master.grad = torch.empty(numel)
    optimizer = torch.optim.AdamW([master], **ADAMW, **options)

    def step() -> None:
        master.grad.copy_(gradient)
        optimizer.step()
        weight.copy_(master.detach())

    return step


def ways(numel: int, threads: int) -> dict[str, Way]:
    """Each way of taking a step, by its name."""
    gradient, weight = torch.randn(numel).bfloat16(), torch.empty(numel, dtype=torch.bfloat16)
    arrays = [torch.randn(numel), torch.randn(numel), torch.rand(numel)]
    other = [torch.zeros(numel) for _ in arrays]
    step = {"weight": weight, "num_threads": threads}
    halves = split(arrays[0])
    coded = {
        codec: [torch.zeros(moment.num_elements(numel), dtype=moment.dtype) for moment in moments]
        for codec, moments in MOMENT_CODECS.items()
    }
    return {
        PEER: torch_way(numel, gradient, weight, fused=True),
        "torch default AdamW (foreach=False), and both casts": torch_way(numel, gradient, weight, foreach=False),
        "torch foreach AdamW, and both casts": torch_way(numel, gradient, weight, foreach=True),
        "zerostd, exact root": lambda: update(EXACT, gradient, arrays, **step),
        "zerostd, exact root, weight on its gradient": lambda: update(
            EXACT, gradient, arrays, weight=gradient, num_threads=threads
        ),
        "zerostd, exact root, out of place": lambda: update(EXACT, gradient, arrays, other, **step),
        "zerostd, torch's root": lambda: update(RULE, gradient, arrays, **step),
        SPLIT: lambda: update(EXACT, gradient, (halves, *arrays[1:]), num_threads=threads),
    } | {
        name: partial(update, EXACT, gradient, (halves, *coded[codec]), num_threads=threads)
        for codec, name in CODED.items()
    }


def measure(numel: int, threads: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every turn of every way, after one to warm up."""
    found = ways(numel, threads)
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for round_ in range(rounds + 1):
        names = list(found)
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            begin = time.perf_counter()
            found[name]()
            if round_ > 0:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def report(arguments: argparse.Namespace) -> str:
    """The table, in Markdown."""
    torch.set_num_threads(arguments.threads)
    if library := native.load():
        arguments.instructions = library.zs_limit_instructions(arguments.instructions)
    seconds = measure(arguments.numel, arguments.threads, arguments.rounds)
    lines = [HEADER.format(**vars(arguments), step=STEP, peer=PEER, machine=machine(), date=date.today())]
    for name, turns in seconds.items():
        fastest, middle = (value / arguments.numel * 1e9 for value in (min(turns), median(turns)))
        ratio = min(seconds[PEER]) / min(turns)
        lines.append(f"| {name} | {fastest:.3f} | {middle:.3f} | {STEPS.get(name, STEP) / fastest:.1f} | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1 << 25, help="parameters")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way, after one to warm up")
    parser.add_argument("--instructions", type=int, default=9, help="most that update may use: 1 AVX2, 2 AVX-512")
    parser.add_argument("--write", action="store_true", help="write results/kernels-cpu.md")
    arguments = parser.parse_args()
    text = report(arguments)
    print(text, end="")
    if arguments.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "kernels-cpu.md").write_text(text)


if __name__ == "__main__":
    main()
