"""Every idiom in every form gives what plain torch gives, or is refused at its own line with a remedy.

`python -m idioms` (with src and tests on the path) runs idioms by hand.
"""

from __future__ import annotations

import ast
import inspect
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from idioms.forms import BY_NAME, FORMS, Form
from idioms.loop import idioms
from idioms.running import SAME_ERROR, VISIBLE, Runner
from idioms.table import EXPECTED, GOOD, complaints, in_words, lines_in_words, read
from zerostd.tiers.debug import VARIABLE

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "what-your-loop-may-do.md"
MOST_LINES = 40  # of an idiom: one screen


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as runner:
        yield runner


def sample(name: str) -> list[Form]:
    """Return two forms of one rank and one of two: others for each idiom, so that each form has its share of them."""
    number = zlib.crc32(name.encode())
    alone = [form for form in FORMS if form.num_ranks == 1]
    together = [form for form in FORMS if form.num_ranks > 1]
    first = number % len(alone)
    return [*(alone * 2)[first : first + 2], together[number // len(alone) % len(together)]]


@pytest.mark.parametrize("name", list(idioms()))
def test_idiom(runner: Runner, name: str) -> None:
    effect = runner.effect(name)
    assert effect is None or effect >= VISIBLE, f"leaving the idiom out changes the outcome by {effect:.1e} only"
    check(runner, name, sample(name))


@pytest.mark.full
@pytest.mark.parametrize("name", list(idioms()))
def test_idiom_in_all_other_forms(runner: Runner, name: str) -> None:
    check(runner, name, [form for form in FORMS if form not in sample(name)])


@pytest.mark.full
@pytest.mark.parametrize("form", ["disk", "host", "early", "all_host", "stage2", "stage3"])
def test_idioms_do_not_depend_on_the_speed_of_threads(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Background work begins late, at random: what does not wait for it overtakes it."""
    monkeypatch.setenv(VARIABLE, "late")
    failures = []
    with Runner() as late:
        for name in idioms():
            failures += complaints(name, {form: late.outcome(name, BY_NAME[form], timeout_s=20.0)})
    assert not failures, "\n".join(failures)


def test_every_form_is_in_a_quarter_of_the_samples() -> None:
    names = [form.name for name in idioms() for form in sample(name)]
    assert all(names.count(form.name) >= 0.25 * len(idioms()) for form in FORMS)


def check(runner: Runner, name: str, forms: list[Form]) -> None:
    outcomes = {form.name: runner.outcome(name, form) for form in forms}
    if complaints(name, outcomes):  # a busy machine may have held a rank up
        for form in forms:
            if outcomes[form.name].timed_out:
                outcomes[form.name] = runner.outcome(name, form, timeout_s=20.0)
    failures = complaints(name, outcomes)
    assert not failures, "\n".join(failures)


def test_table_names_the_forms_that_differ() -> None:
    assert in_words({"device": "same", "host": "same"}) == "same"
    assert in_words({"device": "refused", "early": "same", "bf16": "refused"}) == "refused; same in early"
    assert lines_in_words(["`a`", "`b`", "`c`"]) == "`a`, `b`, `c`"
    assert lines_in_words(["`a`", "`b`", "`c`", "`d`"]) == "`a`, `b`, `c` and 1 other"


def test_page_has_the_expected_outcomes() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = {name: f"| {idiom.text} | {in_words(read(EXPECTED)[name])} |" for name, idiom in idioms().items()}
    assert [name for name, row in rows.items() if row.replace("](", "] (") not in page] == []


def test_every_cell_is_expected_to_be_good() -> None:
    cells = {(name, form): outcome for name, forms in read(EXPECTED).items() for form, outcome in forms.items()}
    assert cells.keys() == {(name, form.name) for name in idioms() for form in FORMS}, "python -m idioms accept"
    assert set(cells.values()) <= set(GOOD)
    assert {form for (_, form), outcome in cells.items() if outcome == SAME_ERROR} == {"bf16"}


def test_there_are_enough_idioms() -> None:
    assert len(idioms()) >= 350


@pytest.mark.parametrize("name", list(idioms()))
def test_idiom_is_described_and_short(name: str) -> None:
    idiom = idioms()[name]
    assert idiom.text.endswith("."), "its docstring is its line in the table"
    assert "\n" not in idiom.text
    source = inspect.getsource(idiom.run)
    assert source.count("\n") <= MOST_LINES
    assert ast.parse(source)
