"""Which tokens are in which of an engine's blocks, for every block size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.connectors.blocks import NO_BLOCK, covered, cut, held_from, holds, pieces, split
from forebay.kvstore.geometry import MATCH_UNIT

BLOCK_TOKENS = st.sampled_from([1, 8, 16, 24, 32, 48, 64, 128, 512])


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, int, int, int, list[int]]:
    """(chunk start, first, last, block tokens, table)."""
    size = draw(BLOCK_TOKENS)
    start = 64 * draw(st.integers(0, 3))
    first = start + draw(st.integers(0, 63))
    last = draw(st.integers(first + 1, start + 64))
    count = -(-last // size)
    table = draw(st.lists(st.integers(1, 40), min_size=count, max_size=count))
    if draw(st.booleans()):
        table = list(range(7, 7 + count))
    return start, first, last, size, table


@given(requests())
def test_pieces_are_each_token_once_where_the_table_says(request: tuple[int, int, int, int, list[int]]) -> None:
    start, first, last, size, table = request
    found = {}
    for piece in pieces(start, first, last, size, table):
        for block in range(piece.blocks):
            for token in range(piece.count):
                at = start + piece.token + block * piece.count + token
                assert at not in found
                found[at] = (piece.block + block, piece.slot + token)
    assert found == {token: (table[token // size], token % size) for token in range(first, last)}


@given(requests())
def test_a_piece_is_inside_a_granule_or_whole_granules(request: tuple[int, int, int, int, list[int]]) -> None:
    start, first, last, size, table = request
    for piece in pieces(start, first, last, size, table):
        inside = piece.token % MATCH_UNIT
        whole = inside == 0 and piece.count % MATCH_UNIT == 0
        assert whole or (inside + piece.count <= MATCH_UNIT and piece.blocks == 1)


@given(requests())
def test_a_table_that_is_cut_gives_the_same_places(request: tuple[int, int, int, int, list[int]]) -> None:
    start, _, last, size, table = request
    whole = pieces(start, start, last, size, table)
    assert pieces(start, start, last, size, cut(start, last, size, table), start // size) == whole


def test_neighbouring_blocks_are_one_piece() -> None:
    assert [(p.block, p.blocks) for p in pieces(0, 0, 128, 32, [4, 5, 6, 9])] == [(4, 3), (9, 1)]


def test_a_hole_is_never_read_nor_written() -> None:
    table = [3, NO_BLOCK, 5]
    with pytest.raises(LookupError):
        pieces(0, 0, 48, 16, table)
    assert len(pieces(0, 32, 48, 16, table)) == 1
    with pytest.raises(LookupError):
        pieces(0, 0, 64, 16, [3, 4, 5])
    assert not holds(0, 48, 16, table) and holds(32, 48, 16, table) and not holds(32, 64, 16, table)


@given(requests(), st.data())
def test_what_is_held_begins_after_the_last_hole(
    request: tuple[int, int, int, int, list[int]], data: st.DataObject
) -> None:
    _, first, last, block_tokens, table = request
    holes = data.draw(st.sets(st.integers(0, len(table) - 1)))
    holed = [NO_BLOCK if place in holes else block for place, block in enumerate(table)]
    begin = held_from(first, last, block_tokens, holed)
    assert first <= begin <= last
    assert all(holds(token, token + 1, block_tokens, holed) for token in range(begin, last))
    assert begin in (first, last) or begin % block_tokens == 0
    assert begin == first or not holds(begin - 1, begin, block_tokens, holed)


@given(st.integers(0, 20), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20))))
def test_spans_cover_as_far_as_no_token_is_lacking(start: int, spans: list[tuple[int, int]]) -> None:
    there = {token for first, last in spans for token in range(first, last)}
    wanted = start
    while wanted in there:
        wanted += 1
    assert covered(start, [(first, last) for first, last in spans if first < last]) == wanted


def test_blocks_that_are_cut_finer_keep_their_order_and_their_holes() -> None:
    assert split([2, NO_BLOCK, 5], 2) == [4, 5, NO_BLOCK, NO_BLOCK, 10, 11]
    assert split([2, 3], 1) == [2, 3]
