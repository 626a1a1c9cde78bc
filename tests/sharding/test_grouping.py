"""Groups from structure alone: repeated blocks, large lone layers, the rest at the root."""

from __future__ import annotations

import pytest

from zerostd.errors import PrepareError
from zerostd.sharding import Node, find_groups, smallest_of
from zerostd.sharding.grouping import LEAST, SMALLEST

BOUNDS = {"smallest": 100, "largest": 1000}


def block(name: str, size: int, key: str = "block") -> Node:
    return Node(name, 0, key, (Node(f"{name}.w", size, "linear"), Node(f"{name}.n", 1, "norm")))


def gpt(num_blocks: int, size: int) -> Node:
    blocks = Node("blocks", 0, "list", tuple(block(f"blocks.{i}", size) for i in range(num_blocks)))
    return Node(
        "", 0, "gpt", (Node("tok", 400, "embedding"), Node("pos", 10, "embedding"), blocks, Node("norm", 2, "n"))
    )


def test_each_block_is_a_group_and_a_small_neighbour_joins_a_large_layer():
    assert find_groups(gpt(3, 200), **BOUNDS) == [("tok", "pos"), ("blocks.0",), ("blocks.1",), ("blocks.2",)]


def test_small_blocks_are_packed_with_their_neighbours_and_none_is_lost():
    found = find_groups(gpt(7, 40), **BOUNDS)
    packs = [pack for pack in found if pack[0].startswith("blocks")]
    assert packs == [("blocks.0", "blocks.1", "blocks.2"), ("blocks.3", "blocks.4", "blocks.5", "blocks.6")]


def test_a_block_that_is_too_large_is_opened():
    big = block("blocks.0", 3000), block("blocks.1", 3000)
    root = Node("", 0, "gpt", (Node("blocks", 0, "list", big),))
    assert find_groups(root, **BOUNDS) == [("blocks.0.w",), ("blocks.1.w",)]


def test_a_model_that_is_small_altogether_is_one_group_at_the_root():
    assert find_groups(gpt(2, 5), smallest=10_000, largest=10**9) == []


def test_globs_choose_modules_and_outer_ones_win():
    found = find_groups(gpt(2, 200), globs=["blocks.*", "tok"])
    assert found == [("tok",), ("blocks.0",), ("blocks.1",)]


def test_a_glob_that_matches_nothing_is_refused_with_what_there_is():
    with pytest.raises(PrepareError, match=r"'layers\.\*' matches no module.*tok"):
        find_groups(gpt(2, 200), globs=["layers.*"])


def test_a_text_instead_of_a_list_is_refused():
    with pytest.raises(PrepareError, match="must be a list"):
        find_groups(gpt(2, 200), globs="blocks.*")


def stack(name: str, num_blocks: int, size: int) -> Node:
    blocks = tuple(block(f"{name}.block.{i}", size) for i in range(num_blocks))
    return Node(name, 0, "stack", (Node(f"{name}.block", 0, "list", blocks),))


def test_an_encoder_and_a_decoder_of_one_class_are_stacks_of_blocks_and_no_groups():
    root = Node("", 0, "t5", (stack("encoder", 3, 200), stack("decoder", 3, 200)))
    names = [f"{side}.block.{i}" for side in ("encoder", "decoder") for i in range(3)]
    assert find_groups(root, **BOUNDS) == [(name,) for name in names]


def test_a_block_of_experts_stays_whole_as_long_as_it_is_a_small_part_of_the_model():
    root = Node("", 0, "moe", (Node("blocks", 0, "list", tuple(stack(f"blocks.{i}", 3, 200) for i in range(4))),))
    assert find_groups(root, **BOUNDS) == [(f"blocks.{i}",) for i in range(4)]


def test_a_small_model_has_groups_enough_for_its_ranks():
    assert smallest_of(32 << 20, 1) == SMALLEST
    assert smallest_of(32 << 20, 4) == 2 << 20  # 16 groups
    assert smallest_of(1 << 40, 4) == SMALLEST
    assert smallest_of(1 << 10, 4) == LEAST
