"""Clears: by namespace, tenant and prefix, in slices, complete when they say so."""

from __future__ import annotations

import asyncio
import random

import pytest

from forebay.errors import RequestRefused
from forebay.kvstore.cascade import Cascade, TierTraffic
from forebay.kvstore.clearing import Prefix, Scope
from forebay.kvstore.entry import Entry
from forebay.kvstore.header import SlotState, decode_header, encode_header
from forebay.kvstore.limits import Limits
from forebay.kvstore.lookup import Offer, Promotion, match, pin
from forebay.kvstore.pins import Owner
from forebay.kvstore.promises import CLEAR_STORES_S, Promises
from forebay.kvstore.protocol import Clear
from forebay.tiers.base import ClearScope, JobResult
from tests.kvstore.support import CHUNK, SmallStore

SYSTEM = list(range(2 * CHUNK))


def put(store: SmallStore, tokens: list[int], tenant: str = "", salt: bytes = b"") -> None:
    for chunk in store.chunks(tokens, salt):
        slot = store.core.reserve(store.client, store.namespace_id, tenant, chunk)
        if slot.status == "reserved":
            store.write_and_commit(store.client, slot, chunk)


def hit(store: SmallStore, tokens: list[int], salt: bytes = b"") -> int:
    return match(store.core, store.prompt(tokens, salt)).hit()


def behind(store: SmallStore, tokens: list[int], tenant: str | None = None) -> Scope:
    """The scope of a prefix, as the service works it out."""
    prompt = store.prompt(tokens)
    start = max(prompt.whole - 1, 0) // CHUNK * CHUNK
    prefix = Prefix(2, prompt.key_at(start), start, prompt.tokens[4 * start : 4 * prompt.whole])
    return Scope(store.namespace_id, tenant, prefix)


def clear(store: SmallStore, scope: Scope) -> int:
    clearing = store.core.clear(scope)
    while store.core.tick(steps=3):
        assert not clearing.done
    assert clearing.done
    return clearing.chunks


def test_a_tenant_is_forgotten_and_the_others_stay() -> None:
    store = SmallStore()
    put(store, [1] * 64, "acme")
    put(store, [2] * 64, "other")
    assert clear(store, Scope(tenant="acme")) == 4
    assert (hit(store, [1] * 64), hit(store, [2] * 64)) == (0, 64)
    assert clear(store, Scope(b"another namespace")) == 0
    assert clear(store, Scope()) == 4 and len(store.core.table) == 0


def test_a_prefix_takes_what_goes_on_from_it_and_leaves_what_others_share() -> None:
    store = SmallStore(extents=8)
    for own in ([1] * 40, [1] * 20 + [9] * 30, [2] * 40, []):
        put(store, SYSTEM + own)
    assert clear(store, behind(store, SYSTEM + [1] * 16)) > 0
    assert hit(store, SYSTEM + [1] * 40) == len(SYSTEM)
    assert hit(store, SYSTEM + [1] * 20 + [9] * 30) == len(SYSTEM)
    assert hit(store, SYSTEM + [2] * 40) == len(SYSTEM) + 32
    clear(store, behind(store, SYSTEM[:16]))
    assert hit(store, SYSTEM) == 0 and len(store.core.table) == 0


def test_an_empty_prefix_takes_all_of_one_salt() -> None:
    store = SmallStore()
    put(store, SYSTEM)
    put(store, SYSTEM, salt=b"other")
    clear(store, behind(store, []))
    assert hit(store, SYSTEM) == 0 and hit(store, SYSTEM, b"other") == len(SYSTEM)


def test_what_has_lost_its_parents_does_not_come_back_with_them() -> None:
    store = SmallStore(extents=8)
    tokens = list(range(6 * CHUNK))
    put(store, tokens)
    for group in (0, 1):  # the chain has a hole in every group
        entry = store.core.table.get(group, store.prompt(tokens).key_at(3 * CHUNK))
        assert entry is not None
        store.core.retire(entry, "evicted")
    clear(store, behind(store, tokens[:CHUNK]))
    assert len(store.core.table) == 0
    put(store, tokens[: 3 * CHUNK])
    assert hit(store, tokens) == 3 * CHUNK


def test_a_clear_beats_pins_and_readers_keep_their_bytes() -> None:
    store = SmallStore()
    put(store, SYSTEM)
    pinned = pin(store.core, store.client, match(store.core, store.prompt(SYSTEM)))
    store.core.keep(pinned.entries, Owner("hard", "ops"), 60)
    before = [store.bytes_of(entry) for entry in pinned.entries]
    clear(store, Scope())
    assert hit(store, SYSTEM) == 0 and [store.bytes_of(entry) for entry in pinned.entries] == before
    assert store.core.pins.hard_bytes == 0
    store.core.release(store.client, [pinned.lease])
    assert store.core.place.slots.used_bytes == 0


def test_what_is_stored_while_a_clear_runs_stays() -> None:
    store = SmallStore(extents=8)
    for number in range(10):
        put(store, [number] * 64)
    clearing = store.core.clear(Scope())
    rng = random.Random(4)
    later = 100
    while store.core.tick(steps=2):
        put(store, [later] * 64)
        if rng.random() < 0.3:
            later += 1
    assert clearing.done
    assert all(hit(store, [number] * 64) == 0 for number in range(10))
    assert hit(store, [later] * 64) == 64


def test_the_end_of_a_clear_is_told_once() -> None:
    store = SmallStore()
    put(store, SYSTEM)
    told: list[int] = []
    store.core.clear(Scope(), lambda: told.append(len(store.core.table)))
    store.core.chores.finish()
    assert told == [0]


# --- tiers -----------------------------------------------------------------------------------------------


def promotion(store: SmallStore, cascade: Cascade, tenant: str) -> tuple[Entry, JobResult]:
    """A load under way, and the result that its tier will report."""
    chunk = store.chunks([5] * CHUNK)[0]
    entry = store.core.reserve_promotion(store.namespace_id, chunk, b"t" * 16)
    assert entry is not None
    offer = Offer("fs", chunk.key, CHUNK, CHUNK, entry.header_bytes + entry.payload_length)
    _, job = cascade.load_job(Promotion(entry, offer), 1.0)
    header = decode_header(memoryview(store.memory.extents[entry.slot.extent])[entry.slot.offset :])
    sums = bytes(8 * (CHUNK // 16))
    values = {name: getattr(header, name) for name in header.__struct_fields__}
    full = type(header)(**values | {"tenant": tenant, "checksums": sums, "owner": b""})
    return entry, JobResult(job.id, True, "", encode_header(full), entry.payload_length)


@pytest.mark.parametrize(("tenant", "comes"), [("acme", False), ("other", True)])
@pytest.mark.parametrize("early", [True, False])
def test_what_a_tier_brings_during_a_clear_is_not_published(tenant: str, comes: bool, early: bool) -> None:
    store = SmallStore()
    cascade = Cascade(store.core)
    cascade.tiers["fs"] = TierTraffic("fs", b"t" * 16)
    if early:
        entry, result = promotion(store, cascade, tenant)
    with cascade.clearing_of(Scope(tenant="acme")):
        if not early:
            entry, result = promotion(store, cascade, tenant)
    load = cascade.finished("fs", result)
    assert load is not None and load.ok is comes
    assert (entry.state is SlotState.COMMITTED) is comes
    assert cascade.clearing == [] and store.core.promoting_bytes == 0


def test_what_is_not_published_for_a_clear_s_sake_is_not_said_to_be_lost() -> None:
    """It is of another prompt, and its tier keeps it."""
    store = SmallStore()
    cascade = Cascade(store.core)
    cascade.tiers["fs"] = TierTraffic("fs", b"t" * 16)
    _, result = promotion(store, cascade, "acme")
    with cascade.clearing_of(behind(store, [6] * CHUNK)):
        load = cascade.finished("fs", result)
    assert load is not None and not load.ok and not load.lost


@pytest.mark.parametrize("reason", ["replaced", "evicted", "cleared"])
@pytest.mark.parametrize(("tenant", "goes"), [("acme", True), ("other", False)])
def test_what_left_the_pool_on_its_way_to_a_tier_is_cleared_there_too(reason: str, tenant: str, goes: bool) -> None:
    store = SmallStore()
    cascade = Cascade(store.core)
    cascade.tiers["fs"] = TierTraffic("fs", b"t" * 16)
    put(store, [5] * CHUNK, tenant)
    entry = next(iter(store.core.table))
    [(_, job)] = cascade.store_jobs(entry)
    if reason != "cleared":
        store.core.retire(entry, reason)
    with cascade.clearing_of(Scope(tenant="acme")):
        clear(store, Scope(tenant="acme"))
    late = cascade.came_too_late("fs", JobResult(job.id, True))
    assert (late == job.chunk) is goes and (late is None) is not goes
    cascade.finished("fs", JobResult(job.id, True))
    assert not cascade.tiers["fs"].unwanted


@pytest.mark.parametrize(("reason", "goes"), [("io", True), ("full", False)])
def test_a_cleared_chunk_whose_store_may_have_succeeded_all_the_same_is_forgotten(reason: str, goes: bool) -> None:
    store = SmallStore()
    cascade = Cascade(store.core)
    cascade.tiers["fs"] = TierTraffic("fs", b"t" * 16)
    put(store, [5] * CHUNK)
    [(_, job)] = cascade.store_jobs(next(iter(store.core.table)))
    with cascade.clearing_of(Scope()):
        clear(store, Scope())
    late = cascade.came_too_late("fs", JobResult(job.id, False, reason))
    assert (late == job.chunk) is goes


class _Tier:
    """Has cleared at once; forgets a chunk when it is told that it may."""

    forgetting = 0
    asked = 0

    async def clear_scope(self, scope: ClearScope, timeout_s: float) -> int:
        self.asked += 1
        return 7


def test_a_clear_ends_when_what_was_on_its_way_to_a_tier_is_forgotten_there() -> None:
    async def scenario() -> None:
        store, tier = SmallStore(), _Tier()
        cascade = Cascade(store.core)
        cascade.tiers["fs"] = TierTraffic("fs", b"t" * 16)
        put(store, [5] * CHUNK)
        [(_, job)] = cascade.store_jobs(next(iter(store.core.table)))
        store.core.chores.wake = lambda: asyncio.get_running_loop().call_soon(store.core.chores.finish)  # type: ignore[assignment]
        clearing = asyncio.create_task(Promises(store.core, cascade, {"fs": tier}, b"boot").clear(Clear(rid=1)))
        while not tier.asked:
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)
        assert not clearing.done(), "a kill would bring the chunk back"
        assert cascade.came_too_late("fs", JobResult(job.id, True)) == job.chunk
        tier.forgetting = 1
        cascade.finished("fs", JobResult(job.id, True))
        await asyncio.sleep(0.1)
        assert not clearing.done(), "nobody has said that it is forgotten"
        tier.forgetting = 0
        assert (await clearing).tiers == {"fs": 7}

    asyncio.run(scenario())


def test_a_clear_that_a_tier_keeps_waiting_says_that_it_does_not_know() -> None:
    async def scenario() -> None:
        store = SmallStore()
        cascade = Cascade(store.core)
        cascade.tiers["fs"] = TierTraffic("fs", b"t" * 16)
        put(store, [5] * CHUNK)
        cascade.store_jobs(next(iter(store.core.table)))
        store.core.chores.wake = lambda: asyncio.get_running_loop().call_soon(store.core.chores.finish)  # type: ignore[assignment]
        tier = _Tier()
        clearing = asyncio.create_task(Promises(store.core, cascade, {"fs": tier}, b"boot").clear(Clear(rid=1)))
        while not tier.asked:
            await asyncio.sleep(0)
        store.now += CLEAR_STORES_S + 1
        assert (await clearing).tiers == {"fs": -1}

    asyncio.run(scenario())


def test_so_many_clears_at_a_time_and_no_more() -> None:
    store = SmallStore(limits=Limits(clears=2))
    cascade = Cascade(store.core)
    promises = Promises(store.core, cascade, {}, b"boot")
    put(store, SYSTEM)

    async def all_at_once() -> list[object]:
        store.core.chores.wake = lambda: asyncio.get_running_loop().call_soon(store.core.chores.finish)  # type: ignore[assignment]
        clears = (promises.clear(Clear(rid=rid)) for rid in range(1, 6))
        return list(await asyncio.gather(*clears, return_exceptions=True))

    answers = asyncio.run(all_at_once())
    refused = [answer for answer in answers if isinstance(answer, RequestRefused)]
    assert len(refused) == 3 and {answer.code for answer in refused} == {"busy"}
    assert cascade.clearing == [] and len(store.core.table) == 0
