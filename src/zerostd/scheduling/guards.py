"""Guards against calls on a prepared module that would go wrong silently: a guard makes the call work, or refuses it.

    .to(), .half(), .cuda()   fine while they change nothing; otherwise refused
    state_dict()              works where parameters are gathered; refused where they are sharded
    load_state_dict()         works everywhere: group by group, masters exact; every rank must call it
    deepcopy, pickle          refused

Every guard is an attribute or a hook of the module itself, and `remove` takes it off again.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zerostd.errors import MisuseError
from zerostd.parameters import Flat, Group
from zerostd.parameters.blueprints import GUARD
from zerostd.scheduling.access import ParameterAccess


class Guards:
    """Installs and removes the guards of one prepared model."""

    def __init__(self, root: nn.Module, access: ParameterAccess, finish_updates: Callable[[], None]) -> None:
        self._root = weakref.ref(root)
        self.gatherer = access.gatherer
        self._access = access
        self.is_open = False  # state_dict is being called by zerostd itself
        self._finish_updates = finish_updates  # masters must be home before they are changed
        self._places = access.places
        members = [member for group in self.gatherer.groups for member in group.blueprint.members]
        self._frozen = [(m.name, m.parameter) for m in members if not m.parameter.requires_grad]
        self._hooks: list[RemovableHandle] = []
        self._loading: dict[Group, None] = {}  # stay gathered while their values are loaded,
        self._loaded: dict[Group, None] = {}  # and are on the device, so that they wait for the end
        self._values: dict[Flat, dict[int, torch.Tensor]] = {}  # that are loaded, before rounding, by index
        self._depth = 0

    def install(self) -> None:
        """Put guards on every module of the model."""
        for module in self._modules():
            module.__dict__["_apply"] = functools.partial(self._apply, weakref.ref(module))
            module.__dict__[GUARD] = self._refuse_copy
            self._hooks += (
                module.register_state_dict_pre_hook(self._before_state_dict),
                module.register_load_state_dict_pre_hook(self._before_load),
                module.register_load_state_dict_post_hook(self._after_load),
            )

    def _modules(self) -> Iterator[nn.Module]:
        root = self._root()
        return iter(()) if root is None else root.modules()

    def remove(self) -> None:
        """Take all guards off."""
        for module in self._modules():
            for name in ("_apply", GUARD):
                module.__dict__.pop(name, None)
        while self._hooks:
            self._hooks.pop().remove()

    def check_frozen(self) -> None:
        """Raise if a parameter that was frozen trains now."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise MisuseError(
                    f"{name!r} was frozen when the model was prepared and trains now, but has no optimizer state: set "
                    "requires_grad before zerostd.prepare, and freeze with lr=0 or requires_grad_(False) afterwards"
                )

    def _apply(
        self,
        reference: weakref.ref[nn.Module],
        function: Callable[[torch.Tensor], torch.Tensor],
        recurse: bool = True,
    ) -> nn.Module:
        module = reference()
        assert module is not None, "it is being called"
        for parameter in module.parameters():
            probe = torch.empty((2,) * parameter.dim(), dtype=parameter.dtype, device=parameter.device)
            changed = function(probe)
            if changed is not probe or (probe.device.type == "cpu" and probe.is_shared()):
                before = f"{probe.dtype} on {probe.device}"
                after = f"{changed.dtype} on {changed.device}"
                change = f"new memory for {before}" if after == before else f"{after} instead of {before}"
                raise MisuseError(
                    f"a prepared model cannot be moved, cast or emptied: its parameters would get {change}. Do it "
                    "before zerostd.prepare (models of zerostd.empty_init() get their memory there), choose the dtype "
                    "with prepare(precision=...), or zerostd.release the model first"
                )
        for submodule in module.modules():
            for name, buffer in submodule._buffers.items():
                if buffer is not None:
                    submodule._buffers[name] = function(buffer)
        return module

    def _refuse_copy(self, protocol: Any) -> Any:
        raise MisuseError(
            "a prepared model cannot be copied or pickled, since its parameters are shared with other ranks: copy "
            "zerostd.full_state_dict(model) into another model, or zerostd.release it first"
        )

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self.is_open:
            return
        self._access.check_unlocked("state_dict()")
        for parameter in module.parameters(recurse=False):
            group = self._places[parameter][0]
            if group.gives_back and not group.num_pins:
                raise MisuseError(
                    "state_dict() of a model whose parameters are sharded (stage 3) or off the device would hold NaN: "
                    "call zerostd.full_state_dict(model) on all ranks"
                )
            self.gatherer.wait_gather(group)

    def _before_load(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise MisuseError("load_state_dict(assign=True) would replace prepared parameters: leave assign out")
        if self._depth == 0:
            self._access.check_unlocked("load_state_dict()")
            self._access.forget()
            self._finish_updates()
        self._depth += 1
        wanted = dict.fromkeys(self._places[parameter][0] for parameter in module.parameters(recurse=False))
        self._commit([group for group in self._loading if group not in wanted])
        for group in wanted:
            self.gatherer.gather(group)
            (self._loading if group.gives_back else self._loaded)[group] = None
        for short, parameter in module._parameters.items():
            value = state_dict.get(prefix + short)
            if parameter is not None and isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                flat, index = self._places[parameter][1:]
                self._values.setdefault(flat, {})[index] = flat.local(index, value)
                if flat.specs[index] is None:
                    self.gatherer.control.note_values(prefix + short, value)

    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._commit([*self._loading, *self._loaded])

    def _commit(self, groups: list[Group]) -> None:
        for group in groups:
            self._loading.pop(group, None)
            self._loaded.pop(group, None)
            for flat in group.flats:
                flat.keep_all(flat.full)
                flat.commit_edits()
                for index, value in self._values.pop(flat, {}).items():
                    flat.write_values(index, value)  # masters are exact, whatever torch has rounded
            self.gatherer.release(group)
