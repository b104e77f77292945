"""The tier's parts by themselves: caps, accounts, who ends what."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import pytest

from forebay.testing.conformance import BIG, QUOTA, Driver, InProcess, Pool, numbered
from forebay.tiers.base import ChunkId, JobResult, LoadJob, Query
from forebay.tiers.mooncake import finder as finder_module
from forebay.tiers.mooncake import holdings as holdings_module
from forebay.tiers.mooncake.figures import parse
from forebay.tiers.mooncake.finder import Finder
from forebay.tiers.mooncake.holdings import Holdings
from forebay.tiers.mooncake.loads import Load
from forebay.tiers.mooncake.options import mooncake_options
from forebay.tiers.mooncake.remote import Place, Remote
from forebay.tiers.mooncake.suspects import HOSTS_MAX, Suspects
from forebay.tiers.mooncake.tier import MooncakeTier
from forebay.tiers.mooncake.watch import Watch
from forebay.tiers.mooncake.work import SPARES_MAX, BatchPool
from forebay.tiers.timers import Timers
from tests.tiers.mooncake.conftest import SharedPool

PATIENCE_S = 60.0


def chunk(number: int) -> ChunkId:
    return ChunkId(0, number.to_bytes(32, "big"))


def until(true: object) -> None:
    assert callable(true)
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


class Clock:
    """Time that stands still unless it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()


@pytest.fixture
def driver(shared: SharedPool, pool: Pool) -> Iterator[Driver]:
    options = {
        "master": str(shared.master.address), "trusted_network": True, "segment_bytes": 0, "quota_bytes": QUOTA,
    }  # fmt: skip
    made = Driver(pool, InProcess(MooncakeTier("tier", options, remote=shared.borrow(), sweep_s=0.05), pool))
    yield made
    made.close()


# --- the account ---------------------------------------------------------------------------------------


def test_the_quota_holds_while_many_are_stored_at_once(driver: Driver) -> None:
    chunks = [numbered(i, granule=BIG) for i in range(24)]
    jobs = [driver.store_job(chunk) for chunk in chunks]
    driver.engine.begin(jobs)
    most = 0.0

    def finished() -> bool:
        nonlocal most
        most = max(most, driver.value("bytes"))
        return len(driver.results) == len(jobs)

    driver.until(finished, "all stores")
    assert 0 < most <= QUOTA
    reasons = [result.reason for result in driver.results]
    assert set(reasons) <= {"", "full"}, "what others are just storing can't make room"
    assert reasons.count("") > 12, "what has been stored can"
    held = [one for one in chunks if driver.has(one)]
    assert len(held) == driver.value("chunks") and all(driver.serves(one) for one in held)
    assert sum(one.length for one in held) == driver.value("bytes")


def test_what_others_remove_leaves_the_account_and_is_told(driver: Driver, shared: SharedPool) -> None:
    chunks = [numbered(i) for i in range(3)]
    for one in chunks:
        driver.store(one)
    assert isinstance(driver.engine, InProcess) and isinstance(driver.engine.tier, MooncakeTier)
    driver.engine.tier._remote.remove([chunks[1].id])
    driver.until(lambda: driver.value("chunks") == 2, "the sweep to find out")
    driver.until(lambda: not driver.changes[-1].stored, "its change")
    assert (driver.changes[-1].chunk, driver.changes[-1].reason) == (chunks[1].id, "evicted")
    assert driver.value("bytes") == chunks[0].length + chunks[2].length


def test_the_account_holds_so_many_chunks_and_names_the_coldest_of_those_beyond() -> None:
    holdings = Holdings(0, chunks_max=3)
    for number in range(5):
        assert holdings.begin(chunk(number), 10)
        holdings.end(chunk(number), stored=True)
    holdings.touch([chunk(0)])
    assert holdings.excess() == [chunk(1), chunk(2)]


def test_removals_of_what_isnt_ours_wait_up_to_a_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings_module, "LEAVING_MAX", 4)
    holdings = Holdings(0)
    assert holdings.begin(chunk(99), 10) and holdings.end(chunk(99), stored=True)
    assert holdings.leave([chunk(number) for number in range(6)], "cleared") == 2
    assert holdings.leave([chunk(99)], "cleared") == 0, "what is in the account always fits"
    assert holdings.leaving == 5 and len(holdings.list_leaving(100)) == 5


def test_a_chunk_that_is_forgotten_while_it_is_stored_is_removed_after_that() -> None:
    holdings = Holdings(0)
    assert holdings.begin(chunk(1), 10)
    holdings.leave([chunk(1)], "cleared")
    assert holdings.list_leaving(10) == [], "its store comes first"
    assert not holdings.end(chunk(1), stored=True), "nobody is told that it came"
    assert [left.chunk for left in holdings.list_leaving(10)] == [chunk(1)]
    assert holdings.gone(chunk(1)) is not None and holdings.bytes == 0


def test_a_store_of_a_leaving_chunk_waits_for_its_removal() -> None:
    holdings = Holdings(0)
    holdings.leave([chunk(1)], "cleared")
    assert not holdings.begin(chunk(1), 10)
    holdings.gone(chunk(1))
    assert holdings.begin(chunk(1), 10)


def test_a_sweep_goes_round_all_that_is_held() -> None:
    holdings = Holdings(0)
    for number in range(10):
        holdings.begin(chunk(number), 1)
        holdings.end(chunk(number), stored=True, cold=number % 2 == 0)
    seen = [one for _ in range(4) for one in holdings.some(3)]
    assert sorted(seen, key=lambda one: one.key) == [chunk(number) for number in range(10)]


# --- lookups -------------------------------------------------------------------------------------------


class Asked(Remote):
    """Answers what the test says, when the test says."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.calls: list[list[ChunkId]] = []
        self.there: dict[ChunkId, Place] = {}

    def find(self, chunks: Sequence[ChunkId], known: Mapping[ChunkId, Place]) -> dict[ChunkId, Place | None]:
        self.calls.append(list(chunks))
        self.known = dict(known)
        assert self.go.wait(PATIENCE_S)
        return {one: self.there.get(one) for one in chunks}


@pytest.fixture
def asked() -> Iterator[Asked]:
    made = Asked()
    yield made
    made.go.set()


def query(number: int) -> Query:
    return Query(0, chunk(number).key, b"p" * 32, bytes(4 * 32))


def test_lookups_wait_up_to_a_cap_and_beyond_it_nobody_knows(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finder_module, "WAITING_MAX", 8)
    found = Finder(asked, Holdings(0), Suspects(), lambda: None)
    found.lookup([query(0)])
    until(lambda: asked.calls)
    outcomes = [found.lookup([query(number)])[0].outcome for number in range(1, 11)]
    assert outcomes == ["retry"] * 8 + ["away"] * 2
    assert found.counts["lookups_dropped"] == 2 and found.waiting == 9
    asked.go.set()
    until(lambda: found.waiting == 0)
    assert found.close(PATIENCE_S)


def test_answers_are_kept_up_to_a_cap_and_for_a_moment(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder_module, "KNOWN_MAX", 5)
    clock = Clock()
    asked.go.set()
    asked.there[chunk(9)] = Place(100, "host")
    found = Finder(asked, Holdings(0), Suspects(clock), lambda: None, clock)
    queries = [query(number) for number in range(10)]
    found.lookup(queries)
    until(lambda: found.waiting == 0)
    assert len(found) == 5
    assert [result.outcome for result in found.lookup(queries[5:])] == ["miss"] * 4 + ["hit"]
    clock.now += finder_module.MISS_S + 0.1
    assert [result.outcome for result in found.lookup(queries[8:])] == ["retry", "hit"]
    clock.now += finder_module.HIT_S
    until(lambda: found.waiting == 0)
    assert found.lookup(queries[9:])[0].outcome == "retry"
    until(lambda: found.waiting == 0)
    assert asked.known == {chunk(9): Place(100, "host")}, "where it was isn't asked for again"
    assert found.lookup(queries[9:])[0].outcome == "hit"
    assert found.close(PATIENCE_S)


def test_without_a_master_nothing_counts_as_missing(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    asked.go.set()
    found = Finder(asked, Holdings(0), Suspects(), lambda: None)
    monkeypatch.setattr(asked, "find", lambda chunks, known: {})
    monkeypatch.setattr(asked, "unreachable", True)
    found.lookup([query(1)])
    until(lambda: found.waiting == 0)
    assert [result.outcome for result in found.lookup([query(1)])] == ["away"]
    assert found.close(PATIENCE_S)


def test_a_host_that_hangs_may_have_its_chunk_all_the_same(asked: Asked) -> None:
    asked.go.set()
    asked.there[chunk(1)] = Place(100, "host")
    suspects = Suspects()
    found = Finder(asked, Holdings(0), suspects, lambda: None)
    until(lambda: found.lookup([query(1)])[0].outcome == "hit")
    suspects.suspect("host", 10.0)
    assert found.lookup([query(1)])[0].outcome == "away"
    assert found.close(PATIENCE_S)


def test_an_answer_that_was_overtaken_is_asked_for_again(asked: Asked) -> None:
    """The master said miss, and then the chunk was stored."""
    found = Finder(asked, Holdings(0), Suspects(), lambda: None)
    found.lookup([query(1)])
    until(lambda: asked.calls)
    found.forget([chunk(1)])
    asked.there[chunk(1)] = Place(100, "host")
    asked.go.set()
    until(lambda: found.lookup([query(1)])[0].outcome == "hit")
    assert len(asked.calls) == 2
    assert found.close(PATIENCE_S)


def test_hosts_that_hang_are_remembered_up_to_a_cap_and_for_a_while() -> None:
    clock = Clock()
    suspects = Suspects(clock)
    for number in range(HOSTS_MAX + 5):
        suspects.suspect(f"host {number}", 10.0)
    assert len(suspects) == HOSTS_MAX
    assert not suspects.hangs("host 0") and suspects.hangs("host 9")
    suspects.trust("host 9")
    assert not suspects.hangs("host 9")
    clock.now += 10.0
    assert not suspects.hangs("host 10") and len(suspects) == HOSTS_MAX - 2


# --- threads -------------------------------------------------------------------------------------------


class Batches:
    """What a pool ran, behind a gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.ran: list[list[int]] = []
        self.abandoned: list[int] = []

    def run(self, batch: Sequence[int], number: int) -> None:
        self.ran.append(list(batch))
        assert self.gate.wait(PATIENCE_S)


def test_a_queue_is_bounded_in_bytes_and_one_job_always_fits() -> None:
    batches = Batches()
    pool = BatchPool("test", 1, 100, 1000, 8, batches.run, batches.abandoned.append)
    assert pool.submit(0, 500), "an empty queue takes anything"
    until(lambda: batches.ran)
    assert not pool.submit(1, 1) and pool.bytes == 500
    batches.gate.set()
    until(lambda: pool.bytes == 0)
    assert pool.submit(2, 60) and pool.close(PATIENCE_S)


def test_batches_are_bounded_in_jobs_and_bytes_and_what_is_left_is_abandoned() -> None:
    batches = Batches()
    pool = BatchPool("test", 1, 10_000, 30, 4, batches.run, batches.abandoned.append)
    pool.submit(0, 1)
    until(lambda: batches.ran)
    for number in range(1, 8):
        pool.submit(number, 10)
    closing = threading.Thread(target=lambda: pool.close(PATIENCE_S))
    batches.gate.set()
    until(lambda: pool.bytes == 0)
    assert batches.ran == [[0], [1, 2, 3], [4, 5, 6], [7]]
    batches.gate.clear()
    pool.submit(8, 1)
    until(lambda: len(batches.ran) == 5)
    pool.submit(9, 1)
    closing.start()
    until(lambda: not pool.submit(10, 1))
    batches.gate.set()
    closing.join(PATIENCE_S)
    assert batches.abandoned == [9]


def test_threads_that_hang_are_replaced_up_to_a_cap_and_too_many_end() -> None:
    batches = Batches()
    pool = BatchPool("test", 1, 10_000, 1, 1, batches.run, batches.abandoned.append)
    for number in range(SPARES_MAX + 4):
        pool.submit(number, 1)
    until(lambda: len(batches.ran) == 1)
    for hanging in range(SPARES_MAX + 2):
        pool.hangs()
        wanted = min(hanging + 2, SPARES_MAX + 1)
        until(lambda wanted=wanted: len(batches.ran) == wanted)
    assert pool.hanging == SPARES_MAX + 2
    batches.gate.set()
    for _ in range(SPARES_MAX + 2):
        pool.hangs_no_more()
    until(lambda: len(pool._alive) == 1)
    assert pool.submit(99, 1)
    until(lambda: [99] in batches.ran)
    assert pool.close(PATIENCE_S)


def test_a_call_that_hangs_is_noticed_once_and_one_that_returns_in_time_never() -> None:
    clock = Clock()
    timers = Timers("test", clock)
    watch = Watch(timers, clock)
    told: list[str] = []
    watch.hangs, watch.hangs_no_more = (lambda: told.append("hangs")), (lambda: told.append("no more"))
    with watch.call():
        assert len(timers) == 1
    assert told == [] and len(timers) == 0
    with watch.call(lambda: told.append("host")):
        clock.now += 10
        timers.add(clock.now, lambda: None)  # wakes the thread, which looks at the clock
        until(lambda: "hangs" in told)
    assert told == ["host", "hangs", "no more"] and watch.counts["calls_hung"] == 1
    timers.close()


def test_timers_that_were_cancelled_are_forgotten() -> None:
    clock = Clock()
    timers = Timers("test", clock)
    for _ in range(10):
        for number in [timers.add(clock.now + 100, lambda: None) for _ in range(100)]:
            timers.cancel(number)
    assert len(timers) == 0 and len(timers._heap) <= 64
    timers.close()


# --- one load ------------------------------------------------------------------------------------------


def test_a_load_is_reported_once_by_whoever_is_first() -> None:
    reports: list[JobResult] = []

    def load() -> Load:
        reports.clear()
        return Load(LoadJob(1, chunk(1), 0, 0, 10, 1.0), memoryview(bytearray(10)), 1.0, reports.append)

    late = load()
    assert late.give_up("late") and not late.give_up("io") and not late.claim()
    assert [report.reason for report in reports] == ["late"]
    assert len(late.memory) == 0, "its slot is out of reach"
    loaded = load()
    assert loaded.claim() and not loaded.claim() and not loaded.give_up("late"), "its slot is being written"
    loaded.finish(JobResult(1, True))
    assert not loaded.give_up("late")
    assert [report.ok for report in reports] == [True]


def test_what_the_masters_page_says_is_read_and_the_rest_left() -> None:
    page = "# HELP x\nmaster_key_count 7\nmaster_allocated_bytes 1.5e3\nmaster_evicted_key_count what\nother 4\n\n"
    assert parse(page) == {"pool_keys": 7.0, "pool_bytes": 1500.0}


def test_the_masters_address_is_read() -> None:
    options = mooncake_options("t", {"master": "pool.example:50051", "trusted_network": True})
    assert (options.address.host, options.address.port) == ("pool.example", 50051)
