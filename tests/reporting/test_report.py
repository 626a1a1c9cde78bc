"""`zerostd report` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from reporting.browser import Document
from reporting.runs import end, real_run, step, write_run
from zerostd.cli.main import app


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
    lines = 2 * (4 * 6 + 2) + 1  # of each rank six a step, a leak and the end; and a plan
    assert result.stdout.splitlines() == [f"monday: 4 steps, {lines} lines", "Written: report.html"]
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
