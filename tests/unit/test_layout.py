"""Flat layout: odd sizes, one element, zero elements, more ranks than elements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zft.engine.layout import ALIGN, SHARD_ALIGN, FlatLayout

SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=8)
RANKS = st.integers(1, 9)


def layout_of(shapes, ranks: int) -> FlatLayout:
    return FlatLayout.of([(f"p{i}", shape, True) for i, shape in enumerate(shapes)], ranks)


@given(SHAPES, RANKS)
def test_spans_are_aligned_ordered_and_apart(shapes, ranks):
    layout = layout_of(shapes, ranks)
    end = 0
    for span, shape in zip(layout.spans, shapes, strict=True):
        assert span.shape == shape and span.offset % ALIGN == 0 and span.offset >= end
        end = span.end
    assert end <= layout.padded_numel < end + SHARD_ALIGN * ranks


@given(SHAPES, RANKS)
def test_shards_divide_the_buffer(shapes, ranks):
    layout = layout_of(shapes, ranks)
    starts = [layout.shard_start(rank) for rank in range(ranks)]
    assert starts == [rank * layout.shard_numel for rank in range(ranks)]
    assert layout.shard_numel * ranks == layout.padded_numel and layout.shard_numel % SHARD_ALIGN == 0


@given(SHAPES, RANKS)
def test_each_element_lies_in_exactly_one_piece_of_one_shard(shapes, ranks):
    layout = layout_of(shapes, ranks)
    found = [0] * len(shapes)
    for rank in range(ranks):
        start = layout.shard_start(rank)
        for index, first, last in layout.pieces(start, start + layout.shard_numel):
            span = layout.spans[index]
            assert start <= first < last <= start + layout.shard_numel
            assert span.offset <= first and last <= span.end
            found[index] += last - first
    assert found == [span.numel for span in layout.spans]


@given(SHAPES, RANKS, st.integers(0, 5000), st.integers(0, 5000))
def test_pieces_of_any_range_are_what_a_walk_over_elements_finds(shapes, ranks, start, length):
    layout, end = layout_of(shapes, ranks), start + length
    expected = {(i, e) for i, span in enumerate(layout.spans) for e in range(span.offset, span.end) if start <= e < end}
    assert {(i, e) for i, first, last in layout.pieces(start, end) for e in range(first, last)} == expected


def test_one_element_over_many_ranks():
    layout = layout_of([(1,)], ranks=7)
    assert layout.padded_numel == 7 * SHARD_ALIGN
    assert [layout.pieces(layout.shard_start(r), layout.shard_start(r) + layout.shard_numel) for r in range(7)] == [
        [(0, 0, 1)], [], [], [], [], [], []
    ]  # fmt: skip


@pytest.mark.parametrize("shapes", [[], [(0,)], [(0, 5), (0,)]])
def test_nothing_takes_no_room(shapes):
    layout = layout_of(shapes, ranks=3)
    assert (layout.padded_numel, layout.shard_numel, layout.pieces(0, 100)) == (0, 0, [])
