"""Moments in fewer bytes on the CPU: the time of an update, how well moments follow fp32's, and the loss of a training.

    python benchmarks/moments.py --write

"Rounded to nearest" is what bf16 would be without its dither: both fp32 moments are rounded after each step. The text
is the language reference that Python has for `help()`; nine tenths of it are trained on. All takes a quarter of an hour
of a core. Times are the thread's own, so that other work on the machine changes them little.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date

import torch
from gpt import RESULTS, machine
from torch import Tensor, nn
from torch.nn import functional as F

import zerostd
from zerostd.kernels import MOMENT_CODECS, Adam, decode_moments, encode_moments, native, split, update

RULE = Adam(3e-4, 0.1, False, beta1=0.9, beta2=0.999, eps=1e-8, decoupled=True, step=10, exact_root=True)
EXACT, NEAREST = "fp32", "bf16, rounded to nearest"
FOLLOWED = 4000  # steps
LENGTH = 48
TEXT = torch.tensor(
    list("\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())).encode("ascii", "ignore"))
)
CUT = len(TEXT) * 9 // 10
HEADER = """# Adam's moments in fewer bytes

- machine: {machine}
- command: `python benchmarks/moments.py --write`
- date: {date}"""


def states(numel: int, codec: str) -> list[Tensor]:
    if codec not in MOMENT_CODECS:
        return [torch.zeros(numel), torch.zeros(numel)]
    return [torch.zeros(moment.num_elements(numel), dtype=moment.dtype) for moment in MOMENT_CODECS[codec]]


# -- time --


def time_lines(numel: int, turns: int) -> Iterator[str]:
    """One thread's own time for a step with bf16 gradients and split masters, the fastest of turns in rotation."""
    gradient, halves = torch.randn(numel).bfloat16(), split(torch.randn(numel))
    kept = {codec: states(numel, codec) for codec in (EXACT, *MOMENT_CODECS)}
    seconds: dict[tuple[str, int], list[float]] = {}
    levels = (2, 1)
    for level in levels:
        native.load().zs_limit_instructions(level)
        for _ in range(turns):
            for codec, columns in kept.items():
                begun = time.thread_time()
                update(RULE, gradient, (halves, *columns))
                seconds.setdefault((codec, level), []).append(time.thread_time() - begun)
    native.load().zs_limit_instructions(9)
    yield "| moments | bytes a parameter | moved by a step | AVX-512, ns | AVX2, ns |\n|---|--:|--:|--:|--:|"
    for codec, columns in kept.items():
        held = sum(column.nbytes for column in columns) / numel
        fastest = [min(seconds[codec, level]) / numel * 1e9 for level in levels]
        yield f"| {codec} | {held:.3f} | {10 + 2 * held:.2f} | {fastest[0]:.2f} | {fastest[1]:.2f} |"


# -- moments that follow --


def followed(codec: str, start: float, gradient_of: Callable[[], Tensor], numel: int) -> Tensor:
    """`exp_avg_sq` after many steps from `start`, with these gradients."""
    arrays = [torch.zeros(numel), *states(numel, codec)]
    if codec in MOMENT_CODECS:
        encode_moments(torch.full((numel,), start), MOMENT_CODECS[codec][1], arrays[2])
    else:
        arrays[2].fill_(start)
    for number in range(1, FOLLOWED + 1):
        update(replace(RULE, step=number), gradient_of(), arrays)
        for column in arrays[1:] if codec == NEAREST else ():
            column.copy_(column.bfloat16())
    return decode_moments(arrays[2], MOMENT_CODECS[codec][1], numel) if codec in MOMENT_CODECS else arrays[2]


def follow_lines(numel: int) -> Iterator[str]:
    yield "| gradients | exp_avg_sq begins at | moments | mean, to fp32's | deviation of one |\n|---|--:|---|--:|--:|"
    for name, start in (("normal", 0.0), ("normal", 4.0), ("0.37", 4.0)):
        exact = None
        for codec in (EXACT, "bf16", NEAREST, "int8"):
            generator = torch.Generator().manual_seed(0)

            def gradient_of(name: str = name, generator: torch.Generator = generator) -> Tensor:
                return torch.randn(numel, generator=generator) if name == "normal" else torch.full((numel,), 0.37)

            found = followed(codec, start, gradient_of, numel)
            exact = found if exact is None else exact
            apart = (found / exact - 1).square().mean().sqrt()
            if codec != EXACT:
                yield f"| {name} | {start:g} | {codec} | {found.mean() / exact.mean():.3f} | {apart:.3f} |"


# -- training --


class Gpt(nn.Module):
    """Two blocks of width 64 on bytes."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.tokens(tokens) + self.places.weight
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))


def loss_of(model: nn.Module, count: int, seed: int, low: int, high: int) -> Tensor:
    starts = torch.randint(low, high - LENGTH - 1, (count,), generator=torch.Generator().manual_seed(seed))
    row = TEXT[starts[:, None] + torch.arange(LENGTH + 1)]
    return F.cross_entropy(model(row[:, :-1]).flatten(0, 1), row[:, 1:].flatten())


def trained(codec: str, seed: int, num_steps: int) -> float:
    """The loss of the other tenth of the text."""
    torch.manual_seed(seed)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.999), weight_decay=0.1)
    if codec in MOMENT_CODECS:
        placement = zerostd.Placement(codec={"optimizer_states": codec})
        model, optimizer = zerostd.prepare(model, optimizer, placement=placement, exact=False)
    for number in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (number + 1) / 50) * (1 - 0.9 * number / num_steps)
        loss_of(model, 16, seed * 100_000 + number, 0, CUT).backward()
        optimizer.step()
        optimizer.zero_grad()
        for kept in optimizer.state.values() if codec == NEAREST else ():
            for key in ("exp_avg", "exp_avg_sq"):
                kept[key].copy_(kept[key].bfloat16())
    with torch.no_grad():
        loss = sum(loss_of(model, 64, number, CUT, len(TEXT)).item() for number in range(20)) / 20
    if codec in MOMENT_CODECS:
        zerostd.release(model)
    return loss


def training_lines(num_steps: int) -> Iterator[str]:
    yield "| moments | seed 0 | seed 1 | seed 2 |\n|---|--:|--:|--:|"
    for codec in (EXACT, "bf16", NEAREST, "int8"):
        losses = [trained(codec, seed, num_steps) for seed in range(3)]
        yield f"| {codec} | {' | '.join(f'{loss:.4f}' for loss in losses)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1 << 24, help="parameters whose update is timed")
    parser.add_argument("--steps", type=int, default=1200, help="of each training")
    parser.add_argument("--write", action="store_true", help="write results/moments-cpu.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = [HEADER.format(machine=machine(), date=date.today())]
    parts = {
        f"## Time of an update\n\nOne thread, {arguments.numel:,} parameters, bf16 gradients, masters in halves; the "
        "thread's own time, fastest of 25.\nA step moves 10 bytes a parameter beside the moments.": time_lines(
            arguments.numel, 25
        ),
        f"## Moments after {FOLLOWED:,} steps\n\nbeta2 = 0.999; 4,096 elements.": follow_lines(4096),
        f"## Loss of a training\n\nA GPT of two blocks of width 64 on bytes, {arguments.steps:,} steps of 16 x "
        f"{LENGTH} bytes, AdamW with beta2 = 0.999;\nloss of text that was not trained on.": training_lines(
            arguments.steps
        ),
    }
    for title, rows in parts.items():
        print(title, end="\n\n")
        lines += ["", title, ""]
        for row in rows:
            print(row, flush=True)
            lines.append(row)
    if arguments.write:
        (RESULTS / "moments-cpu.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
