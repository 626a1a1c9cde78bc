"""Tokens a second of a Llama whose weights do not stay on the device, against accelerate and plain torch, in one run.

    python benchmarks/inference.py --out DIRECTORY            # 6.7 B parameters, 240 s on an H200
    python benchmarks/inference.py --small                    # a tiny one, to try the script

Every row is `generate` of transformers with a cache, greedy, timed from token to token. Rows are written to
DIRECTORY/inference.jsonl and inference.md as they are done. The link is measured in the same run; a row's GB/s are the
bytes that it streams in a pass over the seconds of a token. A part that would not end before the limit is left out, and
a part that fails says so; the others go on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
        if DEVICE.type == "cuda":  # the stream alone: copies for the next token go on
            torch.cuda.current_stream().synchronize()
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


def config_of(*, is_small: bool) -> Any:
    sizes: dict[str, int] = {}  # those of the first Llama, 6.7 B
    if is_small:
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4}
        sizes["vocab_size"] = 1024
    return transformers.LlamaConfig(eos_token_id=None, pad_token_id=0, **sizes)


def make_model(config: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    with DEVICE:
        return transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)


def own_bytes() -> int:
    """Bytes of memory that this process has, without pages of files."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return sum(1024 * int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))


@contextmanager
def watched() -> Iterator[list[int]]:
    """A list that gets the bytes that the process takes inside the block, again and again."""
    found = [own_bytes()]
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.02):
            found.append(own_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()


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
            (self.out / "inference.md").write_text(page(self.rows))

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

    def placed(self, name: str, tier: Tier, batches: tuple[tuple[int, int], ...], rate: float) -> None:
        """All weights in one tier; batch sizes with the tokens of each."""
        plan = zerostd.Plan({"*": Homes(parameters=tier)})
        budget = zerostd.Budget(disk_path=self.disk)
        begun = time.perf_counter()
        zerostd.dispatch(self.model, plan=plan, budget=budget, device=DEVICE, groups=self.groups)
        finish()
        self.add(name=f"{name}: dispatch", seconds=round(time.perf_counter() - begun, 1))
        predicted = self.machine.link.up if self.machine.link else 0.0
        if tier is Tier.DISK and self.machine.disk is not None:
            predicted = self.machine.disk.read
        for batch_size, num_tokens in batches:
            self.measure(name, batch_size, num_tokens, self.total, rate, self.total / predicted if predicted else 0.0)
        zerostd.release(self.model)

    def on_host(self) -> None:
        batches = tuple((batch_size, 14) for batch_size in BATCHES)
        self.placed("ours, all on the host", Tier.HOST, batches, self.link)

    def on_disk(self) -> None:
        rate = self.machine.disk.read if self.machine.disk is not None else 0.0
        self.placed("ours, all on disk", Tier.DISK, ((8, 5), (1, 4), (64, 4)), rate)

    def loading(self, config: Any) -> None:
        """Files straight to the host: the memory that it takes at most, against the weights."""
        with tempfile.TemporaryDirectory(dir=self.disk) as folder:
            self.model.save_pretrained(folder, max_shard_size="2GB")
            with zerostd.empty_init():
                model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
            plan = zerostd.Plan({"*": Homes(parameters=Tier.HOST)})
            begun = time.perf_counter()
            with watched() as found:
                zerostd.dispatch(model, folder, plan=plan, device=DEVICE, groups=self.groups)
            seconds = time.perf_counter() - begun
        taken = round((max(found) - found[0]) / self.total, 4)
        rate = round(self.total / seconds / 1e9, 2)
        self.add(name="loaded from files to the host", seconds=round(seconds, 1), gb_per_s=rate, ram_of_weights=taken)
        zerostd.release(model)

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

    def accelerate(self) -> None:
        import accelerate

        self.model.cpu()
        accelerate.cpu_offload(self.model, execution_device=DEVICE)
        for batch_size in (8, 1, 64):
            self.measure("accelerate cpu_offload", batch_size, 5, self.total, self.link, 0.0)


NAMES = ("batch", "token_s", "tokens_per_s", "gb_per_s", "of_rate", "predicted_over_measured", "device_gib")
NAMES = (*NAMES, "same_tokens", "ram_of_weights", "seconds")


def page(rows: list[dict[str, Any]]) -> str:
    """The rows as a table, with what each is."""
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    lines = [
        "# Inference",
        "",
        f"`python benchmarks/inference.py` on {device}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, one run. of_rate: of the link, or of the disk, as measured in the same run.",
        "",
        "| | " + " | ".join(NAMES) + " |",
        "|---|" + "--:|" * len(NAMES),
    ]
    for row in rows:
        cells = ["" if row.get(name) is None else str(row[name]) for name in NAMES]
        others = ", ".join(f"{key} {value}" for key, value in row.items() if key not in (*NAMES, "name"))
        lines.append(f"| {row['name']}{': ' + others if others else ''} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="where rows are written; default: $OUT")
    parser.add_argument("--disk", default="/tmp", help="a directory on the disk to stream from")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument(
        "--limit", type=float, default=235.0, help="seconds after which no part begins that would pass it"
    )
    parser.add_argument("--only", nargs="*", help="names of parts: plain sleep host accelerate loading planned disk")
    options = parser.parse_args()
    begun = time.perf_counter()
    if options.out is not None:
        options.out = Path(options.out)
        options.out.mkdir(parents=True, exist_ok=True)
    groups = ["model.embed_tokens", "model.layers.*", "lm_head"] if options.small else None
    config = config_of(is_small=options.small)
    bench = Bench(make_model(config), options.out, options.disk, groups)
    parts: dict[
        str, tuple[float, Callable[[], None]]
    ] = {  # with seconds on an H200; what is asked for most comes first
        "plain": (12, bench.plain),
        "host": (28, bench.on_host),
        "sleep": (20, bench.sleep),
        "planned": (15, bench.planned),
        "loading": (40, lambda: bench.loading(config)),
        "disk": (85, bench.on_disk),
        "accelerate": (55, bench.accelerate),  # the last: it changes the model
    }
    for name, (needed_s, run_part) in parts.items():
        if options.only and name not in options.only:
            continue
        left = options.limit - (time.perf_counter() - begun)
        if name == "disk":  # accelerate is compared in any case
            left -= 0 if options.only else parts["accelerate"][0]
        if left < needed_s and not options.small:
            bench.add(name=f"{name} is left out", seconds=round(left, 1))
            continue
        try:
            run_part()
        except Exception as error:
            traceback.print_exc()
            bench.add(name=f"{name} failed: {type(error).__name__}: {str(error)[:200]}".replace("|", "/"))
            with suppress(Exception):
                zerostd.release(bench.model)
    print(page(bench.rows))


if __name__ == "__main__":
    main()
