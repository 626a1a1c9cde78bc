"""The format of torch.distributed.checkpoint (DCP), which FSDP2 programs write and read.

Names are those of torch's `get_state_dict`: model.NAME, optim.state.NAME.STATE, optim.param_groups.N.OPTION. A rank
keeps intervals of flattened tensors; DCP knows boxes of rows and columns. `ShardedValue` presents the one as the other,
and two planners read its boxes from the tier they are in, and write them there. torch does everything else.

`DcpCheckpoint` offers what `reading.Checkpoint` offers, so `loading` loads both. DCP has no checksums. Its metadata and
options are pickled: load only what you trust.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load

from zerostd.checkpointing.storage.manifest import (
    Manifest,
    OptimizerEntry,
    OptimizerGroup,
    TensorEntry,
    dtype_name,
    encode_value,
    refuse_tensor,
)
from zerostd.checkpointing.storage.reading import OnBytes, Target
from zerostd.compat import fsspec_storage
from zerostd.engine.intervals import SavedInterval, tensor_interval
from zerostd.errors import CheckpointError
from zerostd.monitoring.decoding import decode
from zerostd.parameters.state_shard import CodedTensor
from zerostd.sharding.boxes import Box, Stretch

MODEL = "model"
OPTIMIZER = "optim"
OURS = "zerostd"  # what other programs do not have, as JSON: `extra`, states of modules, the number of steps
TENSORS_OF_OURS = "zerostd_tensors"  # that the JSON names by number
AVERAGES = "zerostd_averages"  # by name of average, then of the parameter or buffer
FAILURES = (Exception, CheckpointException)  # the latter holds those of all ranks, and is no Exception
OPTION = re.compile(r"param_groups\.(\d+)\.(.+)")


class ShardedValue:
    """What this rank keeps of one tensor, as boxes. torch calls the methods with two underscores."""

    def __init__(self, records: Sequence[SavedInterval]) -> None:
        self.shape = torch.Size(records[0].full_shape)
        self.dtype = records[0].dtype
        self.places: dict[torch.Size, tuple[Box, SavedInterval, int]] = {}  # by offsets; the first element
        self._decoded: dict[SavedInterval, torch.Tensor] = {}  # coded ones that are being filled, until they are whole
        self._num_filled: Counter[SavedInterval] = Counter()  # elements of them
        for record in records:
            for low, box in record.stretch.boxes():
                self.places[torch.Size(box.offsets)] = (box, record, low)

    def size(self) -> torch.Size:
        return self.shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, torch.Size(box.sizes)) for offsets, (box, _, _) in self.places.items()]

    def __create_write_items__(self, name: str, value: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, block.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=block, properties=properties, size=self.shape),
            )
            for block in self.__create_chunk_list__()
        ]

    def __deepcopy__(self, memo: Any) -> ShardedValue:
        """Return a copy in host memory, which a thread writes while training goes on."""
        copy = ShardedValue.__new__(ShardedValue)
        copy.shape = self.shape
        copy.dtype = self.dtype
        copy.places = {
            offsets: (box, tensor_interval(record.kind, record.of, self.read(offsets)), 0)
            for offsets, (box, record, _) in self.places.items()
        }
        return copy

    def read(self, offsets: torch.Size) -> torch.Tensor:
        """Return the values of a box: a view where they are in memory, a copy where they are on disk."""
        box, record, low = self.places[offsets]
        return record.read(low, low + box.numel)[: box.numel].view(box.sizes)

    def open(self, offsets: torch.Size) -> torch.Tensor:
        """Return the values of a box, some of which are about to be filled."""
        box, record, low = self.places[offsets]
        record.column.keep_own()
        if not isinstance(record.column, CodedTensor):
            return self.read(offsets)
        if record not in self._decoded:
            self._decoded[record] = record.read(0, record.stop - record.start)
        return self._decoded[record][low : low + box.numel].view(box.sizes)

    def write(self, offsets: torch.Size, values: torch.Tensor, num_filled: int) -> None:
        """Write the tensor that `open` returned, once its elements were filled, unless it is a view."""
        box, record, low = self.places[offsets]
        begin = record.offset + low
        if isinstance(record.column, CodedTensor):
            self._num_filled[record] += num_filled
            if self._num_filled[record] == record.stop - record.start:
                record.column.write(record.place, self._decoded.pop(record))
        elif record.column.tensor is None:
            record.column.write(slice(begin, begin + box.numel), values.reshape(-1))


class SavePlanner(DefaultSavePlanner):
    """Gives torch the values of boxes when it writes them, one at a time."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        if isinstance(value, ShardedValue):
            assert index.offset is not None
            return value.read(index.offset)
        return super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    """Takes the values of boxes as torch reads them, one at a time."""

    def __init__(self, on_bytes: OnBytes) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._on_bytes = on_bytes
        self._values = torch.empty(0)  # of the box that is being filled

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the values as they are; torch's own planner would replace those that are no tensors."""
        self.state_dict = state_dict
        self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        value = self.state_dict[index.fqn]
        if isinstance(value, ShardedValue):
            assert index.offset is not None
            self._values = value.open(index.offset)
            return self._values
        return super().lookup_tensor(index)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        index = read_item.dest_index
        value = self.state_dict[index.fqn]
        if isinstance(value, ShardedValue):
            assert index.offset is not None
            value.write(index.offset, self._values, tensor.numel())
            self._on_bytes(tensor.nbytes)


class DcpCheckpoint:
    """An open checkpoint of torch.distributed.checkpoint, with a manifest made from its metadata."""

    def __init__(
        self, path: str, names: Mapping[str, tuple[str, ...]], optimizer_class: str, long_states: Iterable[str]
    ) -> None:
        """Read the metadata, the options and the scalar states. `names` are those of the model's tensors, each with its
        kind and its other names. DCP does not store what the optimizer is that will take the states: its class, and
        which states are as long as their parameter."""
        self._path = path
        self._optimizer_class = optimizer_class
        self._long_states = frozenset(long_states)
        try:
            self._metadata = _reader(path).read_metadata().state_dict_metadata
        except Exception as error:  # whatever the bytes make of pickle, or the file system of the path
            raise CheckpointError(f"{path} is not a torch.distributed.checkpoint: {error!s:.200}") from error
        parameters = [name for name, (kind, *_) in names.items() if kind == "parameter"]
        self._model_prefix = _model_prefix(self._metadata, parameters)
        options = [key[: key.index("param_groups.0.")] for key in self._metadata if "param_groups.0." in key]
        self._optimizer_prefix = options[0] if options else None
        self._keys: dict[tuple[str, str, str], str] = {}  # by identity of an entry
        self.manifest = self._describe(names)

    def _describe(self, names: Mapping[str, tuple[str, ...]]) -> Manifest:
        entries: list[TensorEntry] = []
        modules: dict[str, Any] = {}
        values = self._load([key for key, stored in self._metadata.items() if _is_small(stored)])
        for name, key in self._model_keys(names):
            stored = self._metadata[key]
            if name.endswith("_extra_state"):
                module = name.removesuffix("_extra_state").rstrip(".")
                modules[module] = encode_value(values[key], refuse_tensor, f"the extra state of {module!r}")
            elif isinstance(stored, TensorStorageMetadata):
                entries.append(self._entry(names.get(name, ("parameter",))[0], name, key, stored))
        optimizer = None
        if self._optimizer_prefix is not None:
            optimizer = self._describe_optimizer(self._optimizer_prefix, entries, values)
        ours = decode(values.get(OURS, "{}"), dict[str, Any], what=f"{self._path}: {OURS}", error=CheckpointError)
        for key, stored in self._metadata.items():
            if key.startswith(f"{TENSORS_OF_OURS}.") and isinstance(stored, TensorStorageMetadata):
                entries.append(self._entry("extra", key.rpartition(".")[2], key, stored))
            elif key.startswith(f"{AVERAGES}.") and isinstance(stored, TensorStorageMetadata):
                _, average, of = key.split(".", 2)
                entries.append(self._entry("average", of, key, stored, average))
        return Manifest(
            zerostd="",
            saved=0.0,
            step=int(ours.get("step", 0)),
            world_size=0,  # nobody's random states
            stage=0,
            files={},
            tensors=tuple(entries),
            optimizer=optimizer,
            extra=ours.get("extra"),
            modules=modules | ours.get("modules", {}),
            averages=ours.get("averages", {}),
        )

    def _model_keys(self, known: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, str]]:
        """Yield the names of the model's tensors, each with its key: those that are known, and with a prefix others."""
        aliases = {alias for _, *others in known.values() for alias in others}
        beside = [OURS, TENSORS_OF_OURS]
        if self._optimizer_prefix is not None:
            beside += [f"{self._optimizer_prefix}state.", f"{self._optimizer_prefix}param_groups."]
        for key in self._metadata:
            name = key.removeprefix(self._model_prefix)
            is_ours = key.startswith(self._model_prefix) and name not in aliases and not key.startswith(tuple(beside))
            if is_ours and (self._model_prefix or name in known):
                yield name, key

    def _describe_optimizer(self, prefix: str, entries: list[TensorEntry], values: Mapping[str, Any]) -> OptimizerEntry:
        """Add the long states to the entries, and return options and scalar states."""
        singles: dict[str, dict[str, Any]] = {}
        options: dict[int, dict[str, Any]] = {}
        for key, stored in self._metadata.items():
            if not key.startswith(prefix):
                continue
            rest = key.removeprefix(prefix)
            if match := OPTION.fullmatch(rest):
                options.setdefault(int(match.group(1)), {})[match.group(2)] = values[key]
            elif rest.startswith("state."):
                name, _, state = rest.removeprefix("state.").rpartition(".")
                if key in values and state not in self._long_states:
                    singles.setdefault(name, {})[state] = encode_value(values[key], refuse_tensor, key)
                else:
                    entries.append(self._entry("state", name, key, stored, state))
        groups = []
        for number in sorted(options):
            parameters = tuple(options[number].pop("params"))
            encoded = encode_value(options[number], refuse_tensor, f"param_groups[{number}]")
            groups.append(OptimizerGroup(encoded, parameters))
        return OptimizerEntry(self._optimizer_class, tuple(groups), singles)

    def _entry(self, kind: str, of: str, key: str, stored: TensorStorageMetadata, state: str = "") -> TensorEntry:
        entry = TensorEntry(kind, of, dtype_name(stored.properties.dtype), tuple(stored.size), (), state)
        self._keys[entry.identity] = key
        return entry

    def _load(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return whole values: scalar tensors, and objects that were pickled."""
        state: dict[str, Any] = {}
        for key in keys:
            stored = self._metadata[key]
            is_tensor = isinstance(stored, TensorStorageMetadata)
            state[key] = torch.empty(stored.size, dtype=stored.properties.dtype) if is_tensor else None
        self._read(state, lambda num_bytes: None)
        return state

    def _read(self, state: dict[str, Any], on_bytes: OnBytes) -> None:
        if state:
            try:
                load(state, storage_reader=_reader(self._path), planner=LoadPlanner(on_bytes), no_dist=True)
            except FAILURES as error:
                raise CheckpointError(f"{self._path} cannot be read: {first_failure(error)}") from error

    def verify(self, wanted: Iterable[tuple[TensorEntry, Stretch]], on_bytes: OnBytes) -> None:
        """Check nothing: DCP has no checksums."""

    def read(self, entry: TensorEntry) -> torch.Tensor:
        """Return a whole tensor, on the host."""
        key = self._keys[entry.identity]
        value: torch.Tensor = self._load([key])[key]
        return value

    def fill_tiers(self, targets: Sequence[Target], on_bytes: OnBytes) -> None:
        """Read tensors into tier tensors, each rank what it keeps."""
        records: dict[str, list[SavedInterval]] = {}
        for entry, record in targets:
            if record.start < record.stop:
                records.setdefault(self._keys[entry.identity], []).append(record)
        self._read({key: ShardedValue(of) for key, of in records.items()}, on_bytes)

    def close(self) -> None:
        """Do nothing: no file stays open."""


def _model_prefix(keys: Collection[str], wanted: Sequence[str]) -> str:
    """Return the prefix under which a checkpoint has all of these names, or most of them."""
    first = wanted[0]
    ends = [key.removesuffix(first) for key in keys if key == first or key.endswith(f".{first}")]
    prefixes = [f"{MODEL}.", *(end for end in ends if not end or end.endswith(f"{MODEL}."))]
    return max(prefixes, key=lambda prefix: sum(prefix + name in keys for name in wanted))


def _is_small(stored: Any) -> bool:
    """Return whether something is small enough to be read by every rank: an object, or a scalar."""
    return not isinstance(stored, TensorStorageMetadata) or not stored.size


def first_failure(error: BaseException) -> str:
    """Return the error of the first rank that torch's CheckpointException names."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    return f"{type(error).__name__}: {str(error).strip()[:200]}"


def _reader(path: str) -> Any:
    return fsspec_storage()[0](path) if "://" in path else FileSystemReader(path)


def writer(path: str) -> Any:
    """Return torch's writer for a directory or a URL that fsspec knows. It refuses to write over a checkpoint: killed
    half-way, it would leave a mixture of both."""
    return fsspec_storage()[1](path, overwrite=False) if "://" in path else FileSystemWriter(path, overwrite=False)
