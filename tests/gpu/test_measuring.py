"""A machine with a device, measured for real."""

from __future__ import annotations

import gc
import math
import os
import time

import pytest
import torch

from support.memory import pss
from zerostd.measuring import TrialSizes, load_or_measure, measure_machine
from zerostd.measuring.machine import thread_counts
from zerostd.planning.profiles import MachineProfile

pytestmark = pytest.mark.gpu

MIB = 2**20
WORKSPACE = 64 * MIB  # that cuBLAS keeps
SMALL = TrialSizes(parameters=MIB, copy=4 * MIB, side=1024, turns=3, seconds=0.2)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[MachineProfile, list[tuple[str, float]], float]:
    """One profile at full size, what was told on the way, and the seconds it took."""
    torch.zeros(1, device="cuda")  # the driver's own start is no part of it
    told: list[tuple[str, float]] = []
    path = tmp_path_factory.mktemp("disk")
    begin = time.perf_counter()
    profile = measure_machine("cuda", disk_path=str(path), on_progress=lambda what, done: told.append((what, done)))
    seconds = time.perf_counter() - begin
    assert os.listdir(path) == []
    return profile, told, seconds


def test_measuring_takes_less_than_half_a_minute(found):
    assert found[2] < 30


def test_link_is_measured_in_both_directions(found):
    link = found[0].link
    assert link is not None
    assert 1e9 < link.up < 1e12 and 1e9 < link.down < 1e12
    assert 0.9 * max(link.up, link.down) <= link.both <= 1.1 * (link.up + link.down)
    assert 1e-7 < link.latency < 1e-3


def test_host_memory_carries_updates_and_copies(found):
    profile = found[0]
    assert list(profile.processor.update_ns) == thread_counts(profile.processor.num_cores)
    assert profile.link is not None
    assert profile.processor.memory > 0.5 * profile.link.both


def test_device_is_faster_than_its_processor(found):
    profile = found[0]
    assert 0 < profile.resident_ns < min(profile.processor.update_ns.values())
    assert profile.matrix["float32"] > 1e12 and profile.matrix["bfloat16"] > profile.matrix["float32"]


def test_progress_has_all_parts_of_one_rank(found):
    told = found[1]
    assert [what for what, _ in told] == [
        "copies between host and device",
        "updates on the CPU",
        "host memory with everything busy",
        "updates on the device",
        "matrix products",
        "reading and writing files",
    ]
    fractions = [done for _, done in told]
    assert fractions == sorted(set(fractions)) and fractions[0] == 0.0 and fractions[-1] < 1.0


def test_profile_is_of_here(found):
    profile = found[0]
    assert torch.cuda.get_device_name() in profile.name and profile.device == "cuda"
    assert all(math.isfinite(size) and size > 0 for size in profile.free.values())
    assert MachineProfile.from_json(profile.to_json()) == profile


def test_memory_of_device_and_host_is_given_back():
    measure_machine("cuda", sizes=SMALL)  # what stays: workspaces, threads
    gc.collect()
    allocated, reserved, host = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), pss()
    measure_machine("cuda")
    gc.collect()
    assert torch.cuda.memory_allocated() - allocated < WORKSPACE
    assert torch.cuda.memory_reserved() - reserved < WORKSPACE
    assert pss() - host < 256 * MIB


def test_free_memory_is_that_of_now(tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROSTD_CACHE", str(tmp_path))
    load_or_measure("cuda", sizes=SMALL)
    before = load_or_measure("cuda").free["device"]
    held = torch.empty(1024 * MIB, dtype=torch.uint8, device="cuda")
    assert before - load_or_measure("cuda").free["device"] == pytest.approx(held.nbytes, rel=0.1)
