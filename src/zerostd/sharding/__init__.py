"""Which bytes are mine: pure arithmetic on names, sizes and ranks, without processes."""

from zerostd.sharding.grouping import Bounds, Node, find_groups
from zerostd.sharding.layout import Interval, Layout, Piece, make_layout

__all__ = ["Bounds", "Interval", "Layout", "Node", "Piece", "find_groups", "make_layout"]
