"""Tokens a second of a Llama whose weights do not stay on the device, against accelerate and plain torch, in one run.

    python benchmarks/inference.py --out DIRECTORY            # 6.7 B parameters, about 4 minutes on an H200
    python benchmarks/inference.py --small                    # a tiny one, to try the script

Every row is `generate` of transformers with a cache, greedy, timed from token to token. Rows are appended to
DIRECTORY/inference.jsonl as they are done. The link is measured in the same run; a row's GB/s are the bytes that it
streams in a pass over the seconds of a token.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

import zerostd
from zerostd.policy import Homes, Tier

BATCHES = (1, 8, 64)
PROMPT = 16
NUM_SKIPPED = 2  # tokens from the prompt and to learn the order of groups
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Clock(transformers.StoppingCriteria):
    """Notes when each token was made, and never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        finish()
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    @property
    def token_s(self) -> float:
        times = self.times[NUM_SKIPPED:]
        return statistics.median(after - before for before, after in itertools.pairwise(times))


def finish() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def most_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else 0.0


def run(model: torch.nn.Module, batch_size: int, num_tokens: int) -> tuple[torch.Tensor, float, float]:
    """Return the tokens, the seconds of one, and the most memory of the device in GiB."""
    ids = torch.randint(1, 1000, (batch_size, PROMPT), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    clock = Clock()
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    options = transformers.GenerationConfig(max_new_tokens=num_tokens, do_sample=False, pad_token_id=0, use_cache=True)
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=options,
        stopping_criteria=transformers.StoppingCriteriaList([clock]),
    )
    return made.cpu(), clock.token_s, most_gib()


def link_rate() -> float:
    """Return bytes/s of large pinned copies to the device."""
    if DEVICE.type == "cpu":
        return 0.0
    source = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=DEVICE)
    rates = []
    for _ in range(6):
        finish()
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        finish()
        rates.append(source.nbytes / (time.perf_counter() - begun))
    return max(rates)


def make_model(*, is_small: bool) -> torch.nn.Module:
    config = transformers.LlamaConfig(eos_token_id=None, pad_token_id=0)
    if is_small:
        config = transformers.LlamaConfig(
            hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4, vocab_size=1024,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    torch.manual_seed(0)
    with DEVICE:
        return transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)


class Bench:
    """One model, what plain torch makes of it, and the rows so far."""

    def __init__(self, model: torch.nn.Module, out: Path | None, disk: str, groups: list[str] | None) -> None:
        self.model = model
        self.out = out
        self.disk = disk
        self.groups = groups
        self.total = sum(parameter.nbytes for parameter in model.parameters())
        self.link = link_rate()
        self.machine = zerostd.measure_machine(DEVICE, disk_path=disk)
        self.expected: dict[int, torch.Tensor] = {}
        self.rows: list[dict[str, Any]] = []
        rates = {"link": self.link / 1e9, "read": self.machine.disk.read / 1e9 if self.machine.disk else None}
        self.add(name="this machine, GB/s", weights_gb=self.total / 1e9, **rates)

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        if self.out is not None:
            with (self.out / "inference.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")

    def measure(
        self, name: str, batch_size: int, num_tokens: int, streamed: int, rate: float, predicted_s: float
    ) -> None:
        made, token_s, gib = run(self.model, batch_size, num_tokens)
        expected = self.expected.setdefault(batch_size, made)
        length = min(made.shape[1], expected.shape[1])
        self.add(
            name=name,
            batch=batch_size,
            token_s=round(token_s, 4),
            tokens_per_s=round(batch_size / token_s, 2),
            gb_per_s=round(streamed / token_s / 1e9, 2),
            of_rate=round(streamed / token_s / rate, 3) if streamed and rate else None,
            predicted_over_measured=round(predicted_s / token_s, 3) if predicted_s else None,
            device_gib=round(gib, 2),
            same_tokens=torch.equal(made[:, :length], expected[:, :length]),
        )

    def plain(self) -> None:
        for batch_size in BATCHES:
            self.measure("plain torch, on the device", batch_size, 10, 0, 0.0, 0.0)

    def placed(self, name: str, tier: Tier, batches: tuple[int, ...], num_tokens: int, rate: float) -> None:
        """All weights in one tier."""
        plan = zerostd.Plan({"*": Homes(parameters=tier)})
        budget = zerostd.Budget(disk_path=self.disk)
        begun = time.perf_counter()
        zerostd.dispatch(self.model, plan=plan, budget=budget, device=DEVICE, groups=self.groups)
        finish()
        self.add(name=f"{name}: dispatch", seconds=round(time.perf_counter() - begun, 1))
        predicted = self.machine.link.up if self.machine.link else 0.0
        if tier is Tier.DISK and self.machine.disk is not None:
            predicted = self.machine.disk.read
        for batch_size in batches:
            self.measure(name, batch_size, num_tokens, self.total, rate, self.total / predicted if predicted else 0.0)
        zerostd.release(self.model)

    def planned(self) -> None:
        """Half of the weights stay on the device, as the planner says."""
        ids = torch.ones(8, 1, dtype=torch.long)
        budget = zerostd.Budget(device=int(0.6 * self.total) + (160 << 20 if DEVICE.type == "cuda" else 0))
        batch = {"input_ids": ids}
        plan = zerostd.plan(self.model, budget=budget, batch=batch, machine=self.machine, groups=self.groups)
        print(plan.explain())
        zerostd.dispatch(self.model, plan=plan, budget=budget, device=DEVICE, groups=self.groups)
        off = zerostd.memory(self.model).now["host"]["parameters"]
        self.measure("ours, as planned for 0.6", 8, 14, off, self.link, plan.predicted.step_s or 0.0)
        zerostd.release(self.model)

    def sleep(self) -> None:
        zerostd.dispatch(self.model, device=DEVICE, groups=self.groups)
        self.measure("ours, all on the device", 8, 10, 0, 0.0, 0.0)
        for name, call in (("first sleep", zerostd.sleep), ("wake", zerostd.wake), *self._again()):
            finish()
            begun = time.perf_counter()
            call(self.model)
            finish()
            rate = self.total / (time.perf_counter() - begun)
            held = torch.cuda.memory_allocated() / 2**30 if DEVICE.type == "cuda" else 0.0
            of_link = round(rate / self.link, 3) if self.link else None
            self.add(name=name, gb_per_s=round(rate / 1e9, 2), of_rate=of_link, device_gib=round(held, 2))
        self.measure("after waking", 8, 6, 0, 0.0, 0.0)
        zerostd.release(self.model)

    def _again(self) -> Iterator[tuple[str, Any]]:
        yield "second sleep", zerostd.sleep
        yield "second wake", zerostd.wake

    def accelerate(self, batches: tuple[int, ...]) -> None:
        import accelerate

        self.model.cpu()
        accelerate.cpu_offload(self.model, execution_device=DEVICE)
        for batch_size in batches:
            self.measure("accelerate cpu_offload", batch_size, 5, self.total, self.link, 0.0)


def show(rows: list[dict[str, Any]]) -> None:
    names = ("batch", "token_s", "tokens_per_s", "gb_per_s", "of_rate", "predicted_over_measured", "device_gib")
    print(f"\n{'':<28}" + "".join(f"{name:>14.13}" for name in (*names, "same_tokens")))
    for row in rows:
        if "gb_per_s" in row:
            cells = "".join(f"{'' if row.get(name) is None else row[name]:>14}" for name in (*names, "same_tokens"))
            print(f"{row['name']:<28}{cells}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where rows are written as they are done")
    parser.add_argument("--disk", default="/tmp", help="a directory on the disk to stream from")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--no-accelerate", action="store_true", help="leave accelerate out")
    options = parser.parse_args()
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    groups = ["model.embed_tokens", "model.layers.*", "lm_head"] if options.small else None
    bench = Bench(make_model(is_small=options.small), options.out, options.disk, groups)
    bench.plain()
    bench.sleep()
    bench.placed("ours, all on the host", Tier.HOST, BATCHES, 14, bench.link)
    bench.planned()
    disk = bench.machine.disk.read if bench.machine.disk is not None else 0.0
    bench.placed("ours, all on disk", Tier.DISK, (8,), 6, disk)
    if not options.no_accelerate:
        bench.accelerate(BATCHES)
    show(bench.rows)


if __name__ == "__main__":
    main()
