"""Properties of all gradients together: their norm, a common factor, whether they are finite.

Norms are computed from this rank's part and summed over ranks; gradients that every rank holds whole (stage 0) are
counted once. Factors are applied when the update reads the gradient, or when the user does.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from zerostd.communication import Wires
from zerostd.communication.dtensors import local_values
from zerostd.compat import no_torch_function, version_of
from zerostd.errors import MisuseError, is_number
from zerostd.optimizers.loss_scale import LossScale
from zerostd.parameters import Flat, GradientHandle, Group
from zerostd.parameters.gradient import vector_norm
from zerostd.parameters.observing import StepObserver
from zerostd.parameters.prepared import GRAD

DROPPED = (
    "the gradient of {!r} was dropped by optimizer.zero_grad(), and a forward has reused its memory: copy it before "
    "zero_grad(), with p.grad.clone()"
)
HOMOGENEOUS = (torch.ops.aten.mul_.Tensor, torch.ops.aten.zero_.default)  # whatever factor is still to come


@dataclass
class _Scaled:
    """Gradients that the user multiplied by one number; still pending."""

    given: torch.Tensor
    version: int  # when it was given: the user may change it
    value: torch.Tensor  # a copy
    missing: set[str]  # other parameters that have gradients
    names: list[str] = field(default_factory=list)

    def has(self, factor: torch.Tensor) -> bool:
        """Return whether this is the same number."""
        return factor is self.given and version_of(factor) == self.version


class Gradients(StepObserver):
    """All gradients of one prepared model. The handles in `p.grad` pass their calls on to it."""

    def __init__(
        self, groups: tuple[Group, ...], wires: Wires, loss_scale: LossScale | None, wait: Callable[[], None]
    ) -> None:
        self.groups = groups
        self.wires = wires
        self.loss_scale = loss_scale
        self.factor: torch.Tensor | float = 1.0  # still to be multiplied in: clipping, unscaling
        self.clip_norm: float | None = None  # of the step that comes; None: not clipped
        self.locked: str | None = None  # why an update is using gradients already, so that they cannot be changed
        # Why nothing can be read or changed: the model sleeps, or only a part of it is updated.
        self.refusal: str | None = None
        self._are_dropped = False  # by zero_grad, all of them
        self._wait = wait  # until all gradients have landed, before they are read
        self._groups = {flat: group for group in groups for flat in group.flats}
        self._places = {
            interval.name: (flat, index) for flat in self._flats for index, interval in enumerate(flat.layout.intervals)
        }
        self._handles: dict[str, GradientHandle] = {}
        self._norms: dict[tuple[float, str], torch.Tensor] = {}  # by order and parameter, of the gradients as they are
        self._scaled: _Scaled | None = None  # gradients that are to be multiplied by one number
        self._whole: tuple[Flat, torch.Tensor] | None = None  # the gradient that was read last, from all ranks

    def make_handle(self, name: str, parameter: nn.Parameter) -> GradientHandle:
        """Return the handle of a parameter's gradient."""
        self._handles[name] = GradientHandle(name, parameter, self)
        return self._handles[name]

    def before_backward(self) -> None:
        """Apply pending factors now: they are not for the gradients of the next pass. They change then."""
        self.flush()
        if self.loss_scale is None:
            self._apply_factor()
        self._are_dropped = False
        self._norms.clear()
        self._whole = None

    def check_unlocked(self, call: str) -> None:
        """Raise if `call` would change gradients that an update is using already, the model sleeps, or a part of it is
        updated."""
        if self.refusal is not None:
            raise MisuseError(f"{call}: {self.refusal}")
        if self.locked is not None:
            raise MisuseError(
                f"{call} between backward and optimizer.step(), but the update has begun inside backward, because "
                f"{self.locked}"
            )

    def total_norm(self, order: float = 2.0) -> torch.Tensor:
        """Return the norm of all gradients as one vector, with `factor`; fp32, on the device."""
        self.wires.world.check_here("the norm of gradients")
        self._wait()
        self.flush()
        norms = [norm for flat in self._flats for norm in self._counted_norms(flat, order)]
        stacked = torch.stack(norms) if norms else torch.zeros(1, device=self.wires.world.device)
        total = stacked.max() if math.isinf(order) else stacked.pow(order).sum()
        return torch.mul(self._across_ranks(total, order), self.factor)

    def _counted_norms(self, flat: Flat, order: float) -> list[torch.Tensor]:
        """Return norms of this rank's part of a flat, such that each number counts once over all splits."""
        assert flat.gradient is not None
        num_splits = self.wires.world.num_splits
        with no_torch_function():
            has_gradient = [GRAD.__get__(parameter) is not None for parameter in flat.parameters]
        if all(has_gradient) and num_splits == 1:
            return [flat.gradient.norm(order)]
        pieces = [piece for piece in flat.layout.pieces(flat.region) if has_gradient[piece.index]]
        norms = []
        for num_copies, same in itertools.groupby(pieces, lambda piece: flat.num_copies(piece.index, num_splits)):
            parts = [flat.gradient.norm(order, piece.place) for piece in same]
            norms.append(vector_norm(torch.stack(parts), order) / num_copies ** (1.0 / order))
        return norms

    def _across_ranks(self, value: torch.Tensor, order: float) -> torch.Tensor:
        """Return norms over all ranks, from sums of powers (or from the maximum) on this one."""
        world = self.wires.world
        is_sharded = any(flat.gradient is not None and flat.gradient.numel < flat.layout.numel for flat in self._flats)
        if world.num_splits > 1 and not is_sharded:
            is_sharded = True
            value = value if math.isinf(order) else value / world.num_shards
        with world.at("the norm of gradients"):
            if math.isinf(order):
                return self.wires.largest(value) if is_sharded else value
            return (self.wires.sum(value) if is_sharded else value).pow(1.0 / order)

    @property
    def _flats(self) -> list[Flat]:
        return [flat for group in self.groups for flat in group.trainable]

    def check_clip(self, max_norm: Any, order: Any) -> float:
        """Refuse norms that cannot be clipped to or taken; return the loss scale, which gradients still have."""
        is_tensor = isinstance(max_norm, torch.Tensor) and max_norm.numel() == 1
        if not (is_tensor or (is_number(max_norm) and max_norm >= 0)):
            raise MisuseError(f"clip_grad_norm_(max_norm={max_norm!r}): it must be a number, 0 or more")
        if not (is_number(order) and order > 0):
            raise MisuseError(f"clip_grad_norm_(norm_type={order!r}): it must be a number above 0, or math.inf")
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def clip(self, max_norm: float, order: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm is at most `max_norm`, as torch does; returns the norm before."""
        norm = self.total_norm(order)
        self.clip_norm = max_norm if isinstance(max_norm, float | int) else None
        self.factor = self.factor * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        return norm

    def take_factor(self) -> torch.Tensor | None:
        """Return the factor for the next update, and reset it to one. It is fp32 and one element long, so that it lifts
        16-bit gradients to fp32 while it is multiplied in; None for one."""
        self.flush()
        factor = self.factor
        self.factor = 1.0
        self.clip_norm = None
        self._norms.clear()
        if isinstance(factor, torch.Tensor):
            return factor.reshape(1)
        return None if factor == 1.0 else torch.full((1,), factor, device=self.wires.world.device)

    # Calls on p.grad, which its handle passes on

    def norm(self, handle: GradientHandle, order: float) -> torch.Tensor:
        """Return one parameter's norm. The first call computes all of them with one exchange."""
        if (order, handle.of) not in self._norms:
            self.wires.world.check_here("the norm of p.grad")
            self._wait()
            self.flush()
            parts = torch.cat([self._norms_of(flat, order) for flat in self._flats])
            names = list(self._places)
            if self.wires.world.num_splits > 1:  # in one order on all splits, whose flats may be laid out in others
                rows = sorted(range(len(names)), key=names.__getitem__)
                parts = parts[rows]
                names.sort()
            norms = self._across_ranks(parts if math.isinf(order) else parts.pow(order), order)
            self._norms = {(order, name): norm for name, norm in zip(names, norms.unbind(), strict=True)}
        unscale = 1.0 if self.loss_scale is None else 1.0 / self.loss_scale.value
        return self._norms[order, handle.of] * (self.factor * unscale)

    def _norms_of(self, flat: Flat, order: float) -> torch.Tensor:
        """Return the norms of this rank's part of a flat's gradients, by parameter; a missing one is zero."""
        norms = torch.zeros(len(flat.parameters), device=self.wires.world.device)
        with no_torch_function():
            has_gradient = [GRAD.__get__(parameter) is not None for parameter in flat.parameters]
        pieces = [piece for piece in flat.layout.pieces(flat.region) if has_gradient[piece.index]]
        if pieces and flat.gradient is not None:
            rows = torch.tensor([piece.index for piece in pieces], device=norms.device)
            norms[rows] = flat.gradient.norms(order, [piece.place for piece in pieces])
        num_splits = self.wires.world.num_splits
        if num_splits > 1:  # each number counts once over all splits
            copies = [flat.num_copies(index, num_splits) for index in range(len(flat.parameters))]
            norms /= torch.tensor(copies, device=norms.device) ** (1.0 / order)
        return norms

    def scale(self, handle: GradientHandle, factor: torch.Tensor | float) -> None:
        """Multiply one parameter's gradient."""
        if isinstance(factor, float) and factor == 0.0:
            self.change(handle, torch.ops.aten.zero_.default, (), {})  # 0 * inf is NaN
        else:
            self.change(handle, torch.ops.aten.mul_.Tensor, (torch.as_tensor(factor),), {})

    def change(self, handle: GradientHandle, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Change one parameter's gradient in place, element by element: here this rank's part of it."""
        if self.wires.world.link is None and func is torch.ops.aten.mul_.Tensor and self._put_off(handle, args[0]):
            return
        self.wires.world.check_here("a change of p.grad")
        self._wait()
        self.check_unlocked("a change of p.grad")
        self.flush()
        self._change(handle, func, args, kwargs)

    def _put_off(self, handle: GradientHandle, factor: Any) -> bool:
        """Note that one gradient is to be multiplied by a number on the device. Clipping does this one by one; when all
        are multiplied, the number waits for the update, as `factor` does. Returns False if it must be done now."""
        is_number = isinstance(factor, torch.Tensor) and factor.numel() == 1 and factor.dtype is torch.float32
        if not is_number or self.locked is not None or self.loss_scale is not None:
            return False
        scaled = self._scaled
        if scaled is None or not scaled.has(factor) or handle.of not in scaled.missing:
            self._wait()
            self.flush()
            with no_torch_function():
                names = [name for name, (f, i) in self._places.items() if GRAD.__get__(f.parameters[i]) is not None]
            if handle.of not in names:  # it was dropped, and is being used all the same
                return False
            scaled = self._scaled = _Scaled(factor, version_of(factor), factor.clone().reshape(()), set(names))
            self._norms.clear()
            self._whole = None
        scaled.missing.remove(handle.of)
        scaled.names.append(handle.of)
        if not scaled.missing:
            self._scaled = None
            self.factor = self.factor * scaled.value.to(self.wires.world.device)
        return True

    def flush(self) -> None:
        """Make the multiplications that `_put_off` has noted, since they are not the same for all gradients."""
        scaled = self._scaled
        self._scaled = None
        if scaled is not None:
            for name in scaled.names:
                self._change(self._handles[name], torch.ops.aten.mul_.Tensor, (scaled.value,), {})

    def _change(self, handle: GradientHandle, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        if func not in HOMOGENEOUS:
            self._apply_factor()
        self._norms.clear()
        self._whole = None
        flat, index = self._places[handle.of]
        piece = flat.layout.piece_of(index, flat.region)
        if piece is None:
            return
        part = self._wait_updates(flat, handle.of)[piece.place]
        assert flat.gradient is not None
        flat.gradient.changed()

        def local(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if value.dim():
                value = flat.local(index, value.expand(handle.shape)).reshape(-1)[piece.start : piece.stop]
            return local_values(value).to(part.device)

        func(part, *tree_map(local, tuple(args)), **tree_map(local, dict(kwargs)))

    def read(self, handle: GradientHandle) -> torch.Tensor:
        """Return a copy of one parameter's whole gradient, or the DTensor of one. Every rank must call it."""
        self.wires.world.check_here("a use of p.grad")
        self._wait()
        self.check_unlocked("a use of p.grad")
        self.flush()
        self._apply_factor()
        flat, index = self._places[handle.of]
        if self._whole is None or self._whole[0] is not flat:
            assert flat.gradient is not None
            mine = self._wait_updates(flat, handle.of).to(self.wires.world.device, copy=flat.gradient.comes_up)
            whole = mine if mine.numel() == flat.layout.numel else mine.new_empty(flat.layout.numel)
            if whole is not mine:
                with self.wires.world.at(f"the gather of the gradient of {handle.of!r}"):
                    self.wires.gather(whole, mine).wait()
            self._whole = (flat, whole)
        return flat.shown(index, self._whole[1]).to(handle.dtype, copy=True)

    def replace(self, name: str, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Let `gradient`, which must be alike on all ranks, be the gradient of a parameter."""
        if gradient.shape != parameter.shape:
            raise MisuseError(
                f"p.grad = a tensor of shape {tuple(gradient.shape)} for {name!r} of shape {tuple(parameter.shape)}: a "
                "gradient must have the shape of its parameter"
            )
        flat, index = self._places[name]
        handle = self._handles[name]
        assert flat.gradient is not None
        self._wait()
        flat.gradient.resume(index, has_landed=True)
        self.change(handle, torch.ops.aten.copy_.default, (gradient.detach(),), {})
        parameter.grad = handle

    def _apply_factor(self) -> None:
        """Multiply the factor that waits for the update into all gradients, and take the loss scale for one."""
        if self.loss_scale is not None:
            raise MisuseError(
                "precision='fp16' keeps gradients multiplied by the loss scale until step(): clip them with "
                "optimizer.clip_grad_norm_(max_norm), or use precision='bf16'"
            )
        factor = self.factor
        if isinstance(factor, float) and factor == 1.0:
            return
        self.factor = 1.0
        for flat in self._flats:
            assert flat.gradient is not None
            if flat.gradient.is_given_back:
                continue
            gradient = self._wait_updates(flat, flat.layout.intervals[0].name)
            gradient.mul_(factor.to(gradient.device) if isinstance(factor, torch.Tensor) else factor)
            flat.gradient.changed()

    def _wait_updates(self, flat: Flat, name: str) -> torch.Tensor:
        """Return the gradient of a flat's region when no update reads it any more, also after step() has returned."""
        for update in self._groups[flat].updates:
            update.synchronize()  # the caller may write to it on the host
        gradient = flat.gradient
        assert gradient is not None
        if gradient.is_given_back and gradient.is_kept:
            raise MisuseError(DROPPED.format(name))
        return gradient.wait_landed()

    def drop(self, parameters: Sequence[nn.Parameter]) -> None:
        """Note that the gradients of these parameters were dropped. If all are dropped, the next forward frees their
        memory."""
        self._are_dropped = len(parameters) == len(self._places)

    def put_back(self, handle: GradientHandle, parameter: nn.Parameter) -> None:
        """Note that the user keeps a gradient after all; raise if its memory is gone, or it is another parameter's."""
        flat, index = self._places[handle.of]
        if flat.parameters[index] is not parameter:
            raise MisuseError(
                f"p.grad = the gradient of another parameter, {handle.of!r}: in torch the two would be one tensor, but "
                "gradients of a prepared model cannot share memory. Write p.grad = q.grad.clone()"
            )
        self._are_dropped = False
        if flat.gradient is not None and flat.gradient.is_given_back:
            raise MisuseError(DROPPED.format(handle.of))

    def give_back(self) -> None:
        """Free the memory of gradients, if all were dropped. Gradients that updates still read keep their memory."""
        if not self._are_dropped:
            return
        self._are_dropped = False
        self._whole = None  # it may be a view of that memory
        for group in self.groups:
            if not group.is_updated_later:
                for flat in group.trainable:
                    assert flat.gradient is not None
                    flat.gradient.give_back()

    def unscale(self, handles: Sequence[GradientHandle], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
        """Check and unscale gradients as torch.amp.GradScaler does, over all ranks."""
        if self.loss_scale is not None:
            raise MisuseError(
                "precision='fp16' already scales the loss, so a GradScaler would scale twice: call loss.backward() "
                "and optimizer.step() directly, or pass GradScaler(enabled=False)"
            )
        for handle in handles:
            self.scale(handle, inverse)
        norm = self.total_norm()
        found_inf.copy_(torch.maximum(found_inf, (~torch.isfinite(norm)).to(found_inf.dtype)))
