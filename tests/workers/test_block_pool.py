"""The block pool of one group: promises, the cache, and who pays for a shared block."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.errors import ConfigError
from forebay.workers.block_pool import GroupPool
from forebay.workers.config import WorkerConfig
from forebay.workers.prefix import GroupShape, device_prefix
from forebay.workers.sizing import blocks_for_tokens, bytes_of, divide
from tests.scheduler.simulation import geometry


def pool(blocks: int = 4, *, sharers_pay: bool = False) -> tuple[GroupPool, list[bytes]]:
    evicted: list[bytes] = []
    return GroupPool(blocks, sharers_pay=sharers_pay, on_evicted=evicted.append), evicted


def take(p: GroupPool, key: bytes | None = None) -> int:
    assert p.reserve(1)
    block = p.take()
    if key is not None:
        assert p.seal(block, key)
    return block


def test_what_is_promised_to_one_is_not_available_to_another() -> None:
    p, _ = pool(4)
    assert p.reserve(3)
    assert p.available == 1 and not p.reserve(2)
    p.unreserve(2)
    assert p.reserve(3)
    p.check()


def test_a_dropped_block_stays_findable_until_its_room_is_needed() -> None:
    p, evicted = pool(2)
    first, second = take(p, b"a"), take(p, b"b")
    p.drop(second)
    p.drop(first)
    assert p.find(b"a") == first and p.available == 2
    take(p)
    assert evicted == [b"b"], "the one that was dropped first goes first"
    assert p.find(b"a") == first and p.find(b"b") is None
    p.check()


def test_a_hit_makes_a_block_the_most_recently_used() -> None:
    p, evicted = pool(2)
    for key in (b"a", b"b"):
        p.drop(take(p, key))
    found = p.find(b"a")
    assert found is not None
    p.share(found)
    p.drop(found)
    take(p)
    assert evicted == [b"b"]


def test_a_pinned_block_keeps_its_bytes_after_its_last_request() -> None:
    p, evicted = pool(1)
    block = take(p, b"a")
    p.pin(block)
    p.drop(block)
    assert (p.draining, p.takeable, p.available) == (1, 0, 0)
    assert not p.reserve(1)
    p.unpin(block)
    take(p)
    assert evicted == [b"a"]
    p.check()


def test_the_same_unit_is_known_by_one_block_only() -> None:
    p, _ = pool(3)
    first, second = take(p, b"a"), take(p)
    assert not p.seal(second, b"a")
    assert p.find(b"a") == first and not p.sealed(second)
    p.drop(second)
    p.drop(first)
    p.check()


def test_in_a_window_group_every_sharer_pays_so_a_drop_always_returns_one() -> None:
    p, _ = pool(4, sharers_pay=True)
    block = take(p, b"a")
    assert p.price(block) == 1
    p.share(block)
    assert p.available == 2, "two holders, two blocks less"
    p.drop(block)
    assert p.available == 3
    p.keep_promise()
    assert p.available == 2
    p.check()


def test_a_full_group_shares_for_free() -> None:
    p, _ = pool(4)
    block = take(p, b"a")
    assert p.price(block) == 0
    p.share(block)
    assert p.available == 3


# --- prefixes over groups --------------------------------------------------------------------------------


def keys(count: int) -> list[bytes]:
    return [bytes([i]) * 32 for i in range(count)]


def test_the_device_prefix_is_what_all_groups_can_serve() -> None:
    shapes = [GroupShape(geometry("full"), 32, 64), GroupShape(geometry("window", 40), 32, 64)]
    full, _ = pool(20)
    window, _ = pool(20, sharers_pay=True)
    for key in keys(10):
        take(full, key)
    for key in keys(10)[3:6]:
        take(window, key)
    found = device_prefix(shapes, [full, window], keys(12))
    # At 96 a query sees positions 57 to 95: units 3, 4 and 5. At 112 it would need unit 6.
    assert (found.units, found.runs) == (6, (10, 0))


def test_a_hole_in_the_window_shortens_the_prefix_to_before_it() -> None:
    shapes = [GroupShape(geometry("window", 20), 16, 64)]
    window, _ = pool(20, sharers_pay=True)
    for unit in (0, 1, 3):
        take(window, keys(4)[unit])
    assert device_prefix(shapes, [window], keys(4)).units == 2


@pytest.mark.parametrize(("window", "chunk", "position", "first"), [
    (None, 256, 1000, 0),
    (512, 256, 4080, 223),
    (512, 256, 512, 0),
    (16, 64, 100, 4),
    (20, 16, 32, 0),
    (20, 16, 48, 1),
])  # fmt: skip
def test_first_unit_keeps_the_window_and_the_open_chunk(
    window: int | None, chunk: int, position: int, first: int
) -> None:
    assert GroupShape(geometry("g", window), chunk, 64).first_unit(position) == first


# --- sizes -----------------------------------------------------------------------------------------------


def test_memory_is_divided_so_that_windows_get_what_resume_points_need() -> None:
    shapes = [GroupShape(geometry("full"), 256, 512), GroupShape(geometry("window", 512), 256, 512)]
    sizes = [shape.geometry.granule_bytes for shape in shapes]
    full, window = divide(shapes, sizes, 64 << 20, None, 32768)
    assert bytes_of(sizes, (full, window)) <= 64 << 20
    assert bytes_of(sizes, blocks_for_tokens(shapes, (full + 8) * 16)) > 64 << 20, "and no byte is wasted"
    assert window == pytest.approx(full / 4, rel=0.01)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_that_share_out_positions_have_as_many_times_the_tokens(ranks: int) -> None:
    shapes = [GroupShape(geometry("full"), 256, 512)]
    whole = shapes[0].geometry.granule_bytes
    (alone,), (each,) = (divide(shapes, [size], 64 << 20, None, 32768) for size in (whole, whole // ranks))
    assert ranks * alone <= each < ranks * (alone + 1)


def test_max_tokens_says_exactly_what_the_full_group_holds() -> None:
    shapes = [GroupShape(geometry("full"), 32, 64), GroupShape(geometry("window", 40), 32, 64)]
    full, window = divide(shapes, [1, 1], 1, 1000, 32768)
    assert full == 64 and all(s.footprint(1000) <= n for s, n in zip(shapes, (full, window), strict=True))


def test_too_little_memory_is_refused_with_the_amount_that_would_do() -> None:
    shapes = [GroupShape(geometry("full"), 32, 64)]
    with pytest.raises(ConfigError, match="device_memory of"):
        divide(shapes, [shapes[0].geometry.granule_bytes], 100, None, 32768)


@pytest.mark.parametrize(("change", "words"), [
    ({"chunk_tokens": 100}, "multiple of 16"),
    ({"max_num_seqs": 600}, "max_num_batched_tokens"),
    ({"device": "tpu"}, "cpu, cuda"),
    ({"events_replay": "tcp://127.0.0.1:0"}, "events_replay needs events"),
    ({"max_waiting": 0}, "at least 1"),
    ({"tensor_parallel_size": 65}, "use 1 to 64"),
    ({"tensor_parallel_size": 4, "decode_context_parallel_size": 3}, "must divide tensor_parallel_size 4"),
    ({"decode_context_parallel_size": 2}, "must divide tensor_parallel_size 1"),
    ({"cp_kv_cache_interleave_size": 0}, "must be at least 1"),
    ({"cp_kv_cache_interleave_size": 2}, "are for decode_context_parallel_size > 1"),
    ({"dcp_q_replicate": True}, "are for decode_context_parallel_size > 1"),
    ({"tensor_parallel_size": 32, "prefill_context_parallel_size": 4}, "more ranks than 64"),
    ({"tensor_parallel_size": 2, "device": "cuda:1"}, "with tensor_parallel_size > 1 say cuda"),
    ({"enable_expert_parallel": True}, "raise tensor_parallel_size to 2 or more"),
    ({"enable_expert_parallel": True, "tensor_parallel_size": 2, "prefill_context_parallel_size": 2},
     "with prefill_context_parallel_size 1, or leave it out"),
    ({"distributed_timeout_s": 0.0}, "distributed_timeout must be more than 0"),
])  # fmt: skip
def test_a_wrong_setting_is_named(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        WorkerConfig(Path("m"), "s", **change).check()  # type: ignore[arg-type]
