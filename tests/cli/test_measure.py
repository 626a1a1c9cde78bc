"""`zerostd measure`: measures for real, a little of everything, and shows it."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from zerostd.cli import measure as verb
from zerostd.cli.main import app
from zerostd.measuring import TrialSizes, load_or_measure, load_profile
from zerostd.monitoring import progress
from zerostd.planning import Link, MachineProfile, Wire

MIB = 2**20
TINY = TrialSizes(
    parameters=MIB // 4, cpu_side=128, disk=4 * MIB, wire=MIB // 4, turns=1, seconds=0.05, disk_seconds=0.1
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On the processor, with small sizes; what is kept is kept in a directory of the test."""
    monkeypatch.setattr(verb, "load_or_measure", partial(load_or_measure, "cpu", sizes=TINY))
    monkeypatch.setenv("ZEROSTD_CACHE", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def measure(*words: object) -> Result:
    return CliRunner().invoke(app, ["measure", *(str(word) for word in words)])


def test_table_says_everything(tmp_path: Path) -> None:
    result = measure("--disk-path", tmp_path)
    assert result.exit_code == 0, result.output
    for word in (
        "link",
        "ns per parameter with 1 thread",
        "memory",
        "FLOP/s in float32",
        "read,",
        "wires",
        "free, host",
    ):
        assert word in result.stdout, f"{word}:\n{result.output}"


def test_json_is_the_profile_and_nothing_else(tmp_path: Path) -> None:
    result = measure("--json", "--output", tmp_path / "here.json")
    assert result.exit_code == 0, result.output
    profile = MachineProfile.from_json(result.stdout)
    assert profile.to_json() == result.stdout
    assert load_profile(tmp_path / "here.json") == profile


def test_what_was_kept_is_used_unless_asked_again(tmp_path: Path) -> None:
    first = json.loads(measure("--json").stdout)
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_text(json.dumps({**first, "resident_ns": 12345.0}))
    assert json.loads(measure("--json").stdout)["resident_ns"] == 12345.0
    shown = measure().stdout
    assert "Saved profile, measured on" in shown and "To measure again: `zerostd measure --again`." in shown
    assert json.loads(measure("--json", "--again").stdout)["resident_ns"] != 12345.0


def test_plan_uses_what_was_measured(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["plan", "--params", "1M", "--world", "2", "--samples", "1", "--sequence", "16"])
    assert result.exit_code == 0, result.output
    assert list((tmp_path / "cache").iterdir())
    assert "no wires, so the plan leaves out the time of collectives" in result.stdout


def test_bar_on_a_terminal_says_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(progress, "Console", lambda stderr: terminal)
    assert measure("--json").stdout.startswith("{")
    assert "updates on the CPU" in terminal.file.getvalue()


def test_only_the_first_rank_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert measure().output == ""


def test_all_parts_of_a_machine_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    own = load_or_measure("cpu", sizes=TINY)
    wires = (Wire("NVLink", 8, 360e9, 2e-5),)
    data = json.loads(own.to_json()) | {"link": vars(Link(55e9, 54e9, 99e9)), "wires": [vars(wire) for wire in wires]}
    monkeypatch.setattr(verb, "load_or_measure", lambda **options: MachineProfile.from_json(json.dumps(data)))
    shown = measure().stdout
    assert "55 GB/s up, 54 GB/s down, 99 GB/s both ways" in shown
    assert "360 GB/s per rank among 8 (NVLink), 20 us" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--disk-path", "/no/such/folder"), "/no/such/folder cannot be used as a directory"),
        (("--output", "/no/such/folder/x.json"), "cannot be written"),
    ],
)
def test_bad_input_is_one_line(words: tuple[str, ...], said: str) -> None:
    result = measure(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("zerostd: ") and said in line
