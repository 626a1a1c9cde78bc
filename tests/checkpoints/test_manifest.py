"""The manifest: it comes back as it went, every rule is enforced, and nothing it says does harm."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import fuzz
from zerostd import CheckpointError
from zerostd.checkpointing.storage.manifest import (
    BLOCK,
    FileEntry,
    Manifest,
    OptimizerEntry,
    OptimizerGroup,
    TensorEntry,
    TensorPart,
)

FILE, SECOND = "rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"
LONG = BLOCK // 4 + 1  # elements of a float32 tensor of two blocks
MANIFEST = Manifest(
    zerostd="0.1.0",
    saved=1.5e9,
    step=3,
    world_size=2,
    stage=3,
    files={FILE: FileEntry(5000), SECOND: FileEntry(100)},
    tensors=(
        TensorEntry(
            "parameter",
            "a.weight",
            "float32",
            (2, 5),
            (TensorPart(0, 6, FILE, "0", (1,)), TensorPart(6, 10, SECOND, "0", (2**32 - 1,))),
            original="bfloat16",
            names=("a.weight", "b.weight"),
        ),
        TensorEntry("parameter", "long", "float32", (LONG,), (TensorPart(0, LONG, SECOND, "1", (3, 4)),)),
        TensorEntry("state", "a.weight", "float32", (2, 5), (TensorPart(0, 10, FILE, "1", (1,)),), "exp_avg"),
        TensorEntry("buffer", "seen", "int64", (), (TensorPart(0, 1, FILE, "2", (5,)),)),
        TensorEntry("extra", "0", "bool", (0, 3), ()),
        TensorEntry("gradient", "a.weight", "bfloat16", (2, 5), (TensorPart(0, 10, FILE, "3", (6,)),)),
    ),
    optimizer=OptimizerEntry(
        "AdamW",
        (OptimizerGroup({"lr": 0.1}, ("a.weight",)),),
        {"a.weight": {"step": {"$number": ["float32", 3.0]}}},
    ),
    loss_scale={"value": 1024.0},
    random={"0": {}, "1": {}},
    modules={"": None, "a.count": {"calls": 2}},
    passes=2,
    extra=[None, {"$tensor": 0}],
)
DATA = {**json.loads(MANIFEST.to_json()), "version": 1}  # which has no checksum: the rules behind it are tested
del DATA["crc32"]

Change = Callable[[dict[str, Any]], object]


def part(**fields: Any) -> Change:
    """The first part of the first tensor, changed."""
    return lambda data: data["tensors"][0]["parts"][0].update(fields)


def tensor(number: int = 0, **fields: Any) -> Change:
    return lambda data: data["tensors"][number].update(fields)


def group(**fields: Any) -> Change:
    return lambda data: data["optimizer"]["groups"][0].update(fields)


def double(data: dict[str, Any], number: int, **fields: Any) -> None:
    data["tensors"].append({**copy.deepcopy(data["tensors"][number]), **fields})


BROKEN: dict[str, tuple[Change, str]] = {
    "format": (lambda d: d.update(format="other"), "format is not 'zerostd checkpoint'"),
    "no format": (lambda d: d.pop("format"), "format is not 'zerostd checkpoint'"),
    "newer": (lambda d: d.update(version=4), "version 4, but this zerostd reads up to 3; use a newer zerostd"),
    "no version": (lambda d: d.pop("version"), "version None, but this zerostd reads up to 3"),
    "version 0": (lambda d: d.update(version=0), "version 0, but this zerostd reads up to 3"),
    "version of text": (lambda d: d.update(version="1"), "version '1', but this zerostd reads up to 3"),
    "unknown": (lambda d: d.update(more=1), "Object contains unknown field `more`"),
    "library": (lambda d: d.update(zerostd=1), "zerostd is 1, but must be a string"),
    "saved": (lambda d: d.update(saved="now"), "saved is 'now', but must be a number"),
    "no saved": (lambda d: d.pop("saved"), "the field 'saved' is missing"),
    "negative step": (lambda d: d.update(step=-1), "step is -1: Expected `int` >= 0"),
    "ranks": (lambda d: d.update(world_size=1.5), "world_size is 1.5, but must be a whole number"),
    "true stage": (lambda d: d.update(stage=True), "stage is True, but must be a whole number"),
    "files": (lambda d: d.update(files=[]), r"files is \[\], but must be an object"),
    "path up": (
        lambda d: d["files"].update({"../x.safetensors": {"bytes": 1}}),
        r"'\.\./x\.safetensors' is not a plain file name",
    ),
    "path down": (
        lambda d: d["files"].update({"a/x.safetensors": {"bytes": 1}}),
        r"'a/x\.safetensors' is not a plain file name",
    ),
    "absolute path": (
        lambda d: d["files"].update({"/x.safetensors": {"bytes": 1}}),
        r"'/x\.safetensors' is not a plain file name",
    ),
    "hidden": (
        lambda d: d["files"].update({".x.safetensors": {"bytes": 1}}),
        r"'\.x\.safetensors' is not a plain file name",
    ),
    "nul": (
        lambda d: d["files"].update({"x\0.safetensors": {"bytes": 1}}),
        r"'x\\x00\.safetensors' is not a plain file name",
    ),
    "line": (
        lambda d: d["files"].update({"x.safetensors\n": {"bytes": 1}}),
        r"'x\.safetensors\\n' is not a plain file name",
    ),
    "other file": (lambda d: d["files"].update({"x.pt": {"bytes": 1}}), r"'x\.pt' is not a plain file name"),
    "negative bytes": (lambda d: d["files"][FILE].update(bytes=-1), "bytes is -1: Expected `int` >= 0"),
    "huge bytes": (
        lambda d: d["files"][FILE].update(bytes=2**62),
        r"files.*\.bytes.*: Expected `int` <= 4611686018427387903",
    ),
    "no bytes": (lambda d: d["files"][FILE].pop("bytes"), r"files.*: the field 'bytes' is missing"),
    "tensors": (lambda d: d.update(tensors={}), "tensors is {}, but must be a list"),
    "a tensor": (lambda d: d["tensors"].append(1), "tensors.6 is 1, but must be an object"),
    "unknown of a tensor": (tensor(more=1), r"tensors\[0\]: Object contains unknown field `more`"),
    "kind": (tensor(kind="weight"), "kind of 'a.weight' is 'weight'"),
    "of": (tensor(of=3), "tensors.0.of is 3, but must be a string"),
    "dtype": (tensor(dtype="float33"), "'float33' is not a dtype"),
    "dtype of code": (tensor(dtype="load"), "'load' is not a dtype"),
    "original": (tensor(original="object"), "'object' is not a dtype"),
    "names": (tensor(names="ab"), "names is 'ab', but must be a list"),
    "name": (tensor(names=[1]), "names.0 is 1, but must be a string"),
    "shape": (tensor(shape="25"), "shape is '25', but must be a list"),
    "negative shape": (tensor(shape=[-2, -5]), r"tensors\.0\.shape\.0 is -2: Expected `int` >= 0"),
    "other shape": (tensor(shape=[2, 6]), "ends at element 10 of 12"),
    "smaller shape": (tensor(shape=[2, 4]), "ends at element 10 of 8"),
    "huge shape": (tensor(shape=[2**40, 2**40]), "parameter 'a.weight' has 1208925819614629174706176 elements"),
    "many dimensions": (tensor(shape=[1] * 65), r"tensors\[0\]\.shape: Expected `array` of length <= 64"),
    "state without name": (tensor(2, state=""), "should be a state or an average with a name"),
    "parameter with state": (tensor(state="x"), "should be a state or an average with a name"),
    "state of nothing": (
        tensor(2, of="b.weight"),
        r"state 'b.weight' \(exp_avg\) has shape \(2, 5\), not that of its parameter",
    ),
    "state of another shape": (
        tensor(2, shape=[5, 2]),
        r"state 'a.weight' \(exp_avg\) has shape \(5, 2\), not that of its parameter",
    ),
    "parts": (tensor(parts={}), "parts is {}, but must be a list"),
    "no parts": (tensor(parts=[]), "ends at element 0 of 10"),
    "a part": (tensor(parts=[3]), "parts.0 is 3, but must be an object"),
    "unknown of a part": (part(more=1), r"tensors\[0\]\.parts\[0\]: Object contains unknown field `more`"),
    "negative start": (part(start=-1), r"tensors\.0\.parts\.0\.start is -1: Expected `int` >= 0"),
    "empty part": (part(start=6), "part \\[6, 6\\)"),
    "backward part": (part(start=7), "part \\[7, 6\\)"),
    "huge stop": (part(stop=2**63), r"parts\.0\.stop is 9223372036854775808: Expected `int` <= 4611686018427387903"),
    "gap": (part(stop=5), "a gap at 5"),
    "overlap": (part(stop=7), "parts that overlap at 7"),
    "gap at the beginning": (part(start=1), "a gap at 0"),
    "file of a part": (
        part(file="x.safetensors"),
        "parameter 'a.weight' is in 'x.safetensors', which is not among the files",
    ),
    "file that is no text": (part(file=[]), "file is \\[\\], but must be a string"),
    "key": (part(key=0), "key is 0, but must be a string"),
    "checksums": (part(crc32=1), "crc32 is 1, but must be a list"),
    "no checksum": (part(crc32=[]), "0 checksums in a part, not 1"),
    "two checksums": (part(crc32=[1, 2]), "2 checksums in a part, not 1"),
    "large checksum": (part(crc32=[2**32]), r"crc32\.0 is 4294967296: Expected `int` <= 4294967295"),
    "one block": (lambda d: d["tensors"][1]["parts"][0].update(crc32=[1]), "1 checksums in a part, not 2"),
    "same key": (part(key="1"), "two parts have the key '1'"),
    "twice": (lambda d: double(d, 0), "parameter 'a.weight' is given twice"),
    "same place": (lambda d: double(d, 2, state="exp_avg_sq"), "two parts have the key '1'"),
    "optimizer": (lambda d: d.update(optimizer=[]), "optimizer is \\[\\], but must be an object"),
    "class": (lambda d: d["optimizer"].update({"class": 1}), "optimizer.class is 1, but must be a string"),
    "groups": (lambda d: d["optimizer"].update(groups={}), "optimizer.groups is {}, but must be a list"),
    "no groups": (lambda d: d["optimizer"].pop("groups"), "optimizer: the field 'groups' is missing"),
    "options": (group(options=[]), "options is \\[\\], but must be an object"),
    "parameters as option": (
        group(options={"params": []}),
        "options of an optimizer group contain 'params'",
    ),
    "parameters of a group": (group(parameters=[1]), "parameters.0 is 1, but must be a string"),
    "singles": (lambda d: d["optimizer"].update(singles={"a": 1}), "singles.a is 1, but must be an object"),
    "loss scale": (lambda d: d.update(loss_scale={"value": "1"}), "loss_scale.value is '1', but must be a"),
    "random": (lambda d: d.update(random=[]), "random is \\[\\], but must be an object"),
    "passes": (lambda d: d.update(passes=-1), "passes is -1: Expected `int` >= 0"),
    "gradients of no pass": (lambda d: d.pop("passes"), "it has gradients, but 'passes' is 0"),
    "gradient of another shape": (
        tensor(5, shape=[5, 2]),
        r"gradient 'a.weight' has shape \(5, 2\), not that of its parameter",
    ),
    "gradient with a name": (tensor(5, state="x"), "should be a state or an average with a name"),
    "modules": (lambda d: d.update(modules=3), "modules is 3, but must be an object"),
}


def test_it_comes_back_as_it_went() -> None:
    found = Manifest.from_json(MANIFEST.to_json(), "here")
    assert found == MANIFEST
    assert found.to_json() == MANIFEST.to_json()
    assert found.named("state", "a.weight") == [MANIFEST.tensors[2]] and found.named("state", "seen") == []
    assert found.of_kind("buffer") == [MANIFEST.tensors[3]] and found.named("buffer", "other") == []


def test_without_what_may_be_missing() -> None:
    data = copy.deepcopy(DATA)
    for name in ("optimizer", "loss_scale", "random", "modules", "passes", "extra"):
        data.pop(name)
    del data["tensors"][5]
    found = Manifest.from_json(json.dumps(data), "here")
    assert (found.optimizer, found.loss_scale, found.random, found.extra) == (None, None, {}, None)
    assert (found.modules, found.passes) == ({}, 0) and not {"modules", "passes"} & set(json.loads(found.to_json()))


@pytest.mark.parametrize("name", BROKEN)
def test_every_rule(name: str) -> None:
    change, words = BROKEN[name]
    data = copy.deepcopy(DATA)
    change(data)
    with pytest.raises(CheckpointError, match=f"^here is not a checkpoint's manifest: .*{words}"):
        Manifest.from_json(json.dumps(data), "here")


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"saved": NaN}', b"9" * 5000, b"[" * 10**5])
def test_what_is_not_json(text: bytes) -> None:
    with pytest.raises(CheckpointError, match="here is not a checkpoint's manifest"):
        Manifest.from_json(text, "here")


def test_no_changed_byte_of_it_is_overlooked() -> None:
    text = MANIFEST.to_json().encode()
    draw = random.Random(4)
    places = [*range(len(text) - 30, len(text)), *(draw.randrange(len(text)) for _ in range(400))]
    for place in places:
        for byte in {draw.randrange(256), text[place] ^ 1, text[place] ^ 0x20} - {text[place]}:
            changed = text[:place] + bytes([byte]) + text[place + 1 :]
            with pytest.raises(CheckpointError, match="here is not a checkpoint's manifest"):
                Manifest.from_json(changed, "here")
    for changed in (text[:-1], text + b" ", text.replace(b'"version":2', b'"version":1')):
        with pytest.raises(CheckpointError, match="here is not a checkpoint's manifest"):
            Manifest.from_json(changed, "here")


def test_a_changed_byte_is_called_that() -> None:
    with pytest.raises(CheckpointError, match=r"its checksum is .* it was changed after it was saved"):
        Manifest.from_json(MANIFEST.to_json().replace('"value":1024.0', '"value":1025.0'), "here")


# -- fuzz --


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> fuzz.Target:
    return fuzz.Target(tmp_path_factory.mktemp("fuzz"))


def test_any_text() -> None:
    fuzz.any_text(5 * fuzz.EXAMPLES)


def test_any_value() -> None:
    fuzz.any_value(5 * fuzz.EXAMPLES)


def test_changed_manifests(target: fuzz.Target) -> None:
    fuzz.changed_manifests(fuzz.fresh(target), 3 * fuzz.EXAMPLES)
    assert 0 < target.num_loaded < 3 * fuzz.EXAMPLES  # some changes matter, some do not


def test_changed_headers(target: fuzz.Target) -> None:
    fuzz.changed_headers(fuzz.fresh(target), fuzz.EXAMPLES)


def test_changed_bytes(target: fuzz.Target) -> None:
    fuzz.changed_bytes(fuzz.fresh(target), 2 * fuzz.EXAMPLES)


def test_the_fuzzed_checkpoint_itself_is_good(target: fuzz.Target) -> None:
    before = target.num_loaded
    fuzz.fresh(target).load()
    assert target.num_loaded == before + 1
    assert Path(target.folder, fuzz.FILE).read_bytes() == target.shard
