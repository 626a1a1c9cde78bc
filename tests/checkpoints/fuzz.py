"""Manifests and headers as nobody writes them: random bytes, random JSON, and real ones with something changed.

Whatever they say, only CheckpointError may come out, at once, without a large allocation and with the model as it was.
Each check takes the number of examples: few in the tests, many in benchmarks/checkpoints.py.
"""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import zerostd
from checkpoints.runs import compared
from support.side_by_side import seeded
from zerostd import CheckpointError
from zerostd.checkpointing.storage.manifest import Manifest, decode_value, encode_value
from zerostd.checkpointing.storage.safetensors_files import SafetensorsReader, bytes_of

EXAMPLES = 60  # of each check, in the tests
FILE = "rank-00000-of-00001.safetensors"
SLOWEST_S, MOST_BYTES = 60.0, 1 << 30

ODD: list[Any] = [
    *(-1, 0, 1, 2, 2**31, 2**32, 2**61, 2**62, 2**63, 10**30, 1.5, -0.0, 1e308, float("inf"), float("nan")),
    *("", "..", "../x.safetensors", "/etc/passwd", "a/b.safetensors", "x\0.safetensors", FILE, "0", "1", "float32"),
    *("int8", "bool", "complex64", "parameter", "state", "extra", "buffer", "random", "exp_avg", "master", "params"),
    *(None, True, False, [], {}, [[]], {"": {}}, {"$tensor": 0}, {"$tensor": -1}, {"$float": []}, {"$items": [[]]}),
    *({"$tuple": []}, {"$number": ["float32", "x"]}, {"$number": ["uint8", 300]}, {"$number": ["int64", 2**70]}),
]
texts = st.text(st.characters(codec="utf-8"), max_size=8)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.sampled_from(ODD)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4))
deep = st.integers(1, 30_000).map(lambda depth: "[" * depth + "]" * depth)


class Memo(nn.Module):
    """Keeps whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.value: Any = {"last": torch.ones(2), "calls": 3}

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.memo = nn.Linear(3, 4), nn.Linear(4, 2), Memo()
        self.nothing = nn.Parameter(torch.empty(2, 0))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh())


class Target:
    """A checkpoint of a small model, and another such model to load it into."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.good = folder / "bad", folder / "good"
        model, optimizer = self.prepared()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        zerostd.save(self.good, model, optimizer, {"x": torch.arange(5), "y": (1, {"z": [2.5]})})
        shutil.copytree(self.good, self.folder)
        self.manifest = json.loads((self.good / "manifest.json").read_text())
        del self.manifest["crc32"]
        self.manifest["version"] = 1  # which has no checksum: the rules behind it are what is tried
        self.shard = (self.good / FILE).read_bytes()
        self.model, self.optimizer = self.prepared()
        self.before = self.tensors()
        self.num_loaded = 0

    def prepared(self) -> tuple[Any, Any]:
        model = seeded(Net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return zerostd.prepare(model, optimizer, placement=zerostd.Placement(optimizer_states={"device": 1.0}))

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {name: _as_tensor(value) for name, value in zerostd.full_state_dict(self.model).items()}
        for number, states in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}: {name}": _as_tensor(value) for name, value in states.items()}
        return found | {"generator": torch.get_rng_state()}

    def load(self) -> None:
        """It loads, or says why not and changes nothing."""
        begun = time.monotonic()
        try:
            zerostd.load(self.folder, self.model, self.optimizer)
            self.num_loaded += 1
            self.before = self.tensors()
        except CheckpointError as error:
            assert isinstance(error.__cause__, CheckpointError), f"a {type(error.__cause__).__name__}: {error}"
            assert not compared(self.tensors(), self.before), f"half loaded: {error}"
        zerostd.latest(self.folder.parent)
        assert time.monotonic() - begun < SLOWEST_S


def _as_tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(list(repr(value).encode()))


def examine(check: Callable[..., None], strategy: Any, examples: int) -> None:
    """Run a check on so many examples, with an eye on memory."""
    before = _peak()
    chosen = settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    chosen(given(strategy)(check))()
    assert _peak() - before < MOST_BYTES, f"{(_peak() - before) / 2**30:.1f} GiB were allocated"


def _peak() -> int:
    """Bytes of address space at most so far: allocated, used or not."""
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmPeak:")), 0)


@st.composite
def changed(draw: Any, original: Any) -> Any:
    """A copy with one to three places replaced, removed, doubled or moved."""
    root = [copy.deepcopy(original)]
    for _ in range(draw(st.integers(1, 3))):
        parent, key = root, 0
        while isinstance(parent[key], dict | list) and parent[key] and draw(st.integers(0, 4)):
            parent = parent[key]
            names = list(parent) if isinstance(parent, dict) else range(len(parent))
            key = draw(st.sampled_from(names))
        _change(draw, parent, key)
    return root[0]


def _change(draw: Any, parent: Any, key: Any) -> None:
    value = parent[key]
    ways = ["odd", "any", "double", "remove", "rename"]
    way = draw(st.sampled_from([*ways, "nudge", "nudge"] if isinstance(value, int) else ways))
    if way == "odd":
        parent[key] = copy.deepcopy(draw(st.sampled_from(ODD)))
    elif way == "any":
        parent[key] = copy.deepcopy(draw(values))  # ODD is among them, and a later change may change it
    elif way == "nudge":
        parent[key] = value + draw(st.sampled_from([-(2**40), -1, 1, 7, 2**40]))
    elif way == "double" and isinstance(parent, list):
        parent.insert(0, copy.deepcopy(value))
    elif way == "rename" and isinstance(parent, dict):
        parent[draw(texts)] = parent.pop(key)
    elif isinstance(parent, dict):
        del parent[key]
    else:
        parent[key] = None


# -- the checks --


def any_text(examples: int) -> None:
    """Bytes, JSON and deep nesting instead of a manifest."""

    def check(text: bytes | str) -> None:
        try:
            Manifest.from_json(text, "manifest.json")
        except CheckpointError as error:
            assert str(error)

    examine(check, st.binary(max_size=200) | values.map(json.dumps) | deep, examples)


def any_value(examples: int) -> None:
    """What is encoded comes back, and what is not encoded is refused."""

    def check(value: Any) -> None:
        try:
            decode_value(value, lambda number: torch.zeros(number % 5))
        except CheckpointError as error:
            assert str(error)
        try:
            encoded = encode_value(value, lambda tensor: 0, "it")
        except CheckpointError as error:
            assert "bits, too long" in str(error)
            return
        found = decode_value(json.loads(json.dumps(encoded, allow_nan=False)), lambda number: torch.zeros(0))
        assert str(found) == str(value)

    examine(check, values, examples)


def changed_manifests(target: Target, examples: int) -> None:
    """A real manifest with something changed, beside real files."""

    def check(data: Any) -> None:
        (target.folder / "manifest.json").write_text(json.dumps(data))
        target.load()

    examine(check, changed(target.manifest), examples)


def changed_headers(target: Target, examples: int) -> None:
    """A real header with something changed; the file is as long as the manifest says."""
    (length,) = struct.unpack("<Q", target.shard[:8])
    header, numbers = json.loads(target.shard[8 : 8 + length]), target.shard[8 + length :]

    def check(data: Any) -> None:
        text = json.dumps(data).encode()
        text += b" " * (length - len(text))
        _load_shard(target, struct.pack("<Q", len(text)) + text + numbers)

    examine(check, changed(header), examples)


def changed_bytes(target: Target, examples: int) -> None:
    """Any byte of a shard is another, or some are missing or too many."""

    def check(change: tuple[int, int, bytes]) -> None:
        place, skip, more = change
        place %= len(target.shard)
        _load_shard(target, target.shard[:place] + more + target.shard[place + skip :])

    places = st.integers(0, 2000) | st.integers(0, len(target.shard))
    examine(check, st.tuples(places, st.integers(0, 9), st.binary(max_size=9)), examples)


def _load_shard(target: Target, content: bytes) -> None:
    path = target.folder / FILE
    path.write_bytes(content)
    data = copy.deepcopy(target.manifest)
    data["files"][FILE]["bytes"] = len(content)
    (target.folder / "manifest.json").write_text(json.dumps(data))
    try:
        with contextlib.closing(SafetensorsReader(path)) as reader:
            (length,) = struct.unpack("<Q", content[:8])
            for key, tensor in reader.tensors.items():
                low, high = tensor.data_offsets
                values = torch.empty(tensor.shape, dtype=tensor.dtype)
                reader.read(key, 0, values)
                assert bytes_of(values).tobytes() == content[8 + length + low : 8 + length + high]
    except CheckpointError as error:
        assert str(path) in str(error)
    target.load()


def fresh(target: Target) -> Target:
    """The files as they were."""
    for name in (FILE, "manifest.json"):
        shutil.copy(target.good / name, target.folder / name)
    return target
