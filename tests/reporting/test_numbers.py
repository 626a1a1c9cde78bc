"""The numbers of a report, worked out by hand on small runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from reporting.runs import GIB, end, event, held, plan_data, seconds, step, write_run
from zerostd.reporting import read_run, report_json, report_of
from zerostd.reporting.numbers import thin_extremes, thin_largest


def numbers(path: Path, ranks: dict[int, list[Any]], **about: Any) -> dict[str, Any]:
    """Those of one run, by way of JSON."""
    report = json.loads(report_json(report_of([read_run(write_run(path, ranks, **about))])))
    (run,) = report["runs"]
    return run


# -- speed, losses, quality --


def test_a_step_is_its_slowest_rank_and_the_samples_of_all(tmp_path: Path) -> None:
    first = [step(0, 0.0, 1.0, samples=4, tokens=40), step(1, 2.0, 2.5, samples=4), step(2, 3.0, 3.25, samples=4)]
    second = [step(0, 0.0, 2.0, samples=4, tokens=40), step(1, 2.0, 2.25, samples=4), step(2, 3.0, 3.5, samples=4)]
    found = numbers(tmp_path, {0: [*first, end(4.0)], 1: [*second, end(4.0)]})
    assert found["speed"] == {
        "steps": 3,
        "first_step": 0,
        "last_step": 2,
        "step_s": 0.5,  # of 2, 0.5, 0.5
        "shortest_s": 0.5,
        "longest_s": 2.0,
        "samples_per_s": 16.0,  # of 8 / 2, 8 / 0.5, 8 / 0.5
        "tokens_per_s": 40.0,  # 80 / 2, counted in one step only
        "in_steps_s": 3.0,
        "first_to_last_s": 3.5,
        "change_percent": 0.0,
    }
    assert found["step_times"]["points"] == [[0, 2.0], [1, 0.5], [2, 0.5]]
    assert found["curves"][0]["name"] == "tokens/s" and found["curves"][0]["points"] == [[0, 40.0]]
    assert [(row["rank"], row["steps"], row["step_s"]) for row in found["ranks"]] == [(0, 3, 0.5), (1, 3, 0.5)]
    assert not found["notices"] and not found["is_partial"]


def test_losses_are_means_over_ranks_and_gaps_where_they_are_not_finite(tmp_path: Path) -> None:
    first = [step(0, 0, 1, loss=4.0), step(1, 1, 2, loss=2.0), step(2, 2, 3, loss=math.nan), step(3, 3, 4)]
    second = [step(0, 0, 1, loss=2.0), step(1, 1, 2), step(2, 2, 3, loss=1.0), step(4, 4, 5, loss=math.inf)]
    found = numbers(tmp_path, {0: [*first, end(5)], 1: [*second, end(5)]})
    assert found["losses"]["points"] == [[0, 3.0], [1, 2.0], [2, None], [4, None]]
    assert {name: found["losses"][name] for name in ("first", "last", "last_step", "lowest", "lowest_step")} == {
        "first": 3.0,
        "last": None,
        "last_step": 4,
        "lowest": 2.0,
        "lowest_step": 1,
    }
    assert found["notices"] == ["The loss is NaN or infinite in 2 of 4 steps."]


def test_infinite_losses_of_both_signs_are_not_an_error(tmp_path: Path) -> None:
    ranks = {rank: [step(0, 0, 1, loss=loss), end(1)] for rank, loss in enumerate((math.inf, -math.inf, 1e308, 1e308))}
    assert numbers(tmp_path, ranks)["losses"]["points"] == [[0, None]]


def test_quality_by_name(tmp_path: Path) -> None:
    said = [(10, "accuracy", 0.5), (20, "accuracy", 0.75), (20, "bleu", 31.0)]
    lines = [{"kind": "quality", "step": at, "name": name, "value": value} for at, name, value in said]
    found = numbers(tmp_path, {0: [step(20, 0, 1), *lines, end(1)]})
    assert [(one["name"], one["last"], one["lowest"], one["highest_step"]) for one in found["quality"]] == [
        ("accuracy", 0.75, 0.5, 20),
        ("bleu", 31.0, 31.0, 20),
    ]


# -- resources --


def test_utilisation_is_busy_over_the_steps_that_have_it(tmp_path: Path) -> None:
    first = [step(0, 0, 1), step(1, 1, 3), seconds("busy", 0, device=0.5, gpu2=0.1), seconds("busy", 7, device=9.0)]
    second = [step(0, 0, 3), seconds("busy", 0, device=1.5, up=1.0)]
    found = numbers(tmp_path, {0: [*first, end(3)], 1: [*second, end(3)]})
    shares = {one["name"]: one["share"] for one in found["utilisation"]}
    assert shares == {"device": 0.5, "up": 0.25, "gpu2": 0.025}  # of 1 + 3 s; step 7 has no length, step 1 no line
    assert list(shares) == ["device", "up", "gpu2"]


def test_waiting_by_cause(tmp_path: Path) -> None:
    first = [step(0, 0, 1), step(1, 1, 2), seconds("waiting", 0, updates=0.2), seconds("waiting", 1, updates=0.4)]
    second = [step(0, 0, 1), step(1, 1, 2), seconds("waiting", 0, gradients=0.1), seconds("waiting", 1, updates=0.0)]
    found = numbers(tmp_path, {0: [*first, end(2)], 1: [*second, end(2)]})
    updates, gradients = found["waiting"]
    assert updates["cause"] == "updates" and updates["mean_s"] == pytest.approx(0.15)  # 0.6 s in 4 steps
    assert updates["share"] == pytest.approx(0.15)
    assert (updates["longest_s"], updates["longest_step"], updates["longest_rank"]) == (0.4, 1, 0)
    assert (gradients["longest_s"], gradients["longest_step"], gradients["longest_rank"]) == (0.1, 0, 1)
    assert [row["waiting_share"] for row in found["ranks"]] == pytest.approx([0.3, 0.05])


def test_leaks_of_one_place_are_one_row(tmp_path: Path) -> None:
    def leak(number: int, size: int, where: str) -> dict[str, Any]:
        return {"kind": "leak", "step": number, "group": "blocks.3", "what": "gradients", "bytes": size, "where": where}

    lines = [leak(5, 10, "a.py:1"), leak(4, 30, "a.py:1"), leak(9, 40, "b.py:2")]
    found = numbers(tmp_path, {0: [step(0, 0, 1), *lines, end(1)], 1: [leak(6, 20, "a.py:1"), end(1)]})
    assert [(row["where"], row["bytes"], row["times"], row["first_step"], row["ranks"]) for row in found["leaks"]] == [
        ("b.py:2", 40, 1, 9, 1),
        ("a.py:1", 30, 3, 4, 2),
    ]


# -- memory --


def test_memory_over_time_and_at_its_peak(tmp_path: Path) -> None:
    first = [
        held(
            0, 1.0, {"device": {"parameters": 10, "activations": 5}}, {"device": {"parameters": 10, "activations": 50}}
        ),
        held(1, 0.5, {"device": {"parameters": 10}, "host": {"gradients": 7}}, allocated=99, reserved=128),
    ]
    second = [held(0, 1.0, {"device": {"parameters": 61}})]
    found = numbers(tmp_path, {0: [step(0, 0, 1), *first, end(1)], 1: [*second, end(1)]})["memory"]
    assert found["peaks"] == [
        {"tier": "device", "total": 61, "rank": 1, "kinds": {"parameters": 61}},
        {"tier": "host", "total": 7, "rank": 0, "kinds": {"gradients": 7}},
    ]
    assert (found["allocated"], found["reserved"], found["lines"]) == (99, 128, 3)
    device, host = found["ranks"][0]["tiers"]
    assert device == {
        "tier": "device",
        "kinds": ["parameters", "activations"],
        "times": [0.5, 1.0],
        "steps": [1, 0],
        "bytes": [[10, 10], [0, 5]],
        "peak": [10, 60],
        "allocated": [99, None],
        "reserved": [128, None],
    }
    assert host["bytes"] == [[7, 0]] and host["allocated"] == []


# -- the timeline --


def test_timeline_of_the_typical_step(tmp_path: Path) -> None:
    lines = [step(number, number, number + length) for number, length in enumerate((0.9, 0.3, 0.4, 0.5))]
    lines += [event(number, "up", number + 0.1, number + 0.2, bytes=5) for number in (0, 2, 3)]
    lines += [
        event(3, "cpu", 3.1, 3.4, "update", group="a"),
        event(3, "cpu", 3.2, 3.3, "update", group="b"),
        event(3, "cpu", 3.4, 3.5, "update", group="c"),
    ]
    found = numbers(tmp_path, {0: [*lines, end(4)]})["timeline"]
    assert (found["events"], found["steps_with_events"]) == (6, 3)
    assert [(one["step"], one["why"]) for one in found["steps"]] == [(3, "typical"), (0, "longest")]
    up, cpu = found["steps"][0]["rows"]
    assert (up["lane"], up["bytes"], up["events"], up["busy_s"]) == ("up", 5, 1, pytest.approx(0.1))
    assert cpu["busy_s"] == pytest.approx(0.4)  # 3.1 to 3.5, the second inside the first
    assert [bar["track"] for bar in cpu["bars"]] == [0, 1, 0]
    assert [bar["start"] for bar in cpu["bars"]] == pytest.approx([0.1, 0.2, 0.4])  # since the step began


def test_timeline_has_every_rank_on_one_clock(tmp_path: Path) -> None:
    ranks = {
        rank: [step(0, 1.0 + rank, 4.0), event(0, "up", 2.0, 3.0), event(0, "mine", 3.0, 3.5), end(4)]
        for rank in (0, 1)
    }
    (found,) = numbers(tmp_path, ranks)["timeline"]["steps"]
    assert [(row["rank"], row["lane"]) for row in found["rows"]] == [(0, "up"), (0, "mine"), (1, "up"), (1, "mine")]
    assert [row["bars"][0]["start"] for row in found["rows"]] == [1.0, 2.0, 1.0, 2.0]
    assert (found["seconds"], found["from_s"], found["to_s"], found["why"]) == (3.0, 0.0, 3.0, "only")


def test_events_before_their_step_and_without_one(tmp_path: Path) -> None:
    found = numbers(tmp_path, {0: [step(1, 5.0, 6.0), event(1, "up", 4.5, 5.5), event(9, "up", 7, 9), end(9)]})
    first, second = found["timeline"]["steps"]
    assert (first["step"], first["from_s"], first["to_s"]) == (1, -0.5, 1.0)
    assert (second["step"], second["seconds"], second["to_s"]) == (9, 2.0, 2.0)


def test_clocks_that_are_a_little_ahead(tmp_path: Path) -> None:
    lines = [step(0, -1e-3, 1.0), event(0, "up", -2e-3, 0.5), held(0, -1e-3, {"host": {"gradients": 1}}), end(1)]
    found = numbers(tmp_path, {0: lines})
    assert not found["notices"] and found["speed"]["step_s"] == pytest.approx(1.001)


def test_a_hundred_thousand_events_are_thinned_and_told(tmp_path: Path) -> None:
    lanes = ("compute", "up", "down", "cpu")
    lines = [event(0, lanes[at % 4], at * 1e-5, at * 1e-5 + 8e-6, bytes=1, group=f"g{at}") for at in range(100_000)]
    found = numbers(tmp_path, {0: [step(0, 0.0, 1.0), *lines, end(1)]})
    (drawn,) = found["timeline"]["steps"]
    assert drawn["events"] == 100_000 and 2000 < drawn["bars"] <= 3004
    for row in drawn["rows"]:
        assert row["events"] == row["bytes"] == 25_000 == sum(bar["events"] for bar in row["bars"])
        assert row["busy_s"] == pytest.approx(0.2)
    assert found["notices"] == [
        f"Step 0 has 100,000 events, drawn as {drawn['bars']:,} bars: neighbours on a lane are joined."
    ]
    assert len(json.dumps(found)) < 1_000_000


def test_long_runs_are_thinned_and_told(tmp_path: Path) -> None:
    lines: list[Any] = [step(at, at, at + 0.5, loss=100.0 if at == 777 else 1.0 + at % 3) for at in range(5000)]
    lines += [held(at, at, {"host": {"gradients": 10**6 if at == 333 else 5}}) for at in range(5000)]
    found = numbers(tmp_path, {0: [*lines, end(5000)]})
    points = found["losses"]["points"]
    assert len(points) <= 600 and [777, 100.0] in points and points[0] == [0, 1.0] and points[-1] == [4999, 2.0]
    (tier,) = found["memory"]["ranks"][0]["tiers"]
    assert len(tier["times"]) <= 600 and 10**6 in tier["bytes"][0]
    assert [notice.split(";")[0] for notice in found["notices"]] == [
        "A line has 5,000 points",
        "Memory has 5,000 samples",
    ]


def test_thinning_keeps_gaps_order_and_what_is_short() -> None:
    points: list[tuple[int, float | None]] = [(at, None if at == 50 else float(at % 7)) for at in range(100)]
    kept = thin_extremes(points, 30)
    assert (50, None) in kept and kept == sorted(kept, key=lambda point: point[0]) and len(kept) <= 30
    assert thin_extremes(points, 100) == points
    assert thin_largest([3, 9, 1, 8, 2, 7], lambda one: one, 4) == [3, 9, 8, 7]


# -- plans --


def rows(plan: dict[str, Any]) -> dict[str, tuple[Any, Any, Any]]:
    return {
        f"{row['what']} {row['part']}".strip(): (row["predicted"], row["measured"], row["error_percent"])
        for row in plan["rows"]
    }


def test_plan_against_measured(tmp_path: Path) -> None:
    lines = [step(0, 0, 2), step(1, 2, 2.5), step(2, 3, 3.5)]  # median 0.5
    lines += [seconds("busy", at, device=0.25, cpu=0.3, up=up) for at, up in enumerate((0.1, 0.2, 0.4))]
    now = {"device": {"parameters": 400, "gradients": 100}, "host": {"optimizer_states": 800}}
    peak = {"device": {"parameters": 400, "gradients": 400}, "host": {"optimizer_states": 800}}
    lines += [held(2, 3.5, now, peak)]
    (plan,) = numbers(tmp_path, {0: [*lines, end(4)]}, plan=plan_data(0.4))["plans"]
    assert rows(plan) == {
        "step": (0.4, 0.5, pytest.approx(-20.0)),
        "busy device": (0.2, 0.25, pytest.approx(-20.0)),
        "busy cpu": (0.3, 0.3, 0.0),
        "busy up": (0.1, 0.2, pytest.approx(-50.0)),
        "device": (600, 800, -25.0),
        "device parameters": (400, 400, 0.0),
        "device gradients": (200, 400, -50.0),
        "host": (1000, 800, 25.0),
        "host optimizer_states": (1000, 800, 25.0),
    }
    assert plan["sentences"][0] == "Stage 3 on 1 rank."
    assert "One more GiB of the device would save 10 ms a step." in plan["sentences"]
    assert plan["sentences"][-1] == "The host holds all optimizer states."
    assert plan["prices"] == [
        {"tier": "device", "limit": 24 * GIB, "saved_s_per_gib": pytest.approx(0.01)},
        {"tier": "host", "limit": 96 * GIB, "saved_s_per_gib": 0.0},
    ]


def with_activations(size: int) -> dict[str, Any]:
    plan = plan_data(0.4)
    plan["predicted"]["bytes"]["device"]["activations"] = size
    return plan


@pytest.mark.parametrize(
    ("more", "device", "activations"),
    [
        ({}, ("device without activations", (600, 500, pytest.approx(20.0))), (300, None, None)),
        ({"allocated": 510, "most_allocated": 750}, ("device", (900, 750, pytest.approx(20.0))), (300, 250, 20.0)),
        ({"allocated": 490}, ("device", (900, 500, pytest.approx(80.0))), (300, 0, None)),
    ],
    ids=["the processor", "a device", "less than the ledger has"],
)
def test_activations_are_what_the_allocator_gave_out_beside(
    tmp_path: Path, more: Any, device: Any, activations: Any
) -> None:
    """They are planned, and the ledger does not see them: sums are of what both know."""
    now = {"device": {"parameters": 400, "gradients": 100}}
    lines = [step(0, 0, 1), step(1, 1, 2), held(0, 1.0, now), held(1, 2.0, now, **more), end(2)]
    (plan,) = numbers(tmp_path, {0: lines}, plan=with_activations(300))["plans"]
    found = rows(plan)
    assert found[device[0]] == device[1] and found["device activations"] == activations
    assert found["device parameters"] == (400, 400, 0.0)


def test_each_plan_has_its_own_steps(tmp_path: Path) -> None:
    lines = [step(at, at, at + (0.8 if at < 2 else 0.4)) for at in range(6)]
    lines += [held(at, at, {"device": {"parameters": 100 if at < 2 else 50}}) for at in range(6)]
    lines.insert(3, {"kind": "plan", "step": 2, "reason": "the link is slower", "plan": plan_data(0.4)})
    first, second = numbers(tmp_path, {0: [*lines, end(6)]}, plan=plan_data(0.4))["plans"]
    assert (first["reason"], first["steps"], first["first_step"], first["last_step"]) == ("at the start", 2, 0, 1)
    assert rows(first)["step"] == (0.4, pytest.approx(0.8), pytest.approx(-50.0))
    assert (second["reason"], second["steps"], second["last_step"]) == ("the link is slower", 4, 5)
    assert rows(second)["step"][2] == pytest.approx(0.0)
    assert (rows(first)["device"][1], rows(second)["device"][1]) == (100, 50)


def test_bytes_are_those_of_the_rank_that_holds_most(tmp_path: Path) -> None:
    ranks = {rank: [step(0, 0, 1), held(0, 1, {"device": {"parameters": 300 * (rank + 1)}}), end(1)] for rank in (0, 1)}
    (plan,) = numbers(tmp_path, ranks, plan=plan_data())["plans"]
    assert rows(plan)["device"] == (600, 600, 0.0)
    assert rows(plan)["host"] == (1000, 0, None)  # it has no share of nothing


def test_plan_without_steps_or_time(tmp_path: Path) -> None:
    (plan,) = numbers(tmp_path, {0: [end(0)]}, plan=plan_data(None))["plans"]
    assert rows(plan)["step"] == (None, None, None) and rows(plan)["device"] == (600, None, None)
    assert (plan["steps"], plan["first_step"], plan["last_step"]) == (0, 0, None)


@pytest.mark.parametrize(
    "plan",
    [
        7,
        {},
        {"homes": 7},
        plan_data(version=9),
        plan_data(notes=[1]),
        plan_data(notes=5),
        plan_data(predicted={"step_s": "fast"}),
        plan_data(predicted={"step_s": math.inf}),
        plan_data(predicted={"busy": {"up": "much"}}),
        plan_data(predicted={"bytes": {"device": {"parameters": -1}}}),
        plan_data(limits={"device": math.inf}),
        plan_data(activations={"*": {}}),
    ],
    ids=range(12),
)
def test_plan_that_cannot_be_read_is_told_and_left_out(tmp_path: Path, plan: Any) -> None:
    found = numbers(tmp_path, {0: [step(0, 0, 1), end(1)]}, plan=plan)
    assert found["plans"] == []
    (notice,) = found["notices"]
    assert notice.startswith("the plan of run.json cannot be read")


# -- several runs --


def test_different_models_side_by_side_are_told(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / name, {0: [step(0, 0, 1), end(1)]}, model={"name": name, "parameters": size})
        for name, size in (("GPT", 10), ("BERT", 2000))
    ]
    report = report_of([read_run(path) for path in paths])
    (notice,) = report["notices"]
    assert "GPT (10 parameters), BERT (2,000 parameters)" in notice
    assert [run["name"] for run in report["runs"]] == ["GPT", "BERT"]
    assert not report_of([read_run(paths[0]), read_run(paths[0])])["notices"]


def test_empty_run_has_numbers_of_nothing(tmp_path: Path) -> None:
    found = numbers(tmp_path, {0: [end(0)]})
    assert found["speed"]["steps"] == 0 and found["speed"]["step_s"] is None
    assert found["losses"]["points"] == found["memory"]["ranks"] == found["timeline"]["steps"] == found["waiting"] == []
