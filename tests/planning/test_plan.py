"""Plans as data: text both ways, written by hand, looked up by globs, explained; what is wrong is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planning.machines import GIB, gpt, make_plan, request_of
from zerostd.errors import PrepareError
from zerostd.monitoring.texts import seconds_text, short_size, size_text
from zerostd.planning import Plan, Prediction
from zerostd.policy import Homes, Kind, Placement, Route, Stage, Tier

HALF = ((Tier.DEVICE, Route.RESIDENT, 0.25), (Tier.HOST, Route.CPU, 0.5), (Tier.HOST, Route.STREAMED, 0.25))
names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
numbers = st.floats(0, 1e6)
tiers = st.sampled_from(list(Tier))


@st.composite
def homes(draw: st.DrawFn) -> Homes:
    routes = [(tier, route) for tier in Tier for route in Route if (tier is Tier.DEVICE) == (route is Route.RESIDENT)]
    chosen = draw(st.lists(st.sampled_from(routes), min_size=1, max_size=4))
    parts = [draw(st.integers(1, 9)) for _ in chosen]
    states = tuple((*one, part / sum(parts)) for one, part in zip(chosen, parts, strict=True))
    is_streamed = any(route is Route.STREAMED for _, route in chosen)
    parameters = draw(st.sampled_from([tier for tier in Tier if not (is_streamed and tier is Tier.DISK)]))
    return Homes(parameters, draw(st.sampled_from([Tier.DEVICE, Tier.HOST])), states)


sizes = st.integers(0, 10**13)
predictions = st.builds(
    Prediction,
    step_s=st.none() | numbers,
    compute_s=st.none() | numbers,
    clipped_s=st.none() | numbers,
    bytes=st.dictionaries(tiers, st.dictionaries(st.sampled_from(list(Kind)), sizes)),
    busy=st.dictionaries(st.sampled_from(["up", "down", "cpu", "memory", "a new one"]), numbers),
    prices=st.dictionaries(tiers, st.floats(0, 1e-6)),
)
plans = st.builds(
    Plan,
    homes=st.dictionaries(names, homes(), max_size=5),
    stage=st.sampled_from(list(Stage)),
    world_size=st.integers(1, 10_000),
    speculate=st.booleans(),
    adaptive=st.booleans(),
    predicted=predictions,
    limits=st.dictionaries(tiers, sizes),
    notes=st.lists(names, max_size=3).map(tuple),
    activations=st.dictionaries(names, st.sampled_from(["keep", "recompute", "host"]), max_size=5),
)


# -- text both ways --


@given(plans)
def test_a_plan_is_the_same_after_text(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()


@settings(max_examples=20)
@given(plans)
def test_any_plan_can_be_explained(plan: Plan) -> None:
    text = plan.explain()
    assert f"Stage {plan.stage.value} on {plan.world_size} rank" in text
    for note in plan.notes:
        assert note in text


def test_a_plan_survives_a_file(tmp_path: Path) -> None:
    plan = made()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == Plan.load(str(tmp_path / "plan.json")) == plan
    assert json.loads((tmp_path / "plan.json").read_text())["version"] == 1


def test_by_hand_only_homes_have_to_be_there() -> None:
    plan = Plan.from_json('{"homes": {"*": {"parameters": "host"}}}')
    assert plan.homes_of("anything") == Homes(parameters=Tier.HOST)
    assert (plan.stage, plan.world_size, plan.speculate, plan.adaptive) == (Stage.PARAMETERS, 1, False, True)
    assert plan.predicted == Prediction()
    assert plan.placement({"a": 3.0, "b": 5.0}) == Placement(parameters="host")


def test_activations_are_one_word_or_by_group_and_need_not_be_there() -> None:
    before = json.loads(made().to_json())
    del before["activations"]  # a plan of before they could be chosen
    assert Plan.from_json(json.dumps(before)).activations == {}
    assert Plan.from_json(json.dumps(before)).activations_of("anything") is None
    one = Plan.from_json('{"homes": {"*": {}}, "activations": "recompute"}')
    assert one.activations == {"*": "recompute"} and one.activations_of("blocks.3") == "recompute"
    assert json.loads(one.to_json())["activations"] == "recompute"
    several = Plan.from_json('{"homes": {"*": {}}, "activations": {"blocks.[0-3]": "host", "head": "keep"}}')
    assert [several.activations_of(name) for name in ("blocks.2", "blocks.7", "head")] == ["host", None, "keep"]
    assert json.loads(several.to_json())["activations"] == {"blocks.[0-3]": "host", "head": "keep"}


# -- globs --


def test_a_name_comes_before_globs_and_the_first_glob_before_others() -> None:
    first, second, third = Homes(parameters=Tier.HOST), Homes(gradients=Tier.HOST), Homes(parameters=Tier.DISK)
    plan = Plan({"blocks.[0-3]": first, "blocks.*": second, "blocks.2": third})
    assert plan.homes_of("blocks.2") is third
    assert plan.homes_of("blocks.1") is first
    assert plan.homes_of("blocks.17") is second


def test_a_group_that_no_home_fits_is_named_with_a_remedy() -> None:
    plan = Plan({"blocks.*": Homes()})
    with pytest.raises(PrepareError, match=r"'head'.*Plan again.*'\*'"):
        plan.homes_of("head")
    with pytest.raises(PrepareError, match=r"'Blocks\.1'"):
        plan.homes_of("Blocks.1")


# -- what is wrong is named --


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "plan is not JSON"),
        ("[]", "plan: it is [], but must be an object"),
        ("{}", "homes"),
        ('{"homes": []}', "plan: homes is [], but must be an object"),
        ('{"version": 7, "homes": {}}', "version 7, but this zerostd reads 1"),
        ('{"homes": {"*": {"weights": "host"}}}', "'weights'"),
        ('{"homes": {"*": {"parameters": "attic"}}}', "'attic'"),
        ('{"homes": {"*": {"gradients": "attic"}}}', "'attic'"),
        ('{"homes": {"*": {"states": [["host", "cpu", 0.5]]}}}', "sum to 1"),
        ('{"homes": {"*": {"states": [["host", "cpu", 1.5], ["host", "cpu", -0.5]]}}}', ">= 0"),
        ('{"homes": {"*": {"states": [["host", "resident", 1.0]]}}}', "not a route for the host"),
        ('{"homes": {"*": {"states": [["device", "cpu", 1.0]]}}}', "not a route for the device"),
        (
            '{"homes": {"*": {"states": [["host", "cpu"]]}}}',
            "plan: homes.*.states[0]: Expected `array` of length 3, got 2",
        ),
        ('{"homes": {"*": {"states": [["host", "by mail", 1.0]]}}}', "by mail"),
        ('{"homes": {"*": {}}, "stage": 4}', "stage: Invalid enum value 4"),
        ('{"homes": {"*": {}}, "world_size": "many"}', "many"),
        ('{"homes": {"*": {}}, "limits": {"cellar": 5}}', "cellar"),
        ('{"homes": {"*": {}}, "predicted": {"bytes": {"host": {"junk": 1}}}}', "junk"),
        (
            '{"homes": {"*": {}}, "activations": "forget"}',
            "activations of '*' are 'forget'; use one of keep, recompute",
        ),
        ('{"homes": {"*": {}}, "activations": {"head": "disk"}}', "activations of 'head' are 'disk'"),
        ('{"homes": {"*": {}}, "activations": ["keep"]}', "plan: activations is ['keep'], but must be an object"),
    ],
)
def test_a_plan_that_cannot_be_read_says_why(text: str, says: str) -> None:
    with pytest.raises(PrepareError) as caught:
        Plan.from_json(text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "text", ['{"homes": {"*": {}}, "stages": 2}', '{"homes": {"*": {}}, "predicted": {"steps": 2}}']
)
def test_a_field_nobody_knows_is_named(text: str) -> None:
    """A misspelt one would be left out in silence."""
    with pytest.raises(PrepareError, match=r"'steps'|'stages'"):
        Plan.from_json(text)


def test_a_file_that_is_not_there_or_holds_something_else_is_named(tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match=r"nothing\.json"):
        Plan.load(tmp_path / "nothing.json")
    (tmp_path / "poem.json").write_text("roses are red")
    with pytest.raises(PrepareError, match=r"poem\.json"):
        Plan.load(tmp_path / "poem.json")


# -- shares of the whole --


def test_placement_adds_up_groups_by_size() -> None:
    plan = Plan(
        {
            "a": Homes(Tier.HOST, Tier.HOST, HALF),
            "b": Homes(),
            "c": Homes(Tier.DISK, Tier.DEVICE, ((Tier.DISK, Route.CPU, 1.0),)),
        },
        speculate=True,
    )
    placement = plan.placement({"a": 400, "b": 500, "c": 100})
    assert placement.shares(Kind.PARAMETERS) == pytest.approx({Tier.DEVICE: 0.5, Tier.HOST: 0.4, Tier.DISK: 0.1})
    assert placement.shares(Kind.GRADIENTS) == pytest.approx({Tier.DEVICE: 0.6, Tier.HOST: 0.4})
    states = {Tier.DEVICE: 0.6, Tier.HOST: 0.3, Tier.DISK: 0.1}
    assert placement.shares(Kind.OPTIMIZER_STATES) == pytest.approx(states)
    assert placement.cpu_share == pytest.approx((0.5 * 400 + 100) / (0.75 * 400 + 100))
    assert placement.speculate


@given(plans, st.data())
def test_shares_of_any_plan_are_a_placement(plan: Plan, data: st.DataObject) -> None:
    """One that passes its own checks: shares sum to one."""
    weights: dict[str, Any] = {name: data.draw(st.integers(1, 10**12)) for name in plan.homes}
    placement = plan.placement(weights)
    assert placement.speculate == plan.speculate
    assert placement.cpu_share is None or 0 <= placement.cpu_share <= 1 + 1e-9


def test_nothing_to_place_is_all_on_the_device() -> None:
    assert Plan({"a": Homes()}).placement({"a": 7}) == Plan({}).placement({}) == Placement()


# -- in words --


def made(**options: Any) -> Plan:
    model = gpt(2048, 24, 0.3)
    limits = {Tier.DEVICE: 6 * model.trained, Tier.HOST: 100 * GIB}
    return make_plan(request_of(model, limits, **options), notes=["A note to the reader."])


def test_a_plan_in_words() -> None:
    plan = made(waits_for_norm=True)
    text = plan.explain()
    header, device, host, *_ = text.splitlines()
    for kind in ("parameters", "gradients", "states"):
        assert kind in header
    assert device.startswith("device") and device.endswith(short_size(plan.limits[Tier.DEVICE]))
    assert host.startswith("host") and "100 GiB" in host
    assert "\ndisk" not in text
    assert f"A step takes {plan.predicted.step_s:.3g} s. The bottleneck is " in text
    assert (
        f"One more GiB of the device would save {seconds_text(plan.predicted.prices[Tier.DEVICE] * GIB)} a step" in text
    )
    assert "One more GiB of the host would not shorten the step." in text
    assert "\nA note to the reader." in text


@pytest.mark.parametrize(
    ("busy", "words"),
    [
        ({"up": 0.9, "cpu": 0.5}, "the link to the device, busy 90 % of it; next is the CPU with 50 %"),
        (
            {"disk": 1.0, "read": 0.7},
            "the disk, reading and writing together, busy 100 % of it; next is reading from disk",
        ),
        ({"up": 0.1}, "compute on the device, busy 30 % of it; next is the link to the device with 10 %"),
        ({"memory": 0.5}, "host memory, busy 50 %"),
        ({}, "compute on the device, busy 30 % of it."),
    ],
)
def test_the_bottleneck_in_words(busy: dict[str, float], words: str) -> None:
    predicted = Prediction(step_s=1.0, compute_s=0.3, busy=busy)
    plan = Plan({"*": Homes()}, predicted=predicted)
    assert f"The bottleneck is {words}" in plan.explain()
    assert predicted.bottleneck == max({**busy, "compute": 0.3}, key={**busy, "compute": 0.3}.__getitem__)


@pytest.mark.parametrize(
    ("activations", "words"),
    [
        ({"*": "keep"}, "keep them in all groups."),
        ({"blocks.*": "recompute"}, "recompute them in blocks.*."),
        (
            {**{f"b{i}": "recompute" for i in range(9)}, "b9": "host", "b10": "keep", "head": "keep"},
            "recompute them in b0 to b8 (9 groups); send them to the host in b9; keep them in b10 to head (2 groups).",
        ),
        (
            {f"b{i}": "recompute" if i % 2 else "keep" for i in range(12)},
            "recompute them in b1, b3, b5, b7 and more (6 groups); keep them in b0, b2, b4, b6 and more (6 groups).",
        ),
    ],
)
def test_activations_in_words(activations: dict[str, str], words: str) -> None:
    assert f"\nActivations: {words}\n" in f"{Plan({'*': Homes()}, activations=activations).explain()}\n"
    assert "Activations:" not in Plan({"*": Homes()}).explain()


def test_where_seconds_are_not_known_none_are_told() -> None:
    plan = made()
    text = replace(plan, predicted=replace(plan.predicted, step_s=None, compute_s=None)).explain()
    assert "A step takes" not in text and "One more GiB" not in text
    assert "A note to the reader." in text


def test_sizes_in_words() -> None:
    assert [size_text(size) for size in (0, 17, 2048, 3 * 2**20, 5 * GIB // 2, 2**41)] == [
        "-",
        "17 B",
        "2.00 KiB",
        "3.00 MiB",
        "2.50 GiB",
        "2.00 TiB",
    ]
