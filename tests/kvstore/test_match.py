"""The fixed point of group hits, against trying every length."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forebay.kvstore.identity import GroupGeometry
from forebay.kvstore.match import longest_hit, longest_hit_naive

CHUNK = 64


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[GroupGeometry], list[list[int]], int]:
    positions = draw(st.integers(0, 6))
    windows = draw(st.lists(st.one_of(st.none(), st.integers(1, 200)), min_size=1, max_size=3))
    groups = [
        GroupGeometry(f"g{i}", "window" if w else "full", (i,), 1, 8, "float32", w) for i, w in enumerate(windows)
    ]
    units = st.integers(0, CHUNK // 16).map(lambda n: n * 16)
    reach = [draw(st.lists(units, min_size=positions, max_size=positions)) for _ in groups]
    return groups, reach, draw(st.integers(0, positions * CHUNK + 20))


@given(cases())
def test_the_fixed_point_is_the_longest_length_that_all_groups_serve(
    case: tuple[list[GroupGeometry], list[list[int]], int],
) -> None:
    groups, reach, limit = case
    assert longest_hit(groups, reach, CHUNK, limit) == longest_hit_naive(groups, reach, CHUNK, limit)
