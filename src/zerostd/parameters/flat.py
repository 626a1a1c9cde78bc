"""One flat buffer: the parameters of a group that have one dtype and train (or are frozen) together.

The parameters stay the user's own objects. Gathered, they are views into `full`; released, they show a NaN of their
true shape. [Note: storage] autograd saves views of weights, so a released buffer keeps its storage object and only
gives its memory back: the same views are valid again when it has been gathered anew. Writes go through `full`, whose
version counter is its own, so autograd does not take them for the user's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from zerostd.monitoring import Ledger
from zerostd.parameters.gradient import Gradient
from zerostd.parameters.state_shard import MASTER, StateShard
from zerostd.policy import Kind, Tier
from zerostd.sharding import Layout
from zerostd.tiers import TierTensor
from zerostd.tiers.debug import DEBUG

__all__ = ["Flat"]


class Flat:
    """Holder of one flat buffer's parameters, masters and gradient on this rank."""

    layout: Layout
    parameters: tuple[nn.Parameter, ...]  # in the layout's order
    is_sharded: bool  # parameters rest as this rank's slice only
    region: slice  # what this rank updates: its slice, or everything at stage 0
    full: torch.Tensor  # compute dtype, on the device; its storage is empty while released, if they rest elsewhere
    rest: TierTensor  # compute dtype: where parameters rest; a view into `full` unless sharded or off the device
    state_shards: tuple[StateShard, ...]  # what the optimizer keeps, portion by portion of the region; none if frozen
    gradient: Gradient | None  # None if frozen

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        device: torch.device,
        ledger: Ledger,
    ) -> None:
        self.layout = layout
        self.parameters = tuple(parameters)
        self.ledger = ledger
        self.full = torch.zeros(layout.numel, dtype=dtype, device=device)
        self.is_sharded = False
        self.region = slice(0, layout.numel)
        self.rest = TierTensor(layout.numel, dtype, Tier.DEVICE, self.full)
        self.state_shards = ()
        self.gradient = None
        self.views = [self.full[i.offset : i.end].view(i.shape) for i in layout.intervals]
        loud = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
        blank = torch.full((), loud, dtype=dtype, device=device)
        self.blanks = [blank.expand(interval.shape) for interval in layout.intervals]

    @property
    def gives_back(self) -> bool:
        """Whether a released flat takes no memory beside where it rests."""
        return self.is_sharded or self.rest.tier is not Tier.DEVICE

    @property
    def is_updated_later(self) -> bool:
        """Whether updates go on after the step has returned."""
        return any(not shard.is_resident for shard in self.state_shards)

    def parameters_of(self, shard: StateShard) -> torch.Tensor | None:
        """A portion of the region in the compute dtype: where an update publishes its master. None on disk."""
        if self.rest.tensor is None:
            return None
        mine = self.rest.tensor if self.gives_back else self.full[self.region]
        return mine[shard.portion.start : shard.portion.stop]

    @torch.no_grad()
    def take(self, index: int, value: torch.Tensor) -> None:
        """A parameter's values, before rounding; the parameter lets its own memory go."""
        self.views[index].copy_(value)
        self.set_master(index, value)
        parameter = self.parameters[index]
        if parameter.device.type == "meta":  # torch lets no tensor change between meta and a real device in place
            real = torch.empty(
                0, dtype=self.full.dtype, device=self.full.device
            )  # its own version counter: [Note: storage]
            torch.utils.swap_tensors(parameter, nn.Parameter(real, requires_grad=parameter.requires_grad))
        parameter.data = self.views[index]

    @torch.no_grad()
    def set_master(self, index: int, value: torch.Tensor) -> None:
        """Exact values for the master of one parameter, where there is one beside the parameter itself."""
        for piece in self.layout.pieces(self.region):
            if piece.index != index:
                continue
            part = value.reshape(-1)[piece.start : piece.stop]
            for shard in self.state_shards:
                found = shard.overlap(piece.offset, piece.offset + piece.numel)
                if found is not None and not shard.holds_parameters:
                    shard.master.write(found[0], part[found[1]])

    def settle(self, rank: int, rest: TierTensor | None, *, is_sharded: bool) -> None:
        """All values are in: keep what rests on this rank, in `rest` if that is not the gathered buffer itself."""
        self.is_sharded = is_sharded
        if rest is None:
            self.ledger.enter(Kind.PARAMETERS, self.full.nbytes)
        else:
            rest.write(slice(0, rest.numel), self.full[self.layout.shard(rank)] if is_sharded else self.full)
            self.rest = rest
            self.ledger.enter(Kind.BUFFERS, self.full.nbytes)
        self.share_masters()

    def share_masters(self) -> None:
        """Shelves whose master is the parameter itself get it."""
        for shard in self.state_shards:
            if shard.holds_parameters:
                tensor = self.parameters_of(shard)
                assert tensor is not None
                shard.columns[MASTER] = TierTensor(tensor.numel(), tensor.dtype, self.rest.tier, tensor)

    def open(self) -> None:
        """Take memory for the gathered parameters."""
        if self.gives_back and self.full.untyped_storage().nbytes() == 0:
            self.full.untyped_storage().resize_(self.layout.numel * self.full.element_size())
            self.ledger.enter(Kind.BUFFERS, self.full.nbytes)

    def place(self, rank: int) -> torch.Tensor:
        """Where what rests here goes in the gathered buffer."""
        return self.full[self.layout.shard(rank)] if self.is_sharded else self.full

    def show(self) -> None:
        """Parameters become views of the gathered buffer."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view

    def hide(self) -> None:
        """Parameters show NaN; the gathered buffer's memory goes back, if it is not where they rest."""
        for parameter, blank in zip(self.parameters, self.blanks, strict=True):
            parameter.data = blank
        storage = self.full.untyped_storage()
        if not self.gives_back or not storage.nbytes():
            return
        if not storage.resizable():
            warnings.warn(
                f"the memory of {self.layout.intervals[0].name!r} and its neighbours stays: somebody has it as an "
                "array of numpy's. Take a copy of gathered parameters, such as parameter.detach().clone().numpy()",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        DEBUG.poison(self.full)
        self.ledger.leave(Kind.BUFFERS, self.full.nbytes)
        storage.resize_(0)

    def round_masters(self, *, only_resident: bool = False) -> None:
        """Round the masters into the compute dtype."""
        for shard in self.state_shards:
            if shard.holds_parameters or (only_resident and not shard.is_resident):
                continue
            self.write_parameters(shard, shard.read_master())

    def write_parameters(self, shard: StateShard, values: torch.Tensor) -> None:
        """New values of a portion to where parameters rest."""
        target = self.parameters_of(shard)
        if target is not None:
            target.copy_(values)
        else:
            portion = slice(shard.portion.start, shard.portion.stop)
            self.rest.write(portion, values.to(self.rest.dtype))

    def commit_edits(self) -> None:
        """The user wrote into the gathered parameters: keep it. Masters change only where the rounded value did,
        so untouched parameters lose no bits."""
        if self.gives_back:
            mine = self.full[self.region] if self.is_sharded else self.full
            self.rest.write(slice(0, self.rest.numel), mine)
        for shard in self.state_shards:
            if not shard.holds_parameters:
                master = shard.read_master()
                mine = self.full[self.region][shard.portion.start : shard.portion.stop].to(master.device)
                edited = mine != master.to(mine.dtype)
                values = torch.where(edited, mine.to(master.dtype), master)
                shard.master.write(slice(0, shard.portion.numel), values)

    def exact_values(self) -> torch.Tensor:
        """This rank's region, or shard if it is frozen, at the precision it is kept in, on the device."""
        if not self.state_shards:
            return self.rest.read(slice(0, self.rest.numel)).to(self.full.device)
        parts = [part.to(self.full.device) for part in self._masters()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _masters(self) -> Iterator[torch.Tensor]:
        for shard in self.state_shards:
            yield shard.read_master()
