"""Hybrid sharding, secondary shards and codes on two "nodes": network namespaces with a slow wire between them.

    sudo python benchmarks/nodes.py --rate 400 --steps 6 --write nodes-cpu

Four gloo ranks, two in each namespace, train the same fp32 GPT on the same data. Systems take turns of a few steps in
one process each; "planned" follows `zerostd.plan`, with the wires that the job measures, and "planned, coded" the same
with `exact=False`. Bytes between the nodes are counted by the kernel at the wire. Those of hybrid sharding stand beside
their closed form: a gradient slice is averaged over the nodes, nothing else crosses. Needs Linux, root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, RESULTS, Shape, draw, machine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zerostd

SHAPE = Shape(width=384, depth=6, heads=6, vocabulary=4096, length=128)
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
NUM_NODES = 2
RANKS_PER_NODE = 2
SYSTEMS = ("FSDP2", "FSDP2 hybrid", "stage 3", "stage 3 secondary", "stage 3 hybrid", "stage 2", "stage 2 hybrid")
SYSTEMS += ("planned", "planned, coded")


def run(*words: str) -> str:
    """Run a command, and return what it prints."""
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@contextmanager
def nodes(rate: int, burst: str = "1mb") -> Iterator[list[str]]:
    """Two namespaces with a wire of `rate` Mbit/s each way between them; `burst` bytes may pass at once."""
    names = [f"node{number}-{os.getpid()}" for number in range(NUM_NODES)]
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", "wire0", "netns", names[0], "type", "veth", "peer", "name", "wire1", "netns", names[1])
        for number, name in enumerate(names):
            inside = ("ip", "netns", "exec", name)
            run(*inside, "ip", "addr", "add", f"10.77.0.{number + 1}/24", "dev", f"wire{number}")
            run(*inside, "ip", "link", "set", f"wire{number}", "up")
            run(*inside, "ip", "link", "set", "lo", "up")
            shaped = ("rate", f"{rate}mbit", "burst", burst, "latency", "100ms")
            run(*inside, "tc", "qdisc", "add", "dev", f"wire{number}", "root", "tbf", *shaped)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def sent_bytes() -> int:
    """Bytes that this node has sent over the wire, by the kernel's count."""
    name = f"wire{int(os.environ['NODE'])}"
    return int(json.loads(run("ip", "-s", "-j", "link", "show", name))[0]["stats64"]["tx"]["bytes"])


def prepare(system: str, model: nn.Module) -> tuple[nn.Module, Any]:
    """Return the model and optimizer of one system."""
    keeps_secondary = system.endswith("secondary")
    mesh = init_device_mesh("cpu", (NUM_NODES * RANKS_PER_NODE,))
    if system.endswith("hybrid") or keeps_secondary:
        mesh = init_device_mesh("cpu", (NUM_NODES, RANKS_PER_NODE), mesh_dim_names=("replicate", "shard"))
    if system.startswith("planned"):
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        batch = draw(torch.Generator().manual_seed(0), 2, SHAPE.length)
        plan = zerostd.plan(model, optimizer, batch=batch, exact=system == "planned")
        if dist.get_rank() == 0:
            print(plan.explain(), file=sys.stderr)
        return zerostd.prepare(model, optimizer, plan=plan, exact=system == "planned")
    if not system.startswith("FSDP2"):
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        placement = zerostd.Placement(secondary_shards=keeps_secondary)
        return zerostd.prepare(model, optimizer, stage=int(system.split()[1]), mesh=mesh, placement=placement)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), **ADAMW)


def train(system: str, steps: int) -> dict[str, Any]:
    """Train one system for some steps; the first is not measured."""
    torch.manual_seed(0)
    model, optimizer = prepare(system, GPT(SHAPE))
    rank = dist.get_rank()
    times = []
    sent = 0
    for step in range(steps + 1):
        dist.barrier()
        if step == 1:
            sent = sent_bytes()
        begin = time.perf_counter()
        loss = model(*draw(torch.Generator().manual_seed(100 * step + rank), 2, SHAPE.length))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
    dist.barrier()
    result = {"step_s": median(times[1:]), "node_bytes": (sent_bytes() - sent) / steps, "loss": float(loss.detach())}
    if not system.startswith("FSDP2"):
        result["held_bytes"] = sum(zerostd.memory(model).peak["device"].values())
        zerostd.release(model)
    return result


def work(systems: Sequence[str], steps: int, rounds: int, out: str) -> None:
    """Train every system on this rank, and let rank 0 write the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
    for number in range(rounds):
        for offset in range(len(systems)):
            system = systems[(number + offset) % len(systems)]
            rows[system].append(train(system, steps))
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def table(rows: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> str:
    """The results as a page."""
    numel = sum(parameter.numel() for parameter in GPT(SHAPE).parameters())
    crossing = RANKS_PER_NODE * 2 * (4 * numel / RANKS_PER_NODE) * (NUM_NODES - 1) / NUM_NODES
    flat = {"FSDP2 hybrid": "FSDP2", "stage 3 hybrid": "stage 3", "stage 2 hybrid": "stage 2"}
    flat["stage 3 secondary"] = "stage 3"
    options = f"--rate {arguments.rate} --steps {arguments.steps} --rounds {arguments.rounds}"
    lines = [
        "# Hybrid sharding, secondary shards and codes on two nodes",
        "",
        f"GPT of {numel / 1e6:.1f} M parameters, fp32, 2 x {SHAPE.length} tokens a rank, AdamW. Four gloo ranks, two",
        f"in each of two network namespaces; the wire between them carries {arguments.rate} Mbit/s each way.",
        f"{arguments.rounds} round(s) of rotating order, {arguments.steps} steps a turn. Bytes are those that a node",
        "sends over the wire in a step, by the kernel's count, with headers. Closed form for hybrid sharding:",
        f"{crossing / 1e6:.1f} MB, each rank's slice twice, (N-1)/N of it. Held are the peaks of state and buffers in",
        "the ledger of a rank, added up.",
        "",
        f"- machine: {machine()}",
        f"- command: `python benchmarks/nodes.py {options}`",
        f"- date: {date.today()}",
        "",
        "| system | step s | to the same, sharded over all | MB a node sends | over closed form | MB held | loss |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for system, results in rows.items():
        step_s = median(result["step_s"] for result in results)
        sent = median(result["node_bytes"] for result in results)
        ratio = ""
        if flat.get(system) in rows:
            pairs = zip(results, rows[flat[system]], strict=True)
            ratio = f"{median(ours['step_s'] / theirs['step_s'] for ours, theirs in pairs):.3f}"
        over = f"{sent / crossing:.3f}" if system.endswith("hybrid") else ""
        held = f"{results[0]['held_bytes'] / 1e6:.1f}" if "held_bytes" in results[0] else ""
        loss = f"{results[0]['loss']:.5f}"
        lines.append(f"| {system} | {step_s:.3f} | {ratio} | {sent / 1e6:.1f} | {over} | {held} | {loss} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=int, default=400, help="Mbit/s between the nodes")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--system", action="append", choices=SYSTEMS, help="only these")
    parser.add_argument("--write", metavar="NAME", help="write benchmarks/results/NAME.md")
    parser.add_argument("--out", help=argparse.SUPPRESS)  # of a rank
    arguments = parser.parse_args()
    if arguments.out is not None:
        work(arguments.system or SYSTEMS, arguments.steps, arguments.rounds, arguments.out)
        return
    with tempfile.TemporaryDirectory() as folder, nodes(arguments.rate) as names:
        out = Path(folder) / "rows.json"
        ranks = []
        for rank in range(NUM_NODES * RANKS_PER_NODE):
            node = rank // RANKS_PER_NODE
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(NUM_NODES * RANKS_PER_NODE),
                "LOCAL_WORLD_SIZE": str(RANKS_PER_NODE),
                "MASTER_ADDR": "10.77.0.1",
                "MASTER_PORT": "29511",
                "GLOO_SOCKET_IFNAME": f"wire{node}",
                "NODE": str(node),
            }
            command = ["ip", "netns", "exec", names[node], sys.executable, __file__, "--out", str(out)]
            command += ["--steps", str(arguments.steps), "--rounds", str(arguments.rounds)]
            for system in arguments.system or ():
                command += ["--system", system]
            ranks.append(subprocess.Popen(command, env=environment))
        for rank in ranks:
            if rank.wait() != 0:
                raise SystemExit(f"a rank ended with {rank.returncode}")
        page = table(json.loads(out.read_text()), arguments)
    print(page)
    if arguments.write:
        (RESULTS / f"{arguments.write}.md").write_text(page)


if __name__ == "__main__":
    main()
