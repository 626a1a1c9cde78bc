"""Runs as they are written down: real models, every placement, several ranks, a killed run, a planted leak."""

from __future__ import annotations

import itertools
import json
import signal
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerostd
from support import warm
from support.compare import assert_bitwise
from zerostd import Budget, MisuseError, Placement

WIDTH, DEPTH = 64, 4
PLACEMENTS = {
    "device": Placement(),
    "host": Placement(parameters="host", gradients="host", optimizer_states="host"),
    "disk": Placement(optimizer_states={"host": 0.5, "disk": 0.5}),
}


def prepared(placement: Placement, path: Path | None = None, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(DEPTH)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    budget = Budget(disk_path=None if path is None else str(path))
    told: dict[str, Any] = {"accumulate": 1, "groups": ["*"], "budget": budget, **options}
    return zerostd.prepare(model, optimizer, placement=placement, **told)


def train(model: nn.Module, optimizer: Any, steps: int, log: Callable[..., None] = lambda **_: None) -> list[float]:
    losses = []
    for step in range(steps):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log(loss=loss, samples=8, accuracy=step / 10)
        losses.append(loss.item())
    return losses


def lines(path: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / f"rank-{rank}.jsonl").read_text().splitlines()]


def of(kind: str, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in found if line["kind"] == kind]


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_run_is_written_down_and_changes_nothing(name: str, tmp_path: Path) -> None:
    model, optimizer = prepared(PLACEMENTS[name], tmp_path)
    with zerostd.record(model, tmp_path / "run", every=4) as recording:
        losses = train(model, optimizer, 10, recording.log)
    assert (tmp_path / "run").stat().st_mode & 0o077 == 0  # nobody else's
    state, found = zerostd.full_state_dict(model), lines(tmp_path / "run")
    other, plain = prepared(PLACEMENTS[name], tmp_path)
    train(other, plain, 10)
    assert_bitwise(state, zerostd.full_state_dict(other))

    steps = of("step", found)
    assert [line["step"] for line in steps] == list(range(1, 11))
    assert [line["loss"] for line in steps] == losses and {line["samples"] for line in steps} == {8}
    assert all(one["end"] == other["start"] for one, other in pairwise(steps))
    assert [line["value"] for line in of("quality", found)] == [step / 10 for step in range(10)]
    assert of("memory", found)[-1]["bytes"] == zerostd.memory(other).now
    assert found[-1]["kind"] == "end" and found[-1]["time"] >= steps[-1]["end"]
    assert not of("leak", found)
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["model"]["parameters"] == DEPTH * 2 * (WIDTH + 1) * WIDTH
    assert (run["world_size"], run["settings"]["accumulate"]) == (1, 1)


def test_events_of_some_steps_are_whole(tmp_path: Path) -> None:
    model, optimizer = prepared(PLACEMENTS["disk"], tmp_path)
    with zerostd.record(model, tmp_path / "run", every=4):
        train(model, optimizer, 10)
    found = lines(tmp_path / "run")
    events = of("event", found)
    assert {event["step"] for event in events} == {3, 4, 8}
    steps = {line["step"]: line for line in of("step", found)}
    for step in (3, 4, 8):
        mine = [event for event in events if event["step"] == step]
        updated = {(event["lane"], event["group"]) for event in mine if event["name"] == "update"}
        assert {lane for lane, _ in updated} == {"cpu", "disk"}
        assert {group for _, group in updated} == {str(number) for number in range(DEPTH)}
        names = [event["name"] for event in mine if event["lane"] == "compute" and event["name"] != "wait"]
        assert names.index("forward") < names.index("backward") < names.index("step")
        assert all(steps[step]["start"] <= event["start"] <= event["end"] for event in mine)
        (busy,) = (line["seconds"] for line in of("busy", found) if line["step"] == step)
        assert busy["disk"] > 0 and all(
            0 <= seconds <= steps[step]["end"] - steps[step]["start"] for seconds in busy.values()
        )
    numel = sum(event["bytes"] for event in events if event["step"] == 8 and event["lane"] == "disk") / (2 * 12)
    share = numel / (DEPTH * 2 * (WIDTH + 1) * WIDTH)
    assert 0.4 < share < 0.6, "half of the states are on the disk"


def one_rank(rank: int, path: str) -> None:
    model, optimizer = prepared(Placement(), stage=3)
    with zerostd.record(model, path, every=3):
        train(model, optimizer, 6)


def test_every_rank_writes_its_own(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    ranks(2, one_rank, str(tmp_path / "run"))
    for rank in range(2):
        found = lines(tmp_path / "run", rank)
        assert len(of("step", found)) == 6
        wire = {(event["name"], event["group"]) for event in of("event", found) if event["lane"] == "wire"}
        assert {event["group"] for event in of("event", found) if event["name"] == "release"} == {*"0123"}
        assert wire == {(name, str(group)) for name in ("gather", "reduce") for group in range(DEPTH)}
    assert json.loads((tmp_path / "run" / "run.json").read_text())["world_size"] == 2


def test_a_planted_leak_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that forgets to give the memory of one group back, in two steps."""
    model, optimizer = prepared(PLACEMENTS["host"], tmp_path)
    group = model.__dict__["_zerostd"].groups[3]
    (flat,) = group.flats
    with zerostd.record(model, tmp_path / "run"):
        train(model, optimizer, 6)
        with monkeypatch.context() as patch:
            patch.setattr(flat, "free", lambda: None)
            train(model, optimizer, 2)
        train(model, optimizer, 4)
    (leak,) = of("leak", lines(tmp_path / "run"))
    assert (leak["group"], leak["what"], leak["bytes"]) == (group.name, "buffers", flat.full.nbytes)
    assert (leak["step"], leak["tier"]) == (7, "device") and "flat.py" in leak["where"]


KILLED = """
import sys; sys.path[:0] = {paths!r}
from monitoring.test_recording import *
model, optimizer = prepared(Placement())
recording = zerostd.record(model, {path!r})
train(model, optimizer, 30, recording.log)
print("trained", flush=True)
sys.stdin.read()
"""


def test_a_killed_run_leaves_its_steps(tmp_path: Path) -> None:
    paths = [str(Path(__file__).parents[1]), *sys.path]
    code = KILLED.format(paths=paths, path=str(tmp_path / "run"))
    with warm.Script(code) as script:
        assert script.stdout.readline() == "trained\n"
        script.kill()
        assert script.wait(60) == -signal.SIGKILL
    found = lines(tmp_path / "run")
    assert len(of("step", found)) >= 28 and not of("end", found)


def test_bad_input(tmp_path: Path) -> None:
    model, optimizer = prepared(Placement())
    for every in (0, -1, 2.5, True):
        with pytest.raises(MisuseError, match=f"every={every!r}"):
            zerostd.record(model, tmp_path / "run", every=every)  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match="prepare was called on"):
        zerostd.record(nn.Linear(2, 2), tmp_path / "run")
    recording = zerostd.record(model, tmp_path / "run")
    with pytest.raises(MisuseError, match="before the first"):
        recording.log(loss=1.0)
    train(model, optimizer, 1)
    with pytest.raises(MisuseError, match=r"shape \(2,\)"):
        recording.log(loss=torch.ones(2))
    with pytest.raises(MisuseError, match="already being recorded"):
        zerostd.record(model, tmp_path / "other")
    recording.close()
    recording.close()
    with pytest.raises(MisuseError, match="closed"):
        recording.log(loss=1.0)
    with pytest.raises(MisuseError, match="another run"):
        zerostd.record(model, tmp_path / "run")
    assert not (tmp_path / "other").exists()
    train(model, optimizer, 2)


def test_progress_in_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = prepared(PLACEMENTS["host"], tmp_path)
    batches = [torch.randint(0, 9, (4, WIDTH)) for _ in range(25)]
    steps = zerostd.track(batches, model, run_dir=tmp_path / "run")
    for batch in steps:
        loss = model(batch.float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.log(loss=loss)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("training 25/25 loss ") and "tokens/s" in line and "host " in line and "waiting " in line
    found = of("step", lines(tmp_path / "run"))
    assert {(one["samples"], one["tokens"]) for one in found} == {(4, 4 * WIDTH)} and len(found) == 25
    assert lines(tmp_path / "run")[-1]["kind"] == "end"


def test_progress_ends_with_a_loop_that_breaks(tmp_path: Path) -> None:
    model, optimizer = prepared(Placement())
    with zerostd.track(iter([torch.ones(2, WIDTH)] * 9), model, run_dir=tmp_path / "run", total=9) as steps:
        for number, batch in enumerate(steps):
            if number == 5:
                break
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = lines(tmp_path / "run")
    assert len(of("step", found)) == 5 and found[-1]["kind"] == "end"


def test_a_second_epoch_goes_on_in_the_same_run(tmp_path: Path) -> None:
    model, optimizer = prepared(Placement())
    steps = zerostd.track([torch.ones(2, WIDTH)] * 3, model, run_dir=tmp_path / "run")
    assert len(steps) == 3
    for _ in range(2):
        for batch in steps:
            loss = model(batch).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.log(loss=loss)
    written = lines(tmp_path / "run")
    taken = of("step", written)
    assert [one["step"] for one in taken] == [1, 2, 3, 4, 5, 6] and all(one["lr"] for one in taken)
    assert all(one["end"] <= other["start"] for one, other in itertools.pairwise(taken))
    assert [one["kind"] for one in written].count("end") == 2
    with pytest.raises(TypeError, match="pass total= to"):
        len(zerostd.track(iter([]), model))
