"""Recording on a CUDA device: streams have the device's times, nothing is held up, transfers are all there."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostd
from zerostd import Placement
from zerostd.reporting import read_run, report_of

pytestmark = pytest.mark.gpu

WIDTH, DEPTH, ROWS = 1024, 6, 64
BOTH = Placement(optimizer_states="host", cpu_share=0.5)


def prepared(placement: Placement) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return zerostd.prepare(model, optimizer, precision="bf16", accumulate=1, placement=placement, groups=["*"])


def train(model: nn.Module, optimizer: Any, steps: int, recording: Any = None) -> None:
    for _ in range(steps):
        loss = model(torch.ones(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if recording is not None:
            recording.log(loss=loss)


def test_lanes_have_the_times_of_the_device(tmp_path: Path) -> None:
    model, optimizer = prepared(BOTH)
    with zerostd.record(model, tmp_path / "run", every=4) as recording:
        train(model, optimizer, 10, recording)
    lines = [json.loads(line) for line in (tmp_path / "run" / "rank-0.jsonl").read_text().splitlines()]
    events = [line for line in lines if line["kind"] == "event" and line["step"] == 8]
    assert all(0.0 <= event["start"] <= event["end"] for event in events)
    streams = {event["lane"] for event in events}
    assert streams >= {"compute", "up", "down", "update", "cpu", "gradients"}
    for lane in ("down", "update"):  # one after the other; up is where two workers put things in at once
        mine = sorted((event["start"], event["end"]) for event in events if event["lane"] == lane)
        assert all(one[1] <= other[0] + 1e-5 for one, other in itertools.pairwise(mine)), lane
    streamed = sum(event["bytes"] for event in events if (event["lane"], event["tier"]) == ("down", "device"))
    assert streamed == pytest.approx(10 * 0.5 * DEPTH * (WIDTH + 1) * WIDTH, rel=0.05)  # split masters
    steps = [line for line in lines if line["kind"] == "step"]
    assert len(steps) == 10 and all(line["loss"] is not None for line in steps)


def test_recording_waits_for_nothing(tmp_path: Path) -> None:
    model, optimizer = prepared(Placement())
    with zerostd.record(model, tmp_path / "run", every=2) as recording:
        train(model, optimizer, 3, recording)
        torch.cuda.set_sync_debug_mode("error")
        try:
            train(model, optimizer, 6, recording)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_tensors_kept_from_step_to_step_show_in_the_allocators_count(tmp_path: Path) -> None:
    """Outside of the ledger: the allocator's own count grows."""
    model, optimizer = prepared(Placement())
    kept = []
    with zerostd.record(model, tmp_path / "run"):
        for _ in range(12):
            train(model, optimizer, 1)
            kept.append(torch.empty(1 << 20, dtype=torch.uint8, device="cuda"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "rank-0.jsonl").read_text().splitlines()]
    held = [line["allocated"] for line in lines if line["kind"] == "memory"]
    assert held[-1] - held[3] >= 8 << 20


class Squares(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float().square().mean()


def test_planned_activations_are_held_against_what_the_allocator_gave_out(tmp_path: Path) -> None:
    """They are most of what the device has, and the ledger sees none of them."""
    torch.manual_seed(0)
    model = Squares(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.ones(1024 * ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    options = {"precision": "bf16", "accumulate": 1, "max_grad_norm": None}
    plan = zerostd.plan(model, optimizer, batch=(batch,), **options)
    model, optimizer = zerostd.prepare(model, optimizer, plan=plan, **options)
    torch.cuda.reset_peak_memory_stats()  # what other tests took
    with zerostd.record(model, tmp_path / "run"):
        for _ in range(8):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = report_of([read_run(tmp_path / "run")])["runs"][0]["plans"][0]["rows"]
    rows = {(row["what"], row["part"]): row for row in found}
    assert rows["device", "activations"]["predicted"] > (DEPTH - 1) * batch.nbytes
    assert abs(rows["device", ""]["error_percent"]) < 25, rows
    assert abs(rows["device", "activations"]["error_percent"]) < 25, rows
