"""The gradient of one flat buffer: where it is kept between backward and step, and in which form.

With one backward pass per step it is kept in the reduce dtype (2 bytes in bf16 runs); with several it is summed in
fp32. `region` is the slice of the flat buffer this rank updates. A rank that keeps gradients whole (stages 0 and 1) has
a buffer for the whole flat and reduces in place. A rank that shards them fills a shared buffer and keeps its region
only. The reducer calls the verbs of landing, the optimizer those of reading. A gradient that is kept on the device may
have a copy of parts on the host, for the CPU to read; one that is kept on the host is a `HostGradient`
(host_gradient.py), and one on disk a `DiskGradient` (disk_gradient.py).

[Note: memory of gradients] After zero_grad() no gradient is kept. The next forward frees the memory and can use it for
activations until a gradient lands. Storage objects stay, so views stay valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from zerostd.compat import foreach_add_, foreach_copy_, foreach_norm, storage_of
from zerostd.policy import Kind, Tier
from zerostd.sharding import Layout
from zerostd.tiers import Done, Streams, TierAllocator, TierTensor, Transfer, record_event
from zerostd.tiers.host import Host

DOWN = (Tier.DEVICE.value, Tier.HOST.value)

Arrived = Sequence[torch.Tensor | None]  # what one pass brought, by parameter


@dataclass(eq=False, repr=False)
class Gradient:
    """One flat gradient, which is kept on the device."""

    tier = Tier.DEVICE
    is_kept = True  # until the step
    comes_up = False  # whether an update on the device reads a copy of it: it is in other memory, or on disk
    layout: Layout
    region: slice  # of the flat buffer, in elements
    dtype: torch.dtype  # of the reduce
    allocator: TierAllocator
    keep_whole: bool  # has a buffer of the flat's length, to reduce in place
    host_copy: HostGradientCopy | None = None  # where the CPU reads parts of it
    arrived: Transfer = field(init=False, default_factory=Done)  # the last transfer to its home

    def __post_init__(self) -> None:
        # In `dtype`, the flat buffer's length. None where gradients are sharded.
        self.whole = self._allocate(self.layout.numel, self.dtype) if self.keep_whole else None
        # In `dtype`, the region's length, a view of `whole` where there is one. None before its first use, and while
        # `_sum` holds the gradient.
        self._rest: torch.Tensor | None = None if self.whole is None else self.whole[self.region]
        self._sum: torch.Tensor | None = None  # fp32 (fp64 of fp64), the region's length: several passes make a step
        self._unsynced: torch.Tensor | None = None  # as `_sum`, the flat's length: passes under no_sync, not reduced
        self._has_landed = [False] * len(self.layout.intervals)  # by parameter: a reduced gradient is there
        self._is_unsynced = [False] * len(self.layout.intervals)  # by parameter: `_unsynced` holds something of it
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}

    # Its home

    @property
    def is_given_back(self) -> bool:
        """Whether the gradient has no memory; see [Note: memory of gradients]."""
        return any(tensor.untyped_storage().nbytes() == 0 for tensor in self._memories)

    @property
    def memories(self) -> list[torch.Tensor]:
        """All tensors of the gradient on the device."""
        kept = self._memories if self.tier is Tier.DEVICE else []
        return kept if self._unsynced is None else [*kept, self._unsynced]

    @property
    def _memories(self) -> list[torch.Tensor]:
        """The tensors that keep the gradient on the device, one for each storage."""
        tensors = (self._rest if self.whole is None else self.whole, self._sum)
        return [tensor for tensor in tensors if tensor is not None and tensor.numel()]

    def give_back(self) -> None:
        """Free the memory, which is not needed and which no update reads, unless a numpy array uses it."""
        for tensor in self._memories:
            if tensor.untyped_storage().resizable():
                self._free(tensor)
                tensor.untyped_storage().resize_(0)
        self._has_landed = [False] * len(self._has_landed)

    def take_memory(self) -> None:
        """Allocate memory again, if it was freed. Only padding is zeroed: the rest is about to be written."""
        for tensor in self._memories:
            if tensor.untyped_storage().nbytes() == 0:
                tensor.untyped_storage().resize_(tensor.nbytes)
                self.allocator.ledger.enter(Kind.GRADIENTS, tensor.nbytes)
                self._zero_gaps(tensor, 0 if tensor.numel() == self.layout.numel else self.region.start)

    def _zero_gaps(self, buffer: torch.Tensor, start: int = 0) -> None:
        """Write zeros where no parameter is, in a buffer that begins at element `start` of the flat."""
        for gap in self.layout.gaps:
            buffer[max(0, gap.start - start) : max(0, gap.stop - start)].zero_()

    @property
    def numel(self) -> int:
        return int(self.region.stop - self.region.start)

    @property
    def is_summed(self) -> bool:
        """Whether it is kept as an fp32 sum."""
        return self._sum is not None

    @property
    def rest_dtype(self) -> torch.dtype:
        """The dtype it is kept in now."""
        return self.dtype if self._sum is None else self._sum.dtype

    @property
    def current(self) -> torch.Tensor:
        """The reduced gradient of the region, in the dtype it is kept in."""
        return self._kept()

    def _kept(self) -> torch.Tensor:
        """Return the memory of the gradient; the first call allocates it."""
        if self._sum is not None:
            return self._sum
        if self._rest is None:
            self._rest = self._allocate_rest(self.dtype)
        self._note_form()
        return self._rest

    def use_sum(self) -> None:
        """Keep an fp32 sum from now on, and convert the present gradient."""
        if self._sum is None:
            self._sum = self._allocate_rest(torch.promote_types(self.dtype, torch.float32))
            if self._rest is not None:
                self.arrived.synchronize()
                self._sum.copy_(self._rest)
                if self.whole is None:  # else it is a view of that
                    self._free(self._rest)
                self._rest = None
                self._views.clear()  # they would keep the old memory
            self._note_form()

    def _note_form(self) -> None:
        """Enter in the ledger in which dtype gradients are kept."""
        form = "float32 (summed over several backward passes)"
        if self._sum is None:
            form = f"{str(self.dtype).removeprefix('torch.')} (one backward pass a step)"
        self.allocator.ledger.gradient_form = form

    def close(self) -> None:
        """Free all memory; the gradient is not needed any more."""
        self.arrived.synchronize()
        if self._sum is not None:
            self._free(self._sum)
        elif self._rest is not None and self.whole is None:
            self._free(self._rest)
        for tensor in (self.whole, self._unsynced):
            if tensor is not None:
                self.allocator.ledger.leave(Kind.GRADIENTS, tensor.untyped_storage().nbytes())
        if self.host_copy is not None:
            self.host_copy.close()
        self._rest = self._sum = self.whole = self._unsynced = None
        self._views.clear()

    def _allocate_rest(self, dtype: torch.dtype) -> torch.Tensor:
        return self._allocate(self.numel, dtype)

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.zeros(numel, dtype=dtype, device=self.allocator.device)
        self.allocator.ledger.enter(Kind.GRADIENTS, tensor.nbytes)
        return tensor

    def _free(self, tensor: torch.Tensor) -> None:
        self.allocator.ledger.leave(Kind.GRADIENTS, tensor.untyped_storage().nbytes())

    # Landing, called by the reducer

    def fill(self, buffer: torch.Tensor, arrived: Arrived, wanted: Sequence[bool]) -> None:
        """Write the gradients of this pass into `buffer`, plus those of earlier passes under no_sync that are still
        wanted. Parameters without a gradient count as zero."""
        _write(self._views_of(buffer), arrived)
        self._zero_gaps(buffer)
        if self._unsynced is not None:
            for view, is_wanted in zip(self._views_of(self._unsynced), wanted, strict=True):
                if not is_wanted:
                    view.zero_()
            buffer.add_(self._unsynced)
            self._is_unsynced = [False] * len(self._is_unsynced)
            self.allocator.ledger.leave(Kind.GRADIENTS, self._unsynced.nbytes)
            self._views.pop(_place_of(self._unsynced), None)
            self._unsynced = None

    def prepare_landing(self, wanted: Sequence[bool]) -> bool:
        """Prepare for the gradients of a pass; return True if they must be added to the present ones. `wanted` says for
        each parameter whether the gradient of earlier passes still counts."""
        self.take_memory()
        keep = [is_wanted and has_landed for is_wanted, has_landed in zip(wanted, self._has_landed, strict=True)]
        self._has_landed = [True] * len(keep)
        if not any(keep):
            self._note_form()
            return False
        self.use_sum()
        if not all(keep):
            total = self.wait_landed()
            for piece in self.layout.pieces(self.region):
                if not keep[piece.index]:
                    total[piece.place].zero_()
        return True

    def open_landing(self, *, accumulate: bool) -> torch.Tensor:
        """Return where a reduced gradient is to be written, or added, on the device."""
        self.changed()
        return self.current

    def close_landing(self, landed: torch.Tensor) -> None:
        """Send the gradient, which the current stream has written, to its home."""

    def fold(self, *, accumulate: bool) -> None:
        """Add what was reduced in place to the fp32 sum."""
        assert self._sum is not None and self.whole is not None
        total = self.open_landing(accumulate=accumulate)
        if accumulate:
            total.add_(self.whole)
        else:
            total.copy_(self.whole)
        self.close_landing(total)

    def land_here(self, arrived: Arrived, *, accumulate: bool) -> None:
        """Land without a reduce, in a world of one: straight to its home, without a buffer."""
        target = self.open_landing(accumulate=accumulate)
        views = self._views_of(target)
        if accumulate:
            pairs = [(view, grad) for view, grad in zip(views, arrived, strict=True) if grad is not None]
            if pairs:  # none: nothing of this flat was used in this pass
                foreach_add_([view for view, _ in pairs], [grad for _, grad in pairs])
        else:
            _write(views, arrived)
            if self.comes_up:  # its norm is taken of the whole buffer
                self._zero_gaps(target)
        self.close_landing(target)

    def add_unsynced(self, arrived: Arrived, wanted: Sequence[bool]) -> None:
        """Sum a pass locally, without reducing it."""
        if self._unsynced is None:
            self._unsynced = self._allocate(self.layout.numel, torch.promote_types(self.dtype, torch.float32))
            self._unsynced.zero_()
        views = self._views_of(self._unsynced)
        for index, grad in enumerate(arrived):
            if grad is not None:
                if wanted[index] and self._is_unsynced[index]:
                    views[index].add_(grad)
                else:
                    views[index].copy_(grad)
                self._is_unsynced[index] = True
                self._has_landed[index] = self._has_landed[index] and wanted[index]

    def resume(self, index: int, *, has_landed: bool) -> None:
        """Treat the gradient of one parameter as landed, or as missing."""
        if has_landed and self.is_given_back:
            self.take_memory()
            self.current.zero_()
        self._has_landed[index] = has_landed
        self.changed()

    def changed(self) -> None:
        """Drop everything derived from the gradient: its norm and the host's copy."""
        if self.host_copy is not None:
            self.host_copy.is_current = False

    def _views_of(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return a view per parameter into a buffer of the flat's length. Views are kept, because buffers are few."""
        place = _place_of(buffer)
        views = self._views.get(place)
        if views is None or views[0].dtype != buffer.dtype:
            views = [buffer[i.offset : i.end].view(i.shape) for i in self.layout.intervals]
            self._views[place] = views
        return views

    # Reading, called by the optimizer

    def wait_landed(self) -> torch.Tensor:
        """Return the gradient when it is at its home. Blocks the host if the home is the host."""
        self.arrived.synchronize()
        return self.current

    def tier_tensor(self) -> TierTensor:
        """Return the gradient as a tier tensor, when it is at its home."""
        rest = self.wait_landed()
        is_on_host = self.tier is not Tier.DEVICE and rest.device.type == "cpu"
        return TierTensor(rest.numel(), rest.dtype, Tier.HOST if is_on_host else Tier.DEVICE, rest)

    def hold(self, until: Transfer) -> None:
        """Keep the memory that `current` returned until a transfer is over, if another gradient could take it."""

    def norm(self, order: float, part: slice | None = None) -> torch.Tensor:
        """Return the norm of the region, or of a part of it: fp32, on the device."""
        gradient = self.wait_landed()
        return vector_norm(gradient if part is None else gradient[part], order).to(self.allocator.device)

    def norms(self, order: float, parts: Sequence[slice]) -> torch.Tensor:
        """Return the norms of parts of the region, in one launch: fp32, on the device."""
        gradient = self.wait_landed()
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        norms = foreach_norm([gradient[part] for part in parts], order, dtype)
        return torch.stack(norms).to(self.allocator.device, torch.float32)

    def send_host_copy(self) -> None:
        """Start copying down what the CPU will read."""
        if self.host_copy is not None:
            self.host_copy.send(self.current)

    def change_host_copy(self, copy: HostGradientCopy | None) -> None:
        """Let the CPU read other parts of the gradient, or none."""
        if self.host_copy is not None:
            self.host_copy.close()
        self.host_copy = copy

    def host_view(self, part: slice) -> tuple[torch.Tensor, Transfer]:
        """Return a part of the region in host memory, and its transfer there, which is started if necessary."""
        if self.host_copy is None:
            return self.current[part], self.arrived
        self.send_host_copy()
        return self.host_copy.copy_of(part), self.host_copy.arrived

    def copy_to(self, target: torch.Tensor, region: slice) -> None:
        """Copy a part of it to `target` on the device, in the dtype of `target`; the host does not wait."""
        target.copy_(self.current[region])


class HostGradientCopy:
    """The host's copy of those parts of a gradient that the CPU reads for its update."""

    def __init__(self, parts: Sequence[slice], dtype: torch.dtype, host: Host, streams: Streams) -> None:
        self.parts = tuple(parts)  # of the region
        self.arrived: Transfer = Done()  # the last copy
        self._host = host
        self._streams = streams
        self.is_current = False  # until the gradient changes; then the next `send` copies it again
        self._uploads: list[Transfer] = []  # of new parameters, which were written where the copy was
        self._copies = [self._allocate(part.stop - part.start, dtype) for part in parts]

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._host.allocate(numel * dtype.itemsize, Kind.BUFFERS).view(dtype)

    def send(self, gradient: torch.Tensor) -> None:
        """Start copying the parts down; free if they are there already."""
        if self.is_current:
            return
        if self._copies and self._copies[0].dtype != gradient.dtype:  # a second pass has made it an fp32 sum
            for index, copy in enumerate(self._copies):
                self._host.free(copy)
                self._copies[index] = self._allocate(copy.numel(), gradient.dtype)
        size = sum(copy.nbytes for copy in self._copies)
        within = self._host.events.within("transfer", "gradients", "", size, way=DOWN, device=gradient.device)
        with self._streams.gradients.after(record_event(gradient.device), *self._uploads), within:
            for part, copy in zip(self.parts, self._copies, strict=True):
                copy.copy_(gradient[part], non_blocking=True)
            self.arrived = self._streams.gradients.record_event()
        self._uploads.clear()
        self.is_current = True

    def copy_of(self, part: slice, *, upload: Transfer | None = None) -> torch.Tensor:
        """Return the copy of elements of the region, all of which lie in one of the parts. With `upload`, the caller
        has read the copy and now writes other data there, which is needed until that transfer is over."""
        if upload is not None:
            self._uploads.append(upload)
        for whole, copy in zip(self.parts, self._copies, strict=True):
            if whole.start <= part.start and part.stop <= whole.stop:
                return copy[part.start - whole.start : part.stop - whole.start]
        raise AssertionError(f"elements {part.start} to {part.stop} have no copy on the host")

    def drop_overwritten(self) -> None:
        """Stop expecting a gradient in overwritten memory: all updates that read it have been started."""
        if self._uploads:
            self.is_current = False

    def close(self) -> None:
        self.arrived.synchronize()
        for copy in self._copies:
            self._host.free(copy)
        self._copies = []


def vector_norm(tensor: torch.Tensor, order: float) -> torch.Tensor:
    """Return a norm in fp32, computed in fp32 or wider."""
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, order, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return norm.float()


def _place_of(buffer: torch.Tensor) -> tuple[int, int]:
    """Return which memory a tensor is a view of, and its offset there; the memory may be freed."""
    return storage_of(buffer), int(buffer.storage_offset())


def _write(views: list[torch.Tensor], arrived: Arrived) -> None:
    """Copy what arrived in one launch; zero the rest."""
    targets = [view for view, grad in zip(views, arrived, strict=True) if grad is not None]
    if targets:
        foreach_copy_(targets, [grad for grad in arrived if grad is not None])
    for view, grad in zip(views, arrived, strict=True):
        if grad is None:
            view.zero_()
