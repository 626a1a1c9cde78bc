"""`zerostd report` on the command line."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from reporting.browser import Document
from reporting.runs import end, event, held, real_run, step, write_run
from zerostd.cli.main import COMMANDS, app
from zerostd.reporting import read_run, report_of


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def report(*words: object) -> Result:
    return CliRunner().invoke(app, ["report", *(str(word) for word in words)])


def refused(result: Result) -> str:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("zerostd: ")
    return line


def test_page_is_written_and_told(tmp_path: Path) -> None:
    real_run(tmp_path / "monday", num_steps=4)
    result = report("monday")
    assert result.exit_code == 0, result.output
    verdict = report_of([read_run(tmp_path / "monday")])["runs"][0]["verdict"]
    assert verdict.startswith("Bound by ")
    assert result.stdout.splitlines() == [f"monday: 4 steps. {verdict}", "Written: report.html"]
    assert "monday" in (tmp_path / "report.html").read_text()


def test_json_is_what_the_page_holds_and_nothing_else(tmp_path: Path) -> None:
    real_run(tmp_path / "monday", num_steps=30)
    result = report("monday", "--json", "-o", "page.html")
    assert result.exit_code == 0, result.output
    (held,) = Document((tmp_path / "page.html").read_text()).all("script", id="report")
    assert json.loads(result.stdout) == json.loads(held.text)


def test_json_alone_writes_no_page(tmp_path: Path) -> None:
    real_run(tmp_path / "monday", num_steps=4)
    assert json.loads(report("monday", "--json").stdout)["runs"][0]["name"] == "monday"
    assert not list(tmp_path.glob("*.html"))


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    for day in ("monday", "friday"):
        write_run(tmp_path / day / "run", {0: [step(0, 0, 1), end(1)]}, model={"name": day, "parameters": 1})
    result = report("monday/run", "friday/run")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("The runs are of different models: monday (1 parameters), friday")
    assert [line.split(":")[0] for line in lines[1:3]] == ["monday/run", "friday/run"]


def test_notices_are_told(tmp_path: Path) -> None:
    write_run(tmp_path / "run", {0: ["x", step(0, 0, 1)]})
    assert "  1 line cannot be read" in report("run").stdout


def test_refused_in_one_line(tmp_path: Path) -> None:
    assert "holds no run.json" in refused(report(tmp_path))
    write_run(tmp_path / "run", {0: []}, format=3)
    assert "has format 3" in refused(report("run"))
    write_run(tmp_path / "run", {0: [end(0)]})
    assert "cannot be written" in refused(report("run", "-o", "nowhere/page.html"))
    assert report().exit_code == 2


def test_a_trace_has_every_event_on_its_rank_and_lane(tmp_path: Path) -> None:
    up = event(1, "up", 0.25, 0.5, group="blocks.1", tier="host", to="device", bytes=64)
    wire = event(1, "wire", 0.5, 0.75, name="gather", group="blocks.2")
    odd = event(1, "elsewhere", 0.5, 0.5)
    write_run(tmp_path / "run", {0: [step(1, 0, 1), up, odd, end(1)], 1: [step(1, 0, 2), wire, end(2)]}, world_size=2)
    result = report("run", "-o", "page.html", "--trace", "trace.json")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "Written: page.html, trace.json"
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {(one["pid"], one["tid"]): one["args"]["name"] for one in found if one["name"] == "thread_name"}
    slices = {
        (one["pid"], lanes[one["pid"], one["tid"]], one["name"]): (one["ts"], one["dur"])
        for one in found
        if one["ph"] == "X"
    }
    assert slices == {
        (0, "steps", "step 1"): (0.0, 1e6),
        (1, "steps", "step 1"): (0.0, 2e6),
        (0, "up", "transfer blocks.1"): (250000.0, 250000.0),
        (0, "elsewhere", "transfer"): (500000.0, 0.0),
        (1, "wire", "gather blocks.2"): (500000.0, 250000.0),
    }
    (told,) = (one["args"] for one in found if one["name"] == "transfer blocks.1")
    assert told == {"step": 1, "bytes": 64, "from": "host", "to": "device"}


def test_a_trace_is_of_one_run(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name, {0: [step(1, 0, 1), end(1)]})
    assert "--trace t.json takes one run" in refused(report("one", "two", "--trace", "t.json"))
    assert not list(tmp_path.glob("*.html"))


def test_retries_of_all_ranks_are_a_notice(tmp_path: Path) -> None:
    ranks = {
        rank: [
            step(1, 0.0, 1.0),
            *(held(number, 1.0, {}, retries={"reading: EIO": number}) for number in counts),
            end(2.0),
        ]
        for rank, counts in {0: [1, 2], 1: [1]}.items()
    }
    write_run(tmp_path / "run", ranks)
    run = json.loads(report("run", "--json").stdout)["runs"][0]
    assert "File reads or writes were repeated after errors: reading: EIO 3. Check the drives." in run["notices"]


def test_top_shows_a_run_once(tmp_path: Path) -> None:
    real_run(tmp_path / "monday", num_steps=4)
    result = CliRunner().invoke(app, ["top", str(tmp_path / "monday"), "--once"])
    assert result.exit_code == 0, result.output
    assert "Bound by" in result.stdout and "ended, 4 steps" in result.stdout and "loss" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    refused(CliRunner().invoke(app, ["top", str(tmp_path / "nowhere")]))
    refused(CliRunner().invoke(app, ["top", str(tmp_path / "monday"), "--every", "0"]))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_the_first_sentence_of_each_command(name: str) -> None:
    command = getattr(importlib.import_module(f"zerostd.cli.{name}"), name)
    assert inspect.getdoc(command).startswith(COMMANDS[name])
    assert CliRunner().invoke(app, [name, "--help"]).exit_code == 0


def test_help_and_version_do_not_import_torch() -> None:
    script = "import sys; from zerostd.cli.main import app; app(standalone_mode=False); print('torch' in sys.modules)"
    for option in ("--help", "--version"):
        done = subprocess.run([sys.executable, "-c", script, option], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "False", done.stdout
