"""Load an ordinary model, from files that know nothing of zerostd, into a prepared model.

names, shapes, dtypes -> everything is checked, on all ranks -> each rank reads what it keeps, block by block

The files are safetensors, one or several with an index, or state_dicts that torch.save wrote. They are read in
intervals, and no code in them is run. Names, shapes and dtypes are known before any number is read.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from zerostd.checkpointing.loading import load_in_two_phases
from zerostd.checkpointing.storage.directory import MANIFEST
from zerostd.checkpointing.storage.reading import copy_shared
from zerostd.checkpointing.storage.safetensors_files import SafetensorsReader
from zerostd.engine.intervals import SavedInterval, kept_values
from zerostd.engine.runtime import Runtime
from zerostd.errors import CheckpointError
from zerostd.monitoring.decoding import convert, decode, read_document
from zerostd.monitoring.progress import ByteProgress
from zerostd.optimizers.optimizer import ZeroOptimizer
from zerostd.parameters.blueprints import buffers_of, named_tensors
from zerostd.sharding.boxes import Stretch

BLOCK = 4 << 20  # bytes read at a time
MOST_NAMED = 40  # in an error, of each kind; the log has all
SAFETENSORS = ".safetensors"
STATE_DICT = (".pt", ".pth", ".bin")
INDEX = ".index.json"
STEMS = ("model.safetensors", "pytorch_model.bin")  # of a directory's model, if there are several
OURS = re.compile(r"rank-\d+-of-\d+\.safetensors")  # of a checkpoint that lost its manifest
MAPPED = 16 << 20  # bytes of a mapped file that may stay in memory

TensorReader: TypeAlias = "SafetensorsReader | StateDictReader"
ModelTensor = tuple[torch.Tensor, str, tuple[int, ...], torch.dtype]  # with its name, shape and dtype as it is kept

log = logging.getLogger("zerostd")


@torch.no_grad()
def import_model(runtime: Runtime, optimizer: ZeroOptimizer | None, path: Path) -> None:
    """Load ordinary files. All ranks call it. Nothing is changed unless all fits; optimizer states stay."""
    runtime.world.check_here("zerostd.load() of an ordinary model")
    readers: dict[str, TensorReader] = {}

    def check(files: ExitStack) -> dict[str, str]:
        if optimizer is not None:
            raise CheckpointError(
                f"{path} is an ordinary model without optimizer states: leave the optimizer out of "
                "zerostd.load. Masters take the new values, and optimizer states stay as they are"
            )
        readers.update(open_model(path, files))
        return _match_names(runtime.model, _model_tensors(runtime), readers)

    sources = load_in_two_phases(runtime, optimizer, check, lambda sources: _apply(runtime, readers, sources))
    if runtime.world.rank == 0:
        stored = {name: readers[source].tensors[source].dtype for name, source in sources.items()}
        kept = {name: dtype for _, name, _, dtype in _model_tensors(runtime)}
        conversions = Counter((dtype, kept[name]) for name, dtype in stored.items() if dtype != kept[name])
        how = [
            f"{count} tensor{'s' if count > 1 else ''} from {_dtype_text(old)} to {_dtype_text(new)}"
            for (old, new), count in conversions.items()
        ]
        log.info("%d tensors loaded from %s: %s", len(sources), path, "; ".join(how) or "nothing was converted")


def _model_tensors(runtime: Runtime) -> Iterator[ModelTensor]:
    """Yield every parameter and persistent buffer with its name, its shape and the dtype in which it is kept."""
    for flat, parameter, interval in runtime.parameters():
        kept = flat.state_shards[0].master if flat.state_shards else flat.rest
        yield parameter, interval.name, interval.full_shape, kept.dtype
    for name, buffer in buffers_of(runtime.model).items():
        yield buffer, name, tuple(buffer.shape), buffer.dtype


def check_files(model: nn.Module, path: Path) -> None:
    """Raise CheckpointError if ordinary files do not have what a model needs, which is not prepared yet."""
    named = [*model.named_parameters(), *buffers_of(model).items()]
    with ExitStack() as files:
        readers = open_model(path, files)
        _match_names(model, [(t, name, tuple(t.shape), t.dtype) for name, t in named], readers)


def _match_names(
    model: nn.Module, tensors: Iterable[ModelTensor], readers: Mapping[str, TensorReader]
) -> dict[str, str]:
    """Return the name in the files of every tensor with elements, by its name in the model; raise if any is amiss."""
    aliases: dict[torch.Tensor, list[str]] = {}
    for name, tensor, _ in named_tensors(model):
        aliases.setdefault(tensor, []).append(name)
    known = {name for names in aliases.values() for name in names}
    missing: list[str] = []
    unlike: list[str] = []
    sources: dict[str, str] = {}
    for tensor, model_name, shape, dtype in tensors:
        names = aliases[tensor]
        present = [name for name in names if name in readers]
        if not present and 0 not in shape:
            others = f" (or {', '.join(map(repr, names[1:]))})" if len(names) > 1 else ""
            missing.append(f"{names[0]!r}{others}")
        for name in present:
            stored = readers[name].tensors[name]
            if tuple(stored.shape) != shape:
                unlike.append(f"{name!r} has shape {tuple(stored.shape)}, but {shape} in the model")
            elif _kind(stored.dtype) != _kind(dtype):
                unlike.append(f"{name!r} is {_dtype_text(stored.dtype)}, but {_dtype_text(dtype)} in the model")
        if present and 0 not in shape:
            sources[model_name] = present[0]
    unknown = [repr(name) for name in readers if name not in known]
    sentences = []
    for what, items in (("missing", missing), ("not in the model", unknown), ("different", unlike)):
        more = ""
        if len(items) > MOST_NAMED:
            log.error("%s: %s", what, ", ".join(items))
            more = f", and {len(items) - MOST_NAMED} more, which the log names"
        if items:
            sentences.append(f"{what}: {', '.join(items[:MOST_NAMED])}{more}")
    if sentences:
        raise CheckpointError("the files do not match the model: " + "; ".join(sentences))
    return sources


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    return dtype.is_floating_point, dtype.is_complex, dtype == torch.bool


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _apply(runtime: Runtime, readers: Mapping[str, TensorReader], sources: Mapping[str, str]) -> None:
    """Read what this rank keeps, into the masters where there are any."""
    rank = runtime.world.shard_rank
    records = [record for flat in runtime.flats for record in kept_values(flat, rank) if record.stop]
    total = sum((record.stop - record.start) * record.dtype.itemsize for record in records)
    memory = torch.empty(BLOCK, dtype=torch.uint8)
    with ByteProgress("loading", total, is_shown=runtime.world.rank == 0) as progress:
        for record in records:
            source = sources[record.of]
            block = memory.view(readers[source].tensors[source].dtype)
            if record.whole is not None:
                _fill_box(record, readers[source], source, block)
                progress.add((record.stop - record.start) * record.dtype.itemsize)
                continue
            for low in range(record.start, record.stop, block.numel()):
                values = block[: record.stop - low]
                readers[source].read(source, low, values)
                place = record.offset + low - record.start
                record.column.write(slice(place, place + values.numel()), values.to(record.dtype))
                progress.add(values.numel() * record.dtype.itemsize)
    for flat in runtime.flats:
        flat.round_masters()
    for name, buffer in buffers_of(runtime.model).items():
        if name in sources:
            source = sources[name]
            values = torch.empty(buffer.shape, dtype=readers[source].tensors[source].dtype)
            readers[source].read(source, 0, values.view(-1))
            buffer.copy_(values)


def _fill_box(record: SavedInterval, reader: TensorReader, source: str, block: torch.Tensor) -> None:
    """Read a part of a box of a tensor, of which the file has all rows."""
    values = torch.empty(record.stop - record.start, dtype=record.dtype)
    whole = Stretch((), record.full_shape, 0, 0)
    row = math.prod(whole.shape[1:])
    end = (record.origin[0] + record.shape[0]) * row
    for low in range(record.origin[0] * row, end, block.numel()):
        numbers = block[: end - low]
        stretch = whole.part(low, low + numbers.numel())
        if any(True for _ in record.stretch.shared(stretch)):
            reader.read(source, low, numbers)
            copy_shared(numbers, stretch, values, record.stretch)
    record.column.write(record.place, values)


def is_model(path: Path) -> bool:
    """Return whether `path` is a file, or a directory with a model that is not a checkpoint of ours."""
    try:
        return path.is_file() or (path.is_dir() and not (path / MANIFEST).exists() and bool(_files_in(path)))
    except OSError:
        return False


def open_model(path: Path, files: ExitStack) -> dict[str, TensorReader]:
    """Open the files of a model and return the reader of each tensor, by name. `files` closes them."""
    readers: dict[str, TensorReader] = {}
    for file in _files_in(path) if path.is_dir() else [path]:
        is_index = file.name.endswith(INDEX)
        weights = _read_index(file) if is_index else {}
        for part in [file.parent / name for name in dict.fromkeys(weights.values())] if is_index else [file]:
            if part.suffix not in (SAFETENSORS, *STATE_DICT):
                raise CheckpointError(
                    f"{part} cannot be read as a model: name the directory of a checkpoint or a Hugging Face model, a "
                    f"*{SAFETENSORS} file, its *{INDEX}, or a state_dict in *{', *'.join(STATE_DICT)}"
                )
            reader = SafetensorsReader(part) if part.suffix == SAFETENSORS else StateDictReader(part)
            files.callback(reader.close)
            for name in reader.tensors:
                if name in readers:
                    raise CheckpointError(f"{name!r} is both in {readers[name].path} and in {part}: name one file")
                readers[name] = reader
        for tensor, name in weights.items():
            if tensor not in readers or readers[tensor].path.name != name:
                raise CheckpointError(f"{tensor!r} is not in {file.parent / name}, although {file.name} lists it there")
    return readers


def _files_in(folder: Path) -> list[Path]:
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for suffix in (SAFETENSORS, ".bin"):
        indices = [path for path in paths if path.name.endswith(suffix + INDEX)]
        files = indices or [path for path in paths if path.suffix == suffix and not OURS.fullmatch(path.name)]
        usual = [path for path in files if path.name.removesuffix(INDEX) in STEMS]
        if files:
            return usual or files
    return []


def _read_index(path: Path) -> dict[str, str]:
    what = f"{path} is not the index of a model"
    text = read_document(path, what=str(path), error=CheckpointError)
    index = decode(text, dict[str, Any], what=what, error=CheckpointError)
    weights = convert(index.get("weight_map"), dict[str, str], what=f"{what}: weight_map", error=CheckpointError)
    for name in weights.values():
        if Path(name).name != name or name.endswith(INDEX):
            raise CheckpointError(f"{what}: {name!r} is not a plain file name")
    return weights


class StateDictReader:
    """A file that torch maps into memory. What was read stays mapped, so from time to time it is mapped again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped = _map(path)
        self._num_read = 0
        self._last = ("", torch.empty(0))  # name and numbers of the last tensor that is not stored row by row
        self._most = max(MAPPED, max((tensor.nbytes for tensor in self._mapped.values()), default=0) // 4)
        self.tensors = {name: tensor.to("meta") for name, tensor in self._mapped.items()}  # shapes and dtypes

    def read(self, name: str, low: int, target: torch.Tensor) -> None:
        """Fill `target` with the elements of a flattened tensor from `low` on."""
        if name != self._last[0] and not self._mapped[name].is_contiguous():
            self._last = (name, self._mapped[name].reshape(-1))
        flat = self._last[1] if name == self._last[0] else self._mapped[name].view(-1)
        target.copy_(flat[low : low + target.numel()])
        del flat  # or the old mapping would stay
        self._num_read += target.nbytes
        if self._num_read > self._most:
            self._mapped.clear()
            self._mapped = _map(self.path)
            self._num_read = 0
            if _signature(self._mapped) != _signature(self.tensors):
                raise CheckpointError(f"{self.path} was changed while it was read")

    def close(self) -> None:
        self._mapped = {}
        self._last = ("", torch.empty(0))


def _map(path: Path) -> dict[str, torch.Tensor]:
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever the bytes make of torch's reader
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{path} cannot be read as a state_dict; write it with torch.save(model.state_dict(), path). Cause: "
            f"{text:.200}"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a state_dict; save only model.state_dict()")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{path} is not a state_dict: its entry {name!r} is a {type(value).__name__}; save only "
                "model.state_dict()"
            )
        if value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
            raise CheckpointError(f"{name!r} in {path} is not a dense tensor: {value.layout}, {value.dtype}")
    return {name: value.detach() for name, value in state.items()}


def _signature(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
