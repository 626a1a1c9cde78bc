"""The manifest of a checkpoint as plain data, and every rule it must obey (docs/checkpoint-format.md).

A manifest comes from a file that anybody may have written. `Manifest.from_json` trusts nothing in it: msgspec refuses
unknown fields and wrong types, and `_problems` refuses what types cannot express, such as parts with a gap.

`encode_value` and `decode_value` make JSON of what users hand over, and back: numbers, text, lists, dicts, tuples and
tensors; never code.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, NoReturn, Self

import msgspec
import torch
from msgspec import Meta, Struct

from zerostd.errors import CheckpointError
from zerostd.monitoring.decoding import convert
from zerostd.sharding.boxes import Box, Stretch

FORMAT = "zerostd checkpoint"
VERSION = 3
UNBOXED = 2  # the version of manifests whose parts are no boxes
SEALED_FROM = 2  # the first version whose manifests have a checksum
SEAL = re.compile(rb',"crc32":"([0-9a-f]{8})"}\n')
SEAL_BYTES = len(',"crc32":"01234567"}\n')
BLOCK = 4 << 20  # bytes of a part that share a checksum
KINDS = ("parameter", "buffer", "state", "average", "gradient", "random", "extra")
NAMED_STATES = ("state", "average")  # kinds of which a parameter may have several, by name
MOST_ELEMENTS = 1 << 60
MOST_BOXES = 4096  # of one tensor
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
# Fields that are not written if they have these values.
ABSENT_IF_DEFAULT = {"sequence": 0, "modules": {}, "passes": 0, "frozen": True, "averages": {}}
SAFETENSORS_CODES = {  # of the dtypes that checkpoints hold
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPE_BY_CODE = {code: dtype for dtype, code in SAFETENSORS_CODES.items()}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SAFETENSORS_CODES}
MOST_BITS = 8192  # of a whole number
NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

StoreTensor = Callable[[torch.Tensor], int]
LoadTensor = Callable[[int], torch.Tensor]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Crc32 = Annotated[int, Meta(ge=0, lt=1 << 32)]
Finite = Annotated[float, Meta(gt=-1e300, lt=1e300)]
Shape = Annotated[tuple[Count, ...], Meta(max_length=64)]


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name without its prefix. Raises CheckpointError for a dtype that no checkpoint can hold."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(f"{dtype} cannot be saved in a checkpoint; convert it to one of {', '.join(DTYPES)}")
    return name


class FileEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """One file of the checkpoint."""

    bytes: Count


class TensorPart(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Elements [start, stop) of a flattened tensor, or of a flattened box of it, stored in a file under a key."""

    start: Count
    stop: Count
    file: str
    key: str
    crc32: tuple[Crc32, ...]  # of each BLOCK bytes
    origin: Shape = ()  # where the box begins, and its shape; empty: it is the whole tensor
    sizes: Shape = ()


class TensorEntry(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """One tensor and the parts it is stored in."""

    kind: str
    of: str
    dtype: str
    shape: Shape
    parts: tuple[TensorPart, ...]
    state: str = ""
    original: str = ""  # dtype of a parameter before prepare
    names: tuple[str, ...] = ()  # of a parameter or buffer with several names: all of them

    @property
    def identity(self) -> tuple[str, str, str]:
        return self.kind, self.of, self.state

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def label(self) -> str:
        return f"{self.kind} {self.of!r}" + (f" ({self.state})" if self.state else "")

    def stretch_of(self, part: TensorPart) -> Stretch:
        """Return which elements of the tensor a part has."""
        return Stretch(part.origin, part.sizes if part.origin else self.shape, part.start, part.stop)

    @property
    def whole(self) -> Stretch:
        """All its elements."""
        return Stretch((), self.shape, 0, self.numel)


class OptimizerGroup(Struct, frozen=True, forbid_unknown_fields=True):
    """One of an optimizer's param_groups."""

    options: dict[str, Any]
    parameters: tuple[str, ...]


class OptimizerEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """An optimizer without its long states, which are tensors."""

    class_name: str = msgspec.field(name="class")
    groups: tuple[OptimizerGroup, ...]
    singles: dict[str, dict[str, Any]]  # scalar states, such as `step`, by parameter


class Manifest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Everything a checkpoint says about itself."""

    sequence: Count = 0  # larger than that of every checkpoint that was beside it when it was saved
    zerostd: str
    saved: Finite  # seconds since 1970
    step: Count
    world_size: Count
    stage: Count
    files: dict[str, FileEntry]
    tensors: tuple[TensorEntry, ...]
    optimizer: OptimizerEntry | None = None
    loss_scale: dict[str, int | Finite] | None = None
    random: dict[str, Any] = {}  # by rank: states of generators other than torch's
    extra: Any = None
    modules: dict[str, Any] = {}  # by name: what get_extra_state returned
    passes: Count = 0  # backward passes done of an incomplete step
    frozen: bool = True  # parameters that did not train are stored too
    averages: dict[str, dict[str, Count]] = {}  # by name: their counts of steps

    @cached_property
    def _by_name(self) -> dict[tuple[str, str], list[TensorEntry]]:
        entries: dict[tuple[str, str], list[TensorEntry]] = {}
        for entry in self.tensors:
            entries.setdefault((entry.kind, entry.of), []).append(entry)
        return entries

    def named(self, kind: str, of: str) -> list[TensorEntry]:
        """Return the states or averages of a parameter, or the one tensor of another kind, or nothing."""
        return self._by_name.get((kind, of), [])

    def of_kind(self, kind: str) -> list[TensorEntry]:
        return [entry for entry in self.tensors if entry.kind == kind]

    def to_json(self) -> str:
        has_boxes = any(part.origin for entry in self.tensors for part in entry.parts)
        data = {"format": FORMAT, "version": VERSION if has_boxes else UNBOXED, **msgspec.to_builtins(self)}
        for name, default in ABSENT_IF_DEFAULT.items():
            if data[name] == default:
                del data[name]
        return seal(data)

    @classmethod
    def from_json(cls, text: str | bytes, source: str) -> Self:
        """Return the manifest that `to_json` wrote; errors name the file as `source`."""
        what = f"{source} is not a checkpoint's manifest"
        try:
            # Not msgspec's decoder, which refuses lone surrogates in users' strings.
            data = json.loads(text, parse_constant=_refuse_constant)
            if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
                raise ValueError(f"its format is not {FORMAT!r}")
            version = data.pop("version", None)
            if type(version) is not int or not 1 <= version <= VERSION:
                raise ValueError(f"version {version!r}, but this zerostd reads up to {VERSION}; use a newer zerostd")
            if version >= SEALED_FROM:
                _check_seal(text.encode() if isinstance(text, str) else text)
                del data["crc32"]
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{what}: {error}") from error
        manifest = convert(data, cls, what=what, error=CheckpointError)
        for problem in _problems(manifest):
            raise CheckpointError(f"{what}: {problem}")
        return manifest


def seal(data: Mapping[str, Any]) -> str:
    """Return a manifest's fields as JSON, with the checksum of all that comes before it as the last field."""
    body = json.dumps(data, separators=(",", ":"), allow_nan=False).removesuffix("}")
    return f'{body},"crc32":"{zlib.crc32(body.encode()):08x}"}}\n'


def _check_seal(text: bytes) -> None:
    """Raise ValueError unless a manifest ends with the checksum of the text before it."""
    begin = max(0, len(text) - SEAL_BYTES)
    match = SEAL.fullmatch(text, begin)
    if match is None:
        raise ValueError("it does not end with its checksum: it was changed after it was saved")
    actual = zlib.crc32(text[:begin])
    if actual != int(match[1], 16):
        raise ValueError(
            f"its checksum is {match[1].decode()}, but its content has {actual:08x}: it was changed after it was saved"
        )


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _problems(manifest: Manifest) -> Iterator[str]:
    """Yield problems that types cannot express. Later checks rely on earlier ones, so only the first counts."""
    identities: set[tuple[str, str, str]] = set()
    places: set[tuple[str, str]] = set()
    shapes = {entry.of: entry.shape for entry in manifest.of_kind("parameter")}
    for name in manifest.files:
        if FILE_NAME.fullmatch(name) is None:
            yield f"{name!r} is not a plain file name"
    for entry in manifest.tensors:
        yield from _tensor_problems(entry, manifest.files)
        if entry.identity in identities:
            yield f"{entry.label} is given twice"
        identities.add(entry.identity)
        for part in entry.parts:
            if (part.file, part.key) in places:
                yield f"two parts have the key {part.key!r} in {part.file}"
            places.add((part.file, part.key))
        if entry.kind in ("state", "gradient") and shapes.get(entry.of) != entry.shape:
            yield f"{entry.label} has shape {entry.shape}, not that of its parameter"
        if entry.kind == "average" and entry.state not in manifest.averages:
            yield f"{entry.label} belongs to an average that is not in 'averages'"
        if entry.kind == "gradient" and not manifest.passes:
            yield "it has gradients, but 'passes' is 0"
    if manifest.optimizer is not None and any("params" in group.options for group in manifest.optimizer.groups):
        yield "the options of an optimizer group contain 'params'"


def _tensor_problems(entry: TensorEntry, files: Mapping[str, FileEntry]) -> Iterator[str]:
    """Yield the problems of one tensor: its parts must cover it, each in a file with a checksum for every block."""
    if entry.kind not in KINDS:
        yield f"the kind of {entry.of!r} is {entry.kind!r}, not one of {', '.join(KINDS)}"
    if (entry.kind in NAMED_STATES) != bool(entry.state):
        yield f"{entry.label} should be a state or an average with a name"
    for name in (entry.dtype, entry.original or entry.dtype):
        if name not in DTYPES:
            yield f"{name!r} is not a dtype of a checkpoint"
    if entry.numel > MOST_ELEMENTS:
        yield f"{entry.label} has {entry.numel} elements"
    for part in entry.parts:
        if part.start >= part.stop:
            yield f"part [{part.start}, {part.stop}) of {entry.label} is empty"
        if part.file not in files:
            yield f"a part of {entry.label} is in {part.file!r}, which is not among the files"
    by_box: dict[Box, list[TensorPart]] = {}
    for part in entry.parts:
        sizes = part.sizes if part.origin else entry.shape
        by_box.setdefault(Box(part.origin or (0,) * len(entry.shape), sizes), []).append(part)
    yield from _box_problems(entry, list(by_box))
    for box, parts in by_box.items() if by_box else [(Box((), entry.shape), [])]:
        yield from _part_problems(entry, box.numel, parts)


def _box_problems(entry: TensorEntry, boxes: list[Box]) -> Iterator[str]:
    """Yield the problems of the boxes of one tensor: they must lie in it, and cover it without overlapping."""
    whole = Box((0,) * len(entry.shape), entry.shape)
    if len(boxes) > MOST_BOXES:
        yield f"{entry.label} is in {len(boxes)} boxes, more than {MOST_BOXES}"
    for box in boxes:
        if len(box.offsets) != len(entry.shape) or len(box.sizes) != len(entry.shape):
            yield f"{entry.label} has a box of {len(box.sizes)} dimensions, not {len(entry.shape)}"
        elif box.shared(whole) != box and box != whole:
            yield f"{entry.label} has a box outside the tensor: {box.sizes} at {box.offsets}"
    for index, box in enumerate(boxes):
        if any(box.shared(other) is not None for other in boxes[:index]):
            yield f"{entry.label} has boxes that overlap, {box.sizes} at {box.offsets}"
    if boxes and sum(box.numel for box in boxes) != entry.numel:
        yield f"{entry.label} has boxes of {sum(box.numel for box in boxes)} elements, not {entry.numel}"


def _part_problems(entry: TensorEntry, numel: int, parts: list[TensorPart]) -> Iterator[str]:
    """Yield the problems of the parts of one tensor, or of a box of `numel` elements: they must cover it."""
    end = 0
    for part in sorted(parts, key=lambda part: part.start):
        if part.start != end:
            yield f"{entry.label} has {'a gap' if part.start > end else 'parts that overlap'} at {end}"
        end = part.stop
        wanted = -(-(part.stop - part.start) * entry.torch_dtype.itemsize // BLOCK)  # rounded up
        if len(part.crc32) != wanted:
            yield f"{entry.label} has {len(part.crc32)} checksums in a part, not {wanted}"
    if end != numel:
        yield f"{entry.label} ends at element {end} of {numel}"


def encode_value(value: Any, store: StoreTensor, where: str) -> Any:
    """Return a value as JSON. `store` takes a tensor and returns its number; `where` names the value in errors."""
    try:
        return _encode(value, store, where)
    except RecursionError as error:
        raise CheckpointError(f"{where[:80]} is nested too deeply, or contains itself") from error


def _encode(value: Any, store: StoreTensor, where: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # plain, also if it is of a subclass
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if type(value) is int:
        if value.bit_length() > MOST_BITS:
            raise CheckpointError(f"{where} is a number of {value.bit_length()} bits, too long for a checkpoint")
        return value
    if isinstance(value, torch.Tensor):
        name = dtype_name(value.dtype)
        if value.layout is not torch.strided or value.is_meta:
            raise CheckpointError(f"{where} is a tensor of {value.layout} on {value.device}: make it a dense tensor")
        if value.dim() == 0 and not value.is_complex():
            return {"$number": [name, _encode(value.item(), store, where)]}
        return {"$tensor": store(value.detach().resolve_conj().resolve_neg())}
    if isinstance(value, list) or type(value) is tuple:
        items = [_encode(item, store, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        pairs = [(key, _encode(item, store, f"{where}[{key!r}]")) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(pairs)
        return {"$items": [[_encode(key, store, f"a key of {where}"), item] for key, item in pairs]}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}; a checkpoint takes None, bool, int, float, str, list, tuple, dict and "
        "tensors: save values from which it can be rebuilt, such as its state_dict()"
    )


def decode_value(value: Any, load: LoadTensor) -> Any:
    """Return what `encode_value` was given; `load` returns a tensor by its number."""
    try:
        return _decode(value, load)
    except CheckpointError:
        raise
    except (TypeError, ValueError, RuntimeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{reprlib.repr(value):.80} in the checkpoint is not valid: {error!s:.80}") from error


def _decode(value: Any, load: LoadTensor) -> Any:
    if isinstance(value, list):
        return [_decode(item, load) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: _decode(item, load) for key, item in value.items()}
    match tag, value[tag] if len(value) == 1 else None:
        case "$tensor", int(number) if not isinstance(number, bool):
            return load(number)
        case "$float", str(name) if name in NON_FINITE:
            return NON_FINITE[name]
        case "$tuple", [*items]:
            return tuple(_decode(item, load) for item in items)
        case "$number", [str(name), encoded] if name in DTYPES:
            number = _decode(encoded, load)
            if isinstance(number, bool | int | float):
                return torch.tensor(number, dtype=DTYPES[name])
        case "$items", [*pairs] if all(isinstance(pair, list) for pair in pairs):
            return {_decode(key, load): _decode(item, load) for key, item in pairs}
    raise CheckpointError(f"{tag!r} in the checkpoint is unknown or invalid: {reprlib.repr(value):.80}")


def refuse_tensor(tensor: torch.Tensor | int) -> NoReturn:
    """Store or load tensors where there must be none: among options, scalar states and generators."""
    what = f"a tensor of shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else f"tensor {tensor}"
    raise CheckpointError(f"{what} is in options, scalar states or random states, which cannot hold tensors")
