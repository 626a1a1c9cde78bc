"""Notice reads of parameters: a module may use a weight of another module, whose forward never runs.

`module.weight` looks into `module._parameters`. Hooks replace that dict by one of the same content, which reports the
group of a parameter before the reader gets it. They do so only where groups are gathered at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from zerostd.parameters import Group, GroupState


class WatchedParameters(dict[str, "nn.Parameter | None"]):
    """A module's parameters. Reading one of a group that is not gathered calls `on_read`."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter | None],
        owners: dict[nn.Parameter, Group],
        on_read: Callable[[Group, bool], None],
    ) -> None:
        super().__init__(parameters)
        self._owners = owners
        self._on_read = on_read

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        self._report(parameter, by_name=True)
        return parameter

    def items(self) -> Any:
        for parameter in super().values():
            self._report(parameter, by_name=False)
        return super().items()

    def values(self) -> Any:
        for parameter in super().values():
            self._report(parameter, by_name=False)
        return super().values()

    def _report(self, parameter: nn.Parameter | None, *, by_name: bool) -> None:
        group = self._owners.get(parameter) if parameter is not None else None
        if group is not None and group.state is not GroupState.GATHERED:
            self._on_read(group, by_name)
