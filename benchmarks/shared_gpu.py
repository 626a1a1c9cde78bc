"""Several nccl ranks on one GPU: zerostd's stages against FSDP2, DDP and DDP + ZeroRedundancyOptimizer.

    python benchmarks/shared_gpu.py --ranks 2 --write shared-gpu-2

nccl refuses two ranks of one host on a GPU, so each rank gives itself a host name of its own and they talk over
sockets. It shows order, overlap, memory and numerics, not the speed of NVLink: read the ratios. Where there is an MPS
daemon to start, kernels of the ranks run side by side. All systems train the same GPT with bf16 compute, fp32 masters,
AdamW(fused=True) and clipping, one after the other in the same processes, in rounds of rotating order.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, RESULTS, Shape, draw, machine
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import zerostd

SIZES = {"tiny": (256, 4, 4), "0.4b": (1024, 24, 16), "1.3b": (2048, 24, 16)}
VOCABULARY = 32000
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
PEERS = {
    "stage 1": "DDP + ZeRO-1",
    "stage 2": "DDP + ZeRO-1",
    "stage 3": "FSDP2",
    "stage 2, states on the host": "FSDP2, all on the host",
    "stage 3, states on the host": "FSDP2, all on the host",
}
SYSTEMS = ["DDP", *dict.fromkeys(PEERS.values()), *PEERS]
WARM = 3  # steps of a turn that are not measured
MAX_NORM = 1.0


class Trainer:
    """One system that is ready to train."""

    def __init__(self, system: str, model: nn.Module) -> None:
        self.autocasts = system.startswith("DDP")
        self.is_ours = system.startswith("stage")
        self.model = model
        self.optimizer: Any = None
        if self.is_ours:
            places = {"optimizer_states": "host"} if "host" in system else {}
            stage = int(system.split()[1].strip(","))
            optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
            options: dict[str, Any] = {"precision": "bf16", "accumulate": 1, "max_grad_norm": MAX_NORM}
            options["placement"] = zerostd.Placement(**places)
            self.model, self.optimizer = zerostd.prepare(model, optimizer, stage=stage, **options)
        elif self.autocasts:
            self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
            if system == "DDP":
                self.optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
            else:
                self.optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
        else:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
            offload = CPUOffloadPolicy() if "host" in system else OffloadPolicy()
            for module in [*model.blocks, model]:
                fully_shard(module, mp_policy=policy, offload_policy=offload)
            self.optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocasts):
            loss: Tensor = self.model(tokens, targets)
        loss.backward()
        if not self.is_ours:  # which clips by itself
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def train(system: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one system for some steps."""
    device = torch.device("cuda", 0)
    width, depth, heads = SIZES[arguments.size]
    torch.manual_seed(0)
    with device:
        model = GPT(Shape(width, depth, heads, VOCABULARY, arguments.length))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() - sum(p.nbytes for p in model.parameters())
    trainer = Trainer(system, model)
    del model
    generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
    times = []
    losses = []
    for step in range(WARM + arguments.steps):
        if step == WARM:
            torch.cuda.reset_peak_memory_stats()
        batch = draw(generator, arguments.batch, arguments.length)
        torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        loss = trainer.step(*batch)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
        dist.all_reduce(loss)
        losses.append(float(loss) / dist.get_world_size())
    peak = torch.cuda.max_memory_allocated() - before
    if system.startswith("stage"):
        zerostd.release(trainer.model)
    return {"step_s": median(times[WARM:]), "gib": peak / 2**30, "loss": losses[-1]}


def work(arguments: argparse.Namespace) -> None:
    """Train every system on this rank, and let rank 0 write the results."""
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    systems = arguments.systems.split(";")
    rows: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
    for number in range(arguments.rounds):
        for offset in range(len(systems)):
            system = systems[(number + offset) % len(systems)]
            rows[system].append(train(system, arguments))
            gc.collect()
            torch.cuda.empty_cache()
            if dist.get_rank() == 0:
                print(system, rows[system][-1], flush=True)
                Path(arguments.out).write_text(json.dumps(rows))
    dist.barrier()
    os._exit(0)  # destroying the process groups of peers may hang


@contextmanager
def daemon() -> Iterator[bool]:
    """An MPS daemon inside the context, where there is one."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        yield False
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CUDA_MPS_PIPE_DIRECTORY"] = folder
        os.environ["CUDA_MPS_LOG_DIRECTORY"] = folder
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        try:
            yield True
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit", text=True, check=False)


def table(rows: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace, *, has_mps: bool) -> str:
    """The results as a page."""
    given = f"--ranks {arguments.ranks} --size {arguments.size} --steps {arguments.steps} --rounds {arguments.rounds}"
    lines = [
        f"# {arguments.ranks} nccl ranks on one GPU",
        "",
        f"GPT {arguments.size}, {arguments.batch} x {arguments.length} tokens a rank, bf16 compute with fp32 masters,",
        f"AdamW(fused=True), clip {MAX_NORM:g}. Ranks talk over sockets, {'with' if has_mps else 'without'} MPS.",
        f"{arguments.rounds} round(s) of rotating order; {WARM} + {arguments.steps} steps a turn, the first {WARM} not",
        "measured. GiB: the most that torch had allocated on a rank. Ratios are of the same round; below 1, zerostd is",
        "faster or smaller.",
        "",
        f"- machine: {machine()}",
        f"- command: `python benchmarks/shared_gpu.py {given}`",
        f"- date: {date.today()}",
        "",
        "| system | step s | GiB a rank | peer | time ratio | memory ratio | last loss |",
        "|---|--:|--:|---|--:|--:|--:|",
    ]
    for system, results in rows.items():
        if not results:
            continue
        step_s = median(result["step_s"] for result in results)
        gib = median(result["gib"] for result in results)
        peer = PEERS.get(system, "")
        ratios = ["", ""]
        if rows.get(peer):
            pairs = list(zip(results, rows[peer], strict=False))
            ratios = [f"{median(ours[key] / theirs[key] for ours, theirs in pairs):.3f}" for key in ("step_s", "gib")]
        cells = [system, f"{step_s:.4f}", f"{gib:.2f}", peer, *ratios, f"{results[0]['loss']:.4f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", choices=SIZES, default="0.4b")
    parser.add_argument("--batch", type=int, default=4, help="sequences a rank")
    parser.add_argument("--length", type=int, default=512, help="tokens in a sequence")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--systems", default=";".join(SYSTEMS), help="separated by semicolons")
    parser.add_argument("--write", metavar="NAME", help="write benchmarks/results/NAME.md")
    parser.add_argument("--out", help=argparse.SUPPRESS)  # of a rank
    arguments = parser.parse_args()
    if arguments.out is not None:
        work(arguments)
        return
    with tempfile.TemporaryDirectory() as folder, daemon() as has_mps, socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        probe.close()
        out = Path(folder) / "rows.json"
        everyone = {"WORLD_SIZE": str(arguments.ranks), "LOCAL_WORLD_SIZE": str(arguments.ranks), "LOCAL_RANK": "0"}
        everyone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NCCL_SOCKET_IFNAME": "lo"}
        ranks = []
        for rank in range(arguments.ranks):
            own = {"RANK": str(rank), "NCCL_HOSTID": f"pretended-{rank}"}
            command = [sys.executable, __file__, *sys.argv[1:], "--out", str(out)]
            ranks.append(subprocess.Popen(command, env={**os.environ, **everyone, **own}))
        codes = [rank.wait() for rank in ranks]
        page = table(json.loads(out.read_text()), arguments, has_mps=has_mps)
    if any(codes):
        page += f"\nNot all systems were measured: ranks ended with {codes}.\n"
    print(page)
    if arguments.write:
        (RESULTS / f"{arguments.write}.md").write_text(page)


if __name__ == "__main__":
    main()
