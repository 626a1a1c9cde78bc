"""Train a language model whose state is larger than the device may hold, and look at the page of the run.

    python examples/spill.py

The model is that of offload.py and reads the topics of Python's own help. Its state is larger than what the device may
hold, and what is left over is larger than what the host may hold: the planner spreads it over device, host and disk,
and training goes on as if nothing were amiss. Shown are the plan, progress while it trains, and what each tier held;
`zerostd report` then makes a page of all that was recorded.
"""

import argparse
import pydoc_data.topics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

import zerostd
from offload import LENGTH, Net

MIB = 2**20
BATCH, WIDTH, DEPTH = 4, 256, 8
BUDGET = {"device": "80MiB", "host": "48MiB", "disk": "200MiB"}


def batches(num_steps: int) -> list[torch.Tensor]:
    """Random places in 700 kB of English about Python."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    numbers = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    starts = torch.randint(0, len(numbers) - LENGTH - 1, (num_steps, BATCH), generator=torch.Generator().manual_seed(0))
    return [torch.stack([numbers[i : i + LENGTH + 1] for i in row]) for row in starts]


def train(num_steps: int, run_dir: Path, disk_path: str) -> None:
    """Plan, train, and say what came of it."""
    torch.manual_seed(0)
    model = Net(WIDTH, DEPTH)
    needs = 16 * sum(parameter.numel() for parameter in model.parameters())
    limits = ", ".join(f"{size} of the {tier}" for tier, size in BUDGET.items())
    print(f"The model needs {needs / MIB:.1f} MiB for parameters, gradients and states; it may use {limits}.\n")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    budget = zerostd.Budget(**BUDGET, disk_path=disk_path)
    options = {"precision": "fp32", "accumulate": 1, "max_grad_norm": 1.0}
    data = batches(num_steps)
    plan = zerostd.plan(model, optimizer, batch=data[0][:, :-1], budget=budget, **options)
    print(plan.explain(), "\n")
    model, optimizer = zerostd.prepare(model, optimizer, plan=plan, budget=budget, **options)
    losses = []
    steps = zerostd.track(data, model, run_dir=run_dir)
    for batch in steps:
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.log(loss=loss)
        losses.append(loss.item())
    tenth = max(1, num_steps // 10)
    first, last = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
    print(f"\nloss of the first {tenth} steps {first:.3f}, of the last {last:.3f}\n\n{zerostd.memory(model)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, default=None, help="the run's directory; a new one if not given")
    options = parser.parse_args()
    run_dir = options.out or Path(tempfile.mkdtemp(prefix="zerostd-run-"))
    with tempfile.TemporaryDirectory() as disk_path:
        train(options.steps, run_dir, disk_path)
    page = run_dir / "report.html"
    subprocess.run([sys.executable, "-m", "zerostd", "report", str(run_dir), "-o", str(page)], check=True)


if __name__ == "__main__":
    main()
