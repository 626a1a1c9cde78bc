"""Which bytes are mine: pure arithmetic on names, sizes and ranks, without processes."""

from zerostd.sharding.grouping import Node, find_groups, smallest_of
from zerostd.sharding.layout import Interval, Layout, Piece, Portion, make_layout

__all__ = ["Interval", "Layout", "Node", "Piece", "Portion", "find_groups", "make_layout", "smallest_of"]
