"""One flat buffer: the parameters of a group that have one dtype and train (or are frozen) together.

The parameters stay the user's own objects. Gathered, they are views into `full`; released, they show a NaN of their
true shape. [Note: storage] autograd saves views of weights, so a released buffer keeps its storage object and only
gives its memory back: the same views are valid again when it has been gathered anew. Writes go through `full`, whose
version counter is its own, so autograd does not take them for the user's.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from zerostd.parameters.gradient import Gradient
from zerostd.parameters.state_shard import MASTER, StateShard
from zerostd.policy import Kind, Tier
from zerostd.sharding import Layout
from zerostd.tiers import TierAllocator, TierTensor
from zerostd.tiers.debug import poison


class Flat:
    """One flat buffer's parameters, masters and gradient on this rank."""

    layout: Layout
    parameters: tuple[nn.Parameter, ...]  # in the layout's order
    region: slice  # what this rank updates: its slice, or everything at stage 0
    full: torch.Tensor  # compute dtype, on the device; its storage is empty while released, if they rest elsewhere
    is_sharded: bool  # parameters rest as this rank's slice only
    rest: TierTensor  # compute dtype: where parameters rest; a view into `full` unless sharded or off the device
    state_shards: tuple[StateShard, ...]  # what the optimizer keeps, portion by portion of the region; none if frozen
    gradient: Gradient | None  # None if frozen

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        allocator: TierAllocator,
        *,
        region: slice,
        state_shards: Sequence[StateShard],
    ) -> None:
        self.layout = layout
        self.parameters = tuple(parameters)
        self.region = region
        self.state_shards = tuple(state_shards)
        self.full = torch.zeros(layout.numel, dtype=dtype, device=allocator.device)
        self.is_sharded = False
        self.rest = TierTensor(layout.numel, dtype, Tier.DEVICE, self.full)
        self.gradient = None
        self._ledger = allocator.ledger
        self._views = [self.full[i.offset : i.end].view(i.shape) for i in layout.intervals]
        loud = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
        blank = torch.full((), loud, dtype=dtype, device=allocator.device)
        self._blanks = [blank.expand(interval.shape) for interval in layout.intervals]

    @property
    def gives_back(self) -> bool:
        """Whether a released flat takes no memory beside where it rests."""
        return self.is_sharded or self.rest.tier is not Tier.DEVICE

    @property
    def is_updated_later(self) -> bool:
        """Whether updates go on after the step has returned."""
        return any(not shard.is_resident for shard in self.state_shards)

    def parameters_of(self, shard: StateShard) -> torch.Tensor | None:
        """Return the parameters of a portion where they rest: an update writes its master there. None on disk."""
        if self.rest.tensor is None:
            return None
        mine = self.rest.tensor if self.gives_back else self.full[self.region]
        return mine[shard.region]

    # Filling, when the model is prepared or moved

    @torch.no_grad()
    def adopt(self, index: int, value: torch.Tensor) -> None:
        """Take a parameter's values, before rounding, and let the parameter's own memory go."""
        self._views[index].copy_(value)
        self.set_master(index, value)
        parameter = self.parameters[index]
        if parameter.device.type == "meta":  # torch lets no tensor change between meta and a real device in place
            real = torch.empty(0, dtype=self.full.dtype, device=self.full.device)  # own version: [Note: storage]
            torch.utils.swap_tensors(parameter, nn.Parameter(real, requires_grad=parameter.requires_grad))
        parameter.data = self._views[index]

    @torch.no_grad()
    def set_master(self, index: int, value: torch.Tensor) -> None:
        """Write exact values to the master of one parameter, where there is one beside the parameter itself."""
        piece = self.layout.piece_of(index, self.region)
        if piece is None:
            return
        part = value.reshape(-1)[piece.start : piece.stop]
        for shard in self.state_shards:
            overlap = shard.overlap(piece.offset, piece.offset + piece.numel)
            if overlap is not None and not shard.holds_parameters:
                shard.master.write(overlap[0], part[overlap[1]])

    def keep(self, rank: int, rest: TierTensor | None, *, is_sharded: bool) -> None:
        """Keep what this rank needs of the values that were adopted: in `rest`, or in the gathered buffer itself."""
        self.is_sharded = is_sharded
        if rest is None:
            self._ledger.enter(Kind.PARAMETERS, self.full.nbytes)
        else:
            rest.write(slice(0, rest.numel), self.own_part(rank))
            self.rest = rest
            self._ledger.enter(Kind.BUFFERS, self.full.nbytes)
        self.share_masters()

    def share_masters(self) -> None:
        """Give the parameters to state shards whose master is the parameter itself."""
        for shard in self.state_shards:
            if shard.holds_parameters:
                tensor = self.parameters_of(shard)
                assert tensor is not None
                shard.tensors[MASTER] = TierTensor(tensor.numel(), tensor.dtype, self.rest.tier, tensor)

    # Gathering and releasing, called by the group

    def allocate(self) -> None:
        """Take memory for the gathered parameters, where releasing gave it back."""
        if self.gives_back and self.full.untyped_storage().nbytes() == 0:
            self.full.untyped_storage().resize_(self.layout.numel * self.full.element_size())
            self._ledger.enter(Kind.BUFFERS, self.full.nbytes)

    def own_part(self, rank: int) -> torch.Tensor:
        """Return the part of the gathered buffer that rests on this rank."""
        return self.full[self.layout.shard(rank)] if self.is_sharded else self.full

    def show_values(self) -> None:
        """Let parameters be views of the gathered buffer."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view

    def show_nan(self) -> None:
        """Let parameters show NaN of their shape, which takes no memory."""
        for parameter, blank in zip(self.parameters, self._blanks, strict=True):
            parameter.data = blank

    def free(self) -> None:
        """Give the gathered buffer's memory back, if parameters rest elsewhere."""
        storage = self.full.untyped_storage()
        if not self.gives_back or not storage.nbytes():
            return
        if not storage.resizable():
            warnings.warn(
                f"the memory of {self.layout.intervals[0].name!r} and its neighbours stays: a numpy array still uses "
                "it. Copy gathered parameters before you convert them: parameter.detach().clone().numpy()",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        poison(self.full)
        self._ledger.leave(Kind.BUFFERS, self.full.nbytes)
        storage.resize_(0)

    # Masters and parameters

    def round_masters(self, *, only_resident: bool = False) -> None:
        """Round the masters into the compute dtype, to where parameters rest."""
        for shard in self.state_shards:
            if shard.holds_parameters or (only_resident and not shard.is_resident):
                continue
            values = shard.read_master()
            target = self.parameters_of(shard)
            if target is not None:
                target.copy_(values)
            else:
                self.rest.write(shard.region, values.to(self.rest.dtype))

    def commit_edits(self) -> None:
        """Keep what the user wrote into the gathered parameters. Masters change only where the rounded value did,
        so untouched parameters lose no bits."""
        if self.gives_back:
            mine = self.full[self.region] if self.is_sharded else self.full
            self.rest.write(slice(0, self.rest.numel), mine)
        for shard in self.state_shards:
            if not shard.holds_parameters:
                master = shard.read_master()
                mine = self.full[self.region][shard.region].to(master.device)
                edited = mine != master.to(mine.dtype)
                values = torch.where(edited, mine.to(master.dtype), master)
                shard.master.write(slice(0, shard.numel), values)

    def exact_values(self) -> torch.Tensor:
        """Return this rank's region, or shard if it is frozen, at the precision it is kept in, on the device."""
        if not self.state_shards:
            return self.rest.read(slice(0, self.rest.numel)).to(self.full.device)
        parts = [shard.read_master().to(self.full.device) for shard in self.state_shards]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
