"""Command lines and files that nobody would write end in time, with an exit code and one sentence."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.fuzz import CLUSTER, CONFIG, RUN, check
from zerostd.cli.main import app


def refusal(*words: object) -> str:
    """Return the sentence that a command is refused with."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    return line


@pytest.mark.parametrize("first", range(0, 120, 30))
def test_drawn_command_lines_end_in_one_sentence(first: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parent / "factories.py", tmp_path)
    monkeypatch.chdir(tmp_path)  # some of them write files here
    assert [problem for seed in range(first, first + 30) if (problem := check(seed)[1])] == []


@pytest.mark.parametrize("name", ["run.json", "rank-0.jsonl"])
@pytest.mark.parametrize("source", ["/dev/zero", "pipe"])
def test_a_run_of_devices_and_pipes_is_refused(tmp_path: Path, name: str, source: str) -> None:
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    (tmp_path / name).unlink(missing_ok=True)
    if source == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to(source)
    assert f"{name} is not a regular file" in refusal("report", tmp_path)


def test_documents_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for text in ("[" * 100_000, '{"a":' * 100_000, json.dumps(CONFIG)[:-1] + ', "a": ' + "[" * 5000 + "]" * 5000 + "}"):
        file.write_text(text)
        assert "nested too deeply" in refusal("plan", "--config", file, "--cluster", CLUSTER)


@pytest.mark.parametrize(
    "words",
    [
        ("--params", "1T", "--hidden", "1"),
        ("--params", "1T", "--layers", 10**30),
        ("--params", "1B", "--world", 10**30),
        ("--params", "1B", "--batch", 10**30),
        ("--params", "9" * 5000),
    ],
)
def test_numbers_without_bounds_are_refused(words: tuple[object, ...]) -> None:
    line = refusal("plan", "--cluster", CLUSTER, *words)
    assert len(line) < 400


def test_a_config_with_too_many_layers_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG | {"num_hidden_layers": 10**9}))
    assert "1,000,000,000 layers exceed the limit of 10,000" in refusal("plan", "--config", file, "--cluster", CLUSTER)


def test_a_name_that_cannot_be_printed_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(json.loads(CLUSTER.read_text()) | {"name": "\ud800"}))
    assert "UnicodeEncodeError" in refusal("plan", "--params", "1M", "--cluster", file)
