"""A checkpoint becomes an ordinary model: the bits of full_state_dict, in files that others read, in little memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import zerostd
from checkpoints.runs import PLACEMENTS
from support import warm
from support.compare import assert_bitwise
from support.processes import doing
from support.side_by_side import seeded
from zerostd import Budget, CheckpointError, PrepareError
from zerostd.cli.main import app

MIB = 2**20


class Odd(nn.Module):
    """Tied and frozen parameters, many dtypes, a single number, nothing at all, and enough blocks to be counted."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(12))
        self.norm = nn.BatchNorm1d(6)
        self.short = nn.Linear(6, 5, bias=False, dtype=torch.bfloat16)
        self.wide = nn.Linear(6, 3, dtype=torch.float64).requires_grad_(False)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.tokens.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(5).half(), requires_grad=False)
        self.codes = nn.Parameter(torch.arange(7, dtype=torch.int8), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("none", torch.empty(2, 0))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = x + F.gelu(block(x))
        x = self.norm(x)
        for part in (self.short, self.wide):
            x = x + 0.1 * part(x.to(part.weight.dtype)).sum(-1, keepdim=True).to(x.dtype)
        return self.head(x) * self.scale


TIED = {"head.weight": "tokens.weight"}


def prepared(path: str | Path, stage: int, placement: str, precision: str | None, seed: int = 0) -> tuple[Any, Any]:
    model = seeded(Odd, seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    options: dict[str, Any] = {"placement": PLACEMENTS[placement], "budget": Budget(disk_path=str(path))}
    return zerostd.prepare(model, optimizer, stage=stage, precision=precision, groups=["blocks.1*"], **options)


def train(model: nn.Module, optimizer: Any, steps: int = 2, rank: int = 0) -> None:
    for step in range(steps):
        tokens = torch.randint(11, (8,), generator=torch.Generator().manual_seed(100 * rank + step))
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


SAVED = {
    "fp32": (3, "device", None),
    "bf16": (2, "host", "bf16"),
    "bf16 at home": (3, "parameters on disk", "bf16"),
    "replicated": (0, "device", "bf16"),
}


def saving(rank: int, folder: str) -> dict[str, dict[str, Tensor]]:
    """Trains and saves each; returns what full_state_dict was."""
    found = {}
    for name, (stage, placement, precision) in SAVED.items():
        doing(name)
        model, optimizer = prepared(folder, stage, placement, precision)
        train(model, optimizer, rank=rank)
        zerostd.save(Path(folder, name), model, optimizer)
        found[name] = zerostd.full_state_dict(model, rank=0)
        zerostd.release(model)
    return found


def without_tied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name not in TIED}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Tensor]]]:
    """Checkpoints of one rank, and what is in them."""
    folder = tmp_path_factory.mktemp("one")
    return folder, saving(0, str(folder))


# -- the same bits --


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_merged_is_full_state_dict(world_size: int, ranks: Any, saved: Any, tmp_path: Path) -> None:
    folder, expected = saved
    if world_size > 1:
        folder, expected = tmp_path, ranks(world_size, saving, str(tmp_path))[0]
    for name, state in expected.items():
        (path,) = zerostd.merge(folder / name, tmp_path / f"{name} merged")
        assert path == str(tmp_path / f"{name} merged" / "model.safetensors")
        assert_bitwise(load_file(path), without_tied(state), f"{name} of {world_size}")


def saving_again(rank: int, source: str, target: str) -> None:
    model, optimizer = prepared(target, 3, "all tiers", "bf16", seed=1)
    zerostd.load(source, model, optimizer)
    zerostd.save(Path(target, "again"), model, optimizer)
    zerostd.release(model)


def test_files_do_not_depend_on_the_ranks_that_saved(ranks: Any, saved: Any, tmp_path: Path) -> None:
    source = saved[0] / "bf16"
    ranks(3, saving_again, str(source), str(tmp_path))
    first = zerostd.merge(source, tmp_path / "first", max_shard_size=400)
    second = zerostd.merge(tmp_path / "again", tmp_path / "second", max_shard_size=400)
    assert len(first) > 3
    for mine, theirs in zip(first, second, strict=True):
        assert Path(mine).name == Path(theirs).name
        assert Path(mine).read_bytes() == Path(theirs).read_bytes(), mine


def test_longer_than_a_block(tmp_path: Path) -> None:
    """Parts that begin anywhere, blocks that end inside a slice, in the dtype of training and in another."""
    model = nn.Sequential(nn.Linear(1000, 1501), nn.Linear(1501, 1000)).to(torch.bfloat16)
    placement = zerostd.Placement(optimizer_states={"device": 0.37, "host": 0.63})
    model, optimizer = zerostd.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), placement=placement)
    model(torch.ones(2, 1000, dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
    zerostd.save(tmp_path / "saved", model, optimizer)
    (path,) = zerostd.merge(tmp_path / "saved", tmp_path / "merged")
    assert_bitwise(load_file(path), zerostd.full_state_dict(model))
    (path,) = zerostd.merge(tmp_path / "saved", tmp_path / "masters", dtype="fp32")
    masters = load_file(path)
    assert_bitwise({name: one.bfloat16() for name, one in masters.items()}, zerostd.full_state_dict(model))
    assert any((one != one.bfloat16()).any() for one in masters.values()), "these are rounded, and not the masters"


def test_a_parameter_without_elements(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    model.nothing = nn.Parameter(torch.empty(0, 3))
    model, _ = zerostd.prepare(model)
    zerostd.save(tmp_path / "saved", model)
    (path,) = zerostd.merge(tmp_path / "saved", tmp_path / "merged")
    assert_bitwise(load_file(path), zerostd.full_state_dict(model))


# -- dtypes --


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("float16", torch.float16), ("fp32", torch.float32)]
)
def test_all_floating_point_in_one_dtype(name: str, dtype: torch.dtype, saved: Any, tmp_path: Path) -> None:
    folder, expected = saved
    (path,) = zerostd.merge(folder / "fp32", tmp_path / "merged", dtype=name)
    wanted = without_tied(expected["fp32"])
    found = load_file(path)
    short = found.pop("short.weight")  # trained with a master: rounded once, from that
    assert short.dtype == dtype
    torch.testing.assert_close(short.bfloat16(), wanted.pop("short.weight"), rtol=2**-7, atol=0)
    assert_bitwise(found, {k: one.to(dtype) if one.is_floating_point() else one for k, one in wanted.items()})


# -- files --


def test_several_files_and_their_index(saved: Any, tmp_path: Path) -> None:
    folder, expected = saved
    most = 700
    paths = zerostd.merge(folder / "fp32", tmp_path / "merged", max_shard_size="0.7KB")
    *files, index = map(Path, paths)
    assert index.name == "model.safetensors.index.json"
    assert [f.name for f in files] == [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    assert sorted(path.name for path in (tmp_path / "merged").iterdir()) == sorted(Path(p).name for p in paths)
    parts = {file.name: load_file(file) for file in files}
    sizes = {name: sum(one.nbytes for one in part.values()) for name, part in parts.items()}
    assert len(files) > 3 and all(size <= most or len(parts[name]) == 1 for name, size in sizes.items())
    merged = {name: one for part in parts.values() for name, one in part.items()}
    assert sum(map(len, parts.values())) == len(merged)
    assert_bitwise(merged, without_tied(expected["fp32"]))
    told = json.loads(index.read_text())
    assert told["weight_map"] == {name: file for file, part in parts.items() for name in part}
    assert told["metadata"] == {"total_size": sum(sizes.values()), **TIED}
    order = [name for file in files for name in parts[file.name] if name.startswith("blocks.")]
    numbers = [int(name.split(".")[1]) for name in order]
    assert numbers == sorted(numbers)  # 2 before 10


def test_a_tensor_larger_than_a_file_has_one_of_its_own(saved: Any, tmp_path: Path) -> None:
    *files, _ = zerostd.merge(saved[0] / "fp32", tmp_path / "merged", max_shard_size=1)
    merged = [load_file(file) for file in files]
    assert all(sum(one.numel() > 0 for one in part.values()) <= 1 for part in merged)
    assert_bitwise({k: v for part in merged for k, v in part.items()}, without_tied(saved[1]["fp32"]))


def test_header_says_what_others_look_for(saved: Any, tmp_path: Path) -> None:
    (path,) = zerostd.merge(saved[0] / "fp32", tmp_path / "merged")
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", **TIED}
    data = Path(path).read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    entries.pop("__metadata__")
    begins = [(8 + length + one["data_offsets"][0], saved[1]["fp32"][name]) for name, one in entries.items()]
    assert all(begin % value.element_size() == 0 for begin, value in begins)


def test_plain_torch_loads_it(saved: Any, tmp_path: Path) -> None:
    folder, expected = saved
    (path,) = zerostd.merge(folder / "fp32", tmp_path / "merged")
    one, other = seeded(Odd, 5), seeded(Odd, 6)
    found = one.load_state_dict(load_file(path), strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (list(TIED), [])
    assert load_model(other, path) == (set(), [])
    assert_bitwise(one.state_dict(), expected["fp32"])
    assert_bitwise(other.state_dict(), expected["fp32"])


def test_transformers_loads_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=50, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    model, optimizer = zerostd.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), precision="bf16")
    model(torch.arange(8)[None]).logits.square().mean().backward()
    optimizer.step()
    zerostd.save(tmp_path / "saved", model, optimizer)
    for name, most in (("one", "5GB"), ("several", "2KB")):
        zerostd.merge(tmp_path / "saved", tmp_path / name, max_shard_size=most)
        config.save_pretrained(tmp_path / name)
        loaded, told = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(told[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
        expected = zerostd.full_state_dict(model)
        assert loaded.lm_head.weight is loaded.transformer.wte.weight
        assert_bitwise(loaded.state_dict(), {name: expected[name] for name in loaded.state_dict()})


# -- memory --

MEASURE = """
import sys
import zerostd

def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

before = peak()
zerostd.merge(*sys.argv[1:])
print(peak() - before)
"""


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """300 MB, of them two thirds one tensor, in the dtype of training and in another one."""
    model = nn.Module()
    model.large, model.small = (nn.Parameter(torch.ones(n * MIB // 4)) for n in (200, 100))
    model, _ = zerostd.prepare(model, stage=3, placement=zerostd.Placement())
    zerostd.save(tmp_path / "saved", model)
    zerostd.release(model)
    for arguments in (["merged"], ["converted", "bf16"]):
        out = tmp_path / arguments[0]
        told = warm.run(MEASURE, tmp_path / "saved", out, *arguments[1:])
        assert told.returncode == 0, told.stderr
        assert int(told.stdout) < 32 * MIB, f"{int(told.stdout) / MIB:.0f} MiB"
        assert sum(file.stat().st_size for file in out.iterdir()) >= 150 * MIB


# -- what is refused --


def untouched(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_is_there_is_not_overwritten(saved: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "file").write_text("mine")
    for name in ("out", "file"):
        with pytest.raises(CheckpointError, match="already exists"):
            zerostd.merge(saved[0] / "fp32", tmp_path / name)
    assert untouched(tmp_path) == {"out", "file"} and not untouched(tmp_path / "out")
    assert (tmp_path / "file").read_text() == "mine"


def flip(path: Path, place: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))


def of_parameters(folder: Path) -> tuple[int, int]:
    """Where in the only file the numbers of parameters begin and end."""
    data = (folder / "rank-00000-of-00001.safetensors").read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    tensors = json.loads((folder / "manifest.json").read_text())["tensors"]
    keys = [part["key"] for one in tensors if one["kind"] == "parameter" for part in one["parts"]]
    offsets = [place for key in keys for place in header[key]["data_offsets"]]
    return begin + min(offsets), begin + max(offsets)


@pytest.mark.parametrize("what", ["first byte", "last byte", "header", "manifest", "missing file"])
def test_damage_is_found_and_nothing_is_left(what: str, tmp_path: Path) -> None:
    model, _ = zerostd.prepare(seeded(Odd))
    folder = tmp_path / "saved"
    zerostd.save(folder, model)
    file = folder / ("manifest.json" if what == "manifest" else "rank-00000-of-00001.safetensors")
    first, last = of_parameters(folder)
    if what == "missing file":
        file.unlink()
    elif what == "manifest":
        os.truncate(file, file.stat().st_size // 2)
    else:
        flip(file, {"first byte": first, "last byte": last - 1, "header": 20}[what])
    with pytest.raises(CheckpointError, match="damaged" if "byte" in what else file.name):
        zerostd.merge(folder, tmp_path / "merged")
    assert untouched(tmp_path) == {"saved"}


def test_no_room(saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match="ENOSPC"):
        zerostd.merge(saved[0] / "fp32", tmp_path / "merged")
    assert not untouched(tmp_path)


def test_interrupted(saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        zerostd.merge(saved[0] / "fp32", tmp_path / "merged")
    assert not untouched(tmp_path)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"dtype": "int8"}, CheckpointError, "not a floating-point dtype"),
        ({"dtype": "half"}, CheckpointError, "not a floating-point dtype"),
        ({"max_shard_size": 0}, CheckpointError, "=0 bytes is too small"),
        ({"max_shard_size": "5 bananas"}, PrepareError, "not a size"),
    ],
)
def test_options_are_checked(options: Any, error: type[Exception], said: str, saved: Any, tmp_path: Path) -> None:
    with pytest.raises(error, match=said):
        zerostd.merge(saved[0] / "fp32", tmp_path / "merged", **options)
    assert not untouched(tmp_path)


def test_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, said in (("nowhere", "not a directory"), ("empty", "no manifest.json")):
        with pytest.raises(CheckpointError, match=said):
            zerostd.merge(tmp_path / name, tmp_path / "merged")
    assert untouched(tmp_path) == {"empty"}


# -- from the command line --


def merge(*words: object) -> Result:
    return CliRunner().invoke(app, ["merge", *(str(word) for word in words)])


def test_command_says_what_it_wrote(saved: Any, tmp_path: Path) -> None:
    result = merge(saved[0] / "fp32", tmp_path / "merged", "--max-shard-size", "1KB", "--dtype", "bf16")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) == len(untouched(tmp_path / "merged")) > 2
    assert lines[-1].endswith("model.safetensors.index.json")


def test_command_in_json(saved: Any, tmp_path: Path) -> None:
    result = merge(saved[0] / "fp32", tmp_path / "merged", "--json")
    assert result.exit_code == 0, result.output
    path = tmp_path / "merged" / "model.safetensors"
    assert json.loads(result.stdout) == {"files": {str(path): path.stat().st_size}, "bytes": path.stat().st_size}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("/no/such/checkpoint", "out"), "/no/such/checkpoint is not a directory"),
        (("/no/such/checkpoint", "out", "--dtype", "int4"), "dtype='int4'"),
        (("/no/such/checkpoint", "out", "--max-shard-size", "much"), "'much' is not a size"),
    ],
)
def test_bad_input_is_one_line(words: tuple[str, ...], said: str) -> None:
    result = merge(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("zerostd: ") and said in line
