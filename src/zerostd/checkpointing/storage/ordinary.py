"""Models in files of the usual kinds: safetensors, one or several with an index, and state_dicts that torch.save wrote.

They are read in intervals, and no code in them is run. Names, shapes and dtypes are known before any number is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from zerostd.checkpointing.storage.directory import MANIFEST
from zerostd.checkpointing.storage.files import Reader, reason
from zerostd.errors import CheckpointError

__all__ = ["OrdinaryModel", "is_ordinary"]

SAFETENSORS, STATE_DICT, INDEX = ".safetensors", (".pt", ".pth", ".bin"), ".index.json"
STEMS = ("model.safetensors", "pytorch_model.bin")  # of a directory's model, if there are several
OURS = re.compile(r"rank-\d+-of-\d+\.safetensors")  # of a checkpoint that lost its manifest
MOST_INDEX = 256 << 20
MAPPED = 16 << 20  # bytes of a mapped file that stay in memory at least


class Place(NamedTuple):
    """What is known of a tensor without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _File(Protocol):
    path: Path

    @property
    def tensors(self) -> Mapping[str, Place]: ...

    def read(self, name: str, low: int, target: torch.Tensor) -> None: ...

    def close(self) -> None: ...


def is_ordinary(path: Path) -> bool:
    """Whether `path` is a file, or a directory with a model that is no checkpoint of ours."""
    try:
        return path.is_file() or (path.is_dir() and not (path / MANIFEST).exists() and bool(_found_in(path)))
    except OSError:
        return False


class OrdinaryModel:
    """All tensors of a model by name, whatever files they are in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: list[_File] = []
        self._homes: dict[str, _File] = {}
        try:
            for file in _found_in(path) if path.is_dir() else [path]:
                if file.name.endswith(INDEX):
                    self._open_all(file)
                else:
                    self._open(file)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let the files go."""
        for file in self._files:
            file.close()

    @property
    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._homes)

    def __contains__(self, name: str) -> bool:
        return name in self._homes

    def place(self, name: str) -> Place:
        """Shape and dtype of a tensor."""
        return self._homes[name].tensors[name]

    def read(self, name: str, low: int, high: int, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Elements [low, high) of a tensor, flattened, on the host; in these bytes of memory, if they are given."""
        dtype = self.place(name).dtype
        if memory is None:
            memory = torch.empty((high - low) * dtype.itemsize, dtype=torch.uint8)
        values = memory[: (high - low) * dtype.itemsize].view(dtype)
        self._homes[name].read(name, low, values)
        return values

    def _open(self, path: Path) -> _File:
        if path.suffix == SAFETENSORS:
            file: _File = _Safetensors(path)
        elif path.suffix in STATE_DICT:
            file = _StateDict(path)
        else:
            raise CheckpointError(
                f"{path} is no model that can be read: a checkpoint or a Hugging Face model is a directory, a file is "
                f"*{SAFETENSORS}, its *{INDEX}, or a state_dict in *{', *'.join(STATE_DICT)}"
            )
        self._files.append(file)
        for name in file.tensors:
            if name in self._homes:
                raise CheckpointError(f"{name!r} is in {self._homes[name].path} and in {path}: name one of them")
            self._homes[name] = file
        return file

    def _open_all(self, index: Path) -> None:
        """The files of an index, which must say where each tensor is."""
        weights = _read_index(index)
        files = {name: self._open(index.parent / name) for name in dict.fromkeys(weights.values())}
        for tensor, name in weights.items():
            if tensor not in files[name].tensors:
                raise CheckpointError(f"{tensor!r} is not in {index.parent / name}, where {index.name} says it is")


def _found_in(folder: Path) -> list[Path]:
    """The index of a directory, or its files."""
    names = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for kind in (SAFETENSORS, ".bin"):
        for found in (
            [path for path in names if path.name.endswith(kind + INDEX)],
            [path for path in names if path.suffix == kind and not OURS.fullmatch(path.name)],
        ):
            usual = [path for path in found if path.name.removesuffix(INDEX) in STEMS]
            if found:
                return usual or found
    return []


def _read_index(path: Path) -> dict[str, str]:
    try:
        if path.stat().st_size > MOST_INDEX:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes: it is no index")
        weights = json.loads(path.read_bytes())["weight_map"]
        if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
            raise ValueError("its weight_map does not give files by name")
        odd = [name for name in weights.values() if Path(name).name != name or name.endswith(INDEX)]
        if odd:
            raise ValueError(f"{odd[0]!r} is not a plain file name")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path} is no index of a model: {error!s:.200}") from error
    return weights


class _Safetensors:
    """Read with the file's own offsets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = Reader(path)
        self.tensors = {name: Place(one.shape, one.dtype) for name, one in self._reader.places.items()}

    def read(self, name: str, low: int, target: torch.Tensor) -> None:
        self._reader.read(name, low, low + target.numel(), target)

    def close(self) -> None:
        self._reader.close()


class _StateDict:
    """Mapped into memory by torch. What was read stays mapped, so from time to time it is mapped anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped: dict[str, torch.Tensor] = _mapped(path)
        self._num_read = 0
        self._last: tuple[str, torch.Tensor] | None = None  # one that does not lie row by row, as it should
        self._most = max(MAPPED, max((one.nbytes for one in self._mapped.values()), default=0) // 4)
        self.tensors = {name: Place(tuple(one.shape), one.dtype) for name, one in self._mapped.items()}

    def read(self, name: str, low: int, target: torch.Tensor) -> None:
        target.copy_(self._flat(name)[low : low + target.numel()])
        self._num_read += target.nbytes
        if self._num_read > self._most:
            self._mapped.clear()
            self._mapped, self._num_read = _mapped(self.path), 0
            if self.tensors != {name: Place(tuple(one.shape), one.dtype) for name, one in self._mapped.items()}:
                raise CheckpointError(f"{self.path} was changed while it was read")

    def _flat(self, name: str) -> torch.Tensor:
        if self._last is not None and self._last[0] == name:
            return self._last[1]
        tensor = self._mapped[name]
        if tensor.is_contiguous():
            return tensor.view(-1)
        self._last = (name, tensor.reshape(-1))
        return self._last[1]

    def close(self) -> None:
        self._mapped, self._last = {}, None


def _mapped(path: Path) -> dict[str, torch.Tensor]:
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever the bytes make of torch's reader
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{path} cannot be read as a state_dict of tensors, which torch.save(model.state_dict(), path) writes: "
            f"{text:.200}"
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}; save model.state_dict(), and that alone")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{path} is no state_dict, {name!r} in it is a {type(value).__name__}; save model.state_dict(), and "
                "that alone"
            )
        if value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
            raise CheckpointError(f"{name!r} in {path} is no plain tensor: {value.layout}, {value.dtype}")
    return {name: value.detach() for name, value in found.items()}
