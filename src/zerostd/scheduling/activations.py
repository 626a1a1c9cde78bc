"""Activations: what autograd saves in a group's forward rests elsewhere until the group's backward.

What is saved goes through a pack hook of autograd's, while a group runs whose activations do not stay. Parameters and
buffers are not activations, and small tensors are not worth the way: both stay. What lies in one storage travels once,
whatever tensors see it. A group that is recomputed saves its inputs only, see recomputing.py. Where some groups send
theirs, others make room for what is on its way: before they run, and when backward has passed them. How much they leave
on the device is known without asking autograd if they are like one that sends its own: of the same class, with
parameters of the same shapes and as many bytes of output.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerostd.communication.peers import Peers
from zerostd.compat import has_saved_tensor_hooks, in_backward, version_of
from zerostd.errors import MisuseError
from zerostd.monitoring.loop_timer import LoopPhase
from zerostd.parameters import Group
from zerostd.policy import Tier, Way
from zerostd.scheduling.gathering import Gatherer
from zerostd.scheduling.offloading import ActivationOffloader, GroupActivations, SavedStorage, View
from zerostd.scheduling.recomputing import Recomputed, is_worth_recomputing
from zerostd.scheduling.tensors import tensors_in

__all__ = ["Activations", "Passed"]

WORTH_MOVING = 256 * 2**10  # bytes
MOST_KINDS = 256  # of forwards that are remembered: lengths may vary for ever

Storage = torch.UntypedStorage
Passed = tuple[
    weakref.ref[GroupActivations], int
]  # a group whose activations stay: the bundle before it, and its bytes


@dataclass(frozen=True)
class _Moved:
    """In place of a saved tensor that went elsewhere."""

    bundle: GroupActivations
    parcel: SavedStorage
    view: View


@dataclass(frozen=True)
class _Kept:
    """In place of a saved tensor that stays; without its place in the graph, which would hold itself."""

    tensor: torch.Tensor
    version: int | None  # None: it may change


@dataclass(frozen=True)
class _Running:
    """A group's forward that runs now."""

    module: nn.Module
    bundle: GroupActivations
    hooks: torch.autograd.graph.saved_tensors_hooks


class Activations:
    """Those of one prepared model."""

    def __init__(
        self,
        root: nn.Module,
        gatherer: Gatherer,
        ways: Mapping[str, Way],
        carrier: ActivationOffloader,
        peers: Peers | None,
    ) -> None:
        self._root = root
        self._gatherer = gatherer
        self._carrier = carrier
        self._peers = peers
        self._ways = {group: ways.get(group.name, Way.DEVICE) for group in gatherer.groups}
        self._sends = peers is None and any(way.tier is not Tier.DEVICE for way in self._ways.values())
        self._kinds = {module: _kind(module) for group in gatherer.groups for module in group.modules}
        self._left: dict[tuple[Any, int], int] = {}  # bytes, by kind of a module that sent them and bytes of its output
        self._running: list[_Running] = []  # innermost last
        self._recomputed: list[Recomputed] = []
        self._ours: set[int] = set()  # storages of parameters and buffers
        self._known: dict[tuple[int, Tier], tuple[weakref.ref[Storage], weakref.ref[SavedStorage]]] = {}
        self._inputs: dict[int, int] = {}  # bytes by storage, of the recomputed group that runs now
        self._last: weakref.ref[GroupActivations] | None = None  # left in this pass
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
        self._inputs.clear()
        self._ours = {id(tensor.untyped_storage()) for tensor in self._lasting()}

    def settle(self) -> None:
        """A backward pass has ended."""
        self._carrier.settle()

    def enter(self, group: Group, module: nn.Module) -> None:
        """A group's forward begins."""
        way = self._ways[group]
        stays = way.tier is Tier.DEVICE and (self._peers is None or way.recomputes)
        if stays or module is self._root or self._running or not torch.is_grad_enabled() or in_backward():
            return
        if has_saved_tensor_hooks():
            raise MisuseError(
                f"group {group.name!r} runs inside torch.utils.checkpoint, or other hooks on saved tensors, and "
                f"Placement has its activations at {way.value!r}: use one of them. 'recompute', 'recompute+host' and "
                "'recompute+disk' do what checkpointing does; with Placement(activations={'blocks.*': ...}) others stay"
            )
        bundle = GroupActivations(group.name, way.tier, self._last)

        def pack(tensor: torch.Tensor) -> _Moved | _Kept:
            return self._pack(tensor, bundle)

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, self._unpack)
        hooks.__enter__()
        self._running.append(_Running(module, bundle, hooks))

    def leave(self, group: Group, module: nn.Module, output: Any) -> Passed | None:
        """It has ended, without an output if it failed; what it left goes on its way, unless nobody will come back for
        it. Of one whose activations stay: the bytes of them, and the bundle that was left last before it, if any."""
        inputs, self._inputs = self._inputs, {}
        if self._running:
            if self._running[-1].module is module:
                running = self._running.pop()
                running.hooks.__exit__()
                if output is not None:
                    self._send(group, running.bundle, self._like(module, output))
            return None
        is_training = torch.is_grad_enabled() and not in_backward()
        if output is None or module is self._root or not self._sends or not is_training:
            return None
        size = self._left.get(self._like(module, output), 0)
        if self._ways[group].recomputes:
            size = sum(inputs.values())
        elif has_saved_tensor_hooks():  # somebody else's: nobody knows what they leave
            size = 0
        self._carrier.pass_by(size)
        return None if self._last is None else (self._last, size)

    def _like(self, module: nn.Module, output: Any) -> tuple[Any, int]:
        """The same for forwards that leave as much."""
        return self._kinds[module], sum(tensor.nbytes for tensor in tensors_in(output))

    def pass_back(self, passed: Passed) -> None:
        """Backward comes to a group whose activations stayed."""
        bundle, size = passed
        self._carrier.pass_back(bundle(), size)

    def _send(self, group: Group, bundle: GroupActivations, like: tuple[Any, int]) -> None:
        if self._peers is not None and group.name not in self._checked:
            self._checked.add(group.name)
            self._peers.check_same(group.name, [parcel.num_bytes for parcel in bundle.parcels])
        if len(self._left) >= MOST_KINDS:
            self._left.clear()
        self._left[like] = sum(parcel.num_bytes for parcel in bundle.parcels if parcel.num_users == 1)
        if bundle.parcels:
            self._gatherer.wires.ledger.work_on(group.name)
            self._carrier.send(bundle)
            self._last = weakref.ref(bundle)

    def _keep_input(self, tensor: torch.Tensor) -> _Moved | _Kept:
        """Of a recomputed group."""
        if self._running:
            return self._pack(tensor, self._running[-1].bundle)
        storage = tensor.untyped_storage()
        if id(storage) not in self._ours and self._is_worth_moving(tensor, storage):
            self._inputs[id(storage)] = storage.nbytes()
        return _Kept(tensor.detach(), version_of(tensor))

    def _is_worth_moving(self, tensor: torch.Tensor, storage: Storage) -> bool:
        return storage.nbytes() >= WORTH_MOVING and tensor.device == self._gatherer.wires.world.device

    @torch.no_grad()
    def _pack(self, tensor: torch.Tensor, bundle: GroupActivations) -> _Moved | _Kept:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return _Kept(tensor.detach(), None)
        storage = tensor.untyped_storage()
        if id(storage) in self._ours:
            return _Kept(tensor.detach(), None)
        is_plain = not tensor.is_conj() and not tensor.is_neg()
        if not is_plain or not self._is_worth_moving(tensor, storage):
            return _Kept(tensor.detach(), version_of(tensor))
        parcel = self._parcel_of(tensor, storage, bundle.tier)
        bundle.add(parcel)
        return _Moved(bundle, parcel, View.of(tensor))

    def _parcel_of(self, tensor: torch.Tensor, storage: Storage, tier: Tier) -> SavedStorage:
        """The one that has its storage in this tier already, or a new one."""
        if (id(storage), tier) in self._known:
            seen, known = self._known[id(storage), tier]
            parcel = known()
            if seen() is storage and parcel is not None and parcel.version == version_of(tensor):
                return parcel
        parcel = SavedStorage.of(tensor)
        self._known[id(storage), tier] = (weakref.ref(storage), weakref.ref(parcel))
        return parcel

    @torch.no_grad()
    def _unpack(self, saved: _Moved | _Kept) -> torch.Tensor:
        if isinstance(saved, _Kept):
            if saved.version is not None and version_of(saved.tensor) != saved.version:
                raise _changed(saved.tensor.shape)
            return saved.tensor
        timer = self._gatherer.timer
        doing = timer.mark(LoopPhase.WAITING, "activations")
        self._carrier.want(saved.bundle)
        timer.mark(doing)
        if saved.parcel.is_spoilt():
            raise _changed(saved.view.size)
        return saved.parcel.show(saved.view)

    def _lasting(self) -> Iterator[torch.Tensor]:
        """What is there all the time, or comes and goes by itself."""
        for group in self._gatherer.groups:
            for flat in group.flats:
                yield flat.full
        yield from self._root.buffers()


def _kind(module: nn.Module) -> tuple[Any, ...]:
    """The same for modules that do the same, as far as one can see."""
    return type(module), *(parameter.shape for parameter in module.parameters())


def _changed(size: torch.Size) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"size {tuple(size)} that was saved for backward was changed after that"
    )
