"""Layouts: every element has one owner, nothing overlaps, only the end is padded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zerostd.sharding import make_layout
from zerostd.sharding.layout import ALIGNMENT

shapes = st.lists(st.lists(st.integers(1, 40), min_size=0, max_size=3).map(tuple), min_size=1, max_size=12)


@given(shapes, st.integers(1, 7), st.sampled_from([1, 2, 4, 8]))
def test_parameters_lie_without_gaps_and_padding_is_at_the_end_only(shapes, num_shards, itemsize):
    layout = make_layout([(f"p{i}", shape) for i, shape in enumerate(shapes)], num_shards, itemsize)
    offset = 0
    for interval in layout.intervals:
        assert interval.offset == offset
        offset = interval.end
    assert layout.padding == layout.numel - offset < ALIGNMENT * num_shards
    assert layout.shard_numel % ALIGNMENT == 0
    assert sorted(interval.name for interval in layout.intervals) == sorted(f"p{i}" for i in range(len(shapes)))


@given(shapes, st.integers(1, 7))
def test_every_element_is_owned_by_one_rank(shapes, num_shards):
    layout = make_layout([(f"p{i}", shape) for i, shape in enumerate(shapes)], num_shards, 4)
    owned: dict[str, list[tuple[int, int]]] = {}
    for rank in range(num_shards):
        for piece in layout.pieces(layout.shard(rank)):
            interval = layout.intervals[piece.index]
            assert layout.shard(rank).start + piece.offset == interval.offset + piece.start
            owned.setdefault(interval.name, []).append((piece.start, piece.stop))
    for interval in layout.intervals:
        ends = [0]
        for start, stop in owned.get(interval.name, []):
            assert start == ends[-1] and stop > start
            ends.append(stop)
        assert ends[-1] == interval.numel


def test_matrices_start_on_sixteen_bytes_although_an_odd_vector_comes_first():
    layout = make_layout([("odd", (7,)), ("matrix", (8, 8)), ("other", (3, 16))], 2, 2)
    offsets = {interval.name: interval.offset for interval in layout.intervals}
    assert offsets["matrix"] * 2 % 16 == 0 and offsets["other"] * 2 % 16 == 0
    assert offsets["odd"] == 64 + 48


def test_layout_of_nothing_is_empty():
    assert make_layout([], 3, 4).numel == 0


@given(shapes, st.data())
def test_the_piece_of_one_parameter_is_the_one_among_all_pieces(shapes, data):
    layout = make_layout([(f"p{i}", shape) for i, shape in enumerate(shapes)], 1, 4)
    start = data.draw(st.integers(0, layout.numel))
    region = slice(start, data.draw(st.integers(start, layout.numel)))
    pieces = {piece.index: piece for piece in layout.pieces(region)}
    for index, interval in enumerate(layout.intervals):
        piece = layout.piece_of(index, region)
        assert piece == pieces.get(index)
        inside = range(max(interval.offset, region.start), min(interval.end, region.stop))
        assert (piece.numel if piece is not None else 0) == len(inside)
