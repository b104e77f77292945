"""What lies in the bucket, who finds it, and what becomes of it when somebody else touches it."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.errors import AlreadyRunning
from forebay.testing.buckets import Server
from forebay.tiers.s3.names import Names, segment_name
from forebay.tiers.s3.segment import FRONT_BYTES, Piece, build
from tests.tiers.s3.conftest import MakeRig
from tests.tiers.s3.rig import S3Rig
from tests.tiers.support import Made, make_chunk, numbered

BIG = 256 << 10
"""Granule size of chunks that aren't packed."""


def store_together(rig: S3Rig, chunks: list[Made]) -> None:
    """At once, so that small ones share an object."""
    results = rig.finish([rig.store_job(chunk) for chunk in chunks])
    assert all(result.ok for result in results.values()), results


def smalls(count: int, **more: object) -> list[Made]:
    return [numbered(i, granule=2000 + i, **more) for i in range(count)]


def packing(chunks: list[Made]) -> dict[str, float]:
    """Options with which these chunks, stored together, are one segment: it is full when all are in."""
    return {"pack_wait_s": 60.0, "segment_bytes": sum(chunk.length for chunk in chunks)}


def rested(rig: S3Rig) -> None:
    """Nothing is left to delete."""
    rig.until(
        lambda: rig.value("bytes_leaving") == rig.value("doomed") == rig.value("clears_open") == 0, "deletions"
    )


# --- what is stored ----------------------------------------------------------------------------------------


def test_an_object_is_the_chunk_as_it_describes_itself(make_rig: MakeRig, seaweed: Server) -> None:
    rig, chunk = make_rig(seaweed), make_chunk(granule=BIG)
    assert rig.store(chunk).ok
    assert rig.objects() == [rig.name(chunk)]
    assert rig.get(rig.name(chunk)) == chunk.block + chunk.payload


def test_small_chunks_share_an_object_and_each_comes_back(make_rig: MakeRig, seaweed: Server) -> None:
    chunks = smalls(20)
    rig = make_rig(seaweed, **packing(chunks))
    store_together(rig, chunks)
    assert len(rig.objects()) == 1 and rig.value("chunks_packed") == 20
    assert all(rig.has(chunk) and rig.serves(chunk) for chunk in chunks)
    assert rig.value("bytes") == rig.bytes_in_bucket()


def load_together(rig: S3Rig, chunks: list[Made]) -> list[bool]:
    """At once; was each served? Its bytes are then right."""
    jobs = [rig.load_job(chunk) for chunk in chunks]
    results = rig.finish(jobs)
    return [rig.check_load(job, chunk, results[job.id]) for job, chunk in zip(jobs, chunks, strict=True)]


@pytest.mark.parametrize("own", [True, False], ids=["own", "anothers"])
def test_chunks_of_one_segment_that_are_loaded_at_once_share_requests(
    make_rig: MakeRig, seaweed: Server, own: bool
) -> None:
    chunks = smalls(30)
    writer = make_rig(seaweed, read_threads=1, **packing(chunks))
    rig = writer if own else writer.again()
    store_together(writer, chunks)
    rig.until(lambda: own or rig.value("chunks_learned") == 30, "the segment to be found")
    asked = rig.value("requests_get")
    assert all(load_together(rig, random.Random(1).sample(chunks, 30)))
    assert all(load_together(rig, [*chunks[:5], *chunks[:5], *chunks[20:]])), "some twice"
    assert rig.value("requests_get") - asked < 20 and rig.value("loads_together") > 20


def test_of_chunks_that_are_loaded_at_once_the_damaged_one_alone_is_a_miss(make_rig: MakeRig, seaweed: Server) -> None:
    chunks = smalls(12)
    rig = make_rig(seaweed, read_threads=1, **packing(chunks))
    store_together(rig, chunks)
    (segment,) = rig.objects("segments/")
    body = rig.get(segment)
    at = body.index(chunks[5].payload)
    rig.put(segment, body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :])
    served = load_together(rig, chunks)
    assert not served[5] and sum(served) >= 10, "the last of them may be asked for after the segment was given up"


def test_what_is_stored_while_a_tier_starts_is_told_once(make_rig: MakeRig, seaweed: Server) -> None:
    for number in range(3):
        rig, chunks = make_rig(seaweed, pack_below_bytes=0), [numbered(10 * number + i) for i in range(8)]
        store_together(rig, chunks)
        rig.until(lambda rig=rig: rig.value("announced") == 1, "the walk over what was there")
        rig.pump()
        assert sorted(change.chunk.key for change in rig.changes) == sorted(chunk.id.key for chunk in chunks)


def test_a_small_chunk_that_nothing_joins_in_time_has_its_own_object(make_rig: MakeRig, seaweed: Server) -> None:
    rig, chunk = make_rig(seaweed), numbered(1)
    rig.store(chunk)
    assert rig.objects() == [rig.name(chunk)]


def test_a_full_segment_waits_no_longer(make_rig: MakeRig, seaweed: Server) -> None:
    rig = make_rig(seaweed, pack_wait_s=60.0, segment_bytes=40_000)
    store_together(rig, smalls(10)[:5])
    assert rig.value("segments_written") == 1


def test_chunks_of_different_namespaces_or_tenants_share_nothing(make_rig: MakeRig, seaweed: Server) -> None:
    rig = make_rig(seaweed, pack_wait_s=0.5)
    kinds = [{}, {"tenant": "acme"}, {"namespace": b"o" * 32}]
    chunks = [make_chunk([i * 100 + k] * 16, **kinds[k]) for i in range(4) for k in range(3)]
    store_together(rig, chunks)
    names = [name.rsplit("/", 1)[1].split("-")[2:] for name in rig.objects("segments/")]
    assert len(names) == 3 and len({tuple(name) for name in names}) == 3


# --- others ------------------------------------------------------------------------------------------------


def test_what_one_daemon_stores_another_finds(make_rig: MakeRig, seaweed: Server) -> None:
    chunks, big = smalls(6), numbered(50, granule=BIG)
    one = make_rig(seaweed, **packing(chunks))
    two = one.again()
    store_together(one, [*chunks, big])
    assert two.has(big) and two.serves(big)
    two.until(lambda: two.value("chunks_learned") == 6, "the segment to be found")
    assert all(two.has(chunk) and two.serves(chunk) for chunk in chunks)
    assert two.value("chunks") == 0 and two.changes == [], "it tells of what it has stored itself"


def test_of_two_daemons_the_second_leaves_an_object_that_is_there(make_rig: MakeRig, seaweed: Server) -> None:
    one, chunk = make_rig(seaweed), numbered(1)
    two = one.again()
    one.store(chunk)
    before = one.client.head_object(Bucket=one.bucket, Key=one.name(chunk))["LastModified"]
    assert two.value("conditional_put") == 1
    assert two.store(chunk).ok and two.has(chunk)
    assert two.value("stores_known") == 1 and two.value("chunks") == 0
    assert one.client.head_object(Bucket=one.bucket, Key=one.name(chunk))["LastModified"] == before


def test_an_endpoint_without_conditions_is_written_over_with_the_same_bytes(make_rig: MakeRig, juicefs: Server) -> None:
    one, chunk = make_rig(juicefs), numbered(1)
    two = one.again()
    assert one.value("conditional_put") == 0
    assert one.store(chunk).ok and two.store(chunk).ok
    assert one.get(one.name(chunk)) == chunk.block + chunk.payload
    assert one.serves(chunk) and two.serves(chunk)
    two.engine.clear(b"")
    rested(two)
    assert not one.serves(chunk) and one.objects() == []


def test_an_endpoint_that_refuses_to_delete_several_at_once_is_asked_for_each(
    make_rig: MakeRig, juicefs: Server
) -> None:
    rig, chunks = make_rig(juicefs, pack_below_bytes=0), smalls(5)
    store_together(rig, chunks)
    rig.engine.clear(b"")
    rested(rig)
    assert rig.value("batch_delete") == 0 and rig.objects() == []


def test_what_wasnt_there_is_asked_for_again_after_a_while(make_rig: MakeRig, seaweed: Server) -> None:
    one, chunk = make_rig(seaweed, missing_s=0.5), numbered(1)
    two = one.again()
    assert not two.has(chunk)
    asked = two.value("requests_front")
    one.store(chunk)
    assert not two.has(chunk) and two.value("requests_front") == asked, "a miss is believed for a moment"
    two.until(lambda: two.has(chunk), "it to be asked for again")


def test_an_index_that_is_longer_than_a_first_look_is_read_whole(make_rig: MakeRig, seaweed: Server) -> None:
    rig, chunks = make_rig(seaweed), [make_chunk([i] * 16, granule=16) for i in range(800)]
    segment = build([Piece(one.header, one.length, (one.block, one.payload)) for one in chunks])
    assert segment.index_bytes > FRONT_BYTES
    name = segment_name(time.time_ns(), "0" * 16, chunks[0].header.namespace, "")
    rig.put(Names(rig.prefix).segment(name), segment.body)
    rig.until(lambda: rig.value("chunks_learned") == 800, "the segment to be found")
    assert rig.value("segments_read") == 1
    assert all(rig.serves(chunk) for chunk in (chunks[0], chunks[400], chunks[-1]))


@pytest.mark.parametrize("what", ["cut", "flipped", "of entries behind its end"])
def test_a_segment_whose_index_cant_be_read_is_passed_over(make_rig: MakeRig, seaweed: Server, what: str) -> None:
    rig, chunks = make_rig(seaweed), smalls(3)
    segment = build([Piece(one.header, one.length, (one.block, one.payload)) for one in chunks])
    body = bytearray(segment.body)
    if what == "flipped":
        body[30] ^= 1
    name = segment_name(time.time_ns(), "0" * 16, chunks[0].header.namespace, "")
    cut = {"cut": 100, "of entries behind its end": len(body) - 1}.get(what, len(body))
    rig.put(Names(rig.prefix).segment(name), bytes(body[:cut]))
    rig.until(lambda: rig.value("segments_corrupt") == 1, "it to be looked at")
    assert not any(rig.has(chunk) or rig.serves(chunk) for chunk in chunks)


def test_nothing_is_listed_for_stores_lookups_and_loads(make_rig: MakeRig, seaweed: Server) -> None:
    rig, chunks = make_rig(seaweed, refresh_s=0.0), smalls(6)
    before = rig.value("requests_list")
    store_together(rig, [*chunks, numbered(50, granule=BIG)])
    assert all(rig.has(chunk) and rig.serves(chunk) for chunk in chunks)
    assert not rig.has(numbered(77))
    assert rig.value("requests_list") == before


# --- restarts ----------------------------------------------------------------------------------------------


def test_a_state_directory_remembers_everything(make_rig: MakeRig, seaweed: Server, tmp_path: Path) -> None:
    rig = make_rig(seaweed, state_dir=str(tmp_path / "state"), refresh_s=0.0, **packing(smalls(8)))
    chunks = [*smalls(8), numbered(50, granule=BIG)]
    store_together(rig, chunks)
    taken = rig.value("bytes")
    rig.close()
    again = rig.again()
    asked = again.value("requests_front")
    assert again.value("chunks") == 9 and again.value("bytes") == taken == again.bytes_in_bucket()
    assert all(again.has(chunk) for chunk in chunks) and again.value("requests_front") == asked
    assert all(again.serves(chunk) for chunk in chunks)
    again.until(lambda: len(again.changes) == 9, "everything to be told of")
    assert {change.chunk for change in again.changes if change.stored} == {chunk.id for chunk in chunks}


def test_without_one_objects_are_found_but_belong_to_nobody(make_rig: MakeRig, seaweed: Server) -> None:
    rig, chunk = make_rig(seaweed, quota_bytes=1 << 20), numbered(50, granule=BIG)
    rig.store(chunk)
    rig.close()
    again = rig.again()
    assert again.has(chunk) and again.serves(chunk)
    assert again.value("chunks") == 0 and again.value("bytes") == 0


def test_a_state_directory_belongs_to_one_daemon(make_rig: MakeRig, seaweed: Server, tmp_path: Path) -> None:
    rig = make_rig(seaweed, state_dir=str(tmp_path / "state"))
    with pytest.raises(AlreadyRunning, match="state"):
        rig.again()


def test_a_smaller_quota_holds_after_the_restart(make_rig: MakeRig, seaweed: Server, tmp_path: Path) -> None:
    rig = make_rig(seaweed, state_dir=str(tmp_path / "state"), quota_bytes=8 << 20)
    for i in range(6):
        rig.store(numbered(i, granule=BIG))
    rig.close()
    again = rig.again(quota_bytes=2 << 20)
    again.until(lambda: again.bytes_in_bucket() <= 2 << 20, "the rest to leave")
    again.until(lambda: again.value("bytes") == again.bytes_in_bucket(), "the books to say so")
    assert again.value("chunks") == 3


def test_what_a_crash_left_half_done_is_removed_by_the_next_process(
    make_rig: MakeRig, seaweed: Server, tmp_path: Path
) -> None:
    rig = make_rig(seaweed, state_dir=str(tmp_path / "state"))
    lost, kept = numbered(1), numbered(2)
    rig.store(kept)
    assert rig.tier._memory.cards.begun() == [], "what is in the books isn't half done"
    for chunk in (lost, kept):
        rig.tier._memory.cards.begin(f"chunks/{chunk.id.key.hex()}-00")
    rig.put(rig.name(lost), lost.block + lost.payload)
    rig.close()
    again = rig.again()
    again.until(lambda: again.objects() == [rig.name(kept)] and again.value("doomed") == 0, "the object to go")
    assert again.tier._memory.cards.begun() == [] and again.serves(kept)


# --- behind the tier's back --------------------------------------------------------------------------------


def test_an_object_that_was_deleted_is_a_miss_from_its_first_load_on(make_rig: MakeRig, seaweed: Server) -> None:
    rig, chunk = make_rig(seaweed), numbered(1, granule=BIG)
    rig.store(chunk)
    rig.delete(rig.name(chunk))
    assert rig.load(chunk).result.reason == "missing"
    rig.until(lambda: not rig.has(chunk) and rig.value("bytes") == 0, "the account to know")
    rig.until(lambda: [change.stored for change in rig.changes] == [True, False], "the removal to be told")
    assert rig.store(chunk).ok and rig.serves(chunk)


def test_anothers_object_that_was_deleted_is_no_lasting_hit(make_rig: MakeRig, seaweed: Server) -> None:
    one, chunk = make_rig(seaweed), numbered(1)
    two = one.again(found_s=3600.0)
    one.store(chunk)
    assert two.has(chunk)
    one.delete(one.name(chunk))
    assert two.has(chunk), "what was seen is believed"
    assert two.load(chunk).result.reason == "missing"
    assert not two.has(chunk), "until a load has found out"


Damage = Callable[[bytes, bytes], bytes]
DAMAGE: dict[str, Damage] = {
    "a flipped bit in the payload": lambda whole, other: whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:],
    "a flipped bit in the header": lambda whole, other: whole[:60] + bytes([whole[60] ^ 4]) + whole[61:],
    "a flipped bit in the padding": lambda whole, other: whole[:4000] + bytes([whole[4000] ^ 4]) + whole[4001:],
    "truncated": lambda whole, other: whole[:-1],
    "half": lambda whole, other: whole[: len(whole) // 2],
    "the header alone": lambda whole, other: whole[:4096],
    "a few bytes": lambda whole, other: whole[:20],
    "empty": lambda whole, other: b"",
    "longer": lambda whole, other: whole + b"\0",
    "another chunk": lambda whole, other: other,
    "another chunk's payload": lambda whole, other: whole[:4096] + other[4096:],
    "nothing of ours": lambda whole, other: b"<html>" * 5000,
}


@pytest.mark.parametrize(
    ("what", "own"), [*((what, True) for what in DAMAGE), ("half", False), ("another chunk", False)]
)
def test_an_object_that_was_replaced_is_a_miss_and_is_removed(
    make_rig: MakeRig, seaweed: Server, what: str, own: bool
) -> None:
    chunk, other = numbered(1, granule=BIG), numbered(2, granule=BIG)
    writer = make_rig(seaweed, missing_s=0.3)
    rig = writer if own else writer.again()
    writer.store(chunk)
    writer.put(writer.name(chunk), DAMAGE[what](chunk.block + chunk.payload, other.block + other.payload))
    loaded = rig.load(chunk)
    assert not loaded.result.ok and loaded.result.reason in ("corrupt", "missing")
    rig.until(lambda: not rig.has(chunk), "it to leave sight")
    rested(rig)
    assert writer.name(chunk) not in writer.objects()
    assert rig.store(chunk).ok and rig.serves(chunk)


def test_what_is_no_chunk_is_no_hit_and_a_store_writes_over_it(make_rig: MakeRig, seaweed: Server) -> None:
    rig, chunk = make_rig(seaweed), numbered(1)
    rig.put(rig.name(chunk), (chunk.block + chunk.payload)[:-1])
    assert not rig.has(chunk) and rig.value("fronts_corrupt") == 1
    assert rig.store(chunk).ok and rig.has(chunk) and rig.serves(chunk)
    assert rig.value("stores_written_over") == 1
    assert rig.value("bytes") == rig.bytes_in_bucket()


@pytest.mark.parametrize(
    ("what", "own"),
    [
        ("deleted", True), ("truncated", True), ("flipped", True), ("replaced by another segment", True),
        ("deleted", False), ("replaced by another segment", False),
    ],
)  # fmt: skip
def test_a_segment_that_was_touched_is_a_miss_for_its_chunks(
    make_rig: MakeRig, seaweed: Server, what: str, own: bool
) -> None:
    chunks = smalls(5)
    writer = make_rig(seaweed, **packing(chunks))
    rig = writer if own else writer.again()
    store_together(writer, chunks)
    rig.until(lambda: own or rig.value("chunks_learned") == 5, "the segment to be found")
    (segment,) = writer.objects("segments/")
    body = writer.get(segment)
    if what == "deleted":
        writer.delete(segment)
    elif what == "truncated":
        writer.put(segment, body[: len(body) // 2])
    elif what == "flipped":
        writer.put(segment, bytes(byte ^ 1 for byte in body))
    else:
        others = [numbered(100 + i, granule=2000 + i) for i in range(5)]
        store_together(writer, others)
        writer.put(segment, writer.get(next(name for name in writer.objects("segments/") if name != segment)))
    served = [rig.serves(chunk) for chunk in chunks]  # right bytes or none, says the driver
    assert what == "truncated" or not any(served)
    assert not all(served)
    for chunk, was in zip(chunks, served, strict=True):
        if not was:
            rig.until(lambda chunk=chunk: not rig.has(chunk), "it to leave sight")
    store_together(rig, chunks)
    assert all(rig.serves(chunk) for chunk in chunks)


# --- leaving -----------------------------------------------------------------------------------------------


def test_a_segment_goes_as_a_whole_when_one_of_its_chunks_must(make_rig: MakeRig, seaweed: Server) -> None:
    chunks = smalls(5)
    rig = make_rig(seaweed, **packing(chunks))
    store_together(rig, chunks)
    rig.engine.forget([chunks[2].id], "cleared")
    rested(rig)
    assert rig.objects() == [] and rig.value("bytes") == 0 and rig.value("chunks") == 0
    assert not any(rig.has(chunk) or rig.serves(chunk) for chunk in chunks)
    rig.until(lambda: len(rig.changes) == 10, "all removals")
    assert [c.reason for c in rig.changes[5:] if c.chunk == chunks[2].id] == ["cleared"]
    assert {c.reason for c in rig.changes[5:] if c.chunk != chunks[2].id} == {"evicted"}


def test_a_chunk_that_was_replaced_waits_for_the_others_of_its_segment(make_rig: MakeRig, seaweed: Server) -> None:
    chunks, tail = smalls(3), make_chunk(range(7000, 7016))
    rig = make_rig(seaweed, **packing([*chunks, tail]))
    store_together(rig, [*chunks, tail])
    fuller = make_chunk(range(7000, 7032), granule=BIG)
    assert rig.store(fuller, replaces=tail.header.key).ok
    rig.until(lambda: any(not change.stored for change in rig.changes), "the removal to be told")
    assert [(c.chunk, c.reason) for c in rig.changes if not c.stored] == [(tail.id, "replaced")]
    assert rig.lookup(tail.query())[0].key != tail.header.key and not rig.serves(tail)
    assert all(rig.serves(chunk) for chunk in chunks), "its neighbours stay"
    assert rig.value("bytes") == rig.bytes_in_bucket(), "and its bytes count as long as they are there"
    rig.engine.forget([chunk.id for chunk in chunks], "corrupt")
    rig.until(lambda: rig.value("bytes_leaving") == 0, "the segment to go")
    assert rig.objects() == [rig.name(fuller)]
    assert sum(not c.stored and c.chunk == tail.id for c in rig.changes) == 1, "it is told of once"


def test_the_quota_counts_what_is_in_the_bucket(make_rig: MakeRig, seaweed: Server) -> None:
    quota = 1 << 20
    rig, rng = make_rig(seaweed, quota_bytes=quota, pack_wait_s=0.02), random.Random(1)
    for round_ in range(12):
        granules = rng.choices((1000, 9000, 40_000, 150_000), k=rng.randrange(1, 9))
        chunks = [numbered(round_ * 10 + i, granule=granule) for i, granule in enumerate(granules)]
        rig.finish([rig.store_job(chunk) for chunk in chunks])
        assert rig.bytes_in_bucket() <= quota and rig.value("bytes") <= quota
    rested(rig)
    assert rig.value("bytes") == rig.bytes_in_bucket() and rig.value("evicted") > 0


def test_a_full_memory_forgets_entries_and_not_objects(make_rig: MakeRig, seaweed: Server) -> None:
    rig = make_rig(seaweed, chunks_max=16, pack_below_bytes=0)
    chunks = [numbered(i) for i in range(30)]
    for chunk in chunks:
        assert rig.store(chunk).ok
    assert rig.value("chunks") <= rig.value("chunks_max") == 16 and rig.value("entries_forgotten") >= 14
    assert len(rig.objects()) == 30
    assert rig.has(chunks[0]) and rig.serves(chunks[0]), "it is found by asking the bucket"


# --- any history -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(int(os.environ.get("FOREBAY_S3_SEEDS", "1"))))
def test_whatever_two_daemons_and_a_vandal_do_the_bytes_are_right_or_its_a_miss(
    make_rig: MakeRig, seaweed: Server, seed: int
) -> None:
    rng = random.Random(seed)
    one = make_rig(seaweed, quota_bytes=3 << 20, missing_s=0.25, found_s=0.25, refresh_s=0.05, pack_wait_s=0.01)
    rigs = [one, one.again()]
    chunks = [numbered(i, granule=rng.choice((500, 5000, 20_000, 200_000))) for i in range(20)]
    for _ in range(50):
        rig, some = rng.choice(rigs), rng.sample(chunks, rng.randrange(1, 6))
        match rng.randrange(8):
            case 0 | 1 | 2:
                rig.finish([rig.store_job(chunk) for chunk in some])
            case 3 | 4 | 5:
                for chunk in some:
                    rig.has(chunk)
                    rig.serves(chunk)
            case 6:
                rig.engine.forget([chunk.id for chunk in some[:2]], rng.choice(("cleared", "corrupt", "replaced")))
            case 7:
                vandalise(rig, rng)
    for rig in rigs:  # what was replaced may wait in a segment, as it does elsewhere
        rig.until(lambda rig=rig: rig.value("queue_bytes") == rig.value("doomed") == 0, "it to come to rest")
        assert rig.value("bytes") <= 3 << 20 and rig.value("task_crashes") == 0
        assert rig.value("background_crashes") == 0


def vandalise(rig: S3Rig, rng: random.Random) -> None:
    names = rig.objects()
    for name in rng.sample(names, min(2, len(names))):
        try:
            other, body = rig.get(rng.choice(names)), rig.get(name)
        except rig.client.exceptions.NoSuchKey:
            continue  # the tier has removed it meanwhile
        at = rng.randrange(len(body) or 1)
        flipped = bytes([byte ^ 1 for byte in body[at : at + 1]])
        rig.put(name, rng.choice((body[:at], other, body[:at] + flipped + body[at + 1 :], b"")))
