"""Profiles in files: used while they are of this machine, measured again when they are not."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zerostd.errors import PrepareError
from zerostd.measuring import TrialSizes, load_or_measure, load_profile, machine
from zerostd.measuring.machine import measure_together
from zerostd.planning.profiles import MachineProfile

MIB = 2**20
TINY = TrialSizes(
    parameters=MIB // 4, cpu_side=128, disk=4 * MIB, wire=MIB // 4, turns=1, seconds=0.05, disk_seconds=0.1
)


class Counter:
    """Measures for real, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *args: Any, **options: Any) -> MachineProfile:
        self.count += 1
        return measure_together(*args, **options)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counter:
    """How often was measured; what is kept is kept in a directory of the test."""
    counter = Counter()
    monkeypatch.setattr(machine, "measure_together", counter)
    monkeypatch.setenv("ZEROSTD_CACHE", str(tmp_path / "cache"))
    return counter


def load(**options: Any) -> MachineProfile:
    return load_or_measure("cpu", sizes=TINY, **options)


def kept(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "cache").iterdir()
    return file


def change(path: Path, changes: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    changes(data)
    path.write_text(json.dumps(data))


def test_second_call_reads_the_file(measured, tmp_path):
    first = load()
    second = load()
    assert measured.count == 1
    assert replace(second, free=first.free) == first


def test_file_is_private_and_alone(measured, tmp_path):
    profile = load()
    path = kept(tmp_path)  # and no temporary one beside it
    assert path == machine.cache_file(profile.name, profile.versions)
    assert path.name.startswith("machine-") and path.stat().st_mode & 0o777 == 0o600
    assert load_profile(path) == profile


def test_free_is_fresh(measured, tmp_path):
    load()
    change(kept(tmp_path), lambda data: data["free"].update(device=1, host=2, disk=3))
    profile = load()
    assert measured.count == 1
    assert profile.free["host"] > MIB and profile.free["device"] == profile.free["host"] and profile.free["disk"] == 0


def test_measured_again_when_asked(measured):
    load()
    load(again=True)
    assert measured.count == 2


@pytest.mark.parametrize(
    "content", [b"{", b"", b"[]", b"null", b"\xff\xfe\x00", b'{"name": "x"}'], ids=lambda content: repr(content)
)
def test_corrupted_file_is_measured_again_with_a_warning(measured, tmp_path, caplog, content):
    load()
    kept(tmp_path).write_bytes(content)
    with caplog.at_level(logging.WARNING, logger="zerostd"):
        profile = load()
    assert measured.count == 2
    assert "measuring the machine again" in caplog.text and str(kept(tmp_path)) in caplog.text
    assert load_profile(kept(tmp_path)) == profile


def test_numbers_that_cannot_be_are_measured_again(measured, tmp_path, caplog):
    load()
    change(kept(tmp_path), lambda data: data.update(resident_ns=-1.0))
    load()
    assert measured.count == 2 and "resident_ns" in caplog.text


def test_other_versions_are_measured_again(measured, monkeypatch):
    old = load()
    monkeypatch.setattr(machine, "versions", lambda device: {**old.versions, "torch": "9.9"})
    load()
    assert measured.count == 2


def test_file_whose_versions_are_others_is_measured_again(measured, tmp_path):
    load()
    change(kept(tmp_path), lambda data: data["versions"].update(torch="1.0"))
    load()
    assert measured.count == 2


def test_other_hardware_is_measured_again(measured, monkeypatch):
    load()
    monkeypatch.setattr(machine, "machine_name", lambda device: "another processor, 3 cores")
    load()
    assert measured.count == 2


def test_a_disk_is_measured_once_and_beside_the_rest(measured, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert load().disk is None
    first = load(disk_path=str(tmp_path / "a"))
    assert measured.count == 1 and first.disk is not None and first.disk.path == str(tmp_path / "a")
    again = load(disk_path=str(tmp_path / "b" / ".." / "a"))
    assert again.disk == first.disk and again.free["disk"] > 0
    assert load().disk is None  # none is asked for: the rest is as good
    other = load(disk_path=str(tmp_path / "b"))  # the same file system
    assert other.disk is not None and other.disk == replace(first.disk, path=str(tmp_path / "b"))
    assert measured.count == 1


def test_another_disk_is_measured(measured, tmp_path):
    if not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("there is one file system only")
    first, other = load(disk_path=str(tmp_path)), load(disk_path="/dev/shm")
    assert first.disk is not None and other.disk is not None and first.disk.read != other.disk.read
    assert measured.count == 1 and other.disk.path == "/dev/shm"


def test_directory_that_is_gone_is_refused(measured, tmp_path):
    (tmp_path / "a").mkdir()
    load(disk_path=str(tmp_path / "a"))
    (tmp_path / "a").rmdir()
    with pytest.raises(PrepareError, match="cannot be used as a directory"):
        load(disk_path=str(tmp_path / "a"))


def test_without_a_place_to_keep_it_the_profile_is_there_all_the_same(measured, tmp_path, caplog):
    (tmp_path / "cache").write_text("a file where the directory should be")
    assert load().device == "cpu"
    assert "cannot be saved" in caplog.text


def test_failed_write_leaves_the_old_file(measured, tmp_path, monkeypatch):
    profile = load()

    def refuse(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    load(again=True)
    assert load_profile(kept(tmp_path)) == profile


def test_home_directory_is_used_without_the_variable(monkeypatch, tmp_path):
    monkeypatch.delenv("ZEROSTD_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert machine.cache_file("x", {}).parent == tmp_path / ".cache" / "zerostd"


def test_profile_by_hand_is_loaded_or_refused_with_its_reason(measured, tmp_path):
    path = tmp_path / "elsewhere.json"
    profile = replace(load(), name="NVIDIA H200; 16 cores", device="cuda", measured="")
    path.write_text(profile.to_json())
    assert load_profile(path) == profile
    change(path, lambda data: data["processor"].update(cache=5))
    with pytest.raises(PrepareError, match=r"elsewhere.json.*'cache'"):
        load_profile(path)
    with pytest.raises(PrepareError, match=r"machine profile .*missing.json cannot be read"):
        load_profile(tmp_path / "missing.json")


def load_on_rank(rank: int, folder: str) -> tuple[int, list[MachineProfile]]:
    counter = Counter()
    machine.measure_together, real = counter, machine.measure_together
    os.environ["ZEROSTD_CACHE"] = f"{folder}/{rank}"  # as if each had a home of its own
    try:
        profiles = [load(), load(), load(again=rank == 0)]
        return counter.count, profiles
    finally:
        machine.measure_together = real
        del os.environ["ZEROSTD_CACHE"]


def test_ranks_go_by_what_the_first_one_has(ranks, measured, tmp_path):
    (tmp_path / "0").mkdir()
    measured_alone = load()
    kept(tmp_path).rename(tmp_path / "0" / kept(tmp_path).name)
    for count, profiles in (found := ranks(2, load_on_rank, str(tmp_path))):
        assert (
            count == 2
        )  # the kept one has no wire; the second call finds one; the third is asked to, by the first rank
        assert [len(profile.wires) for profile in profiles] == [1, 1, 1]
        assert profiles[0].wires == profiles[1].wires and profiles[0].ranks_per_node == 2
    assert found[0][1] == found[1][1]
    assert not (tmp_path / "1").exists() and measured_alone.wires == ()
