"""What a pull copies, and how it accounts for it."""

from __future__ import annotations

from forebay.kvstore.protocol import ChunkRead, Found
from forebay.workers.moves import GroupRoom, Pull
from forebay.workers.prefix import GroupShape
from forebay.workers.pulling import missing_runs, plan_copies, sources_of
from tests.scheduler.simulation import geometry

SHAPES = [GroupShape(geometry("full"), 32, 64), GroupShape(geometry("window", 40), 32, 64)]


def chunk(group: int, start: int, tokens: int, promoted: str = "") -> ChunkRead:
    return ChunkRead(group, start, tokens, 0, 0, 0, 0, 1, bytes(32), promoted)


def found(hit: int, *chunks: ChunkRead) -> Found:
    return Found(rid=1, boot=b"", lease=1, hit=hit, chunks=list(chunks), from_tier={})


def pull(full: GroupRoom, window: GroupRoom, device_hit: int = 0) -> Pull:
    return Pull("r", b"", b"", b"", 1000, device_hit, (full, window))


def room(count: int, *have: range) -> GroupRoom:
    return GroupRoom(tuple(have), tuple(range(100, 100 + count)))


WHOLE = (
    chunk(0, 0, 32), chunk(0, 32, 32), chunk(0, 64, 32),
    chunk(1, 32, 32), chunk(1, 64, 32),
)  # fmt: skip


def test_only_what_the_device_lacks_is_copied_each_unit_once() -> None:
    copies = plan_copies(SHAPES, pull(room(9, range(0, 3)), room(9)), found(80, *WHOLE))
    assert copies is not None
    # The full group from unit 3 on; the window group from unit 2 on, the first that a query at 80 sees.
    assert [(c.chunk.group, c.units, c.first) for c in copies] == [
        (0, range(3, 4), 1), (0, range(4, 5), 0), (1, range(2, 4), 0), (1, range(4, 5), 0),
    ]  # fmt: skip
    assert [c.blocks for c in copies] == [(100,), (101,), (100, 101), (102,)]


def test_a_hit_that_its_chunks_do_not_cover_is_not_used() -> None:
    assert plan_copies(SHAPES, pull(room(9), room(9)), found(96, *WHOLE[:2], *WHOLE[3:])) is None


def test_without_room_nothing_is_used() -> None:
    assert plan_copies(SHAPES, pull(room(5), room(1)), found(80, *WHOLE)) is None


def test_overlapping_chunks_are_not_trusted() -> None:
    assert plan_copies(SHAPES, pull(room(9), room(9)), found(80, chunk(0, 0, 16), *WHOLE)) is None


def test_sources_add_up_to_the_hit() -> None:
    asked = pull(room(9, range(0, 2)), room(9), device_hit=32)
    reads = (*WHOLE[:2], chunk(0, 64, 32, "fs"), *WHOLE[3:])
    copies = plan_copies(SHAPES, asked, found(80, *reads))
    assert copies is not None
    assert sources_of(asked, 80, copies) == {"device": 32, "fs": 16, "host": 32}


def test_a_unit_that_a_tier_had_to_bring_in_any_group_is_that_tiers() -> None:
    asked = pull(room(9), room(9))
    reads = (*WHOLE[:3], chunk(1, 32, 32, "fs"), WHOLE[4])
    copies = plan_copies(SHAPES, asked, found(80, *reads))
    assert copies is not None
    assert sources_of(asked, 80, copies) == {"fs": 32, "host": 48}


def test_missing_runs_are_what_is_left_between_those_that_are_there() -> None:
    assert missing_runs([range(2, 4), range(6, 7)], 1, 9) == [range(1, 2), range(4, 6), range(7, 9)]
    assert missing_runs([range(0, 5)], 1, 4) == []
    assert missing_runs([range(8, 9)], 0, 4) == [range(0, 4)]
    assert missing_runs([], 3, 3) == []
