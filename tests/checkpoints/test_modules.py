"""What modules have beside ordinary parameters: nothing at all, several names, a state of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zerostd
from checkpoints.runs import PLACEMENTS
from support.agreement import agree
from support.compare import assert_bitwise
from support.processes import doing
from support.side_by_side import seeded
from zerostd import Budget, CheckpointError


class Counter(nn.Module):
    """Keeps what it has seen in a state that is neither parameter nor buffer."""

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.value = {"calls": 0, "last": torch.zeros(3), "sizes": ()} if value is None else value

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.value, dict):
            self.value = {"calls": self.value["calls"] + 1, "last": x.detach()[0, :3].clone(), "sizes": (*x.shape,)}
        return x

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


class Rooms(nn.Module):
    """A module with buffers under two names, parameters without elements among others and alone, counters."""

    def __init__(self, counter: Callable[[], nn.Module] = Counter) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.inner = nn.ModuleDict({"again": self.first})
        self.count = counter()
        self.nothing = nn.Parameter(torch.empty(0, 6))
        self.void = nn.ParameterDict({"frozen": nn.Parameter(torch.empty(3, 0), requires_grad=False)})
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner["again"](self.count(self.first(x)))
        return self.last(torch.cat([x, x @ self.nothing.T], 1))


def prepared(folder: Path | str, stage: int, placement: str, seed: int = 0, **options: Any) -> tuple[Any, Any]:
    model = seeded(lambda: Rooms(**options), seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    given: dict[str, Any] = {"placement": PLACEMENTS[placement], "budget": Budget(disk_path=str(folder))}
    return zerostd.prepare(model, optimizer, stage=stage, precision="bf16", groups=["first", "last"], **given)


def train(model: nn.Module, optimizer: Any, first: int, steps: int = 2) -> None:
    for step in range(first, first + steps):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    found = {name: one for name, one in zerostd.full_state_dict(model).items() if isinstance(one, Tensor)}
    for number, states in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": torch.as_tensor(value) for key, value in states.items()}
    return found


def goes_on(rank: int, folder: str) -> list[str]:
    for stage, placement in ((3, "device"), (2, "host"), (0, "device"), (3, "parameters on host")):
        doing(f"stage {stage}, {placement}")
        saved = Path(folder, f"{stage} {placement}")
        model, optimizer = prepared(folder, stage, placement)
        train(model, optimizer, 0)
        zerostd.save(saved, model, optimizer)
        other, another = prepared(folder, stage, placement, seed=3)
        train(other, another, 7, 1)
        zerostd.load(saved, other, another)
        assert_bitwise(everything(other, another), everything(model, optimizer), "loaded")
        for one, rules in ((model, optimizer), (other, another)):
            train(one, rules, 2)
        assert_bitwise(everything(other, another), everything(model, optimizer), "went on")
        mine, theirs = model.count.value, other.count.value
        assert mine["calls"] == theirs["calls"] == 4 and mine["sizes"] == theirs["sizes"] == (8, 6)
        assert torch.equal(mine["last"], theirs["last"])
    return []


@pytest.mark.parametrize("world_size", [1, 2])
def test_all_of_it_goes_on(world_size: int, ranks: Any, tmp_path: Path) -> None:
    if world_size == 1:
        assert not goes_on(0, str(tmp_path))
    else:
        agree(ranks(world_size, goes_on, str(tmp_path)))


def on_two(rank: int, folder: str) -> dict[str, Any]:
    model, optimizer = prepared(folder, 3, "device")
    train(model, optimizer, 0)
    zerostd.save(Path(folder, "saved"), model, optimizer)
    return zerostd.full_state_dict(model)


def test_merged_it_loads_everywhere(ranks: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = ranks(2, on_two, str(tmp_path))[0]
    (path,) = zerostd.merge(tmp_path / "saved", tmp_path / "merged")
    assert "the extra state of 'count' is left out of" in caplog.text
    expected = {name: one for name, one in expected.items() if isinstance(one, Tensor)}
    once = {name: one for name, one in expected.items() if not name.startswith("inner.")}
    assert_bitwise(load_file(path), once)
    assert {"nothing", "void.frozen", "first.1.running_mean", "first.1.num_batches_tracked"} <= set(once)
    tensors = json.loads((tmp_path / "saved" / "manifest.json").read_text())["tensors"]
    names = {one["of"]: one.get("names") for one in tensors if one["kind"] == "buffer"}
    assert names["first.1.running_var"] == ["first.1.running_var", "inner.again.1.running_var"]
    assert all(one["original"] for one in tensors if one["kind"] == "parameter")
    plain = Rooms()
    plain.load_state_dict(load_file(path), strict=False)
    assert_bitwise({name: one for name, one in plain.state_dict().items() if isinstance(one, Tensor)}, expected)
    model, _ = prepared(tmp_path, 3, "host", seed=9)
    zerostd.load(path, model)
    found = {name: one for name, one in zerostd.full_state_dict(model).items() if isinstance(one, Tensor)}
    assert_bitwise(found, expected)


def test_an_empty_parameter_of_another_shape(tmp_path: Path) -> None:
    found = []
    for rows in (0, 5):
        model = nn.Linear(3, 3)
        model.nothing = nn.Parameter(torch.empty(rows, 0))
        found.append(zerostd.prepare(model)[0])
    zerostd.save(tmp_path / "saved", found[0])
    with pytest.raises(CheckpointError, match=r"'nothing' has shape \(0, 0\) in the checkpoint, but \(5, 0\)"):
        zerostd.load(tmp_path / "saved", found[1])


# -- what is refused --


class Strange:
    """Neither JSON nor a tensor."""


def failing() -> nn.Module:
    class Failing(Counter):
        def get_extra_state(self) -> Any:
            raise ZeroDivisionError("nothing seen yet")

    return Failing()


@pytest.mark.parametrize(
    ("counter", "words"),
    [
        (
            lambda: Counter({"a": [Strange()]}),
            r"get_extra_state\(\) of module 'count' \(Counter\)\['a'\]\[0\] is a Strange",
        ),
        (lambda: Counter(b"bytes"), r"get_extra_state\(\) of module 'count' \(Counter\) is a bytes"),
        (failing, r"get_extra_state\(\) of module 'count' \(Failing\) failed: ZeroDivisionError: nothing seen yet"),
    ],
)
def test_a_state_that_cannot_be_saved(counter: Callable[[], nn.Module], words: str, tmp_path: Path) -> None:
    model, optimizer = prepared(tmp_path, 3, "device", counter=counter)
    with pytest.raises(CheckpointError, match=words):
        zerostd.save(tmp_path / "saved", model, optimizer)
    assert not list(tmp_path.iterdir())


def refused_on_two(rank: int, folder: str) -> str:
    model, optimizer = prepared(folder, 3, "device", counter=Strangest)
    with pytest.raises(CheckpointError) as caught:
        zerostd.save(Path(folder, "saved"), model, optimizer)
    return str(caught.value)


class Strangest(Counter):
    def get_extra_state(self) -> Any:
        return Strange()


def test_all_ranks_hear_of_it(ranks: Any, tmp_path: Path) -> None:
    for said in ranks(2, refused_on_two, str(tmp_path)):
        assert "of module 'count' (Strangest) is a Strange" in said


class Mute(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Picky(Counter):
    def set_extra_state(self, state: Any) -> None:
        raise KeyError("calls")


def test_a_state_that_does_not_fit(tmp_path: Path) -> None:
    for counter, name in ((Counter, "counted"), (Mute, "mute")):
        model, optimizer = prepared(tmp_path, 3, "device", counter=counter)
        zerostd.save(tmp_path / name, model, optimizer)
    for counter, name, words in (
        (Mute, "counted", "module 'count' has no set_extra_state.*Nothing was changed"),
        (Counter, "mute", "it has no extra state for module 'count'.*Nothing was changed"),
        (Picky, "counted", "KeyError: 'calls'. The model is only partly loaded"),
    ):
        model, optimizer = prepared(tmp_path, 3, "device", counter=counter)
        with pytest.raises(CheckpointError, match=words):
            zerostd.load(tmp_path / name, model, optimizer)
