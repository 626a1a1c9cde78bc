"""Whatever is in the files: a page, or an error with a name; never a traceback."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from reporting.runs import ABOUT, plan_data, real_run
from zerostd.errors import ZerostdError
from zerostd.reporting import page_of, read_run, report_json, report_of
from zerostd.reporting.records import KINDS

NUMBERS = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from([0, 1, 10**400, 5e-324, 1e308])
WORDS = st.sampled_from(["device", "host", "parameters", "gradients", "updates", "up", "homes", "step_s", "*"])
VALUES = st.recursive(
    NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    *("step", "start", "end", "time", "loss", "samples", "tokens", "grad_norm", "lr", "seconds", "value"),
    *(
        "bytes",
        "peak",
        "allocated",
        "most_allocated",
        "reserved",
        "name",
        "group",
        "lane",
        "tier",
        "to",
        "what",
        "where",
        "reason",
        "plan",
    ),
]
LINES = st.fixed_dictionaries({"kind": st.sampled_from(sorted(KINDS))}).flatmap(
    lambda line: st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=12).map(lambda more: {**more, **line})
)
GOOD = st.sampled_from(
    [
        {"kind": "step", "step": 1, "start": 0.0, "end": 5e-324, "samples": 1e15, "loss": 1e308},
        {"kind": "step", "step": 2, "start": 0.0, "end": 0.0, "tokens": 3},
        {"kind": "busy", "step": 1, "seconds": {"up": 1e15, "device": 1.0}},
        {"kind": "memory", "step": 1, "time": 0.0, "bytes": {"device": {"parameters": 2**63}}},
        {"kind": "event", "step": 1, "name": "a", "lane": "b", "start": 0.0, "end": 1e15, "bytes": 2**63},
        {"kind": "plan", "step": 1, "plan": plan_data(5e-324)},
    ]
)


def survives(path: Path) -> None:
    try:
        report = report_of([read_run(path)])
    except ZerostdError as error:
        assert str(path) in str(error)
        return
    assert json.loads(report_json(report)) == json.loads(json.dumps(report))
    page_of(report).encode()


@settings(max_examples=150, deadline=None)
@given(st.lists(LINES | GOOD | VALUES, max_size=6))
def test_any_values_in_lines(lines: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        (path / "run.json").write_text(json.dumps(ABOUT))
        (path / "rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        survives(path)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(ABOUT)), VALUES, max_size=4), st.dictionaries(WORDS, VALUES, max_size=3))
@example({"plan": {**plan_data(), "notes": "abc"}}, {})
def test_any_values_in_run_json(about: dict[str, Any], predicted: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        data = {**ABOUT, "plan": {**plan_data(), "predicted": predicted}, **about}
        (path / "run.json").write_text(json.dumps(data))
        (path / "rank-0.jsonl").write_text('{"kind": "step", "step": 0, "start": 0, "end": 1}\n')
        survives(path)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_files_that_were_cut_or_overwritten(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = real_run(Path(name) / "run", world_size=1, num_steps=6)
        file = path / data.draw(st.sampled_from(["rank-0.jsonl", "rank-0.jsonl", "rank-0.jsonl", "run.json"]))
        content = bytearray(file.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(content)))
            stop = data.draw(st.integers(at, min(len(content), at + 300)))
            content[at:stop] = data.draw(st.binary(max_size=12) | st.sampled_from([b"\n", b"\0" * 64, b'"', b"}"]))
        if data.draw(st.booleans()):
            del content[data.draw(st.integers(0, len(content))) :]
        file.write_bytes(bytes(content))
        survives(path)
