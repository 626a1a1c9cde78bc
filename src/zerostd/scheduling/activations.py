"""Activations: tensors that a group's forward saves are kept elsewhere until its backward.

While a group runs whose activations leave the device, saved tensors go through a pack hook of autograd. Parameters and
buffers are not activations, and small tensors are not worth moving: both stay. A recomputed group keeps only its inputs
and runs again in backward (`recomputing.py`); the inputs may be kept elsewhere meanwhile. If some groups send their
activations away, the other groups make room for those in transit: before they run, and after backward has passed them.
The bytes that such a group keeps are estimated from a similar group that sends its activations: one of the same class,
with parameters of the same shapes and as many bytes of output.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zerostd.communication.control import check_same_activations
from zerostd.compat import has_saved_tensor_hooks, in_backward, version_of
from zerostd.errors import MisuseError, PrepareError
from zerostd.monitoring.events import LoopPhase
from zerostd.parameters import Group
from zerostd.policy import Tier, Way
from zerostd.scheduling.counting import ActivationCounter, CountedBytes
from zerostd.scheduling.gathering import Gatherer
from zerostd.scheduling.offloading import ActivationOffloader
from zerostd.scheduling.recomputing import GiveBack, recompute
from zerostd.scheduling.saved_storage import GroupActivations, SavedStorage, TensorLayout
from zerostd.scheduling.tensors import tensors_in

WORTH_MOVING = 256 * 2**10  # bytes
MOST_KINDS = 256  # of forwards that are remembered: lengths may vary for ever

Storage = torch.UntypedStorage
Passed = tuple[weakref.ref[GroupActivations], int]  # of a group whose activations stay: what left before it; its bytes


class Activations:
    """The activations of one prepared model."""

    def __init__(
        self,
        root: nn.Module,
        gatherer: Gatherer,
        ways: Mapping[str, Way],
        offloader: ActivationOffloader,
    ) -> None:
        self._root = weakref.ref(root)
        self._gatherer = gatherer
        self.offloader = offloader
        self._ways = {group: ways.get(group.name, Way.DEVICE) for group in gatherer.groups}
        self._sends = offloader.peers is None and any(way.tier is not Tier.DEVICE for way in self._ways.values())
        # By module that has run: a key that is the same for modules that do the same, as far as one can see.
        self._kinds: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        self._left: dict[tuple[Any, int], int] = {}  # bytes, by kind of a module that sent them and bytes of its output
        self._running: tuple[nn.Module, GroupActivations, torch.autograd.graph.saved_tensors_hooks] | None = None
        self._undo = contextlib.ExitStack()  # puts back forwards that are recomputed
        self._ours: set[int] = set()  # storages of parameters and buffers
        self._known: dict[tuple[int, Tier], tuple[weakref.ref[Storage], weakref.ref[SavedStorage]]] = {}
        self._inputs: dict[int, int] = {}  # bytes by storage, of the recomputed group that runs now
        self._last: weakref.ref[GroupActivations] | None = None  # left in this pass
        self._checked: set[str] = set()  # groups that peers have compared
        self.counter = ActivationCounter(lambda storage: id(storage) in self._ours)

    @property
    def is_on(self) -> bool:
        """Whether any group does something other than keep its activations."""
        is_changed = any(way is not Way.DEVICE for way in self._ways.values())
        return self.offloader.peers is not None or is_changed or self.counter.is_on

    def count(self) -> None:
        """Count the activations that groups would keep in the next pass."""
        self.counter.is_on = True

    def change(self, ways: Mapping[str, Way]) -> None:
        """Change what groups do with activations from the next forward on."""
        self._undo.close()
        self.counter.recomputed.clear()
        self._ways = {group: ways.get(group.name, Way.DEVICE) for group in self._gatherer.groups}
        self._sends = self.offloader.peers is None and any(way.tier is not Tier.DEVICE for way in self._ways.values())
        for tier, pool in self.offloader.copies.pools.items():
            if all(way.tier is not tier for way in self._ways.values()):
                pool.give_back()
        self.install()

    def install(self) -> None:
        """Replace the forwards of groups that are recomputed."""
        device = self._gatherer.wires.world.device
        for group, way in self._ways.items():
            for module in group.blueprint.modules:
                if way.recomputes and _has_parts(module) and module is not self._root():
                    counting = functools.partial(self.counter.within, group.name)
                    keep = functools.partial(self._keep_input, group.name)
                    self._undo.callback(recompute(group.name, module, device, keep, counting))
                    self.counter.recomputed.add(module)

    def counted(self) -> CountedBytes:
        """Return what groups left in the last pass that was counted."""
        left = 0
        inside = 0
        leaving = 0
        for group, way in self._ways.items():
            size = self.counter.groups.get(group.name)
            if size is not None:
                is_recomputed = not self.counter.recomputed.isdisjoint(group.blueprint.modules)
                size_left = size.boundary if is_recomputed else size.kept
                left += size_left if way.tier is Tier.DEVICE else 0
                leaving = max(leaving, 0 if way.tier is Tier.DEVICE else size_left)
                inside = max(inside, size.kept if is_recomputed else 0)
        return CountedBytes(left, inside, leaving)

    def remove(self) -> None:
        """Leave the modules as they were."""
        self.offloader.end_backward()
        self._undo.close()

    def begin(self) -> None:
        """Begin a forward of the root. An interrupted forward may not have ended."""
        if self._running is not None:
            self._stop_packing()
        self.offloader.end_backward()
        self.offloader.begin()
        self._last = None
        self._known.clear()
        self._inputs.clear()
        self.counter.begin()
        if not self.is_on:
            return
        flats = [flat.full for group in self._gatherer.groups for flat in group.flats]
        root = self._root()
        buffers = [] if root is None else root.buffers()
        self._ours = {id(tensor.untyped_storage()) for tensor in (*flats, *buffers)}

    def enter(self, group: Group, module: nn.Module, inputs: Any) -> None:
        """Begin a group's forward."""
        if module is self._root() or not torch.is_grad_enabled() or in_backward():
            return
        way = self._ways[group]
        stays = way.tier is Tier.DEVICE and (self.offloader.peers is None or way.recomputes)
        self.counter.leave()
        if self._running is None and has_saved_tensor_hooks():  # somebody else has what is saved
            if stays or self.offloader.may_stay:
                return
            raise MisuseError(
                f"group {group.name!r} runs inside torch.utils.checkpoint, or other hooks on saved tensors, but "
                f"Placement also sets its activations to {way.value!r}: use one of them. 'recompute', 'recompute+host' "
                "and 'recompute+disk' replace checkpointing; Placement(activations={'blocks.*': ...}) selects groups"
            )
        if not stays and self._running is None:
            activations = GroupActivations(group.name, way.tier, self._last)
            pack = functools.partial(self._pack, activations)
            hooks = torch.autograd.graph.saved_tensors_hooks(pack, operator.call)
            hooks.__enter__()
            self._running = (module, activations, hooks)
        if module not in self.counter.recomputed:
            self.counter.enter(group.name, inputs if _has_parts(module) else ())

    def leave(self, group: Group, module: nn.Module, output: Any) -> Passed | None:
        """End a group's forward, without an output if it failed. Its activations start to leave, unless no backward
        will need them. If its activations stay and others have left before, return what the offloader's `pass_back`
        needs."""
        inputs = self._inputs
        self._inputs = {}
        self.counter.leave()
        if self._running is not None:
            if self._running[0] is module:
                activations = self._stop_packing()
                if output is not None:
                    self._send(group, activations, self._like(module, output))
            return None
        is_training = torch.is_grad_enabled() and not in_backward()
        if output is None or module is self._root() or not self._sends or not is_training:
            return None
        size = self._left.get(self._like(module, output), 0)
        if self._ways[group].recomputes:
            size = sum(inputs.values())
        elif has_saved_tensor_hooks():  # somebody else's: nobody knows what they leave
            size = 0
        self.offloader.pass_by(size)
        return None if self._last is None else (self._last, size)

    def _stop_packing(self) -> GroupActivations:
        """Return the activations that the running group has left."""
        assert self._running is not None
        _, activations, hooks = self._running
        self._running = None
        hooks.__exit__()
        return activations

    def _like(self, module: nn.Module, output: Any) -> tuple[Any, int]:
        """Return a key that is equal for forwards that leave equally many bytes."""
        if module not in self._kinds:
            self._kinds[module] = (type(module), *(p.shape for p in module.parameters()))
        return self._kinds[module], sum(tensor.nbytes for tensor in tensors_in(output))

    def _send(self, group: Group, activations: GroupActivations, like: tuple[Any, int]) -> None:
        storages = activations.storages
        if self.offloader.peers is not None and group.name not in self._checked:
            self._checked.add(group.name)
            sizes = [storage.num_bytes for storage in storages]
            check_same_activations(self.offloader.peers.world, group.name, sizes)
        if len(self._left) >= MOST_KINDS:
            self._left.clear()
        self._left[like] = sum(storage.num_bytes for storage in storages if storage.num_users == 1)
        if storages:
            self._gatherer.wires.ledger.work_on(group.name)
            try:
                self.offloader.send(activations)
            except PrepareError:  # there is no room for them elsewhere
                if not self.offloader.may_stay:
                    raise
            self._last = weakref.ref(activations)

    def _keep_input(self, group: str, tensor: torch.Tensor) -> GiveBack:
        """Keep an input of a recomputed group."""
        self.counter.take_input(group, tensor)
        if self._running is not None:
            return self._pack(self._running[1], tensor)
        storage = tensor.untyped_storage()
        if id(storage) not in self._ours and self._is_worth_moving(tensor, storage):
            self._inputs[id(storage)] = storage.nbytes()
        return _kept(tensor)

    def _is_worth_moving(self, tensor: torch.Tensor, storage: Storage) -> bool:
        return storage.nbytes() >= WORTH_MOVING and tensor.device == self._gatherer.wires.world.device

    @torch.no_grad()
    def _pack(self, activations: GroupActivations, tensor: torch.Tensor) -> GiveBack:
        """Let a saved tensor travel with the activations of its group, or keep it."""
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return _kept(tensor, may_change=True)
        storage = tensor.untyped_storage()
        if id(storage) in self._ours:
            return _kept(tensor, may_change=True)
        is_plain = not tensor.is_conj() and not tensor.is_neg()
        if not is_plain or not self._is_worth_moving(tensor, storage):
            return _kept(tensor)
        saved = self._saved_storage(tensor, storage, activations.tier)
        activations.add(saved)
        layout = (tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        return functools.partial(self._bring_back, activations, saved, layout)

    def _saved_storage(self, tensor: torch.Tensor, storage: Storage, tier: Tier) -> SavedStorage:
        """Return the saved storage that already has this storage in this tier, or a new one."""
        if (id(storage), tier) in self._known:
            seen, known = self._known[id(storage), tier]
            saved = known()
            if seen() is storage and saved is not None and saved.version == version_of(tensor):
                return saved
        saved = SavedStorage.of(tensor)
        self._known[id(storage), tier] = (weakref.ref(storage), weakref.ref(saved))
        return saved

    @torch.no_grad()
    def _bring_back(self, activations: GroupActivations, saved: SavedStorage, layout: TensorLayout) -> torch.Tensor:
        """Return a saved tensor that had left the device."""
        timer = self._gatherer.timer
        with self._gatherer.turn:
            phase = timer.mark(LoopPhase.WAITING, "activations")
            self.offloader.want(activations)
            timer.mark(phase)
        if saved.is_spoilt():
            raise _changed(layout[1])
        return saved.tensor(layout)


def _has_parts(module: nn.Module) -> bool:
    """Return whether recomputing a module saves memory: a module without submodules keeps little besides its inputs."""
    return next(module.children(), None) is not None


def _kept(tensor: torch.Tensor, *, may_change: bool = False) -> GiveBack:
    """Keep a saved tensor where it is, but detached: otherwise the graph would keep itself alive."""
    kept = tensor.detach()
    version = None if may_change else version_of(tensor)

    def give_back() -> torch.Tensor:
        if version is not None and version_of(kept) != version:
            raise _changed(kept.shape)
        return kept

    return give_back


def _changed(size: torch.Size) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"size {tuple(size)} was changed after it was saved for backward"
    )
