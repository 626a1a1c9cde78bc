"""Run directories, whole and damaged: what is refused by name, and what is left out and told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from reporting.runs import end, event, held, seconds, step, write_run
from zerostd.errors import StorageError
from zerostd.reporting import read_run
from zerostd.reporting.records import EventLine, LeakLine, MemoryLine, PlanLine, QualityLine, StepLine

DOCS = Path(__file__).parents[2] / "docs" / "run-directory.md"


def test_the_documented_directory_is_read_without_a_word(tmp_path: Path) -> None:
    text = DOCS.read_text()
    (about,) = re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL)
    (lines,) = re.findall(r"```jsonl\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "run.json").write_text(about)
    for rank in range(2):
        (tmp_path / f"rank-{rank}.jsonl").write_text(lines)
    run = read_run(tmp_path)
    assert not run.notices
    assert run.info.settings == {"stage": 3, "precision": "bf16", "accumulate": 1, "max_grad_norm": None}
    for log in run.ranks:
        assert log.num_lines == len(lines.splitlines())
        for kind in (StepLine, MemoryLine, EventLine, QualityLine, LeakLine, PlanLine):
            assert len(log.of(kind)) == 1, kind
        assert len(log.seconds("waiting")) == len(log.seconds("busy")) == 1
        assert log.has_ended


# -- refused --


def refused(path: Path) -> str:
    with pytest.raises(StorageError) as caught:
        read_run(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_no_directory(tmp_path: Path) -> None:
    assert "is not a directory" in refused(tmp_path / "nowhere")
    (tmp_path / "file").write_text("{}")
    assert "is not a directory" in refused(tmp_path / "file")


def test_no_run_json(tmp_path: Path) -> None:
    (tmp_path / "rank-0.jsonl").write_text("")
    assert "holds no run.json" in refused(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "\x00", "[" * 100_000])
def test_run_json_is_no_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    assert "run.json" in refused(tmp_path)


def test_no_file_of_any_rank(tmp_path: Path) -> None:
    assert "no rank-0.jsonl" in refused(write_run(tmp_path, {}))


def test_newer_format(tmp_path: Path) -> None:
    said = refused(write_run(tmp_path, {0: []}, format=2))
    assert "has format 2" in said and "reads up to 1" in said


@pytest.mark.parametrize("value", [None, 0, "1", True, 1.5])
def test_no_format(tmp_path: Path, value: object) -> None:
    assert "format is" in refused(write_run(tmp_path, {0: []}, format=value))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("world_size", 0, "world_size.*`int` >= 1"),
        ("world_size", None, "the field 'world_size' is missing"),
        ("world_size", 10**9, "world_size.*`int` <= 1048576"),
        ("model", "GPT", "model is 'GPT'"),
        ("model", {"name": "GPT", "parameters": -1}, "model.parameters is -1.*`int` >= 0"),
        ("command", ["a"], r"command is \['a'\]"),
    ],
)
def test_field_that_is_wrong_is_named(tmp_path: Path, field: str, value: object, said: str) -> None:
    assert re.search(said, refused(write_run(tmp_path, {0: []}, **{field: value})))


def test_rank_file_that_cannot_be_read(tmp_path: Path) -> None:
    write_run(tmp_path, {0: []})
    (tmp_path / "rank-1.jsonl").mkdir()
    assert "rank-1.jsonl is not a regular file" in refused(tmp_path)


# -- told --


def test_torn_last_line_is_left_out_and_counted(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, {0: [step(0, 0.0, 1.0), b'{"kind":"step","step":1,"sta']}))
    assert [one.step for one in run.ranks[0].of(StepLine)] == [0]
    assert run.ranks[0].is_torn and not run.ranks[0].num_unreadable
    assert run.notices == (
        "The run is partial: it is still running, or was killed.",
        "An incomplete last line was left out of 1 file (rank 0).",
    )


def test_last_line_without_its_newline_counts_if_it_is_whole(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, {0: [step(0, 0.0, 1.0), json.dumps(end(1.0)).encode()]}))
    assert run.ranks[0].has_ended and not run.notices


BAD_LINES = [  # and what is said of them, as a regular expression
    ("{", "is not JSON"),
    ("7", "is not a JSON object"),
    ('{"kind": 3}', "kind is 3"),
    ('{"kind": "step", "step": 1}', "the field 'start' is missing"),
    ('{"kind": "step", "step": -1, "start": 0, "end": 1}', "step is -1.*`int` >= 0"),
    ('{"kind": "step", "step": 1.5, "start": 0, "end": 1}', "step is 1.5"),
    ('{"kind": "step", "step": 1, "start": 2, "end": 1}', "ends at 1.0, before it starts at 2.0"),
    ('{"kind": "step", "step": 1, "start": NaN, "end": 1}', "start.*`float` >= -1000000000000000"),
    ('{"kind": "step", "step": 1, "start": 0, "end": 1e300}', "end.*`float` <= 1000000000000000"),
    ('{"kind": "step", "step": 1, "start": 0, "end": 1, "loss": "low"}', "loss is 'low'"),
    ('{"kind": "step", "step": 1, "start": 0, "end": 1, "loss": true}', "loss is True"),
    ('{"kind": "memory", "step": 1, "time": 0, "bytes": {"attic": {}}}', r"bytes.*device\|host\|disk"),
    ('{"kind": "memory", "step": 1, "time": 0, "bytes": {"host": {"toys": 1}}}', r"bytes.*parameters\|gradients"),
    (
        '{"kind": "memory", "step": 1, "time": 0, "bytes": {"host": {"gradients": -1}}}',
        "bytes.*gradients is -1.*`int` >= 0",
    ),
    ('{"kind": "memory", "step": 1, "time": 0, "bytes": []}', r"bytes is \[\]"),
    ('{"kind": "event", "step": 1, "start": 0, "end": 1, "name": "gather"}', "the field 'lane' is missing"),
    ('{"kind": "waiting", "step": 1, "seconds": {"updates": -1}}', "seconds.*updates is -1.*`float` >= 0"),
    ('{"kind": "quality", "step": 1, "value": 1}', "the field 'name' is missing"),
    ('{"kind": "quality", "step": 1, "value": 1, "name": " "}', "name.*length >= 1"),
    ('{"kind": "plan", "step": 1, "plan": 7}', "plan is 7"),
    ('{"kind": "end"}', "the field 'time' is missing"),
    ('{"kind": "end", "time": %s}' % ("9" * 5000), "is not JSON"),
    ("[" * 100_000, "nested too deeply"),
]


@pytest.mark.parametrize(("line", "said"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_line_that_cannot_be_read_is_named(tmp_path: Path, line: str, said: str) -> None:
    run = read_run(write_run(tmp_path, {0: [step(0, 0.0, 1.0), line, end(2.0)]}))
    (notice,) = run.notices
    assert notice.startswith("1 line cannot be read and was left out: rank-0.jsonl:2")
    assert re.search(said, notice), notice
    assert len(run.ranks[0].of(StepLine)) == 1 and run.ranks[0].has_ended


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, {0: [b"\xff\xfe\n", end(1.0)]}))
    assert any("byte 0 is not UTF-8" in notice for notice in run.notices)


def test_many_bad_lines_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, {0: ["x"] * 40 + [step(0, 0.0, 1.0), end(1.0)], 1: ["x"] * 3 + [end(1.0)]}))
    (notice,) = run.notices
    assert notice.startswith("43 lines cannot be read") and notice.endswith("and 38 more.")
    assert "rank-0.jsonl:5 " in notice and "rank-0.jsonl:6 " not in notice


def test_unknown_kinds_are_counted_apart(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, {0: [{"kind": "tea"}, {"kind": "tea"}, step(0, 0.0, 1.0), end(1.0)]}))
    assert run.notices == ("Lines of kinds that this version does not know were left out: tea (2).",)


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, {1: [step(0, 0.0, 1.0), end(1.0)]}, world_size=3))
    (notice,) = run.notices
    assert notice.startswith("Ranks 0, 2 are missing of 3")


def test_missing_ranks_of_a_large_world(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, {0: [step(0, 0.0, 1.0), end(1.0)]}, world_size=100_000))
    assert run.notices[0].startswith("Ranks 1, 2, 3, 4, 5 and 99,994 more are missing of 100000")


def test_more_ranks_than_there_were(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, {0: [step(0, 0.0, 1.0), end(1.0)], 4: [end(1.0)]}, world_size=1))
    assert run.notices == ("Rank 4 is here, but run.json says there were 1.",)


def test_one_rank_without_an_end(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, {0: [step(0, 0.0, 1.0), end(1.0)], 1: [step(0, 0.0, 1.0)]}))
    assert run.notices == ("The run is partial: it is still running, or was killed (Rank 1 is without an end).",)


def test_empty_run(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, {0: [end(0.0)]}))
    assert not run.ranks[0].of(StepLine) and run.notices == ("No step was recorded.",)


def test_a_step_that_comes_again_replaces_the_first(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, {0: [step(1, 0.0, 1.0), step(0, 0.0, 5.0), step(1, 2.0, 4.0), end(5.0)]}))
    assert [(one.step, one.seconds) for one in run.ranks[0].of(StepLine)] == [(0, 5.0), (1, 2.0)]
    assert run.notices == ("1 step was written more than once; the last line counts.",)


def test_text_is_one_printable_line(tmp_path: Path) -> None:
    name = "a\n\x1b[31mred\u202e \ud800" + "x" * 5000
    run = read_run(write_run(tmp_path, {0: [event(0, "up", 0.0, 1.0, group=name), end(1.0)]}))
    (found,) = run.ranks[0].of(EventLine)
    assert found.group.startswith("a \ufffd[31mred\ufffd \ufffdxxx") and len(found.group) == 2000
    found.group.encode()


def test_numbers_of_other_kinds_of_number(tmp_path: Path) -> None:
    lines = [step(3.0, 0, 1, loss=2), held(3, 1, {"host": {"gradients": 8.0}}), seconds("busy", 3, cpu=1), end(1)]
    run = read_run(write_run(tmp_path, {0: lines}))
    assert not run.notices and run.ranks[0].of(StepLine)[0].step == 3
