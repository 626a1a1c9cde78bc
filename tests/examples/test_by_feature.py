"""Each script adds one thing to the base, in a few lines, and trains as the base does."""

from __future__ import annotations

import difflib
import re
import runpy
import sys
from pathlib import Path

import pytest

from support.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "by_feature"
FEATURES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("base", "gpt"))
SAME = {"activations", "checkpoint", "disk", "host", "plan", "prepare", "record", "stages"}  # losses as the base's
STEPS = 6
LOSS = re.compile(r"step (\d+): loss ([0-9]+\.[0-9]{6})")


def losses_of(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in LOSS.findall(text)}


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
):
    """The losses that a script prints, in a directory of its own."""

    def run(name: str, steps: int = STEPS) -> dict[int, float]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("ZEROSTD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        monkeypatch.syspath_prepend(str(FOLDER))
        monkeypatch.delitem(sys.modules, "gpt", raising=False)  # benchmarks have a file of this name too
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--steps", str(steps)])
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        return losses_of(capsys.readouterr().out)

    return run


def test_every_script_adds_little() -> None:
    base = (FOLDER / "base.py").read_text().splitlines()
    assert "zerostd" not in (FOLDER / "base.py").read_text()
    for name in FEATURES:
        changed = list(difflib.unified_diff(base, (FOLDER / f"{name}.py").read_text().splitlines(), n=0, lineterm=""))
        code = [line for line in changed[2:] if re.match(r"[+-](?!\s*$|\"\"\"|    (python|torchrun) )", line)]
        assert 2 <= len(code) <= 12, f"{name}:\n" + "\n".join(code)


def test_the_base_learns_and_features_train_as_it_does(run) -> None:
    base = run("base")
    assert len(base) == STEPS and base[STEPS - 1] < base[0] - 1.0
    for name in FEATURES:
        losses = run(name)
        assert len(losses) == STEPS, name
        if name in SAME:
            assert losses == pytest.approx(base, rel=2e-6), name
        elif name == "precision":
            assert losses == pytest.approx(base, rel=0.05) and losses != base
        else:
            assert losses[STEPS - 1] < losses[0] - 1.0, name


def test_a_second_start_goes_on(run, tmp_path: Path) -> None:
    whole = run("checkpoint", 12)
    assert sorted(one.name for one in (tmp_path / "checkpoints").iterdir()) == ["step-10"]
    again = run("checkpoint", 12)
    assert set(again) == {10, 11} and again == {step: whole[step] for step in again}


def test_activations_rest_on_the_host(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zerostd

    seen = []
    prepare = zerostd.prepare
    monkeypatch.setattr(zerostd, "prepare", lambda *args, **options: seen.append(prepare(*args, **options)) or seen[-1])
    run("activations")
    assert zerostd.memory(seen[0][0]).peak["host"]["activations"] > 0


@pytest.mark.slow
def test_stages_on_two_ranks() -> None:
    said = "".join(run_script(FOLDER / "stages.py", "--steps", "4", ranks=2))
    assert len(LOSS.findall(said)) == 8
