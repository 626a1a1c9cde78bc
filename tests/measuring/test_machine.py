"""A machine's profile, measured for real on this processor with little of everything."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.files import opened
from support.memory import pss
from zerostd.communication.world import thread_budget
from zerostd.errors import PrepareError, StorageError
from zerostd.measuring import TrialSizes, measure_machine
from zerostd.measuring.identity import choose_device, free_bytes, machine_name
from zerostd.measuring.machine import _check_quiet, thread_counts
from zerostd.measuring.rates import (
    UPDATE_BYTES,
    HostUpdates,
    LinkCopies,
    busy_memory,
    disk_rates,
    fit,
    link_rates,
    matrix_rates,
    median_s,
    resident_ns,
    turns_of,
    within,
)
from zerostd.monitoring import Ledger
from zerostd.monitoring.events import Timestamp
from zerostd.planning.profiles import MachineProfile
from zerostd.tiers.host import PAGE, Host
from zerostd.tiers.transfer import Stream

MIB = 2**20
CPU = torch.device("cpu")
SMALL = TrialSizes(
    parameters=MIB, copy=MIB, cpu_side=256, disk=16 * MIB, wire=MIB, turns=3, seconds=0.2, disk_seconds=0.5
)


def is_rate(value: float) -> bool:
    return math.isfinite(value) and value > 0


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[MachineProfile, list[tuple[str, float]], Path]:
    """One profile for all tests that only look at it, what was told on the way, and the directory it was given."""
    told: list[tuple[str, float]] = []
    path = tmp_path_factory.mktemp("disk")
    profile = measure_machine(
        "cpu", disk_path=str(path), on_progress=lambda what, done: told.append((what, done)), sizes=SMALL
    )
    return profile, told, path


@pytest.fixture
def host():
    ledger = Ledger()
    host = Host(CPU, ledger, 2)
    yield host
    host.free_all()
    assert not +ledger.now


def test_profile_of_a_processor_has_no_link_and_no_wires(found):
    profile, _, _ = found
    assert (profile.device, profile.link, profile.wires, profile.ranks_per_node) == ("cpu", None, (), 1)


def test_processor_is_timed_with_one_to_all_cores(found):
    processor = found[0].processor
    assert processor.num_cores == thread_budget(1)
    assert list(processor.update_ns) == thread_counts(thread_budget(1))
    one, most = processor.update_ns[1], processor.update_ns[processor.num_cores]
    assert all(0.01 < ns < 1000 for ns in processor.update_ns.values())
    assert most < 10 * one  # beside other work threads may lose, but not like this


def test_without_a_link_memory_and_resident_updates_follow_from_all_cores(found):
    profile = found[0]
    ns = profile.processor.update_ns[profile.processor.num_cores]
    assert profile.processor.memory == pytest.approx(UPDATE_BYTES / ns * 1e9)
    assert profile.resident_ns == ns


def test_matrix_products_are_within_what_processors_do(found):
    matrix = found[0].matrix
    assert {"float32"} <= set(matrix) <= {"float32", "bfloat16"}
    assert all(1e6 < rate < 1e15 for rate in matrix.values())


def test_free_bytes_are_those_of_the_system(found, tmp_path):
    profile = found[0]
    assert profile.free["device"] == profile.free["host"]
    now = free_bytes(CPU, str(tmp_path))
    for tier in ("host", "disk"):
        assert profile.free[tier] == pytest.approx(now[tier], rel=0.5)
    assert free_bytes(CPU, None)["disk"] == 0


def test_disk_leaves_nothing_behind(found):
    profile, _, path = found
    assert profile.disk is not None and profile.disk.path == str(path)
    assert all(is_rate(rate) for rate in (profile.disk.read, profile.disk.write, profile.disk.both))
    assert profile.disk.both < 3 * max(profile.disk.read, profile.disk.write)
    assert os.listdir(path) == []


def test_name_and_versions_say_what_but_not_who(found):
    profile = found[0]
    assert profile.name == machine_name(CPU) and f"{thread_budget(1)} cores" in profile.name
    assert os.uname().nodename not in profile.name
    assert profile.versions["torch"] == str(torch.__version__) and {"python", "zerostd"} <= set(profile.versions)
    assert time.strptime(profile.measured, "%Y-%m-%d")


def test_json_round_trip_is_equal(found):
    profile = found[0]
    assert MachineProfile.from_json(profile.to_json()) == profile


def test_progress_is_told_before_each_part_and_grows(found):
    told = found[1]
    assert [what for what, _ in told] == ["updates on the CPU", "matrix products", "reading and writing files"]
    fractions = [done for _, done in told]
    assert fractions[0] == 0.0 and fractions == sorted(set(fractions)) and fractions[-1] < 1.0


def test_memory_is_given_back():
    measure_machine("cpu", sizes=SMALL)
    before = pss()
    measure_machine("cpu", sizes=replace(SMALL, parameters=16 * MIB, seconds=0.0))  # 224 MiB
    assert pss() - before < 64 * MIB


def test_random_numbers_of_the_user_stay_as_they_are(tmp_path):
    torch.manual_seed(5)
    expected = torch.randn(4)
    torch.manual_seed(5)
    measure_machine("cpu", disk_path=str(tmp_path), sizes=SMALL)
    assert torch.equal(torch.randn(4), expected)


def test_missing_directory_is_refused(tmp_path):
    with pytest.raises(PrepareError, match="not a directory"):
        measure_machine("cpu", disk_path=str(tmp_path / "nowhere"), sizes=SMALL)


def test_files_are_closed_when_the_disk_fails(tmp_path, monkeypatch):
    write = os.pwritev

    def refuse(fd: int, blocks: Any, offset: int) -> int:
        if sum(len(block) for block in blocks) > PAGE:  # the disk is tried with a page first
            raise OSError(5, "Input/output error")
        return write(fd, blocks, offset)

    with monkeypatch.context() as patch:
        patch.setattr("os.pwritev", refuse)
        with pytest.raises(StorageError, match="Input/output error"):
            disk_rates(str(tmp_path), SMALL)
    assert not opened(tmp_path) and os.listdir(tmp_path) == []


def test_device_is_the_accelerator_or_the_processor():
    assert choose_device("cpu") == choose_device("cpu:0") == CPU
    if not torch.accelerator.is_available():
        assert choose_device(None) == CPU
    else:
        assert choose_device(None).index is not None


def test_thread_counts_have_no_duplicates():
    assert thread_counts(1) == [1]
    assert thread_counts(2) == [1, 2]
    assert thread_counts(16) == [1, 8, 14, 16]


def test_sizes_shrink_when_little_is_free():
    assert within(100 * MIB, 10**12) == 100 * MIB
    assert within(100 * MIB, 80 * MIB) == 10 * MIB
    assert within(100 * MIB, 0) == 4096


def test_median_leaves_out_the_first_turn_and_ends_in_time():
    naps = iter([0.2, 0.01, 0.01, 0.03, 0.01, 0.01])
    assert 0.01 <= median_s(lambda: time.sleep(next(naps)), TrialSizes(turns=5, seconds=5.0)) < 0.1
    begin = time.perf_counter()
    assert len(turns_of(lambda: time.sleep(0.05), TrialSizes(turns=1000, seconds=0.1))) < 10
    assert time.perf_counter() - begin < 25  # of 50


# What a device is measured with runs on the processor too, where a lane does its work at once.


def test_copies_move_every_byte(host):
    copies = LinkCopies(CPU, host, TrialSizes(copy=3 * 4096, copies=2), 10**12)
    copies._ends[copies.up][0].copy_(torch.arange(copies.num_bytes).to(torch.uint8))
    copies._ends[copies.down][0].fill_(7)
    copies.turn(copies.up, copies.down)
    assert all(torch.equal(source, target) for source, target in copies._ends.values())


def test_link_rates_are_sound(host):
    copies = LinkCopies(CPU, host, replace(SMALL, copy=4 * MIB), 10**12)
    link = link_rates(copies, SMALL)
    assert all(1e8 < rate < 1e13 for rate in (link.up, link.down, link.both))
    assert 0 < link.latency < 1e-2


def test_what_goes_alone_at_the_end_does_not_count_as_both(host, monkeypatch):
    """A link of 4 up and 2 down: 6 if they are independent, 4 if down begins when up has ended."""
    copies = LinkCopies(CPU, host, SMALL, 10**12)
    size = copies.num_bytes
    alone = {copies.up: size / 4.0, copies.down: size / 2.0}
    together: list[float] = []

    def turn(*streams: Stream) -> list[float]:
        return [alone[lane] for lane in streams] if len(streams) == 1 else together

    monkeypatch.setattr(copies, "turn", turn)
    together[:] = [size / 4.0, size / 2.0]
    assert link_rates(copies, replace(SMALL, seconds=0.0)).both == pytest.approx(6.0)
    together[:] = [size / 4.0, size / 4.0 + size / 2.0]
    assert link_rates(copies, replace(SMALL, seconds=0.0)).both == pytest.approx(4.0)


def test_updates_change_the_weights(host):
    updates = HostUpdates(host, SMALL, 10**12)
    assert updates.numel == MIB
    updates.step(2)
    assert (updates._arrays[0] != 0.5).all() and torch.equal(updates._gradient, updates._arrays[0].bfloat16())


def test_coded_updates_write_codes_where_moments_were(host):
    updates = HostUpdates(host, SMALL, 10**12)
    assert updates.coded_ns(2, SMALL) > 0
    for moment in updates._arrays[1:]:
        records = moment.view(torch.uint8)[: updates.numel // 64 * 68].view(-1, 68)
        assert (records[:, :64] != 0).all() and (records[:, 64:].contiguous().view(torch.float32) > 0).all()


def test_updates_know_what_they_had_of_their_cores(host):
    updates = HostUpdates(host, replace(SMALL, parameters=4 * MIB), 10**12)
    updates.ns(1, SMALL)
    assert 0 < updates.had <= 1.0, updates.had  # less than one where others are busy
    updates.ns(4 * thread_budget(1), SMALL)  # more threads than cores: none has one to itself
    assert 0 < updates.had < 0.5, updates.had


@pytest.mark.parametrize("had, is_told", [(0.5, True), (0.95, False)])
def test_busy_machine_is_told(caplog, had, is_told):
    _check_quiet(had, 8)
    assert ("when the machine is idle" in caplog.text) == is_told


def test_busy_memory_counts_both(host):
    copies, updates = LinkCopies(CPU, host, SMALL, 10**12), HostUpdates(host, SMALL, 10**12)
    assert 1e8 < busy_memory(updates, copies, 1) < 1e13


def test_resident_updates_are_timed():
    assert 0.01 < resident_ns(CPU, replace(SMALL, parameters=MIB // 4), 10**12) < 1e4


def test_slow_products_end_in_time_and_only_float32_is_not_left_out():
    begin = time.perf_counter()
    assert set(matrix_rates(CPU, replace(SMALL, cpu_side=4096, seconds=0.0), 10**12)) == {"float32"}
    assert set(matrix_rates(CPU, replace(SMALL, cpu_side=8192), 10**12)) >= {"float32"}
    assert time.perf_counter() - begin < 30


def test_stamps_measure_what_lies_between():
    lane = Stream(CPU)
    begin = Timestamp(lane.device, lane.stream)
    time.sleep(0.02)
    assert 0.02 <= Timestamp(lane.device, lane.stream).since(begin) < 60  # seconds, in whatever unit the device counts


# Ranks


def profile_on_rank(rank: int, path: str) -> tuple[MachineProfile, list[str]]:
    told: list[str] = []
    profile = measure_machine("cpu", disk_path=path, on_progress=lambda what, _: told.append(what), sizes=SMALL)
    return profile, told


def refused_on_rank(rank: int, path: str) -> str:
    with pytest.raises(PrepareError) as caught:
        measure_machine("cpu", disk_path=path, sizes=SMALL)
    return str(caught.value)


def test_two_ranks_have_one_profile_with_a_wire(ranks, tmp_path):
    (first, told), (second, _) = ranks(2, profile_on_rank, str(tmp_path))
    assert first == second
    assert first.ranks_per_node == 2 and first.processor.num_cores == thread_budget(1)
    (wire,) = first.wires
    assert (wire.name, wire.ranks) == ("world", 2)
    assert 0 < wire.bandwidth < 1e12 and 0 <= wire.latency < 1.0
    assert told[-1] == "collectives among ranks"


def test_what_fails_on_the_first_rank_is_told_to_all(ranks, tmp_path):
    messages = ranks(2, refused_on_rank, str(tmp_path / "nowhere"), timeout=30)
    assert messages[0] == messages[1] and "not a directory" in messages[0]


def test_fit_finds_latency_and_bandwidth():
    latency, bandwidth = fit([(size, 5e-5 + size / 2e9) for size in (1e4, 1e4, 1e6, 1e8)])
    assert latency == pytest.approx(5e-5) and bandwidth == pytest.approx(2e9)


def test_fit_of_one_size_or_of_noise_stays_positive():
    assert fit([(1e6, 1e-3), (1e6, 1e-3)]) == (0.0, pytest.approx(1e9))
    latency, bandwidth = fit([(1e4, 1e-2), (1e6, 1e-3)])
    assert latency >= 0 and is_rate(bandwidth)
    latency, bandwidth = fit([(1e4, 1e-7), (1e6, 1e-3), (1e7, 1e-1)])
    assert latency >= 0 and is_rate(bandwidth)
