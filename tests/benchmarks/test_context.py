"""The model of cost of ranks that share out positions: its room is the plan's, its bytes are those that are counted."""

from __future__ import annotations

from benchmarks.simulate.context import DEEPSEEK_V3, Device, Side, Workload
from forebay.models.capacity import Budget, Ranks, fit

LOAD = Workload(67_000, 753, 400)
SIDES = {way: Side(DEEPSEEK_V3, Device(), 8, way) for way in (None, "ag_rs", "a2a")}  # type: ignore[arg-type]


def test_room_is_what_the_plan_says() -> None:
    weights = int((DEEPSEEK_V3.always + DEEPSEEK_V3.experts_bytes) / 8)
    budget = Budget(int(Device().memory), weights, 4 << 30)
    for way, dcp in ((None, 1), ("ag_rs", 8), ("a2a", 8)):
        planned = fit(DEEPSEEK_V3.info, Ranks(8, dcp), 2, budget, LOAD.context + LOAD.new + LOAD.output)
        assert SIDES[way].room(LOAD) == planned.requests
    assert SIDES["a2a"].room(LOAD) >= 8 * SIDES[None].room(LOAD)


def test_one_all_to_all_sends_less_and_less_often() -> None:
    gathered, exchanged = (SIDES[way].exchange() for way in ("ag_rs", "a2a"))
    assert gathered is not None and exchanged is not None
    assert (gathered.collectives, exchanged.collectives) == (3, 2)
    # 16 heads of 576 values in bf16 go to 7 others; what they find comes back, in fp32 or in bf16 with its LSE.
    assert gathered.bytes == 7 * (16 * 576 * 2 + 8 * 16 * 4 + 16 * 512 * 4)
    assert exchanged.bytes == 7 * (16 * 576 * 2 + 16 * (512 * 2 + 4))


def test_alone_it_is_slower_and_with_many_it_is_faster() -> None:
    plain, shared = SIDES[None], SIDES["a2a"]
    assert shared.step_s(1, Workload(100, 10, 10)) > plain.step_s(1, Workload(100, 10, 10)), "collectives aren't free"
    assert shared.point(256, LOAD).tokens_s > 3 * plain.point(256, LOAD).tokens_s
    assert plain.point(256, LOAD).running == plain.room(LOAD) < 16
