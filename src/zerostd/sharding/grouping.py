"""Groups from the model's structure: which modules' parameters travel together.

In: a tree of modules with their own bytes and an opaque key that is equal for modules of one sort. Out: for each
group the names of its modules, in registration order; what is left belongs to the root. Repeated siblings are
blocks, one group each; blocks that are too small are packed with their neighbours, ones that are too large are opened;
a large lone layer is a group of its own. No class names.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zerostd.errors import PrepareError

__all__ = ["Bounds", "Node", "find_groups"]

MIB = 2**20


@dataclass(frozen=True)
class Bounds:
    """Sizes of a group in bytes. Below `smallest` a transfer is all latency; above `largest` two gathered groups
    would take more memory than sharding saves."""

    smallest: int = 4 * MIB
    largest: int = 2048 * MIB


@dataclass(frozen=True)
class Node:
    """One module: its full name, the bytes of the parameters it holds itself, and its children."""

    name: str
    own_bytes: int
    key: object  # equal for modules of one sort
    children: tuple[Node, ...] = ()

    @property
    def num_bytes(self) -> int:
        return self.own_bytes + sum(child.num_bytes for child in self.children)

    def walk(self) -> Iterable[Node]:
        """This node and all below, in registration order."""
        yield self
        for child in self.children:
            yield from child.walk()


def find_groups(
    root: Node, *, globs: Sequence[str] | None = None, bounds: Bounds | None = None
) -> list[tuple[str, ...]]:
    """Names of the modules of each group. With `globs`, each module that one of them matches is a group."""
    if globs is not None:
        return [(name,) for name in _matched(root, globs)]
    found: list[tuple[str, ...]] = []
    _descend(root, bounds or Bounds(), found)
    return found


def _matched(root: Node, globs: Sequence[str]) -> list[str]:
    if isinstance(globs, str):
        raise PrepareError(f"groups={globs!r} must be a list of globs of module names, such as ['blocks.*']")
    nodes = [node for node in root.walk() if node.name]
    for glob in globs:
        if not any(fnmatch.fnmatchcase(node.name, glob) and node.num_bytes for node in nodes):
            names = ", ".join(node.name for node in nodes[:8])
            raise PrepareError(
                f"groups: {glob!r} matches no module that holds parameters of its own (a tied one belongs to the "
                f"module that comes first); modules are {names}, ..."
            )
    matched: list[str] = []
    for node in nodes:
        inside = any(node.name.startswith(name + ".") for name in matched)
        if node.num_bytes and not inside and any(fnmatch.fnmatchcase(node.name, glob) for glob in globs):
            matched.append(node.name)
    return matched


def _descend(node: Node, bounds: Bounds, found: list[tuple[str, ...]]) -> None:
    children = [child for child in node.children if child.num_bytes]
    repeats = Counter(child.key for child in children)
    run: list[Node] = []
    for child in children:
        is_block = repeats[child.key] > 1 or not child.children
        if is_block and (child.num_bytes <= bounds.largest or not child.children):
            if run and run[-1].key != child.key:
                _pack(run, bounds, found)
                run = []
            run.append(child)
        else:
            _pack(run, bounds, found)
            run = []
            _descend(child, bounds, found)
    _pack(run, bounds, found)


def _pack(run: list[Node], bounds: Bounds, found: list[tuple[str, ...]]) -> None:
    """Neighbouring blocks of one sort into groups of at least the smallest size; too little for one is left over."""
    packs: list[list[Node]] = [[]]
    for block in run:
        packs[-1].append(block)
        if sum(node.num_bytes for node in packs[-1]) >= bounds.smallest:
            packs.append([])
    left_over = packs.pop()
    if left_over and packs and sum(node.num_bytes for node in packs[-1] + left_over) <= bounds.largest:
        packs[-1].extend(left_over)
    found.extend(tuple(node.name for node in pack) for pack in packs)
