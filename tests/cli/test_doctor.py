"""`zerostd doctor`: what is well is said to be, what is not has a remedy, and the exit code tells them apart."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from zerostd.cli import doctor
from zerostd.cli.doctor import examine
from zerostd.cli.main import app
from zerostd.kernels import native
from zerostd.measuring.rates import TrialSizes

NAMES = [
    "python",
    "torch",
    "native kernels",
    "accelerator",
    "host memory",
    "pinned memory",
    "shared memory",
    "disk",
    "disk, O_DIRECT",
    "disk, speed",
    "process group",
    "extras",
]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process, and less of the disk."""
    monkeypatch.setattr(doctor, "TRIAL", TrialSizes(disk=4 << 20, disk_seconds=0.05))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    native.load.cache_clear()
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "missing.so")
    yield
    native.load.cache_clear()


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["doctor", *(str(word) for word in words)])


def findings(result: Result) -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}


def test_healthy_machine(tmp_path: Path) -> None:
    result = run("--disk", tmp_path)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "0 broken" in lines[0]
    for name in NAMES:
        assert any(line.lstrip("│ ").startswith(name) for line in lines), name
    assert "torch          │ ok" in result.stdout and str(torch.__version__) in result.stdout
    cells = "".join(line.split("│")[3].strip() for line in lines if line.count("│") == 5)  # text that the table wraps
    assert "1rankmetovergloo" in cells.replace(" ", "") and str(tmp_path) in cells


def test_json_has_the_same_findings(tmp_path: Path) -> None:
    result = run("--disk", tmp_path, "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["healthy"] is True
    found = findings(result)
    assert list(found) == NAMES == [finding.name for finding in examine(str(tmp_path))]
    assert all(finding.keys() == {"name", "status", "value", "remedy"} for finding in found.values())
    assert all(finding["remedy"] for finding in found.values() if finding["status"] != "ok")


def test_missing_kernels_are_a_warning(no_library: None, tmp_path: Path) -> None:
    result = run("--disk", tmp_path, "--json")
    assert result.exit_code == 0
    kernels = findings(result)["native kernels"]
    assert kernels["status"] == "warning" and "not loaded" in kernels["value"] and "make native" in kernels["remedy"]


@pytest.mark.parametrize("path", ["/no/such/folder", "/proc"])
def test_disk_that_cannot_be_written_is_a_failure(path: str) -> None:
    result = run("--disk", path, "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["healthy"] is False
    found = findings(result)
    assert (
        found["disk"]["status"] == "failure" and path in found["disk"]["value"] and "--disk" in found["disk"]["remedy"]
    )
    assert "disk, speed" not in found and found["process group"]["status"] == "ok"
    shown = run("--disk", path)
    assert shown.exit_code == 1 and "1 broken" in shown.stdout


def test_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "free_host", lambda: 2**20)
    found = {finding.name: finding for finding in examine(str(tmp_path))}
    assert found["host memory"].status == "warning" and "memory limit" in found["host memory"].remedy


def test_ranks_that_cannot_meet_are_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # and no port: nobody can be met
    monkeypatch.delenv("MASTER_PORT", raising=False)
    found = findings(run("--disk", tmp_path, "--json"))
    assert found["process group"]["status"] == "failure" and "SOCKET_IFNAME" in found["process group"]["remedy"]


def test_what_breaks_a_check_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken() -> int:
        raise ZeroDivisionError("no number")

    monkeypatch.setattr(doctor, "memlock_limit", broken)
    result = run("--disk", tmp_path, "--json")
    found = findings(result)
    assert result.exit_code == 1 and found["host memory"]["value"] == "ZeroDivisionError: no number"
    assert found["process group"]["status"] == "ok"


def test_ranks_meet_and_one_speaks(ranks: Any) -> None:
    first, second = ranks(2, _examine)
    assert first[0] == second[0] == "2 ranks met over gloo"
    assert first[1] and second[1] == ""


def _examine(rank: int) -> tuple[str, str]:
    shown = run("--disk", tempfile.gettempdir())
    (group,) = (finding.value for finding in examine() if finding.name == "process group")
    return group.split(",")[0], shown.output
