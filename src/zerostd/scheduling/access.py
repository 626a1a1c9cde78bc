"""Reads and writes of parameters wherever the user's code touches them.

A parameter that shows its values needs nobody. One that does not asks here (parameters/prepared.py):

    its group rests on the device      wait until the new values are there; it shows them from then on
    a forward or backward is running   gather its group, and from then on whenever the reader is
    else                               a copy of its group's values, kept until another group is touched

What was written goes to where parameters rest at once, and to the masters before they are used next.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn

from zerostd.parameters import Flat, Group, GroupState
from zerostd.parameters.prepared import ACCESS, LENT
from zerostd.scheduling.gathering import Gatherer


class ParameterAccess:
    """The way to the values of all parameters of one prepared model."""

    def __init__(self, gatherer: Gatherer, check_unlocked: Callable[[str], None]) -> None:
        self.gatherer = gatherer
        self.active: list[Group] = []  # groups whose forward runs now, innermost last
        self.places = {
            parameter: (group, flat, index)
            for group in gatherer.groups
            for flat in group.flats
            for index, parameter in enumerate(flat.parameters)
        }
        self._check_unlocked = check_unlocked  # raises where an update inside backward has begun
        self._copied: tuple[Group, dict[Flat, torch.Tensor]] | None = None  # the last group that was touched

    def install(self) -> None:
        """Let parameters ask here."""
        for parameter in self.places:
            parameter.__dict__[ACCESS] = weakref.ref(self)
        for group in self.gatherer.groups:
            if group.state is GroupState.GATHERED:
                group.show_values()

    def remove(self) -> None:
        """Leave parameters as they were."""
        for flat in (flat for group in self.gatherer.groups for flat in group.flats):
            flat.restore_classes()
        for parameter in self.places:
            parameter.__dict__.pop(ACCESS, None)
            parameter.__dict__.pop(LENT, None)

    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the parameter itself, if it shows its values then, else a copy of them outside autograd."""
        group, flat, index = self.places[parameter]
        if group.state is not GroupState.GATHERED:
            self._check_unlocked(f"a use of {flat.layout.intervals[index].name!r}")
            if not group.gives_back:
                self.gatherer.gather(group)
            elif self.active:
                self.active[-1].borrowed[group.name] = group
                self.gatherer.gather(group)
        if group.state is GroupState.GATHERED:
            return parameter
        if self._copied is None or self._copied[0] is not group:
            self._copied = (group, self.gatherer.copy(group))
        interval = flat.layout.intervals[index]
        return self._copied[1][flat][interval.offset : interval.end].view(interval.shape)

    def write(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """Keep what was written to the tensor that `read` returned."""
        _, flat, index = self.places[parameter]
        flat.keep_values(index, values)

    def forget(self) -> None:
        """Drop the copy: values are about to change."""
        self._copied = None
