"""Where the gradient of one flat buffer rests between backward and step, and in which form.

One backward pass a step: in the reduce dtype (2 bytes in bf16 runs). AllOf: summed in fp32. `region` is the slice
of the flat buffer this rank updates; a rank that keeps gradients whole (stages 0 and 1) has a buffer for all of it and
reduces in place, one that shards them fills a passing buffer and keeps its region only. Gradients rest on the device or
in host memory (hosting.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerostd.compat import foreach_add_, foreach_copy_
from zerostd.monitoring import Ledger
from zerostd.parameters.host_gradient import HostGradient, HostGradientCopy
from zerostd.policy import Kind
from zerostd.sharding import Layout
from zerostd.tiers import Done, Transfer
from zerostd.tiers.host import Host

__all__ = ["Gradient", "vector_norm"]


class Gradient:
    """Holder of one flat gradient."""

    layout: Layout
    region: slice  # of the flat buffer, in elements
    whole: torch.Tensor | None  # reduce dtype, the flat buffer's length; None where gradients are sharded
    rest: torch.Tensor | None  # reduce dtype, the region's length; None while `sum` holds it
    sum: torch.Tensor | None  # fp32 (fp64 of fp64), the region's length; there when a step is several backward passes
    unsynced: torch.Tensor | None  # as `sum`, the flat buffer's length: passes under no_sync, not reduced yet
    host: Host | None  # where `rest` and `sum` are, if not on the device
    keeper: HostGradient | None  # how they get there, if the device has memory of its own
    mirror: HostGradientCopy | None  # the host's copy of parts of a gradient on the device

    def __init__(
        self,
        layout: Layout,
        region: slice,
        *,
        keep_whole: bool,
        dtype: torch.dtype,
        device: torch.device,
        ledger: Ledger,
    ) -> None:
        self.layout = layout
        self.region = region
        self.dtype = dtype
        self.device = device
        self.ledger = ledger
        self.whole = self._allocate(layout.numel, dtype) if keep_whole else None
        self.rest = None
        self.sum = None
        self.unsynced = None
        self.host = None
        self.keeper = None
        self.mirror = None
        self.has_landed = [False] * len(layout.intervals)  # by parameter: a reduced gradient rests
        self.is_unsynced = [False] * len(layout.intervals)  # by parameter: `unsynced` holds something of it
        self._views: dict[int, list[torch.Tensor]] = {}

    @property
    def numel(self) -> int:
        """Elements of the region."""
        return int(self.region.stop - self.region.start)

    @property
    def rest_dtype(self) -> torch.dtype:
        """What it rests in now."""
        return self.dtype if self.sum is None else self.sum.dtype

    @property
    def current(self) -> torch.Tensor:
        """The reduced gradient of the region, in the form it rests in."""
        if self.sum is not None:
            return self.sum
        if self.rest is None:
            self.rest = self.whole[self.region] if self.whole is not None else self._allocate_rest(self.dtype)
        self.ledger.gradient_form = f"{str(self.dtype).removeprefix('torch.')} (one backward pass a step)"
        return self.rest

    def use_sum(self) -> torch.Tensor:
        """From now on rest as an fp32 sum; what rests already is carried over."""
        if self.sum is None:
            self.sum = self._allocate_rest(torch.promote_types(self.dtype, torch.float32))
            if self.rest is not None:
                self.wait_landed()
                self.sum.copy_(self.rest)
                if self.host is not None:
                    self.host.free(self.rest)
                elif self.whole is None:
                    self.ledger.leave(Kind.GRADIENTS, self.rest.nbytes)
                self.rest = None
                self._views.clear()  # they would keep the old memory
            self.ledger.gradient_form = "float32 (summed over several backward passes)"
        return self.sum

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """One view per parameter into a buffer of the flat's length; kept, since buffers are few."""
        found = self._views.get(buffer.data_ptr())
        if found is None or found[0].dtype != buffer.dtype:
            found = [buffer[i.offset : i.end].view(i.shape) for i in self.layout.intervals]
            self._views[buffer.data_ptr()] = found
        return found

    def fill(self, buffer: torch.Tensor, arrived: Sequence[torch.Tensor | None], wanted: Sequence[bool]) -> None:
        """Write what this pass brought into `buffer`, with what earlier passes under no_sync left and is still wanted;
        parameters without a gradient count as zero."""
        write(self.views(buffer), arrived)
        if self.layout.padding:
            buffer[self.layout.numel - self.layout.padding :].zero_()
        if self.unsynced is not None:
            for view, is_wanted in zip(self.views(self.unsynced), wanted, strict=True):
                if not is_wanted:
                    view.zero_()
            buffer.add_(self.unsynced)
            self.is_unsynced = [False] * len(self.is_unsynced)
            self.ledger.leave(Kind.GRADIENTS, self.unsynced.nbytes)
            self._views.pop(self.unsynced.data_ptr(), None)
            self.unsynced = None

    def prepare_landing(self, wanted: Sequence[bool]) -> bool:
        """Make ready for a pass to land; True if it must be added to what rests. `wanted` says by parameter whether
        the gradient of earlier passes is."""
        keep = [is_wanted and has_landed for is_wanted, has_landed in zip(wanted, self.has_landed, strict=True)]
        self.has_landed = [True] * len(keep)
        if not any(keep):
            return False
        total = self.use_sum()
        if not all(keep):
            self.wait_landed()
        for piece in self.layout.pieces(self.region):
            if not keep[piece.index]:
                total[piece.offset : piece.offset + piece.numel].zero_()
        return True

    def fold(self, *, accumulate: bool) -> None:
        """Take what was reduced in place into the fp32 sum."""
        assert self.sum is not None and self.whole is not None
        if accumulate:
            self.sum.add_(self.whole)
        else:
            self.sum.copy_(self.whole)

    def add_unsynced(self, arrived: Sequence[torch.Tensor | None], wanted: Sequence[bool]) -> None:
        """Sum a pass locally, without reducing it."""
        if self.unsynced is None:
            self.unsynced = self._allocate(self.layout.numel, torch.promote_types(self.dtype, torch.float32))
            self.unsynced.zero_()
        views = self.views(self.unsynced)
        for index, grad in enumerate(arrived):
            if grad is not None:
                if wanted[index] and self.is_unsynced[index]:
                    views[index].add_(grad)
                else:
                    views[index].copy_(grad)
                self.is_unsynced[index] = True
                self.has_landed[index] = self.has_landed[index] and wanted[index]

    def land_here(self, arrived: Sequence[torch.Tensor | None], *, accumulate: bool) -> None:
        """In a world of one: straight to rest, no buffer between."""
        target = self.open_landing(accumulate=accumulate)
        views = self.views(target)
        if accumulate:
            pairs = [(view, grad) for view, grad in zip(views, arrived, strict=True) if grad is not None]
            if pairs:  # none: nothing of this flat was used in this pass
                foreach_add_([view for view, _ in pairs], [grad for _, grad in pairs])
        else:
            write(views, arrived)
            if self.layout.padding and self.keeper is not None:  # its norm is taken of the whole buffer
                target[self.layout.numel - self.layout.padding :].zero_()
        self.close_landing(target)

    def open_landing(self, *, accumulate: bool) -> torch.Tensor:
        """Where a reduced gradient is to be written, or added, on the device."""
        self.changed()
        if self.keeper is None:
            return self.current
        return self.keeper.open(self.current, self.device, accumulate=accumulate)

    def close_landing(self, landed: torch.Tensor) -> None:
        """It was, as far as the current stream is concerned: send it where it rests."""
        if self.keeper is not None:
            self.keeper.close(landed, self.current)

    def changed(self) -> None:
        """What was derived from the gradient is so no more."""
        if self.keeper is not None:
            self.keeper.norm = None
        if self.mirror is not None:
            self.mirror.is_current = False

    def close(self) -> None:
        """Give all memory back; nothing that rests here is wanted any more."""
        self.wait_landed()
        held = [self.sum if self.sum is not None else self.rest] if self.whole is None or self.sum is not None else []
        for tensor in (tensor for tensor in held if tensor is not None):
            if self.host is not None:
                self.host.free(tensor)
            else:
                self.ledger.leave(Kind.GRADIENTS, tensor.nbytes)
        for tensor in (tensor for tensor in (self.whole, self.unsynced) if tensor is not None):
            self.ledger.leave(Kind.GRADIENTS, tensor.nbytes)
        if self.mirror is not None:
            self.mirror.close()
        self.rest = self.sum = self.whole = self.unsynced = None
        self._views.clear()

    @property
    def arrived(self) -> Transfer:
        """When it is where it rests."""
        return Done() if self.keeper is None else self.keeper.kept

    @property
    def comes_up(self) -> bool:
        """Whether it rests on the host and the device has memory of its own."""
        return self.keeper is not None

    @property
    def has_host_copy(self) -> bool:
        """Whether it rests on the device and the CPU reads a copy of parts of it."""
        return self.mirror is not None

    def norm(self, order: float, part: slice | None = None) -> torch.Tensor:
        """The norm of the region, or of a part of it: fp32, on the device."""
        if part is None and self.keeper is not None and self.keeper.norm is not None and order == 2.0:
            return self.keeper.norm
        gradient = self.wait_landed() if part is None else self.wait_landed()[part]
        return vector_norm(gradient, order).to(self.device)

    def send_host_copy(self) -> None:
        """Start copying down what the CPU will read."""
        if self.mirror is not None:
            self.mirror.send(self.current)

    def host_view(self, part: slice) -> tuple[torch.Tensor, Transfer]:
        """A part of the region in host memory, and when it is there; starts its way down if it rests on the device."""
        if self.mirror is None:
            return self.current[part], self.arrived
        self.send_host_copy()
        return self.mirror.copy_of(part), self.mirror.arrived

    def overwrite_host_copy(self, part: slice) -> torch.Tensor:
        """The memory of `host_view(part)`, to be overwritten by whoever has read it."""
        assert self.mirror is not None
        self.mirror.is_overwritten = True
        return self.mirror.copy_of(part)

    def drop_overwritten_copy(self) -> None:
        """All updates of this gradient have been started: its host copy holds something else now."""
        if self.mirror is not None and self.mirror.is_overwritten:
            self.mirror.is_current = False
            self.mirror.is_overwritten = False

    def copy_to(self, target: torch.Tensor, region: slice) -> None:
        """A part of it on the device, in the dtype of `target`; the host does not wait."""
        if self.keeper is None:
            target.copy_(self.current[region])
        else:
            self.keeper.bring(self.current[region], target)

    def wait_landed(self) -> torch.Tensor:
        """The gradient where it rests, when it is there: holds the host if it rests there."""
        if self.keeper is not None:
            self.keeper.kept.synchronize()
        return self.current

    def _allocate_rest(self, dtype: torch.dtype) -> torch.Tensor:
        if self.host is not None:
            return self.host.allocate(self.numel * dtype.itemsize, Kind.GRADIENTS).view(dtype)
        return self._allocate(self.numel, dtype)

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.zeros(numel, dtype=dtype, device=self.device)
        self.ledger.enter(Kind.GRADIENTS, tensor.nbytes)
        return tensor


def vector_norm(tensor: torch.Tensor, order: float) -> torch.Tensor:
    """A norm in fp32, computed in fp32 or wider."""
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, order, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return norm.float()


def write(views: list[torch.Tensor], arrived: Sequence[torch.Tensor | None]) -> None:
    """Copy what arrived with one launch; zero the rest."""
    targets = [view for view, grad in zip(views, arrived, strict=True) if grad is not None]
    if targets:
        foreach_copy_(targets, [grad for grad in arrived if grad is not None])
    for view, grad in zip(views, arrived, strict=True):
        if grad is None:
            view.zero_()
