"""Models in files of the usual kinds: safetensors, one or several with an index, and state_dicts that torch.save wrote.

They are read in intervals, and no code in them is run. Names, shapes and dtypes are known before any number is read.
`importing` loads prepared models from them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch

from zerostd.checkpointing.storage.directory import MANIFEST
from zerostd.checkpointing.storage.safetensors_files import SafetensorsReader, reason
from zerostd.errors import CheckpointError
from zerostd.monitoring.decoding import convert, decode

__all__ = ["ModelFiles", "is_model"]

SAFETENSORS = ".safetensors"
STATE_DICT = (".pt", ".pth", ".bin")
INDEX = ".index.json"
STEMS = ("model.safetensors", "pytorch_model.bin")  # of a directory's model, if there are several
OURS = re.compile(r"rank-\d+-of-\d+\.safetensors")  # of a checkpoint that lost its manifest
MOST_INDEX = 256 << 20
MAPPED = 16 << 20  # bytes of a mapped file that may stay in memory


def is_model(path: Path) -> bool:
    """Return whether `path` is a file, or a directory with a model that is not a checkpoint of ours."""
    try:
        return path.is_file() or (path.is_dir() and not (path / MANIFEST).exists() and bool(_files_in(path)))
    except OSError:
        return False


class ModelFiles:
    """All tensors of a model by name, whichever files they are in."""

    def __init__(self, path: Path) -> None:
        self._files: list[SafetensorsReader | _StateDictReader] = []
        self._file_of: dict[str, SafetensorsReader | _StateDictReader] = {}
        try:
            for file in _files_in(path) if path.is_dir() else [path]:
                if file.name.endswith(INDEX):
                    self._open_all(file)
                else:
                    self._open(file)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._file_of[name].tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._file_of[name].tensors[name].dtype

    def read(self, name: str, low: int, high: int, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Return elements [low, high) of a flattened tensor, on the host; in these bytes of memory, if given."""
        dtype = self.dtype(name)
        if memory is None:
            memory = torch.empty((high - low) * dtype.itemsize, dtype=torch.uint8)
        values = memory[: (high - low) * dtype.itemsize].view(dtype)
        self._file_of[name].read(name, low, values)
        return values

    def _open(self, path: Path) -> SafetensorsReader | _StateDictReader:
        if path.suffix == SAFETENSORS:
            file: SafetensorsReader | _StateDictReader = SafetensorsReader(path)
        elif path.suffix in STATE_DICT:
            file = _StateDictReader(path)
        else:
            raise CheckpointError(
                f"{path} is no model that can be read: a checkpoint or a Hugging Face model is a directory, a file is "
                f"*{SAFETENSORS}, its *{INDEX}, or a state_dict in *{', *'.join(STATE_DICT)}"
            )
        self._files.append(file)
        for name in file.tensors:
            if name in self._file_of:
                raise CheckpointError(f"{name!r} is in {self._file_of[name].path} and in {path}: name one of them")
            self._file_of[name] = file
        return file

    def _open_all(self, index: Path) -> None:
        """Open the files of an index, which must say where each tensor is."""
        weights = _read_index(index)
        files = {name: self._open(index.parent / name) for name in dict.fromkeys(weights.values())}
        for tensor, name in weights.items():
            if tensor not in files[name].tensors:
                raise CheckpointError(f"{tensor!r} is not in {index.parent / name}, where {index.name} says it is")


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


class _StateDictReader:
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
