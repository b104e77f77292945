"""The fixed point of group hits, against trying every length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.kvstore.identity import GroupGeometry
from forebay.kvstore.match import last_state, longest_hit, longest_hit_naive, needed_positions, state_bit

CHUNK = 64
FULL = GroupGeometry("full", "full", (0,), 1, 8, "float32")
STATE = GroupGeometry("state", "recurrent", (1,), 1, 8, "float32")


def group_of(place: int, kind: str, window: int) -> GroupGeometry:
    return GroupGeometry(f"g{place}", kind, (place,), 1, 8, "float32", window if kind == "window" else None)  # type: ignore[arg-type]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[GroupGeometry], list[list[int]], int]:
    positions = draw(st.integers(0, 6))
    kinds = draw(st.lists(st.sampled_from(["full", "window", "latent", "recurrent"]), min_size=1, max_size=4))
    groups = [group_of(place, kind, draw(st.integers(1, 200))) for place, kind in enumerate(kinds)]
    units = st.integers(0, CHUNK // 16).map(lambda n: n * 16)
    states = st.integers(0, 2 ** (CHUNK // 16) - 1)
    reach = [
        draw(st.lists(states if group.recurrent else units, min_size=positions, max_size=positions)) for group in groups
    ]
    return groups, reach, draw(st.integers(0, positions * CHUNK + 20))


@given(cases())
def test_the_fixed_point_is_the_longest_length_that_all_groups_serve(
    case: tuple[list[GroupGeometry], list[list[int]], int],
) -> None:
    groups, reach, limit = case
    assert longest_hit(groups, reach, CHUNK, limit) == longest_hit_naive(groups, reach, CHUNK, limit)


def row(*ends: int, positions: int = 4) -> list[int]:
    """A row with states at these positions."""
    bits = [0] * positions
    for end in ends:
        bits[(end - 1) // CHUNK] |= state_bit(end - (end - 1) // CHUNK * CHUNK)
    return bits


def test_rows_for_32_and_64_and_states_at_32_and_48_give_32() -> None:
    """Not 48: no group may be asked for a length that another one can't serve."""
    window = GroupGeometry("window", "window", (2,), 1, 8, "float32", 1000)
    assert longest_hit([FULL, STATE], [[64], row(32, 48, positions=1)], CHUNK, 64) == 48
    assert longest_hit([FULL, STATE, window], [[64], row(32, 48, positions=1), [32]], CHUNK, 64) == 32


@pytest.mark.parametrize(("limit", "hit"), [(256, 208), (208, 208), (207, 128), (128, 128), (127, 16), (15, 0)])
def test_a_state_serves_its_own_position_and_no_other(limit: int, hit: int) -> None:
    states = row(16, 128, 208)
    assert longest_hit([STATE], [states], CHUNK, limit) == hit
    assert longest_hit([FULL, STATE], [[64] * 4, states], CHUNK, limit) == hit
    assert last_state(states, CHUNK, limit) == hit


def test_what_lies_between_states_is_lost_without_them() -> None:
    assert longest_hit([FULL, STATE], [[64, 64, 0, 64], row(128, 256)], CHUNK, 256) == 128
    assert longest_hit([FULL, STATE], [[64, 48, 0, 64], row(128, 256)], CHUNK, 256) == 0


def test_a_hit_reads_one_state_the_chunk_that_ends_there() -> None:
    assert needed_positions(STATE, CHUNK, 128) == range(1, 2)
    assert needed_positions(STATE, CHUNK, 144) == range(2, 3)
    assert needed_positions(STATE, CHUNK, 0) == range(0)
