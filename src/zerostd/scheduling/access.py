"""Reads and writes of parameters wherever the user's code touches them.

A parameter that shows its values needs no access. One that does not show them asks here (parameters/prepared.py):

    its group is on the device         wait until the new values are there; it shows them from then on
    a forward is running               gather its group, and from then on whenever the reader is
    else                               a copy of its group's values, kept until another group is touched

Writes go to the parameters' home at once, and to the masters before their next use.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import nn

from zerostd.compat import outside_transforms, storage_of
from zerostd.errors import MisuseError
from zerostd.parameters import Flat, Group, GroupState
from zerostd.parameters.prepared import ACCESS, LAST_HOOK, LENT
from zerostd.scheduling.gathering import Gatherer


class ModelGradients(Protocol):
    """The methods of the model's gradients that access needs."""

    def check_unlocked(self, call: str) -> None:
        """Raise if `call` comes between backward and step, where an update has begun inside backward."""
        ...

    def replace(self, name: str, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Let this be the gradient of a parameter."""
        ...


READ_ONLY = (
    "zerostd.gathered(module): use zerostd.gathered(module, write=True), which keeps the changes of rank 0 on all ranks"
)


def not_writable(name: str, where: str) -> MisuseError:
    """Return the error for a write to a parameter; `where` names the place and the remedy."""
    return MisuseError(f"{name!r} or a parameter of its group was changed inside {where}")


class ParameterAccess:
    """Gives access to the values of all parameters of one prepared model."""

    def __init__(self, gatherer: Gatherer, gradients: ModelGradients) -> None:
        self.gatherer = gatherer
        self.active: list[Group] = []  # groups whose forward runs now, innermost last
        self.places = {
            parameter: (group, flat, index)
            for group in gatherer.groups
            for flat in group.flats
            for index, parameter in enumerate(flat.parameters)
        }
        self._gradients = gradients
        self._copied: tuple[Group, dict[Flat, torch.Tensor]] | None = None  # the last group that was touched
        self._held: dict[Group, dict[Flat, torch.Tensor]] = {}  # inside zerostd.gathered
        self._before: dict[Flat, torch.Tensor] = {}  # likewise: values that may be written to, as they were
        self._references: list[weakref.ref[nn.Parameter]] = []  # torch.utils.swap_tensors refuses what has any
        self._read_only: str | None = None  # where writes are refused now: the context, and the remedy

    def install(self) -> None:
        """Let parameters ask this object for their values."""
        for parameter in self.places:
            parameter.__dict__[ACCESS] = weakref.ref(self)
        self._references = [weakref.ref(parameter) for parameter in self.places]
        for group in self.gatherer.groups:
            if group.state is GroupState.GATHERED:
                group.show_values()

    def remove(self) -> None:
        """Restore the parameters as they were."""
        for flat in (flat for group in self.gatherer.groups for flat in group.flats):
            flat.restore_classes()
        self._references = []
        for parameter in self.places:
            for name in (ACCESS, LENT, LAST_HOOK):
                parameter.__dict__.pop(name, None)

    def check_unlocked(self, call: str) -> None:
        """Raise if `call` comes between backward and step, where an update has begun inside backward."""
        self._gradients.check_unlocked(call)

    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the parameter itself if it shows its values, otherwise a copy of them outside autograd."""
        group, flat, index = self.places[parameter]
        if group in self._held:
            return flat.shown(index, self._held[group][flat])
        has_copy = self._copied is not None and self._copied[0] is group and not self.active
        if group.state is not GroupState.GATHERED and not has_copy:
            with self.gatherer.turn, outside_transforms():
                self._bring(group, flat.layout.intervals[index].name)
        if group.state is GroupState.GATHERED:
            if not flat.holds_halves or self.active:
                return parameter
            with torch.inference_mode(False):  # a write is told from what was there before
                return flat.copied(index)
        assert self._copied is not None
        return flat.shown(index, self._copied[1][flat])

    def _bring(self, group: Group, name: str) -> None:
        """Gather a group, or make a copy of its values."""
        self._gradients.check_unlocked(f"a use of {name!r}")
        if group.gives_back and self.active:
            self.active[-1].borrowed[group.name] = group
        if not group.gives_back or self.active or group.state is GroupState.GATHERING:
            self.gatherer.gather(group)
        else:
            self._copied = (group, self.gatherer.copy(group))

    def write(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """Keep what was written to the tensor that `read` returned."""
        group, flat, index = self.places[parameter]
        group.check_exact(flat)
        if self._read_only is not None:
            raise not_writable(flat.layout.intervals[index].name, self._read_only)
        with self.gatherer.turn, torch.inference_mode(False), torch.no_grad():
            flat.keep_values(index, values, is_compared=flat not in self._before)
        # A call that takes parameters of several groups may have made two copies of this one. The later one is kept,
        # and does not have these values.
        copied = self._copied
        if copied is not None and copied[0] is group and storage_of(values) != storage_of(copied[1][flat]):
            self._copied = None

    @contextlib.contextmanager
    def watched(self, parameter: nn.Parameter, *, gives_view: bool) -> Iterator[None]:
        """Detect a write to a parameter that is half of its master."""
        group, flat, index = self.places[parameter]
        is_elsewhere = flat in self._before or self._read_only is not None  # the end of the context tells
        if not flat.holds_halves or is_elsewhere or (gives_view and self.active):
            yield
            return
        if group.state is not GroupState.GATHERED:
            self.read(parameter)
        with self.gatherer.turn:
            is_new = flat.watch(index)
        try:
            yield
        finally:
            if not gives_view:
                with self.gatherer.turn, torch.inference_mode(False), torch.no_grad():
                    flat.keep_watched(index, forget=is_new)

    @contextlib.contextmanager
    def held(self, groups: Sequence[Group], *, write: bool) -> Iterator[None]:
        """Hold the values of groups inside the context. With `write`, rank 0's changes are kept, on all ranks."""
        outer = self._held
        before = self._before
        with self.gatherer.turn:
            self._hold(groups, write=write)
        try:
            with self.pinned(groups, None if write else READ_ONLY):
                yield
            edited = [flat for group in groups for flat in group.flats if flat.has_edits]
            if edited and not write:
                raise not_writable(edited[0].layout.intervals[0].name, READ_ONLY)
            if write:
                self.gatherer.control.confirm("the end of zerostd.gathered(write=True)")
                with self.gatherer.turn:
                    self._keep_held(groups)
        finally:
            self._held = outer
            self._before = before

    @contextlib.contextmanager
    def pinned(self, groups: Sequence[Group], read_only: str | None) -> Iterator[None]:
        """Keep groups from being updated inside the context, and with `read_only` from being written to."""
        outer = self._read_only
        if outer not in (None, READ_ONLY) and read_only is None:
            raise not_writable(groups[0].name, outer)
        self._read_only = read_only
        try:
            with contextlib.ExitStack() as pins:
                for group in groups:
                    pins.enter_context(group.pinned())
                yield
        finally:
            self._read_only = outer

    def _hold(self, groups: Sequence[Group], *, write: bool) -> None:
        """Gather groups that are kept on the device, and copy the others."""
        for group in (group for group in groups if not group.gives_back):
            self.gatherer.gather(group)
            group.keep_edits()  # from before the context
        if not self.active:
            self.gatherer.drop_kept(group for group in groups if group not in self._held)
        copies = {group: self.gatherer.copy(group) for group in groups if group.gives_back and group not in self._held}
        self._held = copies | self._held
        written = [flat for group in groups for flat in group.flats if write and flat.holds_halves]
        self._before = {flat: flat.full.clone() for flat in written} | self._before

    def _keep_held(self, groups: Sequence[Group]) -> None:
        """Keep what rank 0 has changed."""
        self.forget()
        for group in groups:
            for flat, full in self._held.get(group, {flat: flat.full for flat in group.flats}).items():
                with self.gatherer.wires.world.at(f"the broadcast of group {group.name!r}"):
                    self.gatherer.wires.broadcast([full])
                flat.keep_all(full, self._before.get(flat))
            group.commit_edits()

    def set_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Let this be the gradient of a parameter."""
        _, flat, index = self.places[parameter]
        self.check_trainable(parameter)
        self._gradients.replace(flat.layout.intervals[index].name, parameter, gradient)

    def check_trainable(self, parameter: nn.Parameter) -> None:
        """Raise if a parameter was frozen when the model was prepared: it has no place for gradients and states."""
        _, flat, index = self.places[parameter]
        if flat.gradient is None:
            raise MisuseError(
                f"{flat.layout.intervals[index].name!r} was frozen when the model was prepared, so it has no gradient "
                "and no optimizer state: set requires_grad before zerostd.prepare, and freeze with lr=0 or "
                "requires_grad_(False) afterwards"
            )

    def shows_values(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter shows its values."""
        return self.places[parameter][0].state is GroupState.GATHERED

    def shows_master(self, parameter: nn.Parameter) -> bool:
        """Return whether what a parameter shows is its master, now and after updates, or its forward runs."""
        group, flat, _ = self.places[parameter]
        shards = flat.state_shards
        holds = all(shard.is_resident and shard.holds_parameters and not shard.is_split for shard in shards)
        return bool(self.active) or (holds and not group.gives_back and not group.is_in_slices)

    def forget(self) -> None:
        """Drop the copy: values are about to change."""
        self._copied = None
