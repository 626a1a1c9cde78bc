"""Groups from the model's structure: modules whose parameters travel together.

In: a tree of modules with their own bytes and an opaque key that is equal for modules of one kind. Out: for each group
the names of its modules, in registration order; the remaining modules belong to the root. Repeated siblings are blocks,
one group each; blocks that are too small are packed with their neighbours. Blocks that are too large are divided, and
so are stacks of blocks: an encoder and a decoder of one class are siblings too, and each is half of the model. A large
lone layer is a separate group. No class names.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from zerostd.errors import PrepareError

SMALLEST = 4 << 20  # bytes of a group: a smaller transfer is all latency
LEAST = 64 << 10  # the same in a small model on several ranks
GROUPS_PER_RANK = 4  # six groups pass through buffers at once: they should take less than a rank's part of the state
LARGEST = 2 << 30  # bytes of a group: two larger ones gathered would take more memory than sharding saves
LARGEST_STACK = 0.25  # of the model: a group that has blocks inside; two larger ones would be most of the model


@dataclass(frozen=True)
class Node:
    """One module: its full name, the bytes of the parameters it holds itself, and its children."""

    name: str
    own_bytes: int
    key: object  # equal for modules of one sort
    children: tuple[Node, ...] = ()

    @cached_property
    def num_bytes(self) -> int:
        return self.own_bytes + sum(child.num_bytes for child in self.children)

    @cached_property
    def is_stack(self) -> bool:
        """Whether it holds blocks: three or more sibling modules of one kind that have submodules."""
        kinds = Counter(child.key for child in self.children if child.children and child.num_bytes)
        return any(count > 2 for count in kinds.values()) or any(child.is_stack for child in self.children)

    def walk(self) -> Iterator[Node]:
        """Yield this node and all below it, in registration order."""
        yield self
        for child in self.children:
            yield from child.walk()


def smallest_of(num_bytes: int, num_ranks: int) -> int:
    """Return the bytes of the smallest group, in a model of `num_bytes` that `num_ranks` ranks train. With few
    groups, gathering and reducing them would take more memory than sharding saves."""
    return SMALLEST if num_ranks == 1 else min(SMALLEST, max(LEAST, num_bytes // (GROUPS_PER_RANK * num_ranks)))


def find_groups(
    root: Node, *, globs: Sequence[str] | None = None, smallest: int = SMALLEST, largest: int = LARGEST
) -> list[tuple[str, ...]]:
    """Return the names of the modules of each group. With `globs`, each module that one of them matches is a group;
    otherwise groups are of `smallest` to `largest` bytes, as far as the structure allows."""
    if globs is None:
        return list(_descend(root, smallest, largest, min(largest, int(root.num_bytes * LARGEST_STACK))))
    if not isinstance(globs, list | tuple) or not all(isinstance(glob, str) for glob in globs):
        raise PrepareError(f"groups={globs!r} must be a list of globs of module names, such as ['blocks.*']")
    names = [node.name for node in root.walk() if node.name and node.num_bytes]
    for glob in globs:
        if not fnmatch.filter(names, glob):
            raise PrepareError(
                f"groups: {glob!r} matches no module with its own parameters (a tied parameter belongs to the first of "
                f"its modules); modules are {', '.join(names[:8])}, ..."
            )
    matched: list[tuple[str]] = []
    for name in names:  # what is inside a module follows it
        is_inside = bool(matched) and name.startswith(f"{matched[-1][0]}.")
        if not is_inside and any(fnmatch.fnmatchcase(name, glob) for glob in globs):
            matched.append((name,))
    return [*matched]


def _descend(node: Node, smallest: int, largest: int, largest_stack: int) -> Iterator[tuple[str, ...]]:
    children = [child for child in node.children if child.num_bytes]
    repeats = Counter(child.key for child in children)

    def is_block(child: Node) -> bool:
        limit = largest_stack if child.is_stack else largest
        return not child.children or (repeats[child.key] > 1 and child.num_bytes <= limit)

    for (are_blocks, _), run in groupby(children, lambda child: (is_block(child), child.key)):
        if are_blocks:
            yield from _pack(run, smallest, largest)
            continue
        for child in run:
            yield from _descend(child, smallest, largest, largest_stack)


def _pack(run: Iterable[Node], smallest: int, largest: int) -> list[tuple[str, ...]]:
    """Pack neighbouring blocks of one sort into groups of at least `smallest` bytes. Remaining blocks join the last
    group, or the root if they are too large or there is no group."""
    packs: list[list[Node]] = [[]]
    size = 0  # bytes of the last pack
    for block in run:
        packs[-1].append(block)
        size += block.num_bytes
        if size >= smallest:
            packs.append([])
            size = 0
    left_over = packs.pop()
    if left_over and packs and size + sum(node.num_bytes for node in packs[-1]) <= largest:
        packs[-1].extend(left_over)
    return [tuple(node.name for node in pack) for pack in packs]
