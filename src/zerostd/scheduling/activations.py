"""Activations: what autograd saves in a group's forward rests elsewhere until the group's backward.

What is saved goes through a pack hook of autograd's, while a group runs whose activations do not stay. Parameters and
buffers are not activations, and small tensors are not worth the way: both stay. What lies in one storage travels once,
whatever tensors see it. A group that is recomputed saves its inputs only, see recomputing.py. Where some groups send
theirs, what others leave on the device is counted in the first forward of each: that much room there is for what is on
its way, before they run and when backward has passed them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zerostd.communication.peers import Peers
from zerostd.compat import has_saved_tensor_hooks, in_backward, version_of
from zerostd.errors import MisuseError
from zerostd.monitoring.watch import Doing
from zerostd.parameters import Group
from zerostd.policy import Tier, Way
from zerostd.scheduling.gathering import Gatherer
from zerostd.scheduling.recomputing import Recomputed, is_worth_recomputing
from zerostd.tiers.parcels import Bundle, Carrier, Parcel, View

__all__ = ["Activations", "Passed"]

WORTH_MOVING = 256 * 2**10  # bytes

Storage = torch.UntypedStorage
Passed = tuple[weakref.ref[Bundle], int]  # a group whose activations stay: the bundle before it, and its bytes


@dataclass(frozen=True)
class _Moved:
    """In place of a saved tensor that went elsewhere."""

    bundle: Bundle
    parcel: Parcel
    view: View


@dataclass(frozen=True)
class _Kept:
    """In place of a saved tensor that stays; without its place in the graph, which would hold itself."""

    tensor: torch.Tensor
    version: int | None  # None: it may change


@dataclass
class _Left:
    """What a group's forward leaves."""

    bundle: Bundle | None  # None: it stays, and is counted
    num_bytes: int = 0


@dataclass(frozen=True)
class _Running:
    """A group's forward that runs now."""

    module: nn.Module
    left: _Left
    hooks: torch.autograd.graph.saved_tensors_hooks


class Activations:
    """Those of one prepared model."""

    def __init__(
        self, root: nn.Module, gatherer: Gatherer, ways: Mapping[str, Way], carrier: Carrier, peers: Peers | None
    ) -> None:
        self._root = root
        self._gatherer = gatherer
        self._carrier = carrier
        self._peers = peers
        self._ways = {group: ways.get(group.name, Way.DEVICE) for group in gatherer.groups}
        self._sends = peers is None and any(way.tier is not Tier.DEVICE for way in self._ways.values())
        self._sizes = dict.fromkeys(_outer(root, gatherer.groups), 0)  # bytes that each leaves on the device
        self._running: list[_Running] = []  # innermost last
        self._recomputed: list[Recomputed] = []
        self._ours: set[int] = set()  # storages of parameters and buffers
        self._known: dict[tuple[int, Tier], tuple[weakref.ref[Storage], weakref.ref[Parcel]]] = {}
        self._counted: dict[int, weakref.ref[Storage]] = {}  # in this pass
        self._last: weakref.ref[Bundle] | None = None  # left in this pass
        self._checked: set[str] = set()  # groups that peers have compared

    @property
    def is_on(self) -> bool:
        """Whether anything is done with activations but keeping them."""
        return self._peers is not None or any(way is not Way.DEVICE for way in self._ways.values())

    def install(self) -> None:
        """Let the forwards of recomputed groups be ours."""
        device = self._gatherer.wires.world.device
        for group, way in self._ways.items():
            for module in [module for module in group.modules if way.recomputes and is_worth_recomputing(module)]:
                self._recomputed.append(Recomputed(module, device, self._keep_input, self._unpack))
                self._recomputed[-1].install()

    def remove(self) -> None:
        """Leave the modules as they were."""
        self.settle()
        for recomputed in self._recomputed:
            recomputed.remove()
        self._recomputed.clear()

    def begin(self) -> None:
        """A forward of the root begins. One that was interrupted may not have ended."""
        while self._running:
            self._running.pop().hooks.__exit__()
        self.settle()
        self._carrier.begin()
        self._last = None
        self._known.clear()
        self._counted.clear()
        self._ours = {id(tensor.untyped_storage()) for tensor in self._lasting()}

    def settle(self) -> None:
        """A backward pass has ended."""
        self._carrier.settle()

    def enter(self, group: Group, module: nn.Module) -> None:
        """A group's forward begins."""
        way = self._ways[group]
        if module is self._root or self._running or not torch.is_grad_enabled() or in_backward():
            return
        stays = way.tier is Tier.DEVICE and (self._peers is None or way.recomputes)
        if stays and (not self._sends or module in self._sizes or has_saved_tensor_hooks()):
            return
        if not stays and has_saved_tensor_hooks():
            raise MisuseError(
                f"group {group.name!r} runs inside torch.utils.checkpoint, or other hooks on saved tensors, and "
                f"Placement has its activations at {way.value!r}: use one of them. 'recompute', 'recompute+host' and "
                "'recompute+disk' do what checkpointing does; with Placement(activations={'blocks.*': ...}) others stay"
            )
        left = _Left(None if stays else Bundle(group.name, way.tier, self._last))

        def pack(tensor: torch.Tensor) -> _Moved | _Kept:
            return self._pack(tensor, left)

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, self._unpack)
        hooks.__enter__()
        self._running.append(_Running(module, left, hooks))

    def leave(self, group: Group, module: nn.Module, *, failed: bool) -> Passed | None:
        """It has ended; what it left goes on its way, unless nobody will come back for it. Of one whose activations
        stay: the bytes of them, and the bundle that was left last before it, if there is one."""
        if self._running:
            if self._running[-1].module is not module:
                return None
            running = self._running.pop()
            running.hooks.__exit__()
            if failed:
                return None
            if running.left.bundle is not None:
                self._send(group, running.left.bundle)
                return None
            self._sizes[module] = running.left.num_bytes
        if failed or module is self._root or not self._sends or not torch.is_grad_enabled() or in_backward():
            return None
        size = self._sizes.get(module, 0)
        self._carrier.pass_by(size)
        return None if self._last is None else (self._last, size)

    def pass_back(self, passed: Passed) -> None:
        """Backward comes to a group whose activations stayed."""
        bundle, size = passed
        self._carrier.pass_back(bundle(), size)

    def _send(self, group: Group, bundle: Bundle) -> None:
        if self._peers is not None and group.name not in self._checked:
            self._checked.add(group.name)
            self._peers.check_same(group.name, [parcel.num_bytes for parcel in bundle.parcels])
        if bundle.parcels:
            self._gatherer.wires.ledger.owner = group.name
            self._carrier.send(bundle)
            self._last = weakref.ref(bundle)

    def _keep_input(self, tensor: torch.Tensor) -> _Moved | _Kept:
        """Of a recomputed group."""
        if self._running:
            return self._pack(tensor, self._running[-1].left)
        return _Kept(tensor.detach(), version_of(tensor))

    @torch.no_grad()
    def _pack(self, tensor: torch.Tensor, left: _Left) -> _Moved | _Kept:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return _Kept(tensor.detach(), None)
        storage = tensor.untyped_storage()
        if id(storage) in self._ours:
            return _Kept(tensor.detach(), None)
        is_plain = not tensor.is_conj() and not tensor.is_neg()
        if storage.nbytes() < WORTH_MOVING or tensor.device != self._gatherer.wires.world.device or not is_plain:
            return _Kept(tensor.detach(), version_of(tensor))
        if left.bundle is None:
            left.num_bytes += self._count(storage)
            return _Kept(tensor.detach(), version_of(tensor))
        parcel = self._parcel_of(tensor, storage, left.bundle.tier)
        left.bundle.add(parcel)
        return _Moved(left.bundle, parcel, View.of(tensor))

    def _count(self, storage: Storage) -> int:
        """Its bytes, the first time in a pass."""
        seen = self._counted.get(id(storage))
        if seen is not None and seen() is storage:
            return 0
        self._counted[id(storage)] = weakref.ref(storage)
        return int(storage.nbytes())

    def _parcel_of(self, tensor: torch.Tensor, storage: Storage, tier: Tier) -> Parcel:
        """The one that has its storage in this tier already, or a new one."""
        if (id(storage), tier) in self._known:
            seen, known = self._known[id(storage), tier]
            parcel = known()
            if seen() is storage and parcel is not None and parcel.version == version_of(tensor):
                return parcel
        parcel = Parcel.of(tensor)
        self._known[id(storage), tier] = (weakref.ref(storage), weakref.ref(parcel))
        return parcel

    @torch.no_grad()
    def _unpack(self, saved: _Moved | _Kept) -> torch.Tensor:
        if isinstance(saved, _Kept):
            if saved.version is not None and version_of(saved.tensor) != saved.version:
                raise _changed(saved.tensor.shape)
            return saved.tensor
        watch = self._gatherer.watch
        doing = watch.mark(Doing.WAITING, "activations")
        self._carrier.want(saved.bundle)
        watch.mark(doing)
        if saved.parcel.is_spoilt():
            raise _changed(saved.view.size)
        return saved.parcel.show(saved.view)

    def _lasting(self) -> Iterator[torch.Tensor]:
        """What is there all the time, or comes and goes by itself."""
        for group in self._gatherer.groups:
            for flat in group.flats:
                yield flat.full
        yield from self._root.buffers()


def _outer(root: nn.Module, groups: Sequence[Group]) -> Iterator[nn.Module]:
    """Modules of groups, other than the root, with those of others inside, which speak for themselves."""
    modules = {module for group in groups for module in group.modules if module is not root}
    for module in modules:
        if any(inner in modules for inner in module.modules() if inner is not module):
            yield module


def _changed(size: torch.Size) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"size {tuple(size)} that was saved for backward was changed after that"
    )
