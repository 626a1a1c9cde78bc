"""The page: the same numbers as the JSON, nothing that runs but its own script, and what a real browser makes of it."""

from __future__ import annotations

import json
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from reporting.browser import Document, find_browser, rendered
from reporting.runs import end, event, held, plan_data, real_run, seconds, step, write_run
from zerostd.cli.machines import find_machine
from zerostd.engine.settings import Settings
from zerostd.monitoring.texts import seconds_text
from zerostd.planning.described import from_numbers
from zerostd.policy import Budget
from zerostd.preparing.scaling import plan_numbers
from zerostd.reporting import page_of, plan_page, read_run, report_of

BROWSER = find_browser()
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome here")
EVIL = (
    "</script><script>document.documentElement.dataset.ran=1</script><img src=x onerror='document.title=1'>\"'&{{7*7}}"
)


def report_from(*paths: Path) -> dict[str, Any]:
    return report_of([read_run(path) for path in paths])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two runs like real ones."""
    root = tmp_path_factory.mktemp("two")
    return report_from(real_run(root / "first", num_steps=50), real_run(root / "second", world_size=1, num_steps=30))


def evil_run(path: Path) -> Path:
    """Every text of every file is hostile."""
    lines: list[Any] = [
        step(0, 0, 1, loss=1.0),
        held(0, 1, {"device": {"parameters": 5}}),
        event(0, EVIL, 0, 1, EVIL, group=EVIL, tier=EVIL, to=EVIL),
        seconds("waiting", 0, **{EVIL: 0.5}),
        seconds("busy", 0, **{EVIL: 0.5}),
        {"kind": "quality", "step": 0, "name": EVIL, "value": 1.0},
        {"kind": "leak", "step": 0, "group": EVIL, "what": EVIL, "bytes": 1, "where": EVIL},
        {"kind": "plan", "step": 0, "reason": EVIL, "plan": plan_data(notes=[EVIL])},
        {"kind": EVIL},
        json.dumps({"kind": "step", "step": EVIL, "start": 0, "end": 1}),
        end(1),
    ]
    about = {name: EVIL for name in ("zerostd", "begun", "command")}
    named = {"model": {"name": EVIL}, "machine": {"name": EVIL}, "settings": {EVIL: EVIL}}
    return write_run(path, {0: lines}, plan=plan_data(notes=[EVIL]), **about, **named)


def embedded(document: Document) -> Any:
    (found,) = document.all("script", id="report")
    return json.loads(found.text)


def at(report: Any, path: str) -> Any:
    return reduce(
        lambda found, part: found[int(part)] if isinstance(found, list) else found.get(part), path.split("."), report
    )


def check_cells(document: Document, report: Any) -> int:
    """Every cell that names a place of the report shows what stands there."""
    cells = document.all(data_of=None)
    for cell in cells:
        value = at(report, cell.attributes["data-of"])
        assert cell.attributes.get("data-value") == (None if value is None else str(value)), cell
        assert (cell.text.strip() == "\N{EN DASH}") == (value is None or value == ""), cell
    return len(cells)


# -- without a browser --


def test_page_holds_the_same_json_and_shows_it(two: dict[str, Any]) -> None:
    document = Document(page_of(two))
    assert embedded(document) == json.loads(json.dumps(two))
    assert check_cells(document, two) > 150


def test_cells_are_written_for_people(tmp_path: Path) -> None:
    lines = [step(0, 0.0, 0.25, samples=4, loss=2.5), held(0, 0.2, {"device": {"parameters": 3 * 2**30}}), end(1)]
    busy = seconds("busy", 0, device=0.125)
    plan = plan_data(0.2)
    document = Document(page_of(report_from(write_run(tmp_path, {0: [*lines, busy]}, plan=plan))))
    texts = {cell.attributes["data-of"]: cell.text.strip() for cell in document.all(data_of=None)}
    assert texts["runs.0.speed.step_s"] == "250 ms"
    assert texts["runs.0.speed.samples_per_s"] == "16"
    assert texts["runs.0.memory.peaks.0.total"] == "3.00 GiB"
    assert texts["runs.0.losses.last"] == "2.5"
    assert texts["runs.0.utilisation.0.share"] == "50.0 %"
    assert texts["runs.0.plans.0.rows.0.error_percent"] == "\N{MINUS SIGN}20.0 %"
    assert texts["runs.0.speed.tokens_per_s"] == "\N{EN DASH}"


def test_sections_say_what_there_is(two: dict[str, Any]) -> None:
    document = Document(page_of(two))
    heads = [one.text for one in document.all("h2")]
    for head in ("Side by side", "Progress", "Memory over time", "Timeline of a step", "Waiting", "The plan", "Leaks"):
        assert head in heads, head
    text = page_of(two)
    assert "The bottleneck is the CPU" in text and "train.py:41" in text and "One more GiB of the device" in text


def test_empty_run_has_a_page_that_says_so(tmp_path: Path) -> None:
    page = page_of(report_from(write_run(tmp_path, {0: []})))
    for words in ("No step was recorded", "partial", "No memory was recorded", "No events", "No waiting", "no plan"):
        assert words in page, words


def test_nothing_from_outside_and_ready_for_phones_and_the_dark(two: dict[str, Any]) -> None:
    page = page_of(two)
    assert not re.findall(r"""(?:src|href)=["'](?!#)|url\(|@import|https?://(?!www\.w3\.org/2000/svg)""", page)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert "prefers-color-scheme: dark" in page


def test_hostile_text_is_text(tmp_path: Path) -> None:
    report = report_from(evil_run(tmp_path / "run"))
    page = page_of(report)
    document = Document(page)
    assert [one.attributes.get("type") for one in document.all("script")] == ["application/json", None]
    assert not document.all("img") and page.count("<script") == 2
    assert embedded(document) == json.loads(json.dumps(report))
    assert document.all(data_of="runs.0.leaks.0.group")[0].text.strip() == EVIL


# -- in a browser --


def opened(report: dict[str, Any] | str, folder: Path, width: int = 1280, script: str = "") -> Document:
    """A page as the browser has it, with no error and nothing in the console; `script` runs after its own."""
    page = report if isinstance(report, str) else page_of(report)
    if script:
        page = re.sub(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>", "", page)
        page = page.replace("</body>", f"<script>{script}</script></body>")
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    text, console = rendered(file, BROWSER or "", width)
    document = Document(text)
    (root,) = document.all("html")
    assert not console, console
    assert root.attributes.get("data-errors") is None, root.attributes
    assert int(root.attributes["data-drawn"]) == len(document.all(data_chart=None))
    assert not document.all("p", **{"class": "broken"})
    return document


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_browser_draws_every_number(two: dict[str, Any], tmp_path: Path, width: int) -> None:
    document = opened(two, tmp_path, width)
    assert embedded(document) == json.loads(json.dumps(two)) and check_cells(document, two) > 150
    bars = sum(run["timeline"]["steps"][0]["bars"] for run in two["runs"])
    assert len(document.all("rect", data_bar=None)) == bars
    lines = [int(one.attributes["data-points"]) for one in document.all("path", **{"class": "line"})]
    runs = two["runs"]
    curves = [curve["name"] for curve in runs[0]["curves"]]
    shown = [run[name]["points"] for name in ("step_times", "losses") for run in runs]
    shown += [curve["points"] for name in curves for run in runs for curve in run["curves"] if curve["name"] == name]
    assert lines == [len(points) for points in shown] + [
        len(quality["points"]) for run in runs for quality in run["quality"]
    ]
    assert curves and all(one.text for one in document.all("p", **{"class": "verdict"}))
    kinds = [tier["kinds"] for run in two["runs"] for tier in run["memory"]["ranks"][0]["tiers"]]
    assert len(document.all("path", **{"class": "band"})) == sum(len(some) for some in kinds)
    labels = [one.attributes["aria-label"] for one in document.all("svg", role="img")]
    assert len(labels) == 2 + len(curves) + 1 + len(kinds) + 2 and all(labels)
    first = two["runs"][0]["losses"]
    last = float(f"{first['last']:.4g}")
    assert f"first: {last:g} at step {first['last_step']}" in labels[1]


@needs_browser
def test_browser_draws_the_simulated_step_of_a_plan(tmp_path: Path) -> None:
    machine, _ = find_machine("1xt4-16", None)
    assert machine is not None
    model = from_numbers("350M", samples=1, sequence=256)
    budgets = [Budget(device=size) for size in ("4GiB", "6GiB")]
    plans = [plan_numbers(model, machine, Settings(max_grad_norm=1.0, budget=budget)) for budget in budgets]
    slide = "slider.value = 1; slider.dispatchEvent(new Event('input'));"
    document = opened(plan_page(EVIL, plans[0], plans), tmp_path, 390, script=slide)
    assert len(document.all("rect", data_bar=None)) == len(plans[0].spans) > 20
    (label,) = [one.attributes["aria-label"] for one in document.all("svg", role="img")]
    assert label.startswith("Timeline of a simulated step") and "CPU busy" in label
    (answer,) = document.all("p", id="answer")
    assert seconds_text(plans[1].predicted.step_s) in answer.text
    (root,) = document.all("html")
    assert "data-ran" not in root.attributes


@needs_browser
def test_browser_runs_no_hostile_text(tmp_path: Path) -> None:
    document = opened(report_from(evil_run(tmp_path / "run")), tmp_path)
    (root,) = document.all("html")
    assert "data-ran" not in root.attributes and not document.all("img")
    assert document.all("title")[0].text == "run - zerostd report"
    assert any(EVIL in one.text for one in document.all("li"))  # a legend


@needs_browser
def test_browser_page_answers_to_hands(two: dict[str, Any], tmp_path: Path) -> None:
    script = (Path(__file__).parent / "hands.js").read_text()
    (root,) = opened(two, tmp_path, script=script).all("html")
    said = root.attributes
    first, second = (run["speed"]["step_s"] for run in two["runs"])
    assert said["data-before"] == f"{first} {second}"
    assert said["data-up"] == " ".join(str(one) for one in sorted((first, second)))
    assert said["data-down"] == " ".join(str(one) for one in sorted((first, second), reverse=True))
    assert (said["data-names"], said["data-sort"]) == ("second first", "descending")
    assert said["data-tip"].startswith("step 49") and said["data-left"].startswith("step 48")
    assert "lane" in said["data-bar"] and "takes" in said["data-bar"]
    assert (said["data-fewer"], said["data-same"]) == ("true", "true")


# Notes the texts of charts that begin before their chart does.
CUT = """
const cut = [...document.querySelectorAll("svg[role=img] text")].filter(
  (text) => text.getBoundingClientRect().left < text.ownerSVGElement.getBoundingClientRect().left - 0.5);
document.documentElement.dataset.cut = cut.map((text) => text.textContent).join("; ");
"""


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_browser_cuts_no_label_of_an_axis(tmp_path: Path, width: int) -> None:
    steps = [step(at, at * 0.3, at * 0.3 + 0.1 + 0.2 * (at % 2), loss=1e-5 * at, lr=9.5e-4) for at in range(9)]
    report = report_from(write_run(tmp_path / "run", {0: [*steps, end(3)]}))
    (root,) = opened(report, tmp_path, width, script=CUT).all("html")
    assert root.attributes["data-cut"] == ""


@needs_browser
def test_browser_draws_what_is_hardly_there(tmp_path: Path) -> None:
    odd = [
        step(7, 0, 0, loss=float("nan")),
        held(7, 0, {"disk": {"optimizer_states": 1}}),
        event(7, "up", 0, 0, "wait"),
        {"kind": "quality", "step": 7, "name": "accuracy", "value": -3.0},
    ]
    peaks = [step(0, 0, 1), held(0, 0.5, {}, {"device": {"gradients": 4}}), end(1)]
    paths = [
        write_run(tmp_path / name, {0: lines}, plan=plan)
        for name, lines, plan in (("empty", [], None), ("odd", odd, plan_data()), ("peaks", peaks, None))
    ]
    opened(report_from(*paths), tmp_path)


@needs_browser
def test_browser_draws_a_hundred_thousand_events(tmp_path: Path) -> None:
    lanes = ("compute", "up", "down", "cpu")
    lines = [event(0, lanes[at % 4], at * 1e-5, at * 1e-5 + 4e-5, bytes=at) for at in range(100_000)]
    report = report_from(write_run(tmp_path / "run", {0: [step(0, 0.0, 1.0), *lines, end(1)]}))
    document = opened(report, tmp_path)
    assert len(document.all("rect", data_bar=None)) == report["runs"][0]["timeline"]["steps"][0]["bars"]
    assert any("100,000 events" in one.text for one in document.all("li"))
