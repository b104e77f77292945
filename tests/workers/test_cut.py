"""The table from which both ends of a cut claim: nothing twice, nothing left out, nobody waiting for nothing."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.kvstore.protocol import Place
from forebay.workers.cut import ALONE, MET, Cut
from forebay.workers.moves import GroupRoom
from forebay.workers.pieces import Piece, plan_pieces
from forebay.workers.prefix import GroupShape
from tests.scheduler.simulated_cuts import whims
from tests.scheduler.simulation import geometry

SHAPES = [GroupShape(geometry("full"), 32, 64), GroupShape(geometry("window", 40), 32, 64)]
UNITS = 2
SIZE = 32


def rates(compute_s: float = 1.0, bandwidth: float | None = 1.0, samples: int = 1) -> Any:
    """Seconds a token to compute, bytes a second to load."""
    def seconds(begin: int, end: int) -> float:
        return compute_s * max(0, end - begin)

    return SimpleNamespace(
        prefill=SimpleNamespace(samples=samples, step_s=0.0, seconds=seconds),
        loads=SimpleNamespace(bandwidth=lambda tier: bandwidth),
    )


def table(count: int = 8, load: int = SIZE, said: Any = None) -> Cut:
    """One group, `count` pieces of 32 tokens, each of which takes as many seconds to load as `load`."""
    pieces = [
        Piece(SIZE * i, SIZE * (i + 1), i, ((range(UNITS * i, UNITS * (i + 1)),),), {"fs": load})
        for i in range(count)
    ]  # fmt: skip
    made = Cut("r", pieces, 1, said or rates(), lambda: 0.0)
    made.open([list(range(100, 100 + UNITS * count))])
    return made


def land(cut: Cut) -> None:
    index = cut.next - 1
    blocks = cut.take(index)
    assert blocks is not None
    cut.landed(index, blocks, dict.fromkeys(range(UNITS * index, UNITS * (index + 1)), "fs"))


def test_both_ends_take_what_the_other_leaves_until_they_meet() -> None:
    cut = table()
    front = 0
    while (claimed := cut.claim(front, 1000)) != MET:
        front += claimed
        if not cut.over:
            land(cut)
    assert cut.over and 0 < front < 8 * SIZE
    landed = cut.close()
    assert front + landed.sources()["fs"] == 8 * SIZE
    assert sorted(landed.placed[0]) == list(range(front // 16, 16))


def test_whatever_either_end_does_nothing_is_claimed_twice_and_nothing_left_out() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        cut = table(chance.randrange(1, 12), said=whims(chance))
        front, used = 0, []
        taken: list[list[int]] | None = None
        for _ in range(10_000):
            if chance.random() < 0.5:
                claimed = cut.claim(front, chance.randrange(1, 100))
                if claimed == MET:
                    break
                if claimed == ALONE:
                    claimed = cut.end - front
                assert claimed >= 0 and (taken is None or front + claimed <= cut.pieces[cut.next - 1].start)
                used += cut.spend(0, -(-(front + claimed) // 16) - -(-front // 16))
                front += claimed
                if front == cut.end:
                    break
            elif taken is not None:
                cut.landed(cut.next - 1, taken, {})
                taken = None
            elif not cut.over and cut.next > 0:
                taken = cut.take(cut.next - 1)
                if taken is None:
                    cut.finish()
        else:
            raise AssertionError("the ends never meet")
        landed = cut.close().placed[0]
        assert front == 16 * min(landed, default=cut.end // 16)
        blocks = [*landed.values(), *used]
        assert len(set(blocks)) == len(blocks) == len(cut.pieces) * UNITS


def test_the_front_computes_what_was_asked_for_and_has_not_come() -> None:
    cut = table(said=rates(compute_s=0.01, bandwidth=0.001))
    cut.asked(4)
    front = 0
    while (claimed := cut.claim(front, SIZE)) > 0:
        front += claimed
    assert front == 7 * SIZE and claimed == ALONE, "the last step goes beyond the prefix"
    assert cut.over and cut.take(7) is None, "what comes too late isn't taken"


def test_a_prefix_that_one_step_computes_best_is_computed_in_one_with_what_follows() -> None:
    cut = table(said=rates(compute_s=0.01, bandwidth=0.001))
    assert cut.claim(0, 1000) == ALONE and cut.over


def test_while_a_piece_is_copied_the_front_keeps_off_it_and_then_goes_on() -> None:
    cut = table(2, said=rates(compute_s=0.01, bandwidth=0.001))
    blocks = cut.take(1)
    assert blocks is not None
    assert cut.claim(0, 1000) == SIZE
    assert cut.claim(SIZE, 1000) == 0 and cut.parked and not cut.wakes()
    cut.failed(blocks)
    assert cut.wakes() and not cut.wakes(), "once"
    assert cut.claim(SIZE, 1000) == ALONE


def test_a_front_that_waits_goes_on_when_nothing_more_comes() -> None:
    cut = table(said=rates(compute_s=1000.0, bandwidth=1000.0))
    assert cut.claim(0, 1000) == 0
    assert not cut.wakes()
    cut.finish()
    assert cut.claim(0, 100) == 100
    assert cut.claim(100, 1000) == ALONE


def test_a_piece_that_the_front_has_begun_is_not_loaded() -> None:
    cut = table(1, said=rates(compute_s=0.01, bandwidth=0.001))
    assert cut.claim(0, 5) == 5
    assert cut.take(0) is None


def test_a_claim_that_could_not_be_computed_yet_is_kept() -> None:
    cut = table(said=rates(compute_s=0.01, bandwidth=0.001))
    first = cut.claim(0, 20)
    assert cut.claim(0, 1000) == first == 20


def test_a_worker_of_unknown_speed_computes_one_piece_to_find_out() -> None:
    assert table(said=rates(compute_s=0.01, bandwidth=0.001, samples=0)).claim(0, 1000) == SIZE


def test_without_blocks_nothing_lands() -> None:
    cut = table()
    assert len(cut.spend(0, 15)) == 15
    assert cut.take(7) is None
    cut.refund(0, [1])
    assert cut.take(7) is not None


def test_nothing_lands_in_a_closed_cut() -> None:
    cut = table()
    land(cut)
    assert cut.close().sources() == {"fs": SIZE}
    assert cut.over and cut.take(6) is None and not cut.wakes()


@pytest.mark.parametrize("start", [0, 32, 48])
def test_pieces_cover_what_is_missing_position_by_position(start: int) -> None:
    rooms = [GroupRoom((range(0, start // 16), range(8, 9)), ()), GroupRoom((), ())]
    places = [Place(0, 4, "fs", 100), Place(1, 4, "fs", 200), Place(0, 1, "s3", 50)]
    pieces = plan_pieces(SHAPES, rooms, start, 160 - 16, places)
    assert [piece.start for piece in pieces] == [start, *range(start // 32 * 32 + 32, 144, 32)]
    assert pieces[-1].end == 144
    missing = [unit for piece in pieces for run in piece.missing[0] for unit in run]
    assert missing == [unit for unit in range(start // 16, 9) if unit != 8]
    window = [unit for piece in pieces for run in piece.missing[1] for unit in run]
    assert window == list(range(6, 9)), "of a window group what the end sees, and no more"
    assert pieces[-1].missing[0] == () and pieces[-1].loads == {"fs": 200}, "what the device has costs nothing"
    assert [sorted(piece.loads) for piece in pieces if piece.position == 1] == [["s3"]] * (start < 64)
