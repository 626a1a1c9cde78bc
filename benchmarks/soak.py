"""A soak: thousands of steps with lengths, evaluations, saves and placements drawn from a seed, and the same steps in
plain torch. Memory, descriptors and threads must stay flat, and losses must be those of plain torch.

    python benchmarks/soak.py --steps 5000 --write soak-cpu                  # on the CPU
    python benchmarks/soak.py --seconds 480 --device cuda --write soak-cuda  # as many steps as fit

Free memory that malloc keeps is given back to the system before each sample, so that resident memory is what is used.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import math
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from gpt import RESULTS, machine
from torch import nn

import zerostd
from zerostd import Placement

WIDTH = 64
DEPTH = 4
LENGTHS = (1, 48)  # tokens of a sample
NUM_SAMPLES = 40  # of the process: lines of the table
RISING = ("resident_mb", "allocated_mb", "device_mb", "objects")
# In 1,000 steps, or twice the standard error.
LIMITS = {"resident_mb": 0.5, "allocated_mb": 0.5, "device_mb": 0.5, "objects": 100.0}
# Of losses and outputs, both near one. On a device the CPU's updates have other square roots, and both models go on
# from the same values after each evaluation and each checkpoint.
TOLERANCE = {"cpu": 1e-6, "cuda": 1e-3}
PLACEMENTS = (
    Placement(optimizer_states="disk", gradients="host"),
    Placement(parameters="host", optimizer_states="host", gradients="host"),
    Placement(parameters="disk", optimizer_states="disk", gradients="host", activations="host"),
)


class Block(nn.Module):
    """Attention and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.feed(self.norm(x))


@dataclass(frozen=True)
class Sample:
    """The process after some steps."""

    step: int
    resident_mb: float
    allocated_mb: float  # by malloc, and not freed: without what is free inside its arenas
    device_mb: float  # that torch has given out
    objects: int  # of Python's that the collector knows
    descriptors: int
    threads: int
    worst: float  # difference of losses since the sample before

    @classmethod
    def take(cls, step: int, worst: float) -> Sample:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
        descriptors = len(os.listdir("/proc/self/fd"))
        num_objects = len(gc.get_objects())
        on_device = torch.cuda.memory_allocated() / 1e6 if torch.cuda.is_available() else 0.0
        num_threads = threading.active_count()
        return cls(step, resident, allocated_mb(), on_device, num_objects, descriptors, num_threads, worst)


class MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in NAMES)


def allocated_mb() -> float:
    """Return the bytes that are allocated in all arenas and in mappings of their own."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallocInfo
    info = mallinfo()
    return float(info.uordblks + info.hblkhd) / 1e6


class Job:
    """One prepared model beside its twin in plain torch."""

    def __init__(self, placement: Placement, device: torch.device, folder: Path) -> None:
        torch.manual_seed(0)
        plain = nn.Sequential(*(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, 1)).to(device)
        self.plain = plain
        self.plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
        model = copy.deepcopy(plain)
        self.placement = placement
        self.device = device
        self.folder = folder
        self.model, self.optimizer = self._prepare(model)

    def _prepare(self, model: nn.Module) -> tuple[nn.Module, Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return zerostd.prepare(model, optimizer, placement=self.placement, groups=["*"])

    def step(self, draw: random.Random) -> float:
        """Take a step of drawn length in both; return the difference of their losses."""
        shape = (draw.randint(1, 4), draw.randint(*LENGTHS), WIDTH)
        generator = torch.Generator().manual_seed(draw.randrange(2**31))
        batch = torch.randn(shape, generator=generator).to(self.device)
        target = torch.randn((*shape[:2], 1), generator=generator).to(self.device)  # losses stay large
        losses = []
        for model, optimizer in ((self.model, self.optimizer), (self.plain, self.plain_optimizer)):
            loss = (model(batch) - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return abs(losses[0] - losses[1])

    def evaluate(self, draw: random.Random) -> float:
        batch = torch.randn(2, draw.randint(*LENGTHS), WIDTH, device=self.device)
        with torch.no_grad():
            difference = (self.model(batch) - self.plain(batch)).abs().max().item()
        self._meet()
        return difference

    def _meet(self) -> None:
        """Let the twin go on from the same values, where updates are rounded in another way."""
        if self.device.type != "cpu":
            self.plain.load_state_dict(zerostd.full_state_dict(self.model))
            self.plain_optimizer.load_state_dict(self.optimizer.state_dict())

    def save(self, draw: random.Random) -> float:
        """Save and load again, at once or while training goes on."""
        path = self.folder / f"step-{draw.randrange(10**9)}"
        zerostd.save(path, self.model, self.optimizer, wait=draw.random() < 0.5).wait()
        zerostd.load(path, self.model, self.optimizer)
        shutil.rmtree(path)
        self._meet()
        return 0.0

    def place_again(self, draw: random.Random) -> float:
        """Go on with another placement: release, prepare anew, and take the states over."""
        states = self.optimizer.state_dict()
        self.placement = draw.choice(PLACEMENTS)
        self.model, self.optimizer = self._prepare(zerostd.release(self.model))
        self.optimizer.load_state_dict(states)
        return 0.0


def soak(steps: int, seconds: float, device: torch.device, seed: int) -> tuple[list[Sample], dict[str, int]]:
    """Run until the steps or the seconds are over."""
    draw = random.Random(seed)
    begin = time.monotonic()
    done = 0.0  # of it all
    counts = dict.fromkeys(("step", "evaluate", "save", "place_again"), 0)
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as folder:
        job = Job(PLACEMENTS[0], device, Path(folder))
        worst = 0.0
        while done < 1.0:
            name = draw.choices(list(counts), (100, 5, 1, 1))[0]
            difference = getattr(job, name)(draw)
            worst = max(worst, math.inf if math.isnan(difference) else difference)
            counts[name] += 1
            done = max(counts["step"] / steps, (time.monotonic() - begin) / seconds)
            if done * NUM_SAMPLES >= len(samples) + 1:
                samples.append(Sample.take(counts["step"], worst))
                worst = 0.0
        zerostd.release(job.model)
    return samples, counts


def slope(samples: list[Sample], field: str) -> tuple[float, float]:
    """Return the rise in 1,000 steps by least squares over the later three quarters, and its standard error."""
    later = samples[len(samples) // 4 :]
    values = [getattr(s, field) for s in later]
    mean_x = sum(s.step for s in later) / len(later)
    mean_y = sum(values) / len(later)
    spread = sum((s.step - mean_x) ** 2 for s in later) or 1.0
    rise = sum((s.step - mean_x) * (y - mean_y) for s, y in zip(later, values, strict=True)) / spread
    rest = sum((y - mean_y - rise * (s.step - mean_x)) ** 2 for s, y in zip(later, values, strict=True))
    return 1000 * rise, 1000 * (rest / max(1, len(later) - 2) / spread) ** 0.5


def faults(samples: list[Sample], device: torch.device) -> list[str]:
    """Return what is not as it should be."""
    later = samples[len(samples) // 4 :]
    middle = len(later) // 2
    problems = []
    for field in ("descriptors", "threads"):
        before = max(getattr(sample, field) for sample in later[:middle])
        after = max(getattr(sample, field) for sample in later[middle:])
        if after > before:
            problems.append(f"{field} rise from {before} to {after}")
    for field, limit in LIMITS.items():
        rise, error = slope(samples, field)
        if rise > max(limit, 2 * error):
            problems.append(f"{field} rises by {rise:.2f} in 1,000 steps, with a standard error of {error:.2f}")
    worst = max(sample.worst for sample in samples)
    if not worst <= TOLERANCE[device.type]:
        problems.append(f"losses or outputs differ from plain torch by {worst:.3g}")
    return problems


def report(samples: list[Sample], counts: dict[str, int], device: torch.device) -> str:
    rises = {field: "{:.2f} (standard error {:.2f})".format(*slope(samples, field)) for field in RISING}
    done = ", ".join(f"{count:,} x {name}" for name, count in counts.items())
    lines = [
        f"# Soak on {device.type}",
        "",
        f"{date.today()}, {machine()}. `python benchmarks/soak.py {' '.join(sys.argv[1:])}`",
        "",
        f"{done}. In 1,000 steps resident memory rises by {rises['resident_mb']} MB, what malloc has given out by "
        f"{rises['allocated_mb']} MB, what torch has on the device by {rises['device_mb']} MB, Python's objects by "
        f"{rises['objects']}.",
        f"Largest difference from plain torch, losses and outputs: {max(s.worst for s in samples):.3g}; "
        f"{TOLERANCE[device.type]:g} is allowed.",
        "",
        "| step | resident MB | allocated MB | device MB | objects | descriptors | threads | largest difference |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    chosen = samples[:: max(1, len(samples) // 20)]
    for s in chosen:
        sizes = f"{s.resident_mb:.0f} | {s.allocated_mb:.1f} | {s.device_mb:.1f} | {s.objects:,}"
        lines.append(f"| {s.step:,} | {sizes} | {s.descriptors} | {s.threads} | {s.worst:.3g} |")
    problems = faults(samples, device)
    lines += ["", f"Verdict: {'; '.join(problems) if problems else 'passed'}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10**9, help="at most")
    parser.add_argument("--seconds", type=float, default=1e9, help="at most")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", metavar="NAME", help="write results/NAME.md, and to $OUT if set")
    options = parser.parse_args()
    torch.set_num_threads(1)
    samples, counts = soak(options.steps, options.seconds, options.device, options.seed)
    text = report(samples, counts, options.device)
    print(text, end="")
    for folder in (RESULTS, *map(Path, filter(None, [os.environ.get("OUT")]))) if options.write else ():
        Path(folder, f"{options.write}.md").write_text(text)
    sys.exit(bool(faults(samples, options.device)))


if __name__ == "__main__":
    main()
