"""Gradients that are freed as groups are updated, so that few of them have memory at once.

The updater says which group was updated; backward asks for room before the next gradient lands. A gradient whose update
ran on the device's own stream is freed at once. Updates by threads may still read gradients, of at most `MOST_HELD`
groups; the device waits for the oldest of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from zerostd.parameters import Group
from zerostd.parameters.passing_gradient import PassingGradient

MOST_HELD = 2  # groups that are updated and still have their gradients, when another one lands
MOST_ARRIVING = 2  # groups whose gradients have landed, or are on the wires, and whose parameters backward still needs


class PassingGradients:
    """Frees the gradients of one model's groups."""

    def __init__(self) -> None:
        self._held: dict[Group, None] = {}  # updated, the oldest first

    def updated(self, group: Group) -> None:
        """Note that the updates of a group were started; what they do not read is freed."""
        if any(gradient.readers for gradient in _passing(group)):
            self._held[group] = None
        else:
            _free(group)

    def make_room(self, group: Group) -> None:
        """Free gradients until that of `group` may land."""
        if self._held.pop(group, self) is None:
            _free(group)
        while len(self._held) > MOST_HELD:
            oldest = next(iter(self._held))
            del self._held[oldest]
            _free(oldest)

    @staticmethod
    def most_bytes(root: int, groups: Iterable[int]) -> int:
        """Return the bytes of the gradients that have memory at once, from those of the root and of each other group.
        Backward needs the root's parameters to its end."""
        return root + sum(sorted(groups, reverse=True)[: MOST_HELD + MOST_ARRIVING])


def _passing(group: Group) -> list[PassingGradient]:
    gradients = [flat.gradient for flat in group.trainable]
    return [gradient for gradient in gradients if isinstance(gradient, PassingGradient)]


def _free(group: Group) -> None:
    for gradient in _passing(group):
        gradient.free()
