"""A disk that fails, falls short, is slow or changes bytes: the same numbers, or an error that says where."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from faults import io_shim
from support import warm

HERE = Path(__file__).parent
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("disk")
    done = warm.run_file(HERE / "disk_scenarios.py", folder, env=io_shim.environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "log": {"text": done.stderr}}


def without_fault(scenario: str) -> str:
    """Return the name of the same training on a drive that works."""
    return "gradients: nothing" if scenario.startswith("gradients: ") else "nothing"


@pytest.mark.parametrize(
    ("scenario", "retries"),
    [
        ("EIO once, reading", {"reading: EIO": 1}),
        ("EIO twice, writing", {"writing: EIO": 2}),
        ("short reads", {}),
        ("short writes", {}),
        ("flipped once, reading", {"reading: checksum": 1}),
        ("slow", {}),
        ("gradients: EIO once, reading", {"reading: EIO": 1}),
        ("gradients: EIO twice, writing", {"writing: EIO": 2}),
        ("gradients: flipped once, reading", {"reading: checksum": 1}),
    ],
)
def test_what_passes_leaves_every_bit_as_it_is(results: Results, scenario: str, retries: dict[str, int]) -> None:
    result = results[scenario]
    assert result["error"] is None and result["taken"] > 0
    assert result["losses"] == results[without_fault(scenario)]["losses"] and result["retries"] == retries
    for what in retries:
        assert f"retried {retries[what]} times: {what}" in result["text"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("placement", ["states", "everything"])
def test_what_users_write_waits_for_states_on_their_way(results: Results, placement: str, precision: str) -> None:
    slow, fast = (results[f"{placement}, {precision}, {drive}"] for drive in ("slow", "fast"))
    assert slow["losses"] == fast["losses"] and slow["values"] == fast["values"]
    assert slow["retries"] == {}  # no page is read while it is written


@pytest.mark.parametrize(
    ("scenario", "kind"),
    [
        ("byte of states", "optimizer_states"),
        ("byte of parameters", "parameters"),
        ("flipped, writing", "(optimizer_states|parameters)"),
        ("gradients: flipped, writing", "gradients"),
    ],
)
def test_changed_bytes_are_an_error_that_says_where(results: Results, scenario: str, kind: str) -> None:
    result = results[scenario]
    assert result["type"] == "StorageError"
    match = re.search(
        r"the 4096 bytes at offset (\d+) of (\S+ .*?unlinked\)|.* \(unlinked\)) are not those that were written: "
        rf"{kind} of the group of '[\w.]+', checksum (0x[0-9a-f]{{8}}) expected and (0x[0-9a-f]{{8}}) read.*"
        "load the last checkpoint",
        result["error"],
    )
    assert match is not None, result["error"]
    assert int(match[1]) % 4096 == 0 and match[3] != match[4]
    assert any(match[2] == file for file, _ in result["extents"])


def test_a_byte_is_named_by_the_page_it_is_in(results: Results) -> None:
    assert "at offset 4096 of" in results["byte of states"]["error"]
    assert "at offset 0 of" in results["byte of parameters"]["error"]


def test_a_file_that_was_cut_is_an_error(results: Results) -> None:
    result = results["cut file"]
    assert result["type"] == "StorageError"
    assert re.search(r"ended early|was cut to 4096 bytes by another process", result["error"])


@pytest.mark.parametrize("scenario", ["EIO for ever, reading", "gradients: EIO for ever, reading"])
def test_a_drive_that_cannot_be_read_ends_the_run_with_its_reason(results: Results, scenario: str) -> None:
    result = results[scenario]
    assert result["type"] == "StorageError"
    assert re.search(
        r"reading \d+ bytes at offset \d+ of .* failed, \w+ of the group of '[\w.]+': EIO: ", result["error"]
    )
    assert result["retries"]["reading: EIO"] >= 3


def test_a_write_into_a_page_that_cannot_be_read_loses_nothing(results: Results) -> None:
    result = results["page of a write cannot be read"]
    assert re.search(r"reading 4096 bytes at offset 0 of .* failed, .* 'weight': EIO: ", result["error"])
    assert result["is_on_disk"] and result["bytes"] == [2, 1]


@pytest.mark.parametrize(
    "scenario",
    ["EIO for ever, writing", "ENOSPC for ever", "gradients: EIO for ever, writing", "gradients: ENOSPC for ever"],
)
def test_groups_of_a_drive_that_cannot_be_written_move_to_the_host(results: Results, scenario: str) -> None:
    result = results[scenario]
    assert result["error"] is None and result["taken"] > 0
    assert result["losses"] == results[without_fault(scenario)]["losses"]
    assert result["on_disk"] < results[without_fault(scenario)]["on_disk"]
    assert "moves to host memory" in results["log"]["text"]


def test_without_room_on_the_host_the_run_ends_with_its_reason(results: Results) -> None:
    result = results["ENOSPC, no room on the host"]
    assert result["type"] == "StorageError"
    assert re.search(
        r"writing \d+ bytes at offset \d+ of .* of the group of '[\w.]+': ENOSPC: .*; host memory cannot take its "
        r"place: .*the host budget leaves",
        result["error"],
    )
