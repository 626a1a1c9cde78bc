"""The wires: the only room that speaks to torch.distributed."""

from zerostd.communication.coded_wires import CodedWires
from zerostd.communication.control import Control
from zerostd.communication.shared_wires import SharedWires
from zerostd.communication.wires import NodeWires, Wires
from zerostd.communication.world import World

__all__ = ["CodedWires", "Control", "NodeWires", "SharedWires", "Wires", "World"]
