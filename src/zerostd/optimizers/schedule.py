"""What the optimizer asks of the schedule; it never learns how groups move."""

from __future__ import annotations

from typing import Protocol

from zerostd.parameters import Group

__all__ = ["Schedule"]


class Schedule(Protocol):
    """A step calls check_step, settle, then update_order, renew for each group it updates, and stepped at its end."""

    def check_step(self) -> None:
        """Raise if a step now would lose gradients."""

    def settle(self) -> None:
        """Return when all gradients have landed."""

    def update_order(self) -> list[Group]:
        """Return the groups, those the next forward needs first in front."""

    def renew(self, group: Group) -> None:
        """Note that the group's masters have changed."""

    def stepped(self) -> None:
        """Note that a step was taken, or skipped."""
