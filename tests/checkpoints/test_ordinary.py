"""Ordinary models come in: every kind of file, any ranks, stage and placement, and all of it or nothing."""

from __future__ import annotations

import json
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import zerostd
from checkpoints.runs import PLACEMENTS, compared
from checkpoints.test_merge import TIED, Odd, train, untouched, without_tied
from support.agreement import agree
from support.compare import assert_bitwise
from support.halves import moved_from_ties
from support.processes import doing
from support.side_by_side import seeded
from zerostd import Budget, CheckpointError, MisuseError
from zerostd.checkpointing.storage.safetensors_files import SafetensorsReader

MIB = 2**20
State = dict[str, Tensor]


def prepared(model: nn.Module, folder: Path | str, stage: int, placement: str, precision: str | None) -> Any:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    options: dict[str, Any] = {"placement": PLACEMENTS[placement], "budget": Budget(disk_path=str(folder))}
    return zerostd.prepare(model, optimizer, stage=stage, precision=precision, groups=["blocks.1*"], **options)


def empty() -> nn.Module:
    with zerostd.empty_init():
        return Odd()


def state_of(seed: int = 3) -> State:
    return seeded(Odd, seed).state_dict()


# -- every kind of file --


def indexed(folder: Path, state: State, kind: str, write: Callable[[State, Path], None]) -> Path:
    """Three files and their index, as transformers names them."""
    stem, weights = {"safetensors": "model", "bin": "pytorch_model"}[kind], {}
    for number in range(3):
        name = f"{stem}-{number + 1:05d}-of-00003.{kind}"
        part = {key: state[key] for key in list(state)[number::3]}
        write(part, folder / name)
        weights |= dict.fromkeys(part, name)
    index = folder / f"{stem}.{kind}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weights}))
    return index


def write_torch(state: State, path: Path) -> None:
    torch.save(state, path)


def written(kind: str, folder: Path, state: State) -> Path:
    """The model in files of a kind; returns what to load."""
    if kind.startswith("."):
        torch.save(state, folder / f"it{kind}")
        return folder / f"it{kind}"
    (folder / "config.json").write_text("{}")
    once = without_tied(state)  # the library for safetensors takes no tensor twice
    match kind:
        case "safetensors":
            save_file(once, folder / "any name.safetensors")
            return folder / "any name.safetensors"
        case "directory":
            save_file(once, folder / "model.safetensors", {"format": "pt"})
            save_file({"other": torch.ones(2)}, folder / "consolidated.safetensors")
            write_torch({"other": torch.ones(2)}, folder / "pytorch_model.bin")
        case "index":
            indexed(folder, once, "safetensors", save_file)
        case "index file":
            return indexed(folder, once, "safetensors", save_file)
        case "files without index":
            indexed(folder, once, "safetensors", save_file).unlink()
        case "bin":
            write_torch(state, folder / "pytorch_model.bin")
            write_torch({"lr": torch.ones(2)}, folder / "training_args.bin")
        case "bin index":
            indexed(folder, state, "bin", write_torch)
        case "merged":
            model, _ = zerostd.prepare(seeded(Odd, 3))
            zerostd.save(folder / "saved", model)
            zerostd.merge(folder / "saved", folder / "merged", max_shard_size=500)
            return folder / "merged"
    return folder


KINDS = [
    *("safetensors", "directory", "index", "index file", "files without index", "bin", "bin index", "merged"),
    *(".pt", ".pth", ".bin"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file(kind: str, tmp_path: Path) -> None:
    """The model was never initialised here; then it trains as one that had these values when it was prepared."""
    path = written(kind, tmp_path, state_of())
    model, optimizer = prepared(empty(), tmp_path, 3, "all tiers", "bf16")
    assert zerostd.load(path, model) is None
    other, plain = prepared(seeded(Odd, 3), tmp_path, 3, "all tiers", "bf16")
    assert_bitwise(zerostd.full_state_dict(model), zerostd.full_state_dict(other), "loaded")
    train(model, optimizer)
    train(other, plain)
    assert_bitwise(zerostd.full_state_dict(model), zerostd.full_state_dict(other), "trained")


SETTINGS = [
    (0, "device", "bf16"),
    (1, "host", "bf16"),
    (2, "all tiers", None),
    (2, "disk", "bf16"),
    (3, "device", None),
    (3, "parameters on host", "bf16"),
    (3, "parameters on disk", None),
    (3, "different shares", "bf16"),
]


def loading(rank: int, settings: list[Any], paths: list[str], folder: str) -> list[str]:
    """Loads into a model in the middle of its training; what differs from one that had the values at the beginning."""
    failures = []
    for number, (stage, placement, precision) in enumerate(settings):
        label = f"stage {stage}, {placement}, {precision}"
        doing(label)
        model, optimizer = prepared(seeded(Odd, 8), folder, stage, placement, precision)
        train(model, optimizer, 1, rank)
        zerostd.load(paths[number % len(paths)], model)
        other, _ = prepared(seeded(Odd, 3), folder, stage, placement, precision)
        other.eval(), model.eval()
        tokens = torch.arange(11)
        if not torch.equal(model(tokens), other(tokens)):
            failures.append(f"{label}: parameters are not the masters")
        found, expected = zerostd.full_state_dict(model), zerostd.full_state_dict(other)
        failures += [f"{label}: {text}" for text in compared(found, expected)]
        model.train()
        train(model, optimizer, 2, rank)
        moved = zerostd.full_state_dict(model)
        if not all(value.isfinite().all() for value in moved.values()) or not compared(moved, found):
            failures.append(f"{label}: training does not go on")
        zerostd.release(model)
        zerostd.release(other)
    return failures


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_any_ranks_stage_and_placement(world_size: int, ranks: Any, tmp_path: Path) -> None:
    paths = []
    for kind in ("index", ".pt"):
        (tmp_path / kind).mkdir()
        paths.append(str(written(kind, tmp_path / kind, state_of())))
    settings = SETTINGS if world_size == 2 else SETTINGS[world_size % 2 :: 2]
    args = (settings, paths, str(tmp_path))
    agree(ranks(world_size, loading, *args) if world_size > 1 else [loading(0, *args)])


def test_longer_than_a_block_and_not_row_by_row(tmp_path: Path) -> None:
    """Slices that begin anywhere, and tensors that lie in the file as they lay in memory."""
    state = {"weight": torch.randn(1700, 1501).t(), "bias": torch.randn(2).expand(1501, 2)[:, 0]}
    torch.save(state, tmp_path / "it.pt")
    save_file({name: one.contiguous() for name, one in state.items()}, tmp_path / "it.safetensors")
    for name in ("it.pt", "it.safetensors"):
        options: dict[str, Any] = {"placement": PLACEMENTS["all tiers"], "budget": Budget(disk_path=str(tmp_path))}
        model = nn.Linear(1700, 1501)
        model, _ = zerostd.prepare(model, torch.optim.AdamW(model.parameters()), precision="bf16", **options)
        zerostd.load(tmp_path / name, model)
        masters = {key: moved_from_ties(value) for key, value in state.items()}
        assert_bitwise(zerostd.full_state_dict(model), masters, name)


# -- names and dtypes --


@pytest.mark.parametrize("names", [["tokens.weight"], ["head.weight"], ["tokens.weight", "head.weight"]])
def test_a_tied_parameter_is_found_under_any_name(names: list[str], tmp_path: Path) -> None:
    state = state_of()
    torch.save(
        {k: v for k, v in state.items() if k in names or k not in {**TIED, "tokens.weight": ""}}, tmp_path / "a.pt"
    )
    model, _ = prepared(seeded(Odd, 8), tmp_path, 3, "host", None)
    zerostd.load(tmp_path / "a.pt", model)
    assert_bitwise(zerostd.full_state_dict(model), state)


def test_a_module_that_is_there_twice(tmp_path: Path) -> None:
    shared = nn.BatchNorm1d(4)
    model = nn.Sequential(shared, nn.Linear(4, 4), shared)
    state = {name: torch.full_like(value, 3) for name, value in model.state_dict().items()}
    once = {name: value for name, value in state.items() if not name.startswith("0.")}
    for number, given in enumerate((state, once)):
        save_file(given, tmp_path / f"{number}.safetensors")
        fresh = nn.Sequential(one := nn.BatchNorm1d(4), nn.Linear(4, 4), one)
        fresh, _ = zerostd.prepare(fresh)
        zerostd.load(tmp_path / f"{number}.safetensors", fresh)
        assert_bitwise(zerostd.full_state_dict(fresh), state)


def test_dtypes_are_converted_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {name: one.to(torch.bfloat16) if one.is_floating_point() else one for name, one in state_of().items()}
    save_file(without_tied(state), tmp_path / "model.safetensors")
    model, _ = prepared(seeded(Odd, 8), tmp_path, 3, "device", None)
    with caplog.at_level(logging.INFO, "zerostd"):
        zerostd.load(tmp_path, model)
    told = next(record.getMessage() for record in caplog.records if str(tmp_path) in record.getMessage())
    dtypes = {name: one.dtype for name, one in state_of().items() if one.numel() and name not in TIED}
    singles = sum(dtype == torch.float32 for dtype in dtypes.values()) + 1  # short.weight has a master
    assert f"{len(dtypes)} tensors loaded" in told
    assert f"{singles} tensors from bfloat16 to float32" in told
    assert "2 tensors from bfloat16 to float64" in told and "1 tensor from bfloat16 to float16" in told
    found = zerostd.full_state_dict(model)
    assert_bitwise(found, {name: state[name].to(one.dtype) for name, one in state_of().items()})


def test_masters_take_what_parameters_cannot(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """fp32 values for a model in bf16: nothing is rounded that training keeps."""
    values = {"weight": torch.randn(4, 4), "bias": torch.randn(4)}
    save_file(values, tmp_path / "model.safetensors")
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    model, _ = zerostd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with caplog.at_level(logging.INFO, "zerostd"):
        zerostd.load(tmp_path, model)
    assert "nothing was converted" in caplog.text
    zerostd.save(tmp_path / "saved", model)
    (path,) = zerostd.merge(tmp_path / "saved", tmp_path / "merged", dtype="fp32")
    with_masters, _ = zerostd.prepare(nn.Linear(4, 4))
    zerostd.load(path, with_masters)
    assert_bitwise(zerostd.full_state_dict(with_masters), values)


def test_a_model_of_transformers(tmp_path: Path) -> None:
    """What save_pretrained writes, with its tied head left out."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=50, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    given = transformers.GPT2LMHeadModel(config)
    for number, most in enumerate(("5GB", "2KB")):
        given.save_pretrained(tmp_path / str(number), max_shard_size=most)
        with zerostd.empty_init():
            model = transformers.GPT2LMHeadModel(config)
        model, _ = zerostd.prepare(model, torch.optim.AdamW(model.parameters()), precision="bf16")
        zerostd.load(tmp_path / str(number), model)
        assert_bitwise(zerostd.full_state_dict(model), given.state_dict(), most)


# -- what does not fit --


def wrong_state() -> State:
    state = without_tied(state_of())
    del state["blocks.10.bias"], state["norm.running_var"], state["tokens.weight"]
    state |= {"adapter.weight": torch.ones(2), "scratch": torch.zeros(3)}
    return state | {
        "scale": torch.ones(1),
        "wide.bias": torch.ones(4),
        "codes": torch.ones(7),
        "mask": torch.ones(3).int(),
    }


SAID = [
    "missing: ",
    "'blocks.10.bias'",
    "'norm.running_var'",
    "'tokens.weight' (or 'head.weight')",
    "not in the model: ",
    "'adapter.weight'",
    "'scratch'",
    "'scale' has shape (1,), but () in the model",
    "'wide.bias' has shape (4,), but (3,) in the model",
    "'codes' is float32, but int8 in the model",
    "'mask' is int32, but bool in the model",
    "Nothing was changed",
]


def refused(path: str | Path, model: nn.Module, optimizer: Any = None, error: type[Exception] = CheckpointError) -> str:
    """What load says; nothing may have changed."""
    before = zerostd.full_state_dict(model)
    with pytest.raises(error) as raised:
        zerostd.load(path, model, optimizer)
    assert_bitwise(zerostd.full_state_dict(model), before, "after an error")
    return str(raised.value)


@pytest.mark.parametrize("kind", ["index", ".pt"])
def test_all_that_does_not_fit_is_listed(kind: str, tmp_path: Path) -> None:
    path = written(kind, tmp_path, wrong_state())
    model, optimizer = prepared(seeded(Odd), tmp_path, 3, "host", "bf16")
    said = refused(path, model)
    assert not [text for text in SAID if text not in said], said
    assert "norm.running_mean" not in said
    train(model, optimizer)


def test_long_lists_are_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file({f"other.{number}": torch.ones(1) for number in range(100)}, tmp_path / "model.safetensors")
    model, _ = zerostd.prepare(nn.Linear(2, 2))
    said = refused(tmp_path, model)
    assert "'weight'" in said and "and 60 more, which the log names" in said
    assert all(f"'other.{number}'" in caplog.text for number in range(100))


def one_is_wrong(rank: int, paths: list[str], folder: str) -> list[str]:
    model, optimizer = prepared(seeded(Odd), folder, 3, "host", "bf16")
    said = [refused(paths[rank], model), refused(f"{folder}/nowhere" if rank else paths[0], model)]
    train(model, optimizer, rank=rank)
    zerostd.release(model)
    return said


def test_wrong_on_one_rank_is_an_error_on_all(ranks: Any, tmp_path: Path) -> None:
    for name in ("right", "wrong"):
        (tmp_path / name).mkdir()
    paths = [written("index", tmp_path / "right", state_of()), written("index", tmp_path / "wrong", wrong_state())]
    for said in ranks(2, one_is_wrong, [str(path) for path in paths], str(tmp_path)):
        assert said[0].startswith("rank 1: ") and not [text for text in SAID if text not in said[0]]
        assert said[1].startswith("rank 1: ") and "nowhere" in said[1]


def breaks_off(rank: int, path: str, folder: str) -> str:
    model, _ = prepared(seeded(Odd), folder, 3, "host", None)
    read, count = SafetensorsReader.read, 0

    def failing_read(self: SafetensorsReader, *args: Any) -> None:
        nonlocal count
        count += 1
        if rank == 1 and count > 3:
            raise CheckpointError("the file ends here")
        read(self, *args)

    SafetensorsReader.read = failing_read  # type: ignore[method-assign]
    try:
        with pytest.raises(CheckpointError) as raised:
            zerostd.load(path, model)
    finally:
        SafetensorsReader.read = read  # type: ignore[method-assign]
    zerostd.load(path, model)
    assert_bitwise(zerostd.full_state_dict(model), state_of())
    zerostd.release(model)
    return str(raised.value)


def test_a_disk_that_breaks_meanwhile_stops_all_ranks(ranks: Any, tmp_path: Path) -> None:
    path = written("safetensors", tmp_path, state_of())
    for said in ranks(2, breaks_off, str(path), str(tmp_path)):
        assert said.startswith("rank 1: the file ends here. The model is only partly loaded")


def test_an_optimizer_has_nothing_to_load(tmp_path: Path) -> None:
    path = written("safetensors", tmp_path, state_of())
    model, optimizer = prepared(seeded(Odd), tmp_path, 3, "host", "bf16")
    assert "leave the optimizer out" in refused(path, model, optimizer)


def test_not_inside_gathered(tmp_path: Path) -> None:
    path = written("safetensors", tmp_path, state_of())
    model, _ = prepared(seeded(Odd), tmp_path, 3, "host", "bf16")
    with zerostd.gathered(model):
        assert "leave the context" in refused(path, model, error=MisuseError)


class Command:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_no_code_in_a_file_runs(tmp_path: Path) -> None:
    torch.save({"weight": Command(tmp_path / "made")}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps({"weight": Command(tmp_path / "made")}))
    model, _ = zerostd.prepare(nn.Linear(2, 2))
    for name in ("a.pt", "b.pt"):
        assert "cannot be read as a state_dict" in refused(tmp_path / name, model)
    assert untouched(tmp_path) == {"a.pt", "b.pt"}


def index_of(weights: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, folder / "a.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(weights))

    return write


def two_files(folder: Path) -> None:
    for name in ("a", "b"):
        save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, folder / f"{name}.safetensors")


def cut(folder: Path) -> None:
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, folder / "model.safetensors")
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 4)


def a_checkpoint_without_manifest(folder: Path) -> None:
    model, _ = zerostd.prepare(nn.Linear(2, 2))
    zerostd.save(folder / "saved", model)
    os.rename(folder / "saved" / "rank-00000-of-00001.safetensors", folder / "rank-00000-of-00001.safetensors")


def torch_file(value: Any, **options: Any) -> Callable[[Path], None]:
    return lambda folder: torch.save(value, folder / "pytorch_model.bin", **options)


LINEAR = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "nothing": (lambda folder: None, "no manifest.json"),
    "lost manifest": (a_checkpoint_without_manifest, "no manifest.json"),
    "twice": (two_files, "name one file"),
    "cut": (cut, "damaged header"),
    "index to nowhere": (index_of({"weight_map": {"weight": "b.safetensors"}}), "b.safetensors cannot be read"),
    "index that lies": (
        index_of({"weight_map": {"wait": "a.safetensors"}}),
        "although model.safetensors.index.json",
    ),
    "index to elsewhere": (index_of({"weight_map": {"weight": "../a.safetensors"}}), "not a plain file name"),
    "index of nothing": (index_of({"weight_map": ["weight"]}), "not the index of a model"),
    "no index": (index_of([]), "not the index of a model"),
    "a training": (
        torch_file({"state_dict": LINEAR, "epoch": 3}),
        "its entry 'state_dict' is a dict; save only model.state_dict",
    ),
    "a tensor": (torch_file(torch.ones(2)), "holds a Tensor"),
    "old": (torch_file(LINEAR, _use_new_zipfile_serialization=False), "cannot be read as a state_dict"),
    "sparse": (torch_file({**LINEAR, "weight": torch.ones(2, 2).to_sparse()}), "not a dense tensor"),
    "meta": (torch_file({**LINEAR, "weight": torch.ones(2, 2, device="meta")}), "not a dense tensor"),
    "noise": (lambda folder: (folder / "pytorch_model.bin").write_bytes(b"PK" + bytes(99)) and None, "state_dict"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_named(name: str, tmp_path: Path) -> None:
    write, said = BAD[name]
    write(tmp_path)
    model, _ = zerostd.prepare(nn.Linear(2, 2))
    assert said in refused(tmp_path, model)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"onnx")
    model, _ = zerostd.prepare(nn.Linear(2, 2))
    assert "cannot be read as a model" in refused(tmp_path / "model.onnx", model)


# -- memory --

NUMEL = 16 * MIB  # 64 MiB in fp32


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(NUMEL) for _ in range(3))


def in_status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def taking(rank: int, paths: list[str]) -> list[tuple[str, int, bool]]:
    """Memory that a load takes on top of the model, and whether the values are there."""
    found = []
    model, _ = zerostd.prepare(Large(), stage=3, placement=zerostd.Placement())
    for number, path in enumerate(paths):
        doing(path)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = in_status("VmRSS")
        zerostd.load(path, model)
        taken = in_status("VmHWM") - before
        with zerostd.gathered(model):
            is_there = all(part.eq(number + 1).all().item() for part in model.parts)
        found.append((path, taken, is_there))
    zerostd.release(model)
    return found


def test_a_rank_takes_less_than_one_tensor(ranks: Any, tmp_path: Path) -> None:
    names = [f"parts.{number}" for number in range(3)]
    save_file({name: torch.full((NUMEL,), 1.0) for name in names}, tmp_path / "a.safetensors")
    torch.save({name: torch.full((NUMEL,), 2.0) for name in names}, tmp_path / "b.pt")
    for answer in ranks(2, taking, [str(tmp_path / name) for name in ("a.safetensors", "b.pt")]):
        for path, taken, is_there in answer:
            assert is_there, path
            assert taken < 4 * NUMEL, f"{path}: {taken / MIB:.0f} MiB for tensors of 64"
