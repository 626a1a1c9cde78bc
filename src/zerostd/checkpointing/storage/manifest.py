"""The manifest of a checkpoint as plain data, and every rule it must obey (docs/checkpoint-format.md).

A manifest comes from a file that anybody may have written: nothing in it is believed before `Manifest.from_json` has
seen all of it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Self

from zerostd.checkpointing.storage.values import dtype_of
from zerostd.errors import CheckpointError

__all__ = ["BLOCK", "Manifest", "Part", "TensorEntry", "num_blocks"]

FORMAT, VERSION = "zerostd checkpoint", 1
BLOCK = 4 << 20  # bytes of a part that have a checksum
KINDS = ("parameter", "buffer", "state", "gradient", "random", "extra")
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
MOST_ELEMENTS, MOST_DIMENSIONS = 1 << 60, 64


@dataclass(frozen=True)
class Part:
    """Elements [start, stop) of a flattened tensor, in a file under a key."""

    start: int
    stop: int
    file: str
    key: str
    crc32: tuple[int, ...]  # of each BLOCK bytes


@dataclass(frozen=True)
class TensorEntry:
    """One tensor, whole."""

    kind: str
    of: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    state: str = ""
    original: str = ""  # dtype before prepare, of a parameter
    names: tuple[str, ...] = ()  # all names, of a parameter or buffer that has several

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def label(self) -> str:
        """For errors."""
        return f"{self.kind} {self.of!r}" + (f" ({self.state})" if self.state else "")


@dataclass(frozen=True)
class Manifest:
    """See the module's docstring."""

    zerostd: str
    saved: float
    step: int
    world_size: int
    stage: int
    files: Mapping[str, int]  # bytes, by name
    tensors: tuple[TensorEntry, ...]
    optimizer: Mapping[str, Any] | None = None
    loss_scale: Mapping[str, Any] | None = None
    random: Mapping[str, Any] = field(default_factory=dict)  # by rank: generators that are not torch's
    modules: Mapping[str, Any] = field(default_factory=dict)  # by name: what get_extra_state gave
    passes: int = 0  # backward passes of a step that was not complete
    extra: Any = None
    frozen: bool = True  # parameters that did not train are there too

    @cached_property
    def _by_name(self) -> dict[tuple[str, str, str], TensorEntry]:
        return {(one.kind, one.of, one.state): one for one in self.tensors}

    @cached_property
    def _states(self) -> dict[str, list[TensorEntry]]:
        found: dict[str, list[TensorEntry]] = {}
        for one in self.of_kind("state"):
            found.setdefault(one.of, []).append(one)
        return found

    def find(self, kind: str, of: str, state: str = "") -> TensorEntry | None:
        """A tensor by what it is; None if there is none."""
        return self._by_name.get((kind, of, state))

    def states_of(self, parameter: str) -> list[TensorEntry]:
        """The states of a parameter."""
        return self._states.get(parameter, [])

    def of_kind(self, kind: str) -> list[TensorEntry]:
        """All tensors of a kind."""
        return [one for one in self.tensors if one.kind == kind]

    def to_json(self) -> str:
        """As text that from_json takes."""
        data: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        data |= {name: getattr(self, name) for name in ("zerostd", "saved", "step", "world_size", "stage")}
        data["files"] = {name: {"bytes": size} for name, size in self.files.items()}
        data["tensors"] = [_without_empty(asdict(one)) for one in self.tensors]
        data |= {name: getattr(self, name) for name in ("optimizer", "loss_scale", "random", "extra")}
        data |= {name: getattr(self, name) for name in ("modules", "passes") if getattr(self, name)}
        data |= {} if self.frozen else {"frozen": False}
        return json.dumps(data, separators=(",", ":"), allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, source: str) -> Self:
        """The counterpart of to_json. `source` is the file's name, for errors."""
        try:
            data = json.loads(text, parse_constant=_no_constant)
            return cls(**_checked(data))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise CheckpointError(f"{source} is not a checkpoint's manifest: {_words(error)}") from error


def num_blocks(num_bytes: int) -> int:
    """Checksums of a part of so many bytes."""
    return -(-num_bytes // BLOCK)


def _without_empty(data: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if value or key not in ("state", "original", "names")}


def _words(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error) or type(error).__name__


def _checked(data: Any) -> dict[str, Any]:
    """The fields of a manifest, or an error that names the first one that is wrong."""
    _expect(isinstance(data, dict) and data.get("format") == FORMAT, f"its format is not {FORMAT!r}")
    version = data.get("version")
    if not _is_count(version) or not 1 <= version <= VERSION:
        raise CheckpointError(f"version {version!r}, and this zerostd reads {VERSION}; use a newer zerostd")
    known = {"format", "version", "zerostd", "saved", "step", "world_size", "stage", "files", "tensors", "optimizer"}
    _only(data, known | {"loss_scale", "random", "modules", "passes", "extra", "frozen"}, "a manifest")
    _expect(isinstance(data["zerostd"], str), "'zerostd' is no text")
    _expect(_is_number(data["saved"]), f"'saved' is {data['saved']!r}")
    counts = {"passes": data.get("passes", 0), **{name: data[name] for name in ("step", "world_size", "stage")}}
    for name, value in counts.items():
        _expect(_is_count(value), f"{name!r} is {value!r}")
    frozen = data.get("frozen", True)
    _expect(isinstance(frozen, bool), f"'frozen' is {frozen!r}")
    files = {name: one["bytes"] for name, one in data["files"].items()}
    for name, size in files.items():
        _expect(FILE_NAME.fullmatch(name) is not None, f"{name!r} is not a plain file name")
        _expect(_is_count(size), f"file {name!r} has {size!r} bytes")
    _expect(isinstance(data["tensors"], list), "'tensors' is no list")
    tensors = tuple(_tensor(one, files) for one in data["tensors"])
    _check_no_doubles(tensors)
    _check_states(tensors)
    has_gradients = any(one.kind == "gradient" for one in tensors)
    _expect(counts["passes"] > 0 or not has_gradients, "gradients of a step that has not begun: 'passes' is 0")
    if data.get("optimizer") is not None:
        _check_optimizer(data["optimizer"])
    scale = data.get("loss_scale")
    if scale is not None:
        _expect(isinstance(scale, dict) and all(map(_is_number, scale.values())), "'loss_scale' is not made of numbers")
    dicts = {name: data.get(name, {}) for name in ("random", "modules")}
    for name, value in dicts.items():
        _expect(isinstance(value, dict), f"{name!r} is no dict")
    found = {name: data[name] for name in ("zerostd", "saved")}
    rest = {name: data.get(name) for name in ("optimizer", "loss_scale", "extra")}
    return {**found, **counts, **rest, **dicts, "files": files, "tensors": tensors, "frozen": frozen}


def _tensor(data: Any, files: Mapping[str, int]) -> TensorEntry:
    _only(data, {"kind", "of", "dtype", "shape", "parts", "state", "original", "names"}, "a tensor")
    _expect(data["kind"] in KINDS, f"a tensor's kind is {data['kind']!r}")
    names, parts = data.get("names", []), data.get("parts", [])
    _expect(isinstance(names, list) and isinstance(parts, list), f"names or parts of {data['of']!r} are no list")
    for value in (data["of"], data.get("state", ""), data.get("original", ""), *names):
        _expect(isinstance(value, str), f"{value!r} of a tensor is no text")
    if data.get("original"):
        dtype_of(data["original"])
    shape = data["shape"]
    is_shape = isinstance(shape, list) and len(shape) <= MOST_DIMENSIONS and all(_is_count(size) for size in shape)
    _expect(is_shape, f"shape {str(shape)[:80]} of {data['of']!r}")
    entry = TensorEntry(
        data["kind"],
        data["of"],
        data["dtype"],
        tuple(shape),
        tuple(_part(one, data["of"], files) for one in parts),
        data.get("state", ""),
        data.get("original", ""),
        tuple(names),
    )
    _expect(entry.numel <= MOST_ELEMENTS, f"{entry.label} has {entry.numel} elements")
    _check_parts(entry, dtype_of(entry.dtype).itemsize)
    return entry


def _part(data: Any, of: str, files: Mapping[str, int]) -> Part:
    _only(data, {"start", "stop", "file", "key", "crc32"}, "a part")
    start, stop, sums = data["start"], data["stop"], data["crc32"]
    _expect(_is_count(start) and _is_count(stop) and start < stop, f"part [{start!r}, {stop!r}) of {of!r}")
    _expect(data["file"] in files, f"a part of {of!r} is in {data['file']!r}, which is not among the files")
    _expect(isinstance(data["key"], str), f"key {data['key']!r} of {of!r} is no text")
    _expect(isinstance(sums, list) and all(_is_count(one) and one < 1 << 32 for one in sums), f"checksums of {of!r}")
    return Part(start, stop, data["file"], data["key"], tuple(sums))


def _check_parts(entry: TensorEntry, itemsize: int) -> None:
    end = 0
    for part in sorted(entry.parts, key=lambda part: part.start):
        _expect(
            part.start == end, f"{entry.label} has {'a gap' if part.start > end else 'parts that overlap'} at {end}"
        )
        end = part.stop
        wanted = num_blocks((part.stop - part.start) * itemsize)
        _expect(len(part.crc32) == wanted, f"{entry.label} has {len(part.crc32)} checksums in a part, not {wanted}")
    _expect(end == entry.numel, f"{entry.label} ends at element {end} of {entry.numel}")


def _check_no_doubles(tensors: Sequence[TensorEntry]) -> None:
    seen: set[tuple[str, str, str]] = set()
    keys: set[tuple[str, str]] = set()
    for one in tensors:
        _expect((one.kind, one.of, one.state) not in seen, f"{one.label} is there twice")
        seen.add((one.kind, one.of, one.state))
        for part in one.parts:
            _expect((part.file, part.key) not in keys, f"two parts are {part.key!r} of {part.file}")
            keys.add((part.file, part.key))


def _check_states(tensors: Sequence[TensorEntry]) -> None:
    """Each is as long as its parameter, and so is a gradient."""
    shapes = {one.of: one.shape for one in tensors if one.kind == "parameter"}
    for one in tensors:
        _expect((one.kind == "state") == bool(one.state), f"{one.label} should be a state with a name")
        if one.state or one.kind == "gradient":
            _expect(shapes.get(one.of) == one.shape, f"{one.label} has shape {one.shape}, not that of its parameter")


def _check_optimizer(data: Any) -> None:
    _only(data, {"class", "groups", "singles"}, "an optimizer")
    _expect(isinstance(data["class"], str), "the optimizer's class is no text")
    _expect(isinstance(data["groups"], list), "the optimizer's groups are no list")
    for group in data["groups"]:
        _only(group, {"options", "parameters"}, "a group of the optimizer")
        options, names = group["options"], group["parameters"]
        _expect(isinstance(options, dict) and "params" not in options, "options of a group of the optimizer")
        _expect(isinstance(names, list) and all(isinstance(name, str) for name in names), "parameters of a group")
    singles = data["singles"]
    _expect(isinstance(singles, dict) and all(isinstance(one, dict) for one in singles.values()), "single states")


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _only(data: Any, known: set[str], what: str) -> None:
    _expect(isinstance(data, dict), f"{what} is {str(data)[:40]!r}")
    unknown = sorted(set(data) - known)
    _expect(not unknown, f"{what} has no {unknown[:1]}")


def _expect(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise CheckpointError(otherwise)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
