"""Order: learns the order in which passes need groups, for each group and phase the one that came next last time.

It is only a prediction. `Gatherer` tells it which groups are needed, and asks it which ones to gather ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zerostd.monitoring.events import LoopPhase
from zerostd.parameters import Group


class GroupOrder:
    """What is known of the order of one model's groups, and where the present passes are in it."""

    def __init__(self) -> None:
        self.before: Group | None = None  # the group that this pass needed before the present one
        self._next: dict[tuple[LoopPhase, Group | None], Group] = {}  # by phase and group; None: the first
        self._present: dict[LoopPhase, Group | None] = {}  # the group needed last, in forward and in backward
        self._end: Group | None = None  # of the forward before this one

    def begin(self, phase: LoopPhase) -> None:
        """Begin a pass."""
        if phase is LoopPhase.FORWARD:
            self._end = self._present.get(phase)
        self._present[phase] = None
        self.before = None

    def learn(self, group: Group, phase: LoopPhase) -> bool:
        """Remember that `group` is needed now; return whether it was expected."""
        last = self._present.get(phase)
        if last is group:
            return True
        was_expected = self._next.get((phase, last)) is group
        self._next[phase, last] = group
        self._present[phase] = group
        self.before = last
        return was_expected

    def first(self, phase: LoopPhase) -> Group | None:
        """Return the group that such a pass began with; None if there was none."""
        return self._next.get((phase, None))

    def is_over(self) -> bool:
        """Return whether no group is expected after the present one of forward."""
        return self._next.get((LoopPhase.FORWARD, self._present.get(LoopPhase.FORWARD))) is None

    def after(self, group: Group, phase: LoopPhase, *, repeats: bool = False) -> Iterator[Group]:
        """Yield the groups that are expected after `group`. With `repeats`, the next forward follows this one."""
        current: Group | None = group
        while True:
            if repeats and current is self._end:
                current = None
            current = self._next.get((phase, current))
            if current is None or current is group:
                return
            yield current

    def in_forward(self, groups: Iterable[Group]) -> list[Group]:
        """Return `groups` in the order of the last forward, followed by those that it did not need."""
        ordered: dict[Group, None] = {}
        group = self.first(LoopPhase.FORWARD)
        while group is not None and group not in ordered:
            ordered[group] = None
            group = self._next.get((LoopPhase.FORWARD, group))
        return [*ordered, *(group for group in groups if group not in ordered)]
