"""Which bytes are mine: pure arithmetic on names, sizes and ranks, without processes."""

from zerostd.sharding.grouping import Node, find_groups
from zerostd.sharding.layout import Interval, Layout, Piece, make_layout
from zerostd.sharding.portions import Portion, assign_tiers, cut_by_shares, cut_portions, default_cpu_share

__all__ = [
    "Interval",
    "Layout",
    "Node",
    "Piece",
    "Portion",
    "assign_tiers",
    "cut_by_shares",
    "cut_portions",
    "default_cpu_share",
    "find_groups",
    "make_layout",
]
