"""Parameters, flat buffers, gradients and groups: each owns its state and the verbs on it."""

from zerostd.parameters.flat import Flat
from zerostd.parameters.gradient import Gradient
from zerostd.parameters.group import Group, GroupState
from zerostd.parameters.handle import GradientHandle

__all__ = ["Flat", "Gradient", "GradientHandle", "Group", "GroupState"]
