"""One flat buffer: the parameters of a group that have one dtype and train (or are frozen) together.

The parameters stay the user's own objects. Gathered, they are views into `full`; released, they show a NaN of their
true shape. [Note: storage] autograd saves views of weights, so a released buffer keeps its storage object and only
gives its memory back: the same views are valid again when it has been gathered anew. Writes go through `full`, whose
version counter is its own, so autograd does not take them for the user's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from zerostd.monitoring import Ledger
from zerostd.parameters.gradient import Gradient
from zerostd.policy import Kind
from zerostd.sharding import Layout

__all__ = ["Flat"]


class Flat:
    """Holder of one flat buffer's parameters, masters and gradient on this rank."""

    layout: Layout
    parameters: tuple[nn.Parameter, ...]  # in the layout's order
    is_sharded: bool  # parameters rest as this rank's slice only
    region: slice  # what this rank updates: its slice, or everything at stage 0
    full: torch.Tensor  # compute dtype; its storage is empty while released, if sharded
    shard: torch.Tensor  # compute dtype; a view into `full` unless sharded
    master: torch.Tensor | None  # fp32 region; the parameters themselves if they are fp32; None if frozen
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
        self.shard = self.full
        self.master = None
        self.gradient = None
        self.views = [self.full[i.offset : i.end].view(i.shape) for i in layout.intervals]
        loud = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
        blank = torch.full((), loud, dtype=dtype, device=device)
        self.blanks = [blank.expand(interval.shape) for interval in layout.intervals]

    @property
    def updated(self) -> torch.Tensor:
        """The region in the compute dtype: where an update publishes the masters."""
        return self.shard if self.is_sharded else self.full[self.region]

    def choose_region(self, rank: int, *, shard_states: bool, has_master: bool) -> None:
        """Say what this rank updates, before values come in."""
        if shard_states:
            self.region = self.layout.shard(rank)
        if has_master and self.full.dtype.itemsize < 4:
            self.master = torch.zeros(self.region.stop - self.region.start, device=self.full.device)
            self.ledger.enter(Kind.OPTIMIZER_STATES, self.master.nbytes)
        elif has_master:
            self.master = self.full[self.region]

    @torch.no_grad()
    def take(self, index: int, value: torch.Tensor) -> None:
        """A parameter's values, before rounding; the parameter lets its own memory go."""
        self.views[index].copy_(value)
        self.take_master(index, value)
        parameter = self.parameters[index]
        if parameter.device.type == "meta":  # torch lets no tensor change between meta and a real device in place
            real = torch.empty(
                0, dtype=self.full.dtype, device=self.full.device
            )  # its own version counter: [Note: storage]
            torch.utils.swap_tensors(parameter, nn.Parameter(real, requires_grad=parameter.requires_grad))
        parameter.data = self.views[index]

    @torch.no_grad()
    def take_master(self, index: int, value: torch.Tensor) -> None:
        """Exact values for the master of one parameter, where there is one beside the parameter itself."""
        if self.master is None or self.master.dtype == self.full.dtype:
            return
        for piece in self.layout.pieces(self.region):
            if piece.index == index:
                part = value.reshape(-1)[piece.start : piece.stop]
                self.master[piece.offset : piece.offset + piece.numel].copy_(part)

    def settle(self, rank: int, *, shard_parameters: bool) -> None:
        """All values are in: keep what rests on this rank."""
        self.shard = self.full[self.layout.shard(rank)]
        if shard_parameters:
            self.shard = self.shard.clone()
            self.is_sharded = True
            if self.master is not None and self.master.dtype == self.full.dtype:
                self.master = self.shard
            self.ledger.enter(Kind.BUFFERS, self.full.nbytes)
        self.ledger.enter(Kind.PARAMETERS, self.shard.nbytes if self.is_sharded else self.full.nbytes)

    def open(self) -> None:
        """Take memory for the gathered parameters."""
        if self.is_sharded and self.full.untyped_storage().nbytes() == 0:
            self.full.untyped_storage().resize_(self.layout.numel * self.full.element_size())
            self.ledger.enter(Kind.BUFFERS, self.full.nbytes)

    def show(self) -> None:
        """Parameters become views of the gathered buffer."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view

    def hide(self) -> None:
        """Parameters show NaN; the gathered buffer's memory goes back, if it is not where they rest."""
        for parameter, blank in zip(self.parameters, self.blanks, strict=True):
            parameter.data = blank
        if self.is_sharded and self.full.untyped_storage().nbytes():
            self.ledger.leave(Kind.BUFFERS, self.full.nbytes)
            self.full.untyped_storage().resize_(0)

    def publish(self) -> None:
        """Round the updated masters into the compute dtype."""
        if self.master is not None and self.master.dtype != self.full.dtype:
            self.updated.copy_(self.master)

    def take_edits(self) -> None:
        """The user wrote into the gathered parameters: keep it. Masters change only where the rounded value did,
        so untouched parameters lose no bits."""
        mine = self.full[self.region]
        if self.is_sharded:
            self.shard.copy_(mine)
        if self.master is not None and self.master.dtype != self.full.dtype:
            edited = mine != self.master.to(mine.dtype)
            self.master.copy_(torch.where(edited, mine.float(), self.master))
