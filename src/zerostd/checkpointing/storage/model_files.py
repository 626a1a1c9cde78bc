"""Models in files of the usual kinds: safetensors, one or several with an index, and state_dicts that torch.save wrote.

They are read in intervals, and no code in them is run. Names, shapes and dtypes are known before any number is read.
`importing` loads prepared models from them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import torch

from zerostd.checkpointing.storage.directory import MANIFEST
from zerostd.checkpointing.storage.safetensors_files import SafetensorsReader, reason
from zerostd.errors import CheckpointError
from zerostd.monitoring.decoding import convert, decode

SAFETENSORS = ".safetensors"
STATE_DICT = (".pt", ".pth", ".bin")
INDEX = ".index.json"
STEMS = ("model.safetensors", "pytorch_model.bin")  # of a directory's model, if there are several
OURS = re.compile(r"rank-\d+-of-\d+\.safetensors")  # of a checkpoint that lost its manifest
MOST_INDEX = 256 << 20
MAPPED = 16 << 20  # bytes of a mapped file that may stay in memory

TensorReader: TypeAlias = "SafetensorsReader | StateDictReader"


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
            reader = _open(part)
            files.callback(reader.close)
            for name in reader.tensors:
                if name in readers:
                    raise CheckpointError(f"{name!r} is in {readers[name].path} and in {part}: name one of them")
                readers[name] = reader
        for tensor, name in weights.items():
            if tensor not in readers or readers[tensor].path.name != name:
                raise CheckpointError(f"{tensor!r} is not in {file.parent / name}, where {file.name} says it is")
    return readers


def _open(path: Path) -> TensorReader:
    if path.suffix == SAFETENSORS:
        return SafetensorsReader(path)
    if path.suffix in STATE_DICT:
        return StateDictReader(path)
    raise CheckpointError(
        f"{path} is no model that can be read: a checkpoint or a Hugging Face model is a directory, a file is "
        f"*{SAFETENSORS}, its *{INDEX}, or a state_dict in *{', *'.join(STATE_DICT)}"
    )


def _files_in(folder: Path) -> list[Path]:
    """Return the index of a directory, or its files."""
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for suffix in (SAFETENSORS, ".bin"):
        indices = [path for path in paths if path.name.endswith(suffix + INDEX)]
        files = indices or [path for path in paths if path.suffix == suffix and not OURS.fullmatch(path.name)]
        usual = [path for path in files if path.name.removesuffix(INDEX) in STEMS]
        if files:
            return usual or files
    return []


def _read_index(path: Path) -> dict[str, str]:
    """Return the name of each tensor's file."""
    what = f"{path} is no index of a model"
    try:
        if path.stat().st_size > MOST_INDEX:
            raise CheckpointError(f"{what}: it has {path.stat().st_size} bytes")
        index = decode(path.read_bytes(), dict[str, Any], what=what, error=CheckpointError)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}") from error
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
        self._reshaped: tuple[str, torch.Tensor] | None = None  # the last tensor that is not stored row by row
        self._most = max(MAPPED, max((tensor.nbytes for tensor in self._mapped.values()), default=0) // 4)
        self.tensors = {name: tensor.to("meta") for name, tensor in self._mapped.items()}  # shapes and dtypes

    def read(self, name: str, low: int, target: torch.Tensor) -> None:
        """Fill `target` with the elements of a flattened tensor from `low` on."""
        target.copy_(self._flat(name)[low : low + target.numel()])
        self._num_read += target.nbytes
        if self._num_read > self._most:
            self._mapped.clear()
            self._mapped = _map(self.path)
            self._num_read = 0
            if _signature(self._mapped) != _signature(self.tensors):
                raise CheckpointError(f"{self.path} was changed while it was read")

    def _flat(self, name: str) -> torch.Tensor:
        if self._reshaped is not None and self._reshaped[0] == name:
            return self._reshaped[1]
        tensor = self._mapped[name]
        if tensor.is_contiguous():
            return tensor.view(-1)
        self._reshaped = (name, tensor.reshape(-1))
        return self._reshaped[1]

    def close(self) -> None:
        """Give the memory back."""
        self._mapped = {}
        self._reshaped = None


def _map(path: Path) -> dict[str, torch.Tensor]:
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever the bytes make of torch's reader
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{path} cannot be read as a state_dict of tensors, which torch.save(model.state_dict(), path) writes: "
            f"{text:.200}"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}; save model.state_dict(), and that alone")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{path} is no state_dict, {name!r} in it is a {type(value).__name__}; save model.state_dict(), and "
                "that alone"
            )
        if value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
            raise CheckpointError(f"{name!r} in {path} is no plain tensor: {value.layout}, {value.dtype}")
    return {name: value.detach() for name, value in state.items()}


def _signature(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
