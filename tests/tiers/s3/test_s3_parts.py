"""The S3 tier's parts that need no server."""

from __future__ import annotations

import itertools
import threading

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    ReadTimeoutError,
    ResponseStreamingError,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import ConfigError, CorruptChunk
from forebay.tiers.base import ChunkId, ClearScope, JobResult, LoadJob
from forebay.tiers.fs.manifest import tenant_digest
from forebay.tiers.s3.breaker import Breaker, State
from forebay.tiers.s3.bucket import GivenUp
from forebay.tiers.s3.budget import RetryBudget
from forebay.tiers.s3.cards import HEADER_KEPT, Card, Cards, Written
from forebay.tiers.s3.clears import OPEN_MAX, Clears
from forebay.tiers.s3.complaints import complain
from forebay.tiers.s3.doomed import Doomed
from forebay.tiers.s3.failures import Kind, RequestFailed, failure_of
from forebay.tiers.s3.locks import ChunkLocks
from forebay.tiers.s3.metrics import Latencies
from forebay.tiers.s3.names import Names, segment_name
from forebay.tiers.s3.options import s3_options
from forebay.tiers.s3.requests import Requests
from forebay.tiers.s3.segment import Piece, build, parse
from forebay.tiers.s3.sightings import SHORTEST_S, Sighting, Sightings
from forebay.tiers.s3.slot import LoadSlot, TooLarge
from forebay.tiers.timers import Timers
from tests.tiers.support import Made, make_chunk, numbered

KEY = b"k" * 32
ACME, OTHER = tenant_digest("acme"), tenant_digest("other")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# --- options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"bucket": "b"}, "bucket"),
        ({"bucket": "kv-1", "prefix": "/a"}, "prefix"),
        ({"bucket": "kv-1", "prefix": "a//b"}, "prefix"),
        ({"bucket": "kv-1", "endpoint_url": "localhost:9000"}, "endpoint_url"),
        ({"bucket": "kv-1", "endpoint_url": "http://u:hunter2@h:1"}, "endpoint_url"),
        ({"bucket": "kv-1", "endpoint_url": "http://h:1?token=hunter2"}, "endpoint_url"),
        ({"bucket": "kv-1", "addressing": "sideways"}, "addressing"),
        ({"bucket": "kv-1", "quota_bytes": -1}, "quota_bytes"),
        ({"bucket": "kv-1", "attempts": 0}, "attempts"),
        ({"bucket": "kv-1", "read_threads": 0}, "read_threads"),
        ({"bucket": "kv-1", "timeout_s": 0.0}, "timeout_s"),
        ({"bucket": "kv-1", "remembered": 7}, "remembered"),
        ({"bucket": "kv-1", "state_dir": "here"}, "state_dir"),
        ({"bucket": "kv-1", "ca_bundle": "/nowhere.pem"}, "ca_bundle"),
        ({"bucket": "kv-1", "aws_secret_access_key": "hunter2"}, "AWS"),
        ({"bucket": "kv-1", "session_token": "hunter2"}, "AWS"),
        ({"bucket": "kv-1", "colour": "red"}, "colour"),
        ({}, "bucket"),
    ],
)
def test_an_option_that_cant_be_used_is_named_and_what_may_be_secret_isnt_repeated(
    options: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named) as told:
        s3_options("t", options)
    assert "hunter2" not in str(told.value)


# --- breaker and budget ------------------------------------------------------------------------------------


def test_the_circuit_opens_after_failures_in_a_row_and_admits_one_trial_at_a_time() -> None:
    clock = Clock()
    breaker = Breaker(3, 1.0, clock)
    for _ in range(2):
        assert breaker.admit()
        breaker.failed()
    assert breaker.state is State.CLOSED
    breaker.failed()
    assert breaker.state is State.OPEN and not breaker.admit() and breaker.rejected == 1
    clock.now += 1.0
    assert breaker.due and breaker.admit()
    assert breaker.state is State.HALF_OPEN and not breaker.admit(), "one trial at a time"
    breaker.succeeded()
    assert breaker.state is State.CLOSED and breaker.admit()


def test_a_failed_trial_doubles_the_pause_up_to_a_limit() -> None:
    clock = Clock()
    breaker = Breaker(1, 1.0, clock)
    breaker.failed()
    pauses = []
    for _ in range(8):
        waited = 0.0
        while not breaker.admit():
            clock.now += 0.5
            waited += 0.5
        pauses.append(waited)
        breaker.failed()
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    assert breaker.opened == 9


def test_a_success_in_between_starts_the_count_anew() -> None:
    breaker = Breaker(2, 1.0, Clock())
    for _ in range(5):
        breaker.failed()
        breaker.succeeded()
    assert breaker.state is State.CLOSED


def test_a_trial_that_is_given_up_makes_room_for_another() -> None:
    clock = Clock()
    breaker = Breaker(1, 1.0, clock)
    breaker.failed()
    clock.now += 1
    assert breaker.admit()
    breaker.abandoned()
    assert breaker.admit()


def requests(budget: float = 20, attempts: int = 3, failures_max: int = 100) -> tuple[Requests, list[float]]:
    clock = Clock()
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.now += seconds

    made = Requests(
        "s3://kv/x", Breaker(failures_max, 1.0, clock), RetryBudget(budget), attempts, clock, sleep, lambda: 0.5
    )
    return made, slept


def busy() -> None:
    raise RequestFailed(Kind.BUSY, "busy")


def test_what_may_pass_is_tried_again_with_longer_pauses_and_no_more_often_than_said() -> None:
    made, slept = requests(attempts=4)
    with pytest.raises(RequestFailed):
        made.run("get", busy)
    assert slept == [0.05, 0.1, 0.2]
    assert made.values()["requests_get"] == 4 and made.values()["requests_busy"] == 4


@pytest.mark.parametrize("kind", [Kind.MISSING, Kind.REFUSED, Kind.EXISTS, Kind.NO_BUCKET, Kind.OTHER])
def test_what_wont_pass_is_asked_once(kind: Kind) -> None:
    made, slept = requests()
    calls = []

    def refuse() -> None:
        calls.append(1)
        raise RequestFailed(kind, "no")

    with pytest.raises(RequestFailed):
        made.run("get", refuse)
    assert len(calls) == 1 and not slept


def test_retries_end_with_their_budget_and_successes_fill_it_again() -> None:
    made, _ = requests(budget=2, attempts=10)
    with pytest.raises(RequestFailed):
        made.run("get", busy)
    values = made.values()
    assert (values["retries"], values["retries_refused"], values["requests_get"]) == (2, 1, 3)
    with pytest.raises(RequestFailed):
        made.run("get", busy)
    assert made.values()["requests_get"] == 4, "no retry is left"
    for _ in range(10):
        made.run("get", lambda: None)
    assert made.values()["retry_budget_left"] == pytest.approx(1.0)


def test_no_retry_begins_that_would_be_too_late() -> None:
    made, slept = requests()
    with pytest.raises(RequestFailed):
        made.run("get", busy, until=made.clock() + 0.01)
    assert not slept


def test_a_shut_circuit_refuses_without_asking() -> None:
    made, _ = requests(attempts=1, failures_max=2)
    for _ in range(2):
        with pytest.raises(RequestFailed):
            made.run("get", busy)
    asked = []
    with pytest.raises(RequestFailed) as told:
        made.run("get", lambda: asked.append(1))
    assert told.value.kind is Kind.OPEN and not asked
    assert made.values()["breaker_state"] == 2 and made.values()["breaker_opened"] == 1


def test_an_answer_that_says_no_is_an_answer_to_the_breaker() -> None:
    made, _ = requests(failures_max=1)

    def missing() -> None:
        raise RequestFailed(Kind.MISSING, "not there")

    for _ in range(5):
        with pytest.raises(RequestFailed):
            made.run("get", missing)
    assert made.breaker.state is State.CLOSED


# --- failures ----------------------------------------------------------------------------------------------


def answer(code: str, status: int, message: str = "") -> ClientError:
    return ClientError(
        {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject"
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (answer("NoSuchKey", 404), Kind.MISSING), (answer("404", 404), Kind.MISSING),
        (answer("NoSuchBucket", 404), Kind.NO_BUCKET), (answer("PreconditionFailed", 412), Kind.EXISTS),
        (answer("ConditionalRequestConflict", 409), Kind.EXISTS), (answer("InvalidRange", 416), Kind.RANGE),
        (answer("AccessDenied", 403), Kind.REFUSED), (answer("SignatureDoesNotMatch", 403), Kind.REFUSED),
        (answer("ExpiredToken", 400), Kind.REFUSED), (answer("SlowDown", 503), Kind.BUSY),
        (answer("InternalError", 500), Kind.BUSY), (answer("NotImplemented", 501), Kind.UNSUPPORTED),
        (answer("MissingContentMD5", 400), Kind.OTHER), (NoCredentialsError(), Kind.REFUSED),
        (EndpointConnectionError(endpoint_url="http://x"), Kind.UNREACHABLE),
        (ConnectTimeoutError(endpoint_url="http://x"), Kind.UNREACHABLE),
        (ReadTimeoutError(endpoint_url="http://x"), Kind.BROKEN), (ResponseStreamingError(error="x"), Kind.BROKEN),
        (ConnectionResetError(), Kind.BROKEN), (TimeoutError(), Kind.BROKEN),
    ],
)  # fmt: skip
def test_each_error_of_the_library_is_one_of_a_few_kinds(error: Exception, kind: Kind) -> None:
    failure = failure_of(error)
    assert failure is not None and failure.kind is kind


def test_a_mistake_of_ours_is_no_failure_of_a_request() -> None:
    assert failure_of(TypeError("x")) is None


def test_a_failure_repeats_nothing_that_the_service_or_the_library_wrote() -> None:
    errors = [
        answer("AccessDenied", 403, "key AKIAHUNTER2 secret hunter2"), answer("hunter2 hunter2", 400, "hunter2"),
        EndpointConnectionError(endpoint_url="http://user:hunter2@host"), ReadTimeoutError(endpoint_url="hunter2"),
        OSError("hunter2"),
    ]  # fmt: skip
    for error in errors:
        assert "hunter2" not in str(failure_of(error)).lower()


# --- names and segments ------------------------------------------------------------------------------------


def test_names_are_read_as_they_are_written_and_nothing_else_is() -> None:
    names = Names("a/b")
    chunk = ChunkId(3, KEY)
    assert names.parse_chunk(names.chunk(chunk)) == chunk
    segment = segment_name(12345, "0" * 16, b"n" * 32, "acme")
    assert names.parse_segment(names.segment(segment)) == segment
    for other in ("a/b/chunks/", "a/b/chunks/x", names.chunk(chunk) + "0", names.chunk(chunk).upper(), "c", ""):
        assert names.parse_chunk(other) is None and names.parse_segment(other) is None


def test_a_segments_name_says_whose_it_is() -> None:
    name = segment_name(1, "0" * 16, b"n" * 32, "acme")
    covering = [ClearScope(), ClearScope(b"n" * 32), ClearScope(b"n" * 32, "acme"), ClearScope(b"", "acme")]
    others = [ClearScope(b"o" * 32), ClearScope(b"n" * 32, ""), ClearScope(b"", "other")]
    assert all(name.covered(scope) for scope in covering) and not any(name.covered(scope) for scope in others)


def pieces(*chunks: Made) -> list[Piece]:
    return [Piece(chunk.header, chunk.length, (chunk.block, memoryview(chunk.payload))) for chunk in chunks]


@given(st.lists(st.integers(1, 400), min_size=1, max_size=60))
@settings(max_examples=25)
def test_a_segment_says_where_each_of_its_chunks_is(granules: list[int]) -> None:
    chunks = [numbered(i, granule=granule) for i, granule in enumerate(granules)]
    segment = build(pieces(*chunks))
    entries = parse(segment.body[: segment.index_bytes])
    assert entries == segment.entries and [entry.chunk for entry in entries] == [chunk.id for chunk in chunks]
    for entry, chunk in zip(entries, chunks, strict=True):
        assert segment.body[entry.offset : entry.offset + entry.length] == chunk.block + chunk.payload
    assert segment.index_bytes + sum(entry.length for entry in entries) == len(segment.body)


def test_an_index_with_any_byte_changed_or_missing_is_none() -> None:
    segment = build(pieces(numbered(1, granule=16), numbered(2, granule=16)))
    end = len(segment.body[: segment.index_bytes].rstrip(b"\0"))
    for at in range(end):
        changed = bytearray(segment.body[: segment.index_bytes])
        changed[at] ^= 1
        with pytest.raises(CorruptChunk):
            parse(bytes(changed))
        with pytest.raises(CorruptChunk):
            parse(segment.body[:at])


# --- tables ------------------------------------------------------------------------------------------------


def sighting(segment: str = "", modified: float = 1.0) -> Sighting:
    return Sighting(b"n" * 32, ACME, 0, 32, 5000, 5000, modified, segment)


def test_what_was_seen_or_missed_is_believed_for_a_while() -> None:
    clock = Clock()
    seen = Sightings(100, found_s=60, missing_s=5, clock=clock)
    seen.found(ChunkId(0, KEY), sighting())
    seen.missing(ChunkId(1, KEY))
    assert seen.get(ChunkId(0, KEY)) == (True, sighting()) and seen.get(ChunkId(1, KEY)) == (True, None)
    assert not seen.unsure(ChunkId(1, KEY))
    seen.missing(ChunkId(2, KEY), 3.0)
    assert seen.get(ChunkId(2, KEY)) == (True, None) and seen.unsure(ChunkId(2, KEY)), "nobody has said so"
    clock.now += 5
    assert seen.get(ChunkId(2, KEY)) == (False, None)
    assert seen.get(ChunkId(1, KEY)) == (False, None)
    clock.now += 55
    assert seen.get(ChunkId(0, KEY)) == (False, None) and len(seen) == 0


def test_an_answer_is_kept_long_enough_to_be_read_even_if_nothing_is_to_be_believed() -> None:
    clock = Clock()
    seen = Sightings(100, found_s=0, missing_s=0, clock=clock)
    seen.missing(ChunkId(0, KEY))
    clock.now += SHORTEST_S / 2
    assert seen.get(ChunkId(0, KEY)) == (True, None)


def test_an_answer_of_before_a_chunk_was_forgotten_is_not_believed() -> None:
    seen, chunk = Sightings(100, 60, 60, Clock()), ChunkId(0, KEY)
    newer = (
        lambda: seen.forget(chunk), lambda: seen.forget_if(lambda _: True), lambda: seen.missing(chunk),
        lambda: seen.found(chunk, sighting(modified=2.0)),
    )  # fmt: skip
    for says in newer:
        seen.forget(chunk)
        seen.ask(chunk)
        says()
        said = seen.get(chunk)
        assert not seen.answered(chunk, sighting()) and seen.get(chunk) == said
    seen.ask(chunk)
    assert seen.answered(chunk, sighting()) and seen.get(chunk) == (True, sighting())


def test_the_table_of_sightings_has_a_cap_and_the_least_recently_used_leave() -> None:
    seen = Sightings(10, 60, 60, Clock())
    for group in range(10):
        seen.found(ChunkId(group, KEY), sighting("s" if group % 2 else ""))
    seen.get(ChunkId(0, KEY))
    for group in range(10, 19):
        seen.missing(ChunkId(group, KEY))
    assert len(seen) == 10 and seen.pushed_out == 9
    assert seen.get(ChunkId(0, KEY))[0] and not seen.get(ChunkId(1, KEY))[0]
    assert seen.segments == 0


def test_a_segment_that_is_gone_takes_its_chunks_from_the_table() -> None:
    seen = Sightings(10, 60, 60, Clock())
    for group, segment in enumerate(("one", "one", "two", "")):
        seen.found(ChunkId(group, KEY), sighting(segment))
    seen.segment_gone("one")
    assert [seen.get(ChunkId(group, KEY))[0] for group in range(4)] == [False, False, True, True]


def test_names_that_have_to_go_are_capped_and_counted() -> None:
    doomed = Doomed(3)
    assert [doomed.add(name) for name in ("a", "b", "c", "d", "a")] == [True, True, True, False, True]
    assert len(doomed) == 3 and doomed.lost == 1 and "b" in doomed and doomed.some(2) == ["a", "b"]
    doomed.put_back("a")
    assert doomed.some(1) == ["b"]
    doomed.gone("b")
    assert doomed.some(5) == ["c", "a"]


def test_clears_beyond_the_cap_become_one_that_covers_both() -> None:
    clears = Clears()
    for number in range(OPEN_MAX + 1):
        clears.add(ClearScope(bytes([number]) * 32))
    assert len(clears) == OPEN_MAX and clears.merged == 1
    assert all(clears.hide(bytes([number]) * 32, ACME, 0, 0.0) for number in range(OPEN_MAX + 1))


def test_a_clear_is_open_as_long_as_the_one_that_it_is_part_of() -> None:
    clears = Clears()
    last = [clears.add(ClearScope(bytes([number]) * 32)) for number in range(OPEN_MAX)][-1]
    wide = clears.add(ClearScope(b"x" * 32))
    assert clears.is_open(last) and clears.is_open(wide)
    clears.done(wide)
    assert not clears.is_open(last) and not clears.is_open(wide)


def test_a_clear_hides_what_is_older_and_nothing_else() -> None:
    clears = Clears()
    clear = clears.add(ClearScope(b"n" * 32, "acme", 2, b"p" * 32, 64))
    clear.before = 10.0
    assert clears.hide(b"n" * 32, ACME, 64, 9.0)
    assert clears.hide(b"n" * 32, ACME, 64, 10.9), "in the second in which the clear began, as the service tells it"
    assert not clears.hide(b"n" * 32, ACME, 32, 9.0), "it starts before the prefix's end"
    assert not clears.hide(b"n" * 32, ACME, 64, 11.0), "it is younger"
    assert not clears.hide(b"n" * 32, OTHER, 64, 9.0)
    assert not clears.hide(b"o" * 32, ACME, 64, 9.0)
    clears.done(clear)
    assert not clears.hide(b"n" * 32, ACME, 64, 9.0)


def test_cards_remember_where_chunks_are(tmp_path) -> None:
    cards = Cards(tmp_path, 100)
    one, two, long = ChunkId(0, KEY), ChunkId(1, KEY), ChunkId(2, KEY)
    cards.put([Written(one, Card("s", 0, 9, 10, b"h")), Written(two, Card("s", 9, 9, 10, b"h"))])
    cards.put([Written(long, Card("", 0, 5, 5, b"x" * (HEADER_KEPT + 1)))])
    assert cards.get(one) == Card("s", 0, 9, 10, b"h")
    assert set(cards.members("s")) == {one, two} and cards.is_segment("s")
    assert cards.get(long) == Card("", 0, 5, 5, b""), "too long to be kept"
    cards.drop([one, two])
    assert cards.get(one) is None and not cards.is_segment("s")
    cards.begin("chunks/x")
    cards.begin("chunks/y")
    cards.end("chunks/x")
    assert cards.begun() == ["chunks/y"]
    cards.close()


def test_locks_are_taken_all_at_once_or_not_at_all() -> None:
    locks, got = ChunkLocks(), []
    one, two = ChunkId(0, KEY), ChunkId(1, KEY)
    with locks.hold(one):
        with locks.hold_free([one, two]) as free:
            assert free == [two]

        def both() -> None:
            with locks.hold_all([one, two]):
                got.append(1)

        thread = threading.Thread(target=both)
        thread.start()
        with locks.hold(two):  # whoever waits for one doesn't sit on the other
            pass
        assert not got
    thread.join(10)
    assert got


def test_a_call_at_a_time_is_made_once_or_never_after_a_cancel() -> None:
    clock, called = Clock(), threading.Event()
    deadlines = Timers("test", clock)
    never = deadlines.add(101.0, lambda: pytest.fail("it was cancelled"))
    deadlines.cancel(never)
    deadlines.add(100.0, called.set)
    assert called.wait(10)
    assert len(deadlines) == 0
    deadlines.close()


def test_quantiles_are_upper_bounds() -> None:
    latencies = Latencies()
    for _ in range(99):
        latencies.add(0.010)
    latencies.add(5.0)
    assert 0.010 <= latencies.quantile(0.5) <= 0.015 and latencies.quantile(1.0) >= 5.0
    assert Latencies().quantile(0.5) == 0


# --- a load's slot -----------------------------------------------------------------------------------------


class Taken:
    """A slot with memory around it, and what it told."""

    def __init__(self, chunk: Made, capacity: int | None = None) -> None:
        self.memory = bytearray(b"\xee" * (len(chunk.payload) if capacity is None else capacity))
        self.told: list[JobResult] = []
        job = LoadJob(1, chunk.id, 0, 0, len(self.memory), 1.0)
        self.slot = LoadSlot(job, memoryview(self.memory), self.told.append)

    def all_of(self, whole: bytes) -> None:
        self.slot.begin(len(whole), 1.0)
        self.slot.take(whole)
        self.slot.verified()


@given(st.lists(st.integers(1, 20_000), max_size=8), st.sampled_from([32, 1024]))
@settings(max_examples=40)
def test_an_answer_may_come_in_any_pieces(cuts: list[int], tokens: int) -> None:
    chunk = make_chunk(range(tokens), granule=100)
    whole = chunk.block + chunk.payload
    taken = Taken(chunk)
    taken.slot.begin(len(whole), 1.0)
    edges = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    for begin, end in itertools.pairwise(edges):
        taken.slot.take(whole[begin:end])
    assert taken.slot.verified() == chunk.header and taken.slot.succeed()
    assert taken.memory == chunk.payload and taken.told[0].header == chunk.block


def test_a_second_attempt_begins_anew() -> None:
    chunk = make_chunk()
    whole = chunk.block + chunk.payload
    taken = Taken(chunk)
    taken.slot.begin(len(whole), 1.0)
    taken.slot.take(whole[:-7])
    taken.slot.begin(len(whole), 1.0)
    taken.slot.take(whole)
    assert taken.slot.verified() == chunk.header and taken.memory == chunk.payload


def test_after_its_deadline_nothing_is_written_and_nothing_else_is_told() -> None:
    chunk = make_chunk()
    whole = chunk.block + chunk.payload
    taken = Taken(chunk)
    taken.slot.begin(len(whole), 1.0)
    taken.slot.take(whole[: len(chunk.block)])
    assert taken.slot.fail("late")
    with pytest.raises(GivenUp):
        taken.slot.take(whole[len(chunk.block) :])
    assert set(taken.memory) == {0xEE} and not taken.slot.succeed()
    assert [result.reason for result in taken.told] == ["late"]
    with pytest.raises(GivenUp):
        taken.slot.begin(len(whole), 1.0)


@pytest.mark.parametrize("at", [0, 9, 13, 24, 33, 40, 100, 4000, 4096, -1])
def test_any_byte_that_differs_is_found(at: int) -> None:
    chunk = make_chunk()
    whole = bytearray(chunk.block + chunk.payload)
    whole[at] ^= 1
    with pytest.raises(CorruptChunk):
        Taken(chunk).all_of(bytes(whole))


def test_another_chunk_or_another_length_is_refused() -> None:
    chunk, other = numbered(1), numbered(2)
    taken = Taken(chunk)
    taken.slot.begin(other.length, 1.0)
    taken.slot.take(other.block + other.payload)
    with pytest.raises(CorruptChunk):
        taken.slot.verified()
    taken.slot.expected = chunk.length
    with pytest.raises(CorruptChunk):
        taken.slot.begin(chunk.length + 1, 1.0)


def test_what_doesnt_fit_is_refused_and_stays_outside() -> None:
    chunk = make_chunk(granule=4096)
    taken = Taken(chunk, capacity=5000)
    taken.slot.begin(chunk.length, 1.0)
    with pytest.raises(TooLarge):
        taken.slot.take(chunk.block + chunk.payload)
    assert set(taken.memory) == {0xEE}


def test_complaints_take_what_the_tier_says(caplog: pytest.LogCaptureFixture) -> None:
    complain("s3 parts", "%s: %s", "where", RequestFailed(Kind.BUSY, "busy"))
    assert "where: busy" in caplog.text
