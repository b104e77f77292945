"""A prefix that only tiers have: a request begins with its index keys, and rows come as they are chosen."""

from __future__ import annotations

import time

import pytest

from forebay.workers.generation import RequestKey
from tests.workers.fake_store import FakeStore, Stored
from tests.workers.harness import CHUNK, Answer, Harness, wait_until
from tests.workers.hot.conftest import SQUEEZED, TIGHT, Sparse

CHUNKS = 14
"""Just more than SQUEEZED holds whole."""
MANY = 60
"""A token of these models chooses 24 rows in a layer, which are all over the prompt."""


def cold_prefix(sparse: Sparse, seed: int, chunks: int = CHUNKS) -> tuple[list[int], FakeStore]:
    """A prompt of which a tier has everything but the last token, and memory nothing."""
    prompt, store = sparse.text(chunks * CHUNK + 1, seed), FakeStore()
    with sparse.worker(store) as whole:
        whole.ask(prompt, 1)
        whole.settle()
    store.tier.take_all()
    store.tier.brought.clear()
    return prompt, store


def ask(worker: Harness, prompt: list[int], count: int) -> Answer:
    answer = worker.wait(worker.submit(prompt, count), 60)
    assert answer.finished is not None and answer.finished.reason != "error", answer.finished
    return answer


def rows_brought(store: FakeStore) -> set[int]:
    return {start // CHUNK for group, start in store.tier.brought if group == 0}


def submit_to_wait(worker: Harness, store: FakeStore, prompt: list[int]) -> RequestKey:
    """Its index keys come, and then nothing until the tier is allowed more: it waits for rows."""
    store.tier.allowed = CHUNKS
    key = worker.submit(prompt, 4)
    wait_until("it waits", lambda: worker.stat("hot.parked") == 1, 60)
    return key


def test_rows_come_as_they_are_chosen_and_others_stay_where_they_are(sparse: Sparse) -> None:
    prompt, store = cold_prefix(sparse, 61, MANY)
    with sparse.worker(store, **TIGHT) as worker:
        answer = ask(worker, prompt, 2)
        assert answer.tokens == sparse.expected(prompt, 2) and answer.cached == MANY * CHUNK
        assert answer.started is not None and answer.started.cached == {"slow": MANY * CHUNK}
        assert worker.stat("hot.parked_steps") > 0 and worker.stat("hot.put_off") == 0
        assert worker.stat("hot.chunks_brought") == worker.stat("hosted.slow.chunks") == len(rows_brought(store))
    assert 0 < len(rows_brought(store)) < MANY
    assert sum(group == 1 for group, _ in store.tier.brought) == MANY
    assert store.leases == store.released and not store.asides


def test_what_a_tier_has_lost_is_computed_from_there_on(glm: Sparse) -> None:
    """It says that it has it, and brings nothing."""
    prompt, store = cold_prefix(glm, 62)
    first = None

    def gone(stored: Stored) -> bool:
        nonlocal first
        first = stored.chunk.start if first is None and stored.chunk.group == 0 else first
        return stored.chunk.group == 0 and stored.chunk.start == first

    store.tier.gone = gone
    with glm.worker(store, **TIGHT) as worker:
        assert ask(worker, prompt, 4).tokens == glm.expected(prompt, 4)
        assert worker.stat("hot.chunks_late") == worker.stat("hot.chunks_lost") == 1
        assert worker.stat("hot.put_off") == 1 and worker.stat("hot.given_up") == 0
    assert store.leases == store.released


def rows(stored: Stored) -> bool:
    return stored.chunk.group == 0


@pytest.mark.parametrize("most_room", [1 << 20, 10])
def test_what_there_is_no_room_for_is_asked_for_until_there_is(glm: Sparse, most_room: int) -> None:
    """With a lease for all that comes together, and with one for each chunk."""
    prompt, store = cold_prefix(glm, 72)
    store.tier.full, store.most_room = rows, most_room
    with glm.worker(store, **TIGHT) as worker:
        key = worker.submit(prompt, 4)
        wait_until("it waits", lambda: worker.stat("hot.parked") == 1, 60)
        time.sleep(1.5)
        assert worker.stat("hot.parked") == 1 and worker.stat("hot.chunks_late") == 0
        each = 1 if most_room > 10 else worker.stat("hot.chunks_waited_for")
        assert each <= store.tier.refused <= 8 * each, "with pauses that grow"
        store.tier.full = lambda stored: False
        assert worker.wait(key, 60).tokens == glm.expected(prompt, 4)
        assert worker.stat("hot.put_off") == worker.stat("hot.chunks_lost") == 0
    assert store.leases == store.released


@pytest.mark.parametrize("most_room", [1 << 20, 10])
def test_one_chunk_that_hangs_holds_up_none_of_the_others(glm: Sparse, most_room: int) -> None:
    prompt, store = cold_prefix(glm, 74)
    hung: list[int] = []

    def hangs(stored: Stored) -> bool:
        if rows(stored) and not hung:
            hung.append(stored.chunk.start)
        return rows(stored) and hung == [stored.chunk.start]

    store.tier.hangs, store.most_room = hangs, most_room
    with glm.worker(store, **TIGHT) as worker:
        key = worker.submit(prompt, 4)
        wait_until("it waits", lambda: worker.stat("hot.parked") == 1, 60)
        waited = worker.stat("hot.chunks_waited_for")
        wait_until("the others are there", lambda: worker.stat("hot.chunks_brought") == waited - 1, 10)
        assert waited > 4 and worker.stat("hot.parked") == 1 and len(rows_brought(store)) == waited - 1
        hung.append(-1)
        assert worker.wait(key, 60).tokens == glm.expected(prompt, 4)
        assert worker.stat("hot.put_off") == 0
        assert worker.stat("hosted.slow.chunks") == worker.stat("hot.chunks_brought")
    assert store.leases == store.released


def test_rows_that_do_not_come_by_their_deadline_are_computed(glm: Sparse) -> None:
    """The tier brings all index keys, and then hangs for ever."""
    prompt, store = cold_prefix(glm, 63)
    with glm.worker(store, **(TIGHT | {"hot_buffer_deadline_s": 0.2, "lookup_deadline_ms": 300})) as worker:
        store.tier.allowed = CHUNKS
        assert ask(worker, prompt, 4).tokens == glm.expected(prompt, 4)
        assert worker.stat("hot.chunks_late") > 0 and rows_brought(store) == set()
    assert store.leases == store.released


def test_others_go_on_while_one_waits_for_its_rows(glm: Sparse) -> None:
    prompt, store = cold_prefix(glm, 64)
    with glm.worker(store, **SQUEEZED) as worker:
        waiting = submit_to_wait(worker, store, prompt)
        short = glm.text(60, 65)
        assert ask(worker, short, 8).tokens == glm.expected(short, 8)
        assert worker.stat("hot.parked") == 1 and not worker.answers[waiting].tokens
        store.tier.allowed = None
        assert worker.wait(waiting, 60).tokens == glm.expected(prompt, 4)
        assert worker.stat("hot.put_off") == 0


def test_one_that_is_cancelled_while_it_waits_leaves_nothing_behind(glm: Sparse) -> None:
    prompt, store = cold_prefix(glm, 66)
    with glm.worker(store, **TIGHT) as worker:
        key = submit_to_wait(worker, store, prompt)
        worker.cancel(key)
        wait_until("it has gone", lambda: worker.answers[key].finished)
        store.tier.allowed = None
        wait_until("what came for it was let go of", lambda: store.leases == store.released, 60)
    assert not store.asides


@pytest.mark.parametrize("most_room", [1 << 20, 10])
def test_nobody_asks_on_for_one_that_is_cancelled(glm: Sparse, most_room: int) -> None:
    """Its tier still hangs."""
    prompt, store = cold_prefix(glm, 75)
    store.most_room = most_room
    with glm.worker(store, **TIGHT) as worker:
        key = submit_to_wait(worker, store, prompt)
        wait_until("it asks", lambda: worker.stat("hosted.row_asks") == 1, 10)
        worker.cancel(key)
        wait_until("what it asked for is over", lambda: worker.stat("hosted.row_asks") == 0, 5)
        assert worker.answers[key].finished and store.leases == store.released and store.tier.allowed == 0
    assert not store.asides


def test_a_store_that_goes_away_while_one_waits_costs_no_token(glm: Sparse) -> None:
    prompt, store = cold_prefix(glm, 67)
    with glm.worker(store, **TIGHT) as worker:
        key = submit_to_wait(worker, store, prompt)
        store.lose_connections()
        wait_until("it was put off", lambda: worker.stat("hot.put_off") > 0, 60)
        store.tier.allowed = None
        store.up = True
        assert worker.wait(key, 60).tokens == glm.expected(prompt, 4)
        assert worker.stat("hot.chunks_late") == 0, "its rows weren't"


def test_a_chunk_that_is_damaged_on_its_way_is_brought_again(glm: Sparse) -> None:
    prompt, store = cold_prefix(glm, 68)
    spoilt: list[tuple[int, bytes]] = []
    bring = store.tier._bring

    async def spoiling(stored: Stored, until: float) -> bool:
        came = await bring(stored, until)
        if came and stored.chunk.group == 0 and not spoilt:
            spoilt.append((0, stored.chunk.key))
            wrong = Stored(stored.chunk, bytearray(stored.payload), stored.checksums, stored.generation, "slow")
            wrong.payload[100] ^= 1
            store.chunks[0, stored.chunk.key] = wrong
        return came

    store.tier._bring = spoiling  # type: ignore[method-assign]
    with glm.worker(store, **TIGHT) as worker:
        assert ask(worker, prompt, 4).tokens == glm.expected(prompt, 4)
        assert worker.stat("loads.corrupt") == 1 and store.reported == spoilt
        assert worker.stat("hot.put_off") == 0


def test_what_was_read_last_is_brought_ahead_the_next_time(glm: Sparse) -> None:
    prompt, store = cold_prefix(glm, 69)
    with glm.worker(store, **TIGHT) as worker:
        assert ask(worker, prompt, 4).tokens == glm.expected(prompt, 4)
        first, waits = rows_brought(store), worker.stat("hot.parked_steps")
        assert worker.stat("hot.chunks_ahead") == 0 < waits
        worker.settle()
        store.tier.take_all()
        store.tier.brought.clear()
        longer = [*prompt, *glm.text(20, 70)]
        assert ask(worker, longer, 4).tokens == glm.expected(longer, 4)
        assert worker.stat("hot.chunks_ahead") > 0 and first & rows_brought(store)
        assert worker.stat("hot.chunks_brought") > worker.stat("hot.chunks_waited_for") - waits


def test_a_prefix_that_could_never_lie_in_memory_as_a_whole_is_read_all_the_same(sparse: Sparse) -> None:
    """Chunks that were read least recently make room for others."""
    prompt, store = cold_prefix(sparse, 61, MANY)
    store.most_room = MANY - 20
    with sparse.worker(store, **TIGHT) as worker:
        assert ask(worker, prompt, 4).tokens == sparse.expected(prompt, 4)
        assert worker.stat("hosted.begun_cold") == 1 and worker.stat("hot.put_off") == 0
        assert worker.stat("hot.chunks_left") > 0
    assert store.leases == store.released and not store.asides


def test_a_step_that_reads_more_than_there_may_be_gets_on(glm: Sparse) -> None:
    """There is no promise of room for that, and here there is some."""
    prompt, store = cold_prefix(glm, 71)
    store.most_room = 4
    with glm.worker(store, **TIGHT) as worker:
        assert ask(worker, prompt, 6).tokens == glm.expected(prompt, 6)
        assert worker.stat("hosted.begun_cold") == 1 and worker.stat("hot.put_off") == 0
    assert store.leases == store.released and not store.asides


def test_rows_that_come_again_and_again_take_nothing_of_the_room_for_what_a_request_adds(glm: Sparse) -> None:
    """Every step reads more than may be in memory, so what comes is more than there was set aside for, many times."""
    count = 160
    prompt, store = cold_prefix(glm, 72)
    expected = glm.expected(prompt, count)
    store.most_room = CHUNKS // 2 + -(-(len(prompt) + count) // CHUNK) - CHUNKS
    store.refuse = "full"
    with glm.worker(store, **(TIGHT | {"hot_buffer_deadline_s": 5.0})) as worker:
        assert ask(worker, prompt, count).tokens == expected
        assert worker.stat("hosted.begun_cold") == 1 and worker.stat("hot.chunks_brought") > store.most_room
        assert worker.stat("hot.chunks_refused") == worker.stat("hot.put_off") == 0
    assert store.leases == store.released and not store.asides


def test_a_chunk_that_is_refused_takes_the_place_of_one_that_no_step_needs(glm: Sparse) -> None:
    """Rows of the prefix have taken all of the room, what the request adds included."""
    count = 160
    prompt, store = cold_prefix(glm, 74)
    expected = glm.expected(prompt, count)
    store.most_room = CHUNKS // 2 + -(-(len(prompt) + count) // CHUNK) - CHUNKS
    store.refuse, store.greedy = "full", True
    with glm.worker(store, **(TIGHT | {"hot_buffer_deadline_s": 20.0})) as worker:
        assert ask(worker, prompt, count).tokens == expected
        assert worker.stat("hot.chunks_refused") > 0 and worker.stat("hot.put_off") == 0
        assert worker.stat("hot.chunks_refused") < 100, "it isn't offered without a pause"
    assert store.leases == store.released and not store.asides


def test_what_is_promised_is_renewed_while_index_keys_are_still_on_their_way(
    glm: Sparse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.workers.transfer.RENEW_S", 0.05)
    prompt, store = cold_prefix(glm, 73)
    with glm.worker(store, **(TIGHT | {"lookup_deadline_ms": 60_000})) as worker:
        store.tier.allowed = 5
        key = worker.submit(prompt, 4)
        wait_until("its room was renewed", lambda: store.asides and store.joined.issuperset(store.asides), 60)
        assert worker.answers[key].started is None
        store.tier.allowed = None
        assert worker.wait(key, 60).tokens == glm.expected(prompt, 4)
    assert worker.stat("hosted.leases") == 0 and store.leases == store.released
