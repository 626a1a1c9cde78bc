"""`optimizer.state` as torch has it, by parameter: read, written, replaced and deleted by the user's code.

Spans keep states (spans.py). The states of a parameter are put together when they are read, from all ranks where ranks
update slices of it: then every rank must read them. What is written goes to this rank's part at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import nn

from zerostd.communication import Control
from zerostd.communication.dtensors import is_dtensor
from zerostd.errors import MisuseError
from zerostd.optimizers.gradients import Gradients
from zerostd.optimizers.states import States, has_states, parameters_with_states, read_states, write_states
from zerostd.optimizers.updater import Updater
from zerostd.parameters.lending import CopySource, lend


class ParameterStates(MutableMapping[nn.Parameter, MutableMapping[str, Any]]):
    """The states of all parameters of one prepared optimizer."""

    def __init__(self, updater: Updater, gradients: Gradients, control: Control) -> None:
        self._updater = updater
        self._gradients = gradients
        self._control = control
        self._places = {p: (flat, index) for flat in updater.spans for index, p in enumerate(flat.parameters)}

    def __getitem__(self, parameter: nn.Parameter) -> ParameterState:
        return ParameterState(self, parameter)

    def __setitem__(self, parameter: nn.Parameter, states: Mapping[str, Any]) -> None:
        self.write(parameter, dict(states))

    def __delitem__(self, parameter: nn.Parameter) -> None:
        if parameter not in self:
            raise KeyError(parameter)
        self.write(parameter, {})

    def __iter__(self) -> Iterator[nn.Parameter]:
        self._synchronize()
        here = set().union(*(parameters_with_states(spans) for spans in self._updater.spans.values()))
        everyone = self._control.collect([parameter in here for parameter in self._places])
        return iter([p for p, *flags in zip(self._places, *everyone, strict=True) if any(flags)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, parameter: object) -> bool:
        if not isinstance(parameter, nn.Parameter) or parameter not in self._places:
            return False
        self._synchronize()
        flat, index = self._places[parameter]
        return any(self._control.collect(has_states(self._updater.spans[flat], index)))

    def clear(self) -> None:
        self._synchronize()
        for spans in self._updater.spans.values():
            for span in spans:
                spans.forget(span)

    def replace(self, states: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """Replace all states by these."""
        kept = {parameter: dict(named) for parameter, named in states.items()}
        self.clear()
        self.update(kept)

    def _synchronize(self) -> None:
        """Wait for running updates; raise if one has failed, or has begun inside backward."""
        self._gradients.check_unlocked("optimizer.state")
        self._updater.check()
        self._updater.drain()

    def read(self, parameter: nn.Parameter) -> States:
        """Return the states of one parameter, whole, as copies. Every rank must call it."""
        if parameter not in self._places:
            return {}
        self._synchronize()
        flat, index = self._places[parameter]
        interval, states = read_states(self._updater.spans[flat], index)
        if flat.region.stop - flat.region.start < flat.layout.numel:
            everyone = self._control.collect((interval, states))
            parts = sorted(everyone[self._control.world.row], key=lambda part: part[0])
            states = _join([part for _, part in parts if part])
        device = parameter.device
        shape = flat.layout.intervals[index].shape
        states |= {n: value.to(device).reshape(shape) for n, value in states.items() if n in self._updater.states}
        spec = flat.specs[index]
        if spec is not None:
            local = {n: v for n, v in states.items() if isinstance(v, torch.Tensor) and tuple(v.shape) == shape}
            states |= {name: spec.wrap(value) for name, value in local.items()}
        return states

    def write(self, parameter: nn.Parameter, states: States) -> None:
        """Set the states of one parameter."""
        if parameter not in self._places:
            raise MisuseError(
                f"optimizer.state of a parameter of shape {tuple(parameter.shape)} that this optimizer does not "
                "update: put all parameters into the optimizer before zerostd.prepare"
            )
        dtypes = self._updater.states
        states = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in states.items()}
        for name, value in states.items():
            if name in dtypes and value.shape != parameter.shape:
                raise MisuseError(
                    f"optimizer.state: {name!r} of shape {tuple(value.shape)} for a parameter of shape "
                    f"{tuple(parameter.shape)}: it must have the parameter's shape"
                )
        self._synchronize()
        flat, index = self._places[parameter]
        states |= {name: flat.local(index, v).to(dtypes[name]) for name, v in states.items() if name in dtypes}
        write_states(self._updater, self._updater.spans[flat], index, states)


def _join(parts: list[States]) -> States:
    """Return the states of a parameter from those of its intervals, in order."""
    if not parts:
        return {}
    return {
        name: torch.cat([part[name] for part in parts]) if isinstance(value, torch.Tensor) and value.dim() else value
        for name, value in parts[0].items()
    }


class ParameterState(MutableMapping[str, Any]):
    """The states of one parameter by name. Tensors are lent: what is written to them is kept."""

    def __init__(self, states: ParameterStates, parameter: nn.Parameter) -> None:
        self._states = states
        self._parameter = parameter

    def __getitem__(self, name: str) -> Any:
        value = self.read()[name]
        if not isinstance(value, torch.Tensor) or is_dtensor(value):
            return value
        return lend(CopySource(lambda: self.read()[name], partial(self.__setitem__, name)), value)

    def __setitem__(self, name: str, value: Any) -> None:
        self._states.write(self._parameter, {**self.read(), name: value})

    def __delitem__(self, name: str) -> None:
        states = self.read()
        del states[name]
        self._states.write(self._parameter, states)

    def __iter__(self) -> Iterator[str]:
        return iter(self.read())

    def __len__(self) -> int:
        return len(self.read())

    def __repr__(self) -> str:
        return repr(self.read())

    def read(self) -> States:
        """Return all of them, as copies."""
        return self._states.read(self._parameter)
