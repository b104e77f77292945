"""Clears of a bucket that several daemons have stored in."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from forebay.testing.buckets import Server
from forebay.tiers.base import ClearScope
from forebay.tiers.s3 import finder
from forebay.tiers.s3.finder import FrontSeen, see_front
from tests.tiers.s3.conftest import MakeRig
from tests.tiers.s3.test_s3_objects import BIG, packing, rested, smalls, store_together
from tests.tiers.support import make_chunk, numbered


def test_a_clear_reaches_what_other_daemons_have_stored(make_rig: MakeRig, seaweed: Server) -> None:
    one = make_rig(seaweed, **packing(smalls(4)))
    two = one.again()
    ours = [*smalls(4), numbered(50, granule=BIG)]
    others = [numbered(20 + i, namespace=b"o" * 32, granule=BIG if i == 4 else 2000 + i) for i in range(5)]
    for chunks in (ours, others):
        store_together(one, chunks)
    two.until(lambda: two.value("chunks_learned") == 8, "segments to be found")
    assert all(two.has(chunk) for chunk in ours)
    assert two.engine.clear(ours[0].header.namespace) == 0, "it has stored none of them itself"
    assert not any(two.has(chunk) for chunk in ours), "out of sight at once"
    assert not any(two.serves(chunk) for chunk in ours)
    rested(two)
    assert all(two.serves(chunk) for chunk in others)
    assert not any(one.serves(chunk) for chunk in ours) and all(one.serves(chunk) for chunk in others)
    assert len(one.objects()) == 2


def test_an_answer_that_comes_after_the_clear_is_not_believed(
    make_rig: MakeRig, seaweed: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A front is read, then the clear deletes its object and ends, and only then the answer is written down."""
    one, chunk = make_rig(seaweed, pack_below_bytes=0), numbered(1)
    two = one.again()
    store_together(one, [chunk])
    read, cleared = threading.Event(), threading.Event()

    def slow(*args: Any) -> FrontSeen:
        seen = see_front(*args)
        read.set()
        assert cleared.wait(30)
        return seen

    monkeypatch.setattr(finder, "see_front", slow)
    assert [found.outcome for found in two.engine.lookup_once([chunk.query()])] == ["retry"]
    assert read.wait(30)
    two.engine.clear(chunk.header.namespace)
    two.until(lambda: two.value("sweeps") == 1 and not one.objects(), "the clear to end")
    cleared.set()
    two.until(lambda: two.value("fronts_outdated") == 1, "the late answer")
    assert not two.has(chunk)


def test_what_was_seen_of_an_object_that_a_clear_could_not_delete_at_once_goes_with_it(
    make_rig: MakeRig, seaweed: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, chunk = make_rig(seaweed, pack_below_bytes=0), numbered(1)
    two = one.again()
    store_together(one, [chunk])
    sweep = two.tier._sweeper.step
    with two.tier._holdings.locks.hold(chunk.id):  # as if it were being stored at this moment
        monkeypatch.setattr(two.tier._sweeper, "step", lambda: False)
        two.engine.clear(chunk.header.namespace)
        assert not two.has(chunk) and two.value("fronts_found") == 1, "seen, and hidden by the clear"
        monkeypatch.setattr(two.tier._sweeper, "step", sweep)
        two.tier._keeper.kick()
        two.until(lambda: two.value("sweeps") == 1, "the clear to end")
        assert one.objects() and two.value("doomed") == 1 and not two.has(chunk)
    rested(two)
    assert not one.objects() and not two.has(chunk)


def test_a_clear_is_done_when_nothing_is_left_that_a_new_process_would_find(make_rig: MakeRig, seaweed: Server) -> None:
    one = make_rig(seaweed, pack_below_bytes=0)
    two = one.again()
    store_together(one, smalls(4))
    store_together(two, [numbered(20)])
    steps = two.tier.clear_steps(ClearScope())
    cleared = 0
    while (count := next(steps, -1)) != -1:
        cleared += count or 0
        time.sleep(0.001)
    assert cleared == 1 and one.objects("chunks/") == []


def test_a_clear_of_a_tenant_reaches_its_objects_alone(make_rig: MakeRig, seaweed: Server) -> None:
    one = make_rig(seaweed, pack_below_bytes=0)
    two = one.again()
    ours, others = [numbered(i, tenant="acme") for i in range(3)], [numbered(9, tenant="other"), numbered(10)]
    store_together(one, [*ours, *others])
    assert two.engine.clear_scope(ClearScope(ours[0].header.namespace, "acme")) == 0
    rested(two)
    assert not any(two.serves(chunk) for chunk in ours) and all(two.serves(chunk) for chunk in others)


def test_a_clear_behind_a_prefix_takes_no_less_of_others_than_it_covers(make_rig: MakeRig, seaweed: Server) -> None:
    one = make_rig(seaweed)
    two = one.again()
    front = make_chunk(range(32))
    behind = make_chunk([1] * 32, parent=front.header.key, start=32)
    for chunk in (front, behind):
        one.store(chunk)
    scope = ClearScope(front.header.namespace, None, 1, front.header.key, 32, behind.header.tokens[:64])
    two.engine.clear_scope(scope)
    rested(two)
    assert not two.serves(behind) and two.serves(front)


def test_what_is_stored_after_a_clear_stays(make_rig: MakeRig, seaweed: Server) -> None:
    rig, chunks = make_rig(seaweed, **packing(smalls(4))), [*smalls(4), numbered(50, granule=BIG)]
    for _ in range(3):
        store_together(rig, chunks)
        assert rig.engine.clear(b"") == 5
        store_together(rig, chunks)
        rested(rig)
        assert all(rig.serves(chunk) for chunk in chunks)
        assert rig.value("bytes") == rig.bytes_in_bucket()
        rig.engine.clear(b"")
        rested(rig)
        assert rig.objects() == []


def test_a_chunk_that_the_daemon_forgets_goes_from_the_bucket_whoever_stored_it(
    make_rig: MakeRig, seaweed: Server
) -> None:
    one, chunk = make_rig(seaweed), numbered(1)
    two = one.again()
    one.store(chunk)
    two.engine.forget([chunk.id], "cleared")
    assert not two.has(chunk) and not two.serves(chunk)
    rested(two)
    assert one.objects() == []
