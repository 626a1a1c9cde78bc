"""A gradient that is kept on disk, as a tier tensor with page checksums.

It passes through host memory. `Windows` are buffers as large as the two largest gradients: one lands in a window, as a
host gradient does in its own memory, and is written from there while the next one lands in the other. Reads and changes
first bring the gradient back into a window, and work there. A window stays with its gradient until another gradient
needs the window. Then the updates that read it are waited for, and changes are written.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from zerostd.parameters.gradient import vector_norm
from zerostd.parameters.host_gradient import NUM_STAGING, HostGradient, Staging
from zerostd.policy import Kind, Tier
from zerostd.tiers import Done, TierAllocator, TierTensor, Transfer, Worker, record_event
from zerostd.tiers.debug import poison


@dataclass(eq=False)
class _Window:
    memory: torch.Tensor  # bytes
    gradient: DiskGradient | None = None  # that it holds
    is_changed: bool = False  # since it was written
    written: Transfer = field(default_factory=Done)  # the last write
    readers: list[Transfer] = field(default_factory=list)  # updates that read it

    def tensor(self, on_disk: TierTensor) -> torch.Tensor:
        """Return the window as the numbers of a gradient."""
        return self.memory[: on_disk.numel * on_disk.dtype.itemsize].view(on_disk.dtype)


class Windows:
    """Host memory that gradients on disk pass through. While a gradient lands in a window, only the call that ends the
    landing is allowed."""

    def __init__(self, allocator: TierAllocator) -> None:
        self._host = allocator.host
        self._sizes: dict[DiskGradient, int] = {}  # bytes
        self._windows = [_Window(torch.empty(0, dtype=torch.uint8)) for _ in range(NUM_STAGING)]
        self._turn = 0
        self._worker = Worker("the write of gradients to disk", allocator.device)
        allocator.before_close(self._worker.stop)

    def expect(self, gradient: DiskGradient, num_bytes: int) -> None:
        """Count a gradient whose memory is allocated by `fit`, or when the gradient comes."""
        self._sizes[gradient] = num_bytes

    def fit(self) -> None:
        """Allocate memory for the expected gradients, and free what is not needed."""
        for window, size in zip(self._windows, Staging.sizes(self._sizes.values()), strict=True):
            if window.memory.nbytes != size:
                self._clear(window)
                if window.memory.nbytes:
                    self._host.free(window.memory)
                window.memory = self._host.allocate(size, Kind.BUFFERS) if size else window.memory[:0].clone()

    def bring(self, gradient: DiskGradient, on_disk: TierTensor, *, is_overwritten: bool = False) -> torch.Tensor:
        """Return a gradient in host memory; without its values if it is about to be overwritten."""
        window = self._of(gradient)
        if window is None:
            window = self._take(on_disk.numel * on_disk.dtype.itemsize)
            if not is_overwritten:
                on_disk.start_read(0, window.tensor(on_disk)).wait()
            window.gradient = gradient
        return window.tensor(on_disk)

    def hold(self, gradient: DiskGradient, until: Transfer) -> None:
        """Keep a gradient in its window until a transfer has ended."""
        window = self._of(gradient)
        if window is not None:
            window.readers.append(until)

    def mark_changed(self, gradient: DiskGradient) -> None:
        """Write a gradient before its window goes to another. Its numbers may not change while they are written."""
        window = self._of(gradient)
        if window is not None:
            window.written.wait()
            window.is_changed = True

    def write(self, gradient: DiskGradient) -> None:
        """Start writing a gradient, when it has arrived in its window."""
        window = self._of(gradient)
        if window is None or gradient.on_disk is None:
            return
        arrived = gradient.arrived
        on_disk = gradient.on_disk
        tensor = window.tensor(on_disk)

        def write() -> None:
            arrived.synchronize()
            on_disk.start_write(0, tensor).wait()

        window.written = self._worker.submit(write, ready=arrived)
        window.is_changed = False

    def leave(self, gradient: DiskGradient) -> None:
        """Keep a gradient on disk only."""
        window = self._of(gradient)
        if window is not None:
            self._clear(window)

    def forget(self, gradient: DiskGradient) -> None:
        """Stop expecting a gradient."""
        self._sizes.pop(gradient, None)
        self.fit()

    def _of(self, gradient: DiskGradient) -> _Window | None:
        return next((window for window in self._windows if window.gradient is gradient), None)

    def _take(self, num_bytes: int) -> _Window:
        """Return the next free window, or the first window if the next is too small."""
        self.fit()
        self._turn = (self._turn + 1) % NUM_STAGING
        if self._windows[self._turn].memory.nbytes < num_bytes:
            self._turn = 0
        self._clear(self._windows[self._turn])
        return self._windows[self._turn]

    def _clear(self, window: _Window) -> None:
        for reader in window.readers:
            reader.synchronize()
        window.readers.clear()
        if window.gradient is not None and window.is_changed:
            self.write(window.gradient)
        window.written.wait()
        window.gradient = None
        window.is_changed = False
        poison(window.memory)


@dataclass(eq=False, repr=False, kw_only=True)
class DiskGradient(HostGradient):
    """One flat gradient, which is kept on disk. The base class keeps a tensor without memory."""

    tier = Tier.DISK
    owner: str  # of the space, for errors
    windows: Windows
    on_disk: TierTensor | None = field(init=False, default=None)  # None: it is in the buffer that is reduced

    def __post_init__(self) -> None:
        super().__post_init__()
        self.comes_up = True  # a window may go to another gradient, whatever memory the device has

    def _allocate_rest(self, dtype: torch.dtype) -> torch.Tensor:
        num_bytes = self.numel * dtype.itemsize
        extent = self.allocator.allocate_bytes(Tier.DISK, Kind.GRADIENTS, num_bytes, self.owner)
        self.on_disk = TierTensor.cut(extent, 0, self.numel, dtype, self.allocator.disk)
        self.windows.expect(self, num_bytes)
        return torch.empty(self.numel, dtype=dtype, device="meta")

    def _free(self, tensor: torch.Tensor) -> None:
        assert self.on_disk is not None and self.on_disk.extent is not None
        self.windows.leave(self)
        self.allocator.free_bytes(self.on_disk.extent)
        self.on_disk = None

    def close(self) -> None:
        """Free all space; the gradient is not needed any more."""
        super().close()
        self.windows.forget(self)

    @property
    def current(self) -> torch.Tensor:
        """The reduced gradient of the region, in a window that another gradient's `current` may take."""
        rest = self._kept()
        return rest if self.on_disk is None else self.windows.bring(self, self.on_disk)

    def use_sum(self) -> None:
        """Keep an fp32 sum from now on, and convert the present gradient."""
        if self._sum is not None:
            return
        wide = torch.promote_types(self.dtype, torch.float32)
        landed = self.wait_landed().to(wide, copy=True) if any(self._has_landed) else None
        if self.on_disk is not None and self._rest is not None:
            self._free(self._rest)
        self._rest = None
        super().use_sum()
        if landed is not None:
            self.current.copy_(landed)
            self.changed()

    def open_landing(self, *, accumulate: bool) -> torch.Tensor:
        """Return memory on the device to land in; with `accumulate` it holds the gradient already."""
        self._kept()
        if self.on_disk is not None and not accumulate:
            self.windows.bring(self, self.on_disk, is_overwritten=True)
        return super().open_landing(accumulate=accumulate)

    def close_landing(self, landed: torch.Tensor) -> None:
        """Take the norm of the gradient that landed, to save a read later, and start writing it."""
        super().close_landing(landed)
        if self.staging is None:
            self._norm = vector_norm(landed, 2.0)
        self.windows.write(self)

    def changed(self) -> None:
        """Forget the norm, and write the gradient again."""
        super().changed()
        self.windows.mark_changed(self)

    def hold(self, until: Transfer) -> None:
        """Keep the gradient in its window until a transfer is over."""
        self.windows.hold(self, until)

    def copy_to(self, target: torch.Tensor, region: slice) -> None:
        """Bring a part to the device."""
        super().copy_to(target, region)
        self.hold(record_event(target.device))

    def tier_tensor(self) -> TierTensor:
        """Return the gradient as it is kept on disk. It may not be in memory while the result is used."""
        self._kept()
        if self.on_disk is None:
            return super().tier_tensor()
        self.arrived.synchronize()
        self.windows.leave(self)
        return self.on_disk
