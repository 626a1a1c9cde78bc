"""Run directories for tests: a small writer, lines by hand, and a run that looks like a real one."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zerostd.planning import Plan, Prediction
from zerostd.policy import Homes, Kind, Route, Stage, Tier

MIB, GIB = 2**20, 2**30
ABOUT = {
    "format": 1,
    "zerostd": "0.1.0",
    "begun": "2026-11-15T12:00:00",
    "world_size": 1,
    "command": "python train.py --lr 1e-4",
    "model": {"name": "GPT", "parameters": 1_340_000_000},
    "machine": {"name": "one H200"},
    "settings": {"stage": 3, "precision": "bf16", "accumulate": 1, "max_grad_norm": None},
    "plan": None,
}
Line = Mapping[str, Any] | str | bytes


def write_run(path: Path, ranks: Mapping[int, Iterable[Line]], **about: Any) -> Path:
    """A run directory: `about` changes fields of run.json; lines are objects, or texts as they are."""
    path.mkdir(parents=True, exist_ok=True)
    data = {**ABOUT, "world_size": len(ranks) or 1, **about}
    (path / "run.json").write_text(json.dumps(data))
    for rank, lines in ranks.items():
        with (path / f"rank-{rank}.jsonl").open("wb") as file:
            for line in lines:
                file.write(line if isinstance(line, bytes) else _text(line).encode() + b"\n")
    return path


def _text(line: Mapping[str, Any] | str) -> str:
    return line if isinstance(line, str) else json.dumps(line)


def step(number: int, start: float, end: float, **more: Any) -> dict[str, Any]:
    return {"kind": "step", "step": number, "start": start, "end": end, **more}


def held(number: int, time: float, now: Any, peak: Any = None, **more: Any) -> dict[str, Any]:
    return {"kind": "memory", "step": number, "time": time, "bytes": now, "peak": peak or now, **more}


def event(number: int, lane: str, start: float, end: float, name: str = "transfer", **more: Any) -> dict[str, Any]:
    return {"kind": "event", "step": number, "name": name, "lane": lane, "start": start, "end": end, **more}


def seconds(kind: str, number: int, **named: float) -> dict[str, Any]:
    return {"kind": kind, "step": number, "seconds": named}


def end(time: float) -> dict[str, Any]:
    return {"kind": "end", "time": time}


def plan_data(step_s: float | None = 0.4, **more: Any) -> dict[str, Any]:
    """A plan as run.json has it: 600 bytes planned on the device, 1000 on the host."""
    plan = Plan(
        homes={"*": Homes(Tier.DEVICE, Tier.DEVICE, ((Tier.HOST, Route.CPU, 1.0),))},
        stage=Stage.PARAMETERS,
        predicted=Prediction(
            step_s=step_s,
            compute_s=0.2,
            bytes={
                Tier.DEVICE: {Kind.PARAMETERS: 400, Kind.GRADIENTS: 200},
                Tier.HOST: {Kind.OPTIMIZER_STATES: 1000},
            },
            busy={"up": 0.1, "cpu": 0.3},
            prices={Tier.DEVICE: 0.01 / GIB, Tier.HOST: 0.0},
        ),
        limits={Tier.DEVICE: 24 * GIB, Tier.HOST: 96 * GIB},
        notes=("The host holds all optimizer states.",),
    )
    return {**json.loads(plan.to_json()), **more}


# -- a run that looks like a real one --


def real_run(path: Path, world_size: int = 2, num_steps: int = 120, pace: float = 1.0, **about: Any) -> Path:
    """Some GPT whose states rest on the host; one step of which is recorded lane by lane."""
    ranks = {
        rank: list(_real_rank(f"{path.name} {rank}", rank, world_size, num_steps, pace)) for rank in range(world_size)
    }
    plan = plan_data(0.31 * pace)
    plan["predicted"] |= {
        "compute_s": 0.14,
        "bytes": {
            "device": {"parameters": int(2.5 * GIB), "gradients": int(1.3 * GIB), "activations": int(11 * GIB)},
            "host": {"optimizer_states": int(15.1 * GIB), "gradients": int(1.2 * GIB)},
        },
        "busy": {"up": 0.11, "down": 0.05, "cpu": 0.27, "memory": 0.2, "wire": 0.02},
    }
    later = {**plan, "notes": ["After three steps the processor was found 8 % slower than measured beforehand."]}
    ranks[0].insert(40, {"kind": "plan", "step": 5, "reason": "after the first steps", "plan": later})
    return write_run(path, ranks, **{"plan": plan, "world_size": world_size, **about})


def _real_rank(seed: str, rank: int, world_size: int, num_steps: int, pace: float) -> Iterable[dict[str, Any]]:
    chance, now, peak = random.Random(seed), 2.0, 0
    for number in range(num_steps):
        length = pace * (0.33 + 0.02 * chance.random() + (0.9 if number == 0 else 0.0) + 0.01 * rank)
        loss = 2.0 + 8.5 * math.exp(-number / 28) + 0.12 * chance.gauss(0, 1)
        more = {"samples": 4, "tokens": 4096, "grad_norm": 1.1, "lr": 1e-4}
        yield step(number, now, now + length, loss=loss, **more)
        for part, active in ((0.3, 0.7), (0.5, 1.0), (0.95, 0.02)):
            book = _book(active, 0.4 + 0.6 * part)
            peak = max(peak, book["device"]["activations"])
            top = {**book, "device": {**book["device"], "activations": peak, "gradients": int(1.25 * GIB)}}
            total = sum(book["device"].values())
            yield held(number, now + part * length, book, top, allocated=int(total * 1.05), reserved=18 * GIB)
        yield seconds("waiting", number, updates=0.05 * length, parameters=0.012 * length, gradients=0.002 * length)
        busy = {"device": 0.45, "cpu": 0.81, "up": 0.35, "down": 0.16, "disk": 0.0, "wire": 0.07}
        yield seconds("busy", number, **{name: share * length for name, share in busy.items()})
        if number % 40 in (20, 21):
            yield from _lanes(number, now, length, world_size)
        if rank == 0 and number % 20 == 19:
            yield {
                "kind": "quality",
                "step": number,
                "name": "accuracy",
                "value": 0.4 + 0.5 * (1 - math.exp(-number / 40)),
            }
        now += pace * (0.36 if number else 1.3)  # the ranks begin together
    yield {
        "kind": "leak",
        "step": 60,
        "group": "blocks.3",
        "what": "gradients",
        "bytes": 12 * MIB,
        "where": "train.py:41",
    }
    yield end(now)


def _book(active: float, gradients: float) -> dict[str, dict[str, int]]:
    device = {"parameters": 2.5, "gradients": 1.25 * gradients, "optimizer_states": 0.4, "buffers": 0.6}
    host = {"optimizer_states": 15.0, "gradients": 1.25, "buffers": 0.25}
    sizes = {"device": {**device, "activations": 10.8 * active}, "host": host}
    return {tier: {kind: int(size * GIB) for kind, size in row.items()} for tier, row in sizes.items()}


def _lanes(number: int, now: float, length: float, world_size: int) -> Iterable[dict[str, Any]]:
    blocks = [f"blocks.{index}" for index in range(8)]
    slot, size = length / 26, 96 * MIB
    for index, group in enumerate(blocks):
        begin = now + slot * (1 + index)
        if world_size > 1:
            yield event(number, "wire", begin - slot, begin - 0.3 * slot, "gather", group=group, bytes=size)
        if index in (2, 5):
            yield event(number, "loop", begin - 0.2 * slot, begin, "wait", group=group)
        yield event(number, "compute", begin, begin + 0.95 * slot, "forward", group=group)
        back = now + slot * (9.2 + 1.8 * (7 - index))
        yield event(number, "compute", back, back + 1.7 * slot, "backward", group=group)
        if world_size > 1:
            yield event(number, "wire", back + 1.7 * slot, back + 2.3 * slot, "reduce", group=group, bytes=size)
        ways = {"tier": "device", "to": "host", "bytes": size}
        yield event(number, "gradients", back + 2.3 * slot, back + 2.9 * slot, group=group, **ways)
        yield event(number, "cpu", back + 2.9 * slot, back + 4.6 * slot, "update", group=group)
        yield event(number, "up", back + 3 * slot, back + 3.5 * slot, group=group, tier="host", to="device", bytes=size)
