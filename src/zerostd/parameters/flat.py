"""One flat buffer: the parameters of a group that have one dtype and train (or are frozen) together.

The parameters stay the user's own objects. Gathered, they are views into `full`; released, they show a NaN of their
true shape. What the optimizer keeps for a region is in `StateShard`s. [Note: storage] autograd saves views of weights,
so a released buffer keeps its storage object and only gives its memory back: the same views are valid again when it has
been gathered anew. Writes go through `full`, which has a separate version counter, so autograd does not mistake them
for the user's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from zerostd import kernels
from zerostd.communication.dtensors import Spec
from zerostd.compat import no_torch_function, set_local, version_of, versions_of
from zerostd.parameters.gradient import Gradient
from zerostd.parameters.lending import DATA, set_data
from zerostd.parameters.prepared import Classes, classes_for
from zerostd.parameters.secondary import SecondaryShard
from zerostd.parameters.state_shard import HIGH, LOW, MASTER, CodedTensor, Edits, StateShard, clear_low
from zerostd.policy import Kind, Tier
from zerostd.sharding import Layout, Piece
from zerostd.tiers import TierAllocator, TierTensor, Transfer
from zerostd.tiers.debug import poison
from zerostd.tiers.packed_extents import PackedExtent


@dataclass(eq=False, repr=False)
class Flat:
    """One flat buffer's parameters, masters and gradient on this rank."""

    layout: Layout
    parameters: Sequence[nn.Parameter]  # in the layout's order
    dtype: torch.dtype  # they compute in
    allocator: TierAllocator
    region: slice  # what this rank updates: its slice, or everything at stage 0
    state_shards: Sequence[StateShard]  # portion by portion of the region; none if frozen
    specs: Sequence[Spec | None] = ()  # of parameters that are DTensors: their local tensors are here; empty: none is
    is_sharded: bool = field(init=False, default=False)  # only this rank's slice of the parameters is kept
    gradient: Gradient | None = field(init=False, default=None)  # None if frozen
    secondary: SecondaryShard | None = field(init=False, default=None)  # None: every gather is one from all ranks
    readers: list[Transfer] = field(init=False, default_factory=list)  # of values and states; writes wait for them

    def __post_init__(self) -> None:
        self.specs = self.specs or [None] * len(self.parameters)
        # On the device. Its storage is empty while released, if parameters are kept elsewhere.
        self.full = torch.zeros(self.layout.numel, dtype=self.dtype, device=self.allocator.device)
        # Where parameters rest: a view into `full` unless sharded or off the device.
        self.rest = TierTensor(self.layout.numel, self.dtype, Tier.DEVICE, self.full)
        loud = float("nan") if self.dtype.is_floating_point or self.dtype.is_complex else 0
        blank = torch.full((), loud, dtype=self.dtype, device=self.full.device)
        self._faces = [  # of each parameter: its view of `full`, its NaN, and its classes
            (self._view(index, self.full), blank.expand(i.shape), classes_for(type(parameter)))
            for index, (parameter, i) in enumerate(zip(self.parameters, self.layout.intervals, strict=True))
        ]
        self._edits = Edits(self.allocator.ledger, self._read_versions())

    @property
    def gives_back(self) -> bool:
        """Whether a released flat takes no memory besides its home."""
        return self.is_sharded or self.rest.tier is not Tier.DEVICE

    def _view(self, index: int, full: torch.Tensor) -> torch.Tensor:
        """Return one parameter's values in a gathered buffer. A DTensor keeps its local tensor, which must have a
        separate version counter: [Note: storage]."""
        interval = self.layout.intervals[index]
        view = full[interval.offset : interval.end].view(interval.shape)
        return view if self.specs[index] is None else view.data

    def shown(self, index: int, full: torch.Tensor) -> torch.Tensor:
        """Return one parameter's values in a gathered buffer as users see them, in the same memory."""
        spec = self.specs[index]
        return self._view(index, full) if spec is None else spec.wrap(self._view(index, full))

    def copied(self, index: int) -> torch.Tensor:
        """Return a copy of one gathered parameter's values as users see them."""
        spec = self.specs[index]
        copy = self._faces[index][0].clone()
        return copy if spec is None else spec.wrap(copy)

    def local(self, index: int, values: torch.Tensor) -> torch.Tensor:
        """Return the part that the flat holds of a parameter, gradient or state as users see it."""
        spec = self.specs[index]
        return values if spec is None else spec.local(values)

    def num_copies(self, index: int, num_splits: int) -> int:
        """Return how many splits have the same values of a parameter; all of them, unless it is a DTensor."""
        spec = self.specs[index]
        return num_splits if spec is None else spec.num_copies

    def saves(self, index: int, split: int) -> bool:
        """Return whether this split saves a parameter: it is the first split with these values."""
        spec = self.specs[index]
        return split == 0 if spec is None else spec.is_first_copy

    def parameters_of(self, shard: StateShard) -> torch.Tensor | None:
        """Return the parameters of a portion at their home, where an update writes its master. None on disk."""
        if self.rest.tensor is None:
            return None
        mine = self.rest.tensor if self.gives_back else self.full[self.region]
        return mine[shard.region]

    @property
    def holds_halves(self) -> bool:
        """Whether parameters that users can write to without asking are the upper halves of masters."""
        return not self.gives_back and any(shard.is_split and shard.holds_parameters for shard in self.state_shards)

    # Filling, when the model is prepared or moved

    def adopt(self, index: int, value: torch.Tensor | None) -> None:
        """Take a parameter's values before rounding, if they are known, and free the parameter's own memory."""
        if value is not None:
            self.write_values(index, value)
        parameter = self.parameters[index]
        if parameter.device.type == "meta":  # torch lets no tensor change between meta and a real device in place
            real = torch.empty(0, dtype=self.full.dtype, device=self.full.device)  # own version: [Note: storage]
            torch.utils.swap_tensors(parameter, nn.Parameter(real, requires_grad=parameter.requires_grad))
        self.set_values(index, self._faces[index][0])

    def set_values(self, index: int, values: torch.Tensor) -> None:
        """Let a parameter have these values, in this memory."""
        spec = self.specs[index]
        if spec is None:
            set_data(self.parameters[index], values)
        else:
            spec.show(self.parameters[index], values)

    @torch.no_grad()
    def write_values(self, index: int, value: torch.Tensor) -> None:
        """Write the values of one gathered parameter, before rounding: to the parameter, where it is kept, and to its
        master."""
        view = self._view(index, self.full).copy_(value)
        if self.gives_back:
            piece = self._kept_piece(index)
            if piece is not None:
                self.rest.write(piece.place, view.reshape(-1)[piece.start : piece.stop])
        shards = [shard for shard in self.state_shards if shard.is_split or not shard.holds_parameters]
        owned = self.layout.piece_of(index, self.region) if shards else None
        for shard in shards:
            for part, here in shard.parts([] if owned is None else [owned]):
                exact = value.reshape(-1)[part.start : part.stop]
                if not shard.holds_parameters:
                    shard.master.write(here, exact)
                else:
                    shard.tensors[LOW].write(here, kernels.split(exact.to(torch.float32)).low)

    def _kept_piece(self, index: int) -> Piece | None:
        """Return the part of a parameter that this rank keeps."""
        return self.layout.piece_of(index, self.region if self.is_sharded else slice(0, self.layout.numel))

    def keep(self, rest: TierTensor | None, *, is_sharded: bool, has_values: bool = True) -> None:
        """Keep this rank's part of the adopted values, in `rest` or in the gathered buffer itself."""
        self.is_sharded = is_sharded
        self._edits.versions = self._read_versions()  # a DTensor of another dtype was exchanged
        if rest is None:
            self.allocator.ledger.enter(Kind.PARAMETERS, self.full.nbytes)
        else:
            if has_values:
                rest.write(slice(0, rest.numel), self.full[self.region] if self.is_sharded else self.full)
            self.rest = rest
            self.allocator.ledger.enter(Kind.BUFFERS, self.full.nbytes)
        self.share_masters()

    def share_masters(self) -> None:
        """Give the parameters to state shards whose master, or its upper half, is the parameter itself."""
        for shard in self.state_shards:
            if shard.holds_parameters:
                tensor = self.parameters_of(shard)
                assert tensor is not None
                shared = TierTensor(tensor.numel(), tensor.dtype, self.rest.tier, tensor)
                shard.tensors[HIGH if shard.is_split else MASTER] = shared

    # Gathering and releasing, called by the group

    def allocate(self) -> None:
        """Allocate memory for the gathered parameters, if a release freed it."""
        if self.gives_back and self.full.untyped_storage().nbytes() == 0:
            self.full.untyped_storage().resize_(self.layout.numel * self.full.element_size())
            self.allocator.ledger.enter(Kind.BUFFERS, self.full.nbytes)

    def show_values(self) -> None:
        """Let parameters be views of the gathered buffer."""
        with no_torch_function():
            for parameter, spec, (view, _, (_, prepared, _)) in self._with_faces():
                (DATA.__set__ if spec is None else set_local)(parameter, view)
                parameter.__class__ = prepared
        self._renew_copies()

    def show_nan(self) -> None:
        """Let parameters take no memory, and ask for their values when they are touched. Code that bypasses torch's
        functions cannot ask, and sees NaN."""
        with no_torch_function():
            for parameter, spec, (_, blank, (_, _, released)) in self._with_faces():
                (DATA.__set__ if spec is None else set_local)(parameter, blank)
                parameter.__class__ = released

    def _with_faces(self) -> Iterable[tuple[nn.Parameter, Spec | None, tuple[torch.Tensor, torch.Tensor, Classes]]]:
        return zip(self.parameters, self.specs, self._faces, strict=True)

    def free(self) -> None:
        """Free the gathered buffer, if parameters are kept elsewhere."""
        storage = self.full.untyped_storage()
        if not self.gives_back or not storage.nbytes():
            return
        if not storage.resizable():
            warnings.warn(
                f"the memory of {self.layout.intervals[0].name!r} and its neighbours is not freed: a numpy array uses "
                "it. Copy gathered parameters before you convert them: parameter.detach().clone().numpy()",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        poison(self.full)
        self.allocator.ledger.leave(Kind.BUFFERS, self.full.nbytes)
        storage.resize_(0)

    def restore_classes(self) -> None:
        """Let parameters be ordinary ones again."""
        for parameter, (_, _, (original, _, _)) in zip(self.parameters, self._faces, strict=True):
            parameter.__class__ = original

    # Masters and parameters

    def round_masters(self, *, only_resident: bool = False) -> None:
        """Round the masters into the compute dtype, to the home of the parameters."""
        self._forget_secondary()
        for shard in self.state_shards:
            if shard.holds_parameters or (only_resident and not shard.is_resident):
                continue
            column = shard.tensors[HIGH if shard.is_split else MASTER]
            values = column.read(slice(0, shard.numel))
            target = self.parameters_of(shard)
            if target is not None:
                target.copy_(values)
            else:
                self.rest.write(shard.region, values.to(self.rest.dtype))
        self._renew_copies()

    # What users write to parameters

    def wait_readers(self) -> None:
        """Wait until all reads of values and states have ended."""
        for reader in self.readers:
            reader.wait()
        self.readers.clear()

    def keep_values(self, index: int, values: torch.Tensor, *, is_compared: bool = True) -> None:
        """Keep what the user wrote to one parameter; `values` are all of its values. Unless compared with the old
        values, they reach the lower halves later."""
        self.wait_readers()
        view = self._faces[index][0]
        values = self.local(index, values)
        if self.gives_back:
            piece = self._kept_piece(index)
            if piece is not None:
                self._write_rest(piece.place, values.reshape(-1)[piece.start : piece.stop])
        elif values.data_ptr() != view.data_ptr():
            piece = self.layout.piece_of(index, self.region)
            if piece is not None and is_compared:
                part = slice(piece.start, piece.stop)
                clear_low(self.state_shards, piece.offset, values.reshape(-1)[part], view.reshape(-1)[part])
            self._view(index, self.full).copy_(values)
            self._renew_copies()
        self._edits.awaits_commit = True
        self._forget_secondary()

    def _forget_secondary(self) -> None:
        """Note that parameters change where they rest: this and other ranks gather them anew."""
        if self.secondary is not None:
            self.secondary.forget()

    def _write_rest(self, place: slice, values: torch.Tensor) -> None:
        """Write parameters to their home off the device, or in slices."""
        if any(shard.is_split and shard.holds_parameters for shard in self.state_shards):
            clear_low(self.state_shards, place.start, values, self.rest.read(place))
        self.rest.write(place, values)

    def watch(self, index: int) -> bool:
        """Copy a parameter that is half of its master, since it is about to be written to. Returns False if a copy is
        there already, or comes too late: the write went unnoticed."""
        piece = self.layout.piece_of(index, self.region)
        is_late = self._read_versions()[index] != self._edits.versions[index]
        if piece is None or is_late or piece in self._edits.copies:
            return False
        self._edits.take(piece, self.full[self.region], is_brief=True)
        return True

    def keep_watched(self, index: int, *, forget: bool) -> None:
        """Keep what the user wrote to a watched parameter; with `forget`, stop watching it."""
        piece = self.layout.piece_of(index, self.region)
        version = self._read_versions()[index]
        copy = None if piece is None else self._edits.copies.get(piece)
        if piece is None or copy is None:
            return
        if version != self._edits.versions[index]:
            self.wait_readers()
            clear_low(self.state_shards, piece.offset, self.full[self.region][piece.place], copy)
            self._edits.renew(self.full[self.region], piece)
            self._edits.versions[index] = version
            self._edits.awaits_commit = True
        if forget:
            self._edits.forget(piece)

    @property
    def has_edits(self) -> bool:
        """Whether the user wrote in place to parameters that show their values."""
        return self._read_versions() != self._edits.versions

    @property
    def awaits_commit(self) -> bool:
        """Whether the user wrote to parameters whose masters have not followed yet."""
        return self._edits.awaits_commit or self.has_edits

    def _read_versions(self) -> list[int]:
        if not any(self.specs):
            return versions_of(self.parameters)
        with no_torch_function():
            # The local tensor of a DTensor that shows its values is its view; a NaN has no version to count.
            versions = [
                version_of(parameter) + (0 if spec is None else version_of(view))
                for parameter, spec, (view, _, _) in self._with_faces()
            ]
        return versions

    def keep_all(self, full: torch.Tensor, before: torch.Tensor | None = None) -> None:
        """Keep all values of a gathered buffer: the user may have written to any. `before` are the earlier values.
        Without them, the copy of a watched parameter tells what has changed. A parameter that was written to unnoticed
        counts as new in all its elements; from then on a copy of its values tells what later writes change."""
        self.wait_readers()
        versions = self._read_versions()
        if self.gives_back:
            self._write_rest(slice(0, self.rest.numel), full[self.region] if self.is_sharded else full)
        elif before is not None:
            clear_low(self.state_shards, 0, full[self.region], before[self.region])
        elif self.holds_halves:
            for index, (then, now) in enumerate(zip(self._edits.versions, versions, strict=True)):
                piece = self.layout.piece_of(index, self.region)
                if then != now and piece is not None:
                    copy = self._edits.copies.get(piece)
                    clear_low(self.state_shards, piece.offset, full[self.region][piece.place], copy)
                    if copy is None:
                        self._edits.take(piece, full[self.region], is_brief=False)
        self._renew_copies()
        self._edits.versions = versions
        self._edits.awaits_commit = True
        self._forget_secondary()

    def commit_edits(self) -> None:
        """Let masters follow what the user wrote. Masters change only where the rounded value did, so untouched masters
        lose no bits. A master whose upper half is the parameter has followed already."""
        if self.has_edits and self.full.untyped_storage().nbytes():
            self.keep_all(self.full)
        if not self._edits.awaits_commit:
            return
        self._edits.awaits_commit = False
        self.wait_readers()
        for shard in self.state_shards:
            if not shard.holds_parameters:
                master = shard.read_master()
                mine = self.parameters_of(shard)
                mine = (self.rest.read(shard.region) if mine is None else mine).to(master.device)
                edited = mine != master.to(mine.dtype)
                shard.master.write(slice(0, shard.numel), torch.where(edited, mine.to(master.dtype), master))

    def _renew_copies(self) -> None:
        if self._edits.copies:  # else the gathered buffer may have no memory
            self._edits.renew(self.full[self.region])

    def mark_updated(self) -> None:
        """Note that an update changes the parameters: backward must not run an older graph on new values."""
        torch.autograd.graph.increment_version(self.parameters)
        self._edits.versions = self._read_versions()
        self._edits.forget(*self._edits.brief)

    def coded_bytes(self) -> Iterator[tuple[Kind, int, int]]:
        """Yield for each kind of coded state: the kind, the bytes of its numbers, and the bytes of its codes."""
        if isinstance(self.rest.extent, PackedExtent):
            yield Kind.PARAMETERS, self.rest.extent.num_bytes, self.rest.extent.held_bytes
        for tensor in (tensor for shard in self.state_shards for tensor in shard.tensors.values()):
            if isinstance(tensor, CodedTensor):
                yield Kind.OPTIMIZER_STATES, 4 * tensor.numel, tensor.moment.num_bytes(tensor.numel)

    def exact_values(self) -> torch.Tensor:
        """Return this rank's region, or shard if it is frozen, at the precision it is kept in, on the device."""
        if not self.state_shards:
            return self.rest.read(slice(0, self.rest.numel)).to(self.full.device)
        parts = [shard.read_master().to(self.full.device) for shard in self.state_shards]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
