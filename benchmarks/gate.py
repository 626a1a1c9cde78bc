"""The gate of lossy codecs: a GPT of 122 M parameters on real text, exact and coded, by validation loss.

    python benchmarks/gate.py --write NAME --limit 380       (a GPU; runs begin while time is left)
    python benchmarks/gate.py --run int8:1 --run bf16:0 --run "int8 wire:0" --records RUNS --write NAME
    python benchmarks/gate.py --tiny                         (no GPU: shows that it works)

The text is Python source, up to 60 M characters: the standard library of this interpreter, and torch, numpy and
transformers as far as they are installed. Files are told apart by their contents; one in fifty, by its checksum, is
kept for validation. A token is one of the most frequent words, runs of spaces and signs, or a byte of a rarer one.

Runs: exact and int8 moments with three seeds each, int8 without companding, codes on the wire. Without companding, m
and v are fractions of the largest in 64, rounded after each exact step. `kernels/moments.py` also keeps squares above
zero from becoming zero, so one run adds that alone, to tell the two apart. A wire takes two ranks at stage 3, which
share the device and halve each batch. A run's seed decides first values and the order of the text, so runs of one seed
differ by their codes alone. With `--records`, several processes add their runs to one file, and each reports them all.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import socket
import subprocess
import sys
import sysconfig
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from statistics import mean

import torch
from gpt import GPT, RESULTS, Shape, machine
from torch import Tensor
from torch.nn import functional as F

import zerostd
from zerostd.kernels import MOMENT_CODECS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PACKAGES = ("torch", "numpy", "transformers")
WORDS = re.compile(r"[A-Za-z]+|[0-9]|_|\n *| +|[^A-Za-z0-9_\s]|\s")
MOST_CHARACTERS = 60_000_000
WARM_STEPS = 100
DIVERGED = 15.0  # nats; more than tokens drawn at random have
BEGIN = time.perf_counter()
BARE, FLOORED = "int8 without companding", "int8 without companding, squares kept above zero"
WIRES = {"int8 wire": {"gather": "int8", "reduce": "int8"}, "int4 wire": {"gather": "int8", "reduce": "int4"}}
COLOURS = {"exact": "#4477aa", "int8": "#228833", BARE: "#cc3311", FLOORED: "#ee7733"}
COLOURS |= {"int8 wire": "#aa3377", "int4 wire": "#66ccee", "bf16": "#ccbb44"}
ALL_RUNS = ("exact:0", "int8:0", f"{BARE}:0", "exact:1", "exact:2", "int8:1", "int8:2", f"{FLOORED}:0")
NUM_RANKS = 2  # of a run with a wire
RANK = int(os.environ.get("RANK", 0))


@dataclass(frozen=True)
class Sizes:
    """What is trained, and for how long."""

    shape: Shape
    steps: int
    batch: int  # sequences
    validation: int  # sequences, at the end
    every: int  # steps between two points of the curve
    rate: float = 6e-4  # at its highest
    beta2: float = 0.95


WHOLE = Sizes(Shape(768, 12, 12, vocabulary=24_000, length=512), steps=2000, batch=16, validation=640, every=200)
TINY = Sizes(Shape(64, 2, 2, vocabulary=1000, length=64), steps=60, batch=8, validation=32, every=20)


@dataclass
class Run:
    """One training."""

    kind: str
    seed: int
    curve: list[tuple[int, float]] = field(default_factory=list)  # steps, validation loss
    seconds: float = 0.0
    state_bytes: float = 0.0  # of the optimizer, for each parameter

    @property
    def is_emulated(self) -> bool:
        """Whether fp32 states are rounded to codes after each step, since the library has no such codes."""
        return self.kind in (BARE, FLOORED)

    @property
    def loss(self) -> float:
        return self.curve[-1][1]


def source_files(is_tiny: bool) -> Iterator[Path]:
    yield from sorted(Path(sysconfig.get_path("stdlib")).glob("*.py" if is_tiny else "**/*.py"))
    for name in () if is_tiny else PACKAGES:
        folder = Path(sysconfig.get_path("purelib"), name)
        yield from sorted(folder.glob("**/*.py"))


def read_text(is_tiny: bool) -> tuple[list[str], list[str], Counter[str]]:
    """Files to train on, files to validate with, and characters by where they come from."""
    texts: dict[int, str] = {}
    counts: Counter[str] = Counter()
    site = sysconfig.get_path("purelib")
    for path in source_files(is_tiny):
        if "site-packages" in path.parts and not path.is_relative_to(site):
            continue
        if sum(counts.values()) > MOST_CHARACTERS:
            break
        text = path.read_text(errors="ignore")
        key = zlib.crc32(text.encode())
        if len(text) > 200 and key not in texts:
            texts[key] = text
            counts[path.relative_to(site).parts[0] if path.is_relative_to(site) else "standard library"] += len(text)
    kept = [text for key, text in texts.items() if key % 50 == 0]
    return [text for key, text in texts.items() if key % 50], kept, counts


class Tokens:
    """The most frequent pieces of text, and bytes."""

    def __init__(self, texts: list[str], vocabulary: int) -> None:
        counts = Counter(piece for text in texts for piece in WORDS.findall(text))
        pieces = [piece for piece, _ in counts.most_common(vocabulary - 256)]
        self.numbers = {piece: 256 + index for index, piece in enumerate(pieces)}

    def encode(self, texts: list[str]) -> Tensor:
        numbers: list[int] = []
        for text in texts:
            for piece in WORDS.findall(text):
                number = self.numbers.get(piece)
                numbers.extend(piece.encode() if number is None else (number,))
            numbers.append(0)
        return torch.tensor(numbers, dtype=torch.int32).to(DEVICE)


@torch.no_grad()
def drop_companding(state: dict[str, Tensor], *, keeps_squares: bool) -> None:
    """Let moments be what plain codes of 8 bits say: fractions of the largest of 64, rounded. With `keeps_squares`, a
    square above zero has a code above zero."""
    for name, most in (("exp_avg", 127.0), ("exp_avg_sq", 255.0)):
        rows = F.pad(state[name], (0, -state[name].numel() % 64)).view(-1, 64)
        scales = rows.abs().amax(1, keepdim=True).div_(most)
        codes = (rows / scales).nan_to_num_(0.0).round_()
        if keeps_squares and name == "exp_avg_sq":
            codes = torch.where(rows > 0, codes.clamp(min=1.0), codes)
        state[name].copy_(codes.mul_(scales).view(-1)[: state[name].numel()])


def train(run: Run, sizes: Sizes, text: Tensor, validation: Tensor) -> None:
    torch.manual_seed(run.seed)
    model = GPT(sizes.shape).to(DEVICE)
    numel = sum(p.numel() for p in model.parameters())
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=sizes.rate, betas=(0.9, sizes.beta2), fused=True)
    codec = {"optimizer_states": run.kind} if run.kind in MOMENT_CODECS else WIRES.get(run.kind, {})
    model, optimizer = zerostd.prepare(
        model,
        optimizer,
        precision="bf16",
        accumulate=1,
        max_grad_norm=1.0,
        placement=zerostd.Placement(codec=codec),
        exact=not codec,
        stage=3 if run.kind in WIRES else None,
    )
    order = torch.Generator().manual_seed(run.seed)
    length = sizes.shape.length
    begin = time.perf_counter()
    for step in range(1, sizes.steps + 1):
        warm = min(1.0, step / WARM_STEPS)
        rate = sizes.rate * warm * 0.5 * (1 + math.cos(math.pi * step / sizes.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(text) - length - 1, (sizes.batch,), generator=order)
        if run.kind in WIRES:
            starts = starts.chunk(NUM_RANKS)[RANK]
        model(*batch_at(text, starts, length)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if run.is_emulated:
            for state in optimizer.updater.state.values():
                drop_companding(state, keeps_squares=run.kind == FLOORED)
        if step % sizes.every == 0 or step == sizes.steps:
            part = sizes.validation if step == sizes.steps else sizes.validation // 8
            run.curve.append((step, validate(model, validation, part, sizes)))
            print(
                f"+{time.perf_counter() - BEGIN:5.0f} s {run.kind}, seed {run.seed}, {run.curve[-1]}", file=sys.stderr
            )
            if not run.loss < DIVERGED:
                break
    run.seconds = time.perf_counter() - begin
    run.state_bytes = zerostd.memory(model).now["device"]["optimizer_states"] / numel
    zerostd.release(model)


def batch_at(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    places = starts.to(DEVICE, non_blocking=True)[:, None] + torch.arange(length + 1, device=DEVICE)
    rows = text[places].long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


@torch.no_grad()
def validate(model: GPT, text: Tensor, num_sequences: int, sizes: Sizes) -> float:
    """The mean loss of sequences spread over the text, always the same ones."""
    length = sizes.shape.length
    starts = torch.linspace(0, len(text) - length - 2, num_sequences).long()
    losses = [model(*batch_at(text, part, length)) for part in starts.split(sizes.batch)]
    return torch.stack(losses).mean().item()


# the report


def verdict(runs: list[Run]) -> list[str]:
    exact = {run.seed: run.loss for run in runs if run.kind == "exact"}
    lines = []
    if len(exact) > 1:
        lines.append(
            f"Spread of exact runs over {len(exact)} seeds: {max(exact.values()) - min(exact.values()):.4f} nats."
        )
    for codec in MOMENT_CODECS:
        apart = [run.loss - exact[run.seed] for run in runs if run.kind == codec and run.seed in exact]
        if apart:
            each = ", ".join(f"{difference:+.4f}" for difference in apart)
            lines.append(f"{codec} minus exact, seed by seed: {each}; mean {mean(apart):+.4f} nats.")
    for run in runs:
        if (run.is_emulated or run.kind in WIRES) and run.seed in exact:
            steps = run.curve[-1][0]
            lines.append(f"{run.kind}, minus exact: {run.loss - exact[run.seed]:+.4f} nats, after {steps} steps.")
    return lines


def report(runs: list[Run], sizes: Sizes, text: Tensor, validation: Tensor, counts: Counter[str]) -> list[str]:
    sources = ", ".join(f"{name} {count / 1e6:.1f} M characters" for name, count in counts.items())
    shape = sizes.shape
    lines = [
        "# Codes, by validation loss",
        "",
        f"GPT of width {shape.width}, depth {shape.depth}, {shape.vocabulary} tokens; {sizes.steps} steps of "
        f"{sizes.batch}x{shape.length} tokens, AdamW, rate {sizes.rate:g}, betas 0.9 and {sizes.beta2:g}, clip 1.0, "
        f"bf16. Text: {sources}; {len(text) / 1e6:.1f} M tokens to train on, {len(validation) / 1e6:.2f} M to validate "
        "with.",
        "",
        f"- machine: {machine()}",
        f"- command: `python benchmarks/gate.py {' '.join(sys.argv[1:])}`",
        f"- date: {date.today()}",
        "",
        "| run | seed | validation loss | state bytes a parameter | seconds |",
        "|---|--:|--:|--:|--:|",
    ]
    for run in runs:
        state_bytes = "emulated" if run.is_emulated else f"{run.state_bytes:.3f}"
        row = (run.kind, str(run.seed), f"{run.loss:.4f}", state_bytes, f"{run.seconds:.0f}")
        lines.append(f"| {' | '.join(row)} |")
    return [*lines, "", *verdict(runs), "", "![validation loss by step](NAME.svg)"]


def picture(runs: list[Run]) -> str:
    """Validation loss by step, as an SVG."""
    width, height, margin = 720, 400, 56
    most_steps = max(step for run in runs for step, _ in run.curve)
    shown = [min(loss, 12.0) for run in runs for _, loss in run.curve if math.isfinite(loss)]
    low, high = min(shown) - 0.05, min(max(shown), min(shown) + 5) + 0.05

    def place(step: int, loss: float) -> str:
        y = height - margin - (min(loss, high) - low) / (high - low) * (height - 2 * margin)
        return f"{margin + step / most_steps * (width - 2 * margin):.1f},{y:.1f}"

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
             'font-size="12">', f'<rect width="{width}" height="{height}" fill="white"/>']  # fmt: skip
    for number in range(6):
        loss = low + (high - low) * number / 5
        y = place(0, loss).split(",")[1]
        parts.append(f'<line x1="{margin}" x2="{width - margin}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{margin - 8}" y="{y}" text-anchor="end" dy="4">{loss:.2f}</text>')
    for run in runs:
        points = " ".join(place(step, loss) for step, loss in run.curve if math.isfinite(loss))
        parts.append(f'<polyline fill="none" stroke="{COLOURS[run.kind]}" stroke-width="1.5" points="{points}"/>')
    for number, (kind, colour) in enumerate(COLOURS.items()):
        y = margin + 18 * number
        parts.append(f'<rect x="{width - 380}" y="{y - 9}" width="18" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{width - 354}" y="{y}">{kind}</text>')
    parts.append(f'<text x="{width / 2}" y="{height - 14}" text-anchor="middle">steps (0 to {most_steps})</text>')
    parts.append(f'<text x="14" y="{height / 2}" transform="rotate(-90 14 {height / 2})">validation loss, nats</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def run_ranks() -> int:
    """Run this command once for each rank of the wire, all on one device."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": str(NUM_RANKS), "LOCAL_WORLD_SIZE": str(NUM_RANKS), "LOCAL_RANK": "0"}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NCCL_SOCKET_IFNAME": "lo"}
    ranks = []
    for rank in range(NUM_RANKS):
        own = {"RANK": str(rank), "NCCL_HOSTID": f"pretended-{rank}"}
        ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=os.environ | world | own))
    return max(rank.wait() for rank in ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few steps of a small model on a part of the text")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds after which no run begins")
    parser.add_argument("--run", action="append", metavar="KIND:SEED", help=f"kinds: {', '.join(COLOURS)}; all if none")
    parser.add_argument("--rate", type=float, default=WHOLE.rate, help="the highest learning rate")
    parser.add_argument("--beta2", type=float, default=WHOLE.beta2)
    parser.add_argument("--records", type=Path, help="lines of JSON that runs are added to and reported from")
    parser.add_argument("--write", metavar="NAME", help="write results/gate-NAME.md and .svg, and to $OUT if set")
    options = parser.parse_args()
    planned = [Run(kind, int(seed)) for kind, _, seed in (word.rpartition(":") for word in options.run or ALL_RUNS)]
    if any(run.kind in WIRES for run in planned) and "RANK" not in os.environ:
        sys.exit(run_ranks())
    sizes = replace(TINY if options.tiny else WHOLE, rate=options.rate, beta2=options.beta2)
    texts, kept, counts = read_text(options.tiny)
    tokens = Tokens(texts, sizes.shape.vocabulary)
    text, validation = tokens.encode(texts), tokens.encode(kept)
    print(f"+{time.perf_counter() - BEGIN:5.0f} s {len(text)} tokens, {len(validation)} to validate", file=sys.stderr)
    runs: list[Run] = []
    lines: list[str] = []
    for run in planned:
        if runs and time.perf_counter() - BEGIN + 1.1 * max(done.seconds for done in runs) > options.limit:
            continue
        train(run, sizes, text, validation)
        runs.append(run)
        if RANK:
            continue
        if options.records:
            with options.records.open("a") as file:
                file.write(json.dumps(asdict(run)) + "\n")
            runs = [Run(**json.loads(line)) for line in options.records.read_text().splitlines()]
            runs.sort(key=lambda run: (list(COLOURS).index(run.kind), run.seed))
        lines = report(runs, sizes, text, validation, counts)
        name = f"gate-{options.write or 'latest'}"
        folders = [RESULTS] if options.write else []
        folders += [Path(os.environ["OUT"])] if "OUT" in os.environ else []
        for folder in folders:
            folder.mkdir(exist_ok=True)
            (folder / f"{name}.md").write_text("\n".join(lines).replace("NAME", name) + "\n")
            (folder / f"{name}.svg").write_text(picture(runs))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
