"""A worker answers the same, whatever it finds cached; and says exactly what it found."""

from __future__ import annotations

import logging
import random
import re

import pytest

from forebay.workers.messages import Stop
from tests.workers.fake_model import VOCAB, FakeModel
from tests.workers.fake_store import FakeStore
from tests.workers.harness import CHUNK, Harness, wait_until, worker


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB - 1) for _ in range(length)]


def cold(prompt: list[int], max_tokens: int = 4, **more: object) -> list[int]:
    """What a worker without any cache answers."""
    with worker(None, max_num_batched_tokens=512) as fresh:
        return fresh.ask(prompt, max_tokens, **more).tokens


LENGTHS = [1, 15, 16, 17, 31, 32, 33, 39, 40, 41, 63, 64, 65, 100, 170]


def test_a_device_hit_answers_like_a_cold_run_and_counts_exactly() -> None:
    with worker(None) as w:
        for length in LENGTHS:
            prompt = text(length, seed=length)
            first, second = w.ask(prompt), w.ask(prompt)
            assert first.cached == 0
            assert second.cached == (length - 1) // 16 * 16
            assert first.tokens == second.tokens == cold(prompt)
            assert second.started is not None
            assert second.started.cached == ({"device": second.cached} if second.cached else {})


@pytest.mark.parametrize("window", [None, 16, 40, 64])
def test_a_store_hit_answers_like_a_cold_run_and_counts_exactly(window: int | None) -> None:
    store = FakeStore()
    answers = {}
    with worker(store, window=window) as w:
        for length in LENGTHS:
            answers[length] = w.ask(text(length, seed=length)).tokens
    with worker(store, window=window) as w:
        for length in LENGTHS:
            again = w.ask(text(length, seed=length))
            assert again.tokens == answers[length]
            assert again.cached == (length - 1) // 16 * 16
            assert again.started is not None
            assert again.started.cached == ({"host": again.cached} if again.cached else {})
    assert store.leases == store.released


def test_prefixes_shared_at_every_offset_hit_to_the_unit() -> None:
    store = FakeStore()
    base = text(200)
    with worker(store) as w:
        w.ask(base)
    with worker(store) as w:
        for shared in range(1, 140, 7):
            prompt = [*base[:shared], VOCAB - 2, *text(9, seed=shared)]
            got = w.ask(prompt)
            assert got.cached == shared // 16 * 16, shared
            assert got.tokens == cold(prompt)


def test_device_and_store_together_reach_further_than_either() -> None:
    store = FakeStore()
    base = text(150)
    with worker(store) as w:
        w.ask(base)
    with worker(store) as w:
        w.ask(base[:70])  # the device now has the first 64 tokens
        loaded = w.stat("loaded.host.bytes")
        got = w.ask(base)
        assert got.started is not None
        assert got.cached == 144
        # The last window lies beyond what the device had; of the full group only the rest was copied.
        assert got.started.cached == {"device": 64, "host": 80}
        assert w.stat("loaded.host.bytes") > loaded
        assert got.tokens == cold(base)


def test_the_store_is_not_asked_when_the_device_has_it_all() -> None:
    store = FakeStore()
    with worker(store) as w:
        w.ask(text(50))
        asked = store.lookups
        assert w.ask(text(50)).cached == 48
        assert store.lookups == asked


def test_a_conversation_goes_on_from_the_tail_of_its_last_turn() -> None:
    store = FakeStore()
    prompt = text(45)
    with worker(store) as w:
        answer = w.ask(prompt, 30).tokens
    with worker(store) as w:
        longer = prompt + answer + text(5, seed=9)
        got = w.ask(longer)
        assert got.cached == (len(prompt) + len(answer) - 1) // 16 * 16
        assert got.tokens == cold(longer)


def test_every_sealed_chunk_is_stored_in_every_group_parents_first() -> None:
    store = FakeStore()
    with worker(store) as w:
        w.ask(text(100), 60)
    spans = {(c.group, c.start, c.start + len(c.tokens) // 4) for c in store.order}
    for group in (0, 1):
        for start in range(0, 128, CHUNK):
            assert (group, start, start + CHUNK) in spans
    assert (0, 128, 144) in spans and (1, 128, 144) in spans, "the tail, cut at the unit"
    for group in (0, 1):
        starts = [c.start for c in store.order if c.group == group]
        assert starts == sorted(starts)


def test_prompt_chunks_are_stored_before_the_request_ends() -> None:
    store = FakeStore()
    with worker(store) as w:
        key = w.submit(text(70), 500)
        wait_until("the first chunks", lambda: len(store.order) >= 4)
        assert w.answers[key].finished is None
        w.cancel(key)
        w.wait(key)


def test_a_flipped_bit_is_never_served() -> None:
    store = FakeStore()
    prompt = text(150)
    with worker(store) as w:
        expected = w.ask(prompt).tokens
    for name in list(store.chunks):
        damaged = FakeStore(dict(store.chunks))
        kept = bytes(damaged.chunks[name].payload)
        damaged.chunks[name].payload[5] ^= 1
        with worker(damaged) as w:
            got = w.ask(prompt)
            assert got.tokens == expected
            touched = w.stat("loads.corrupt") > 0
            assert touched == (name in damaged.reported)
            assert got.cached < 144 if touched else got.cached == 144
        store.chunks[name].payload[:] = kept


def test_a_slot_that_was_given_away_during_the_copy_is_a_miss() -> None:
    store = FakeStore()
    prompt = text(100)
    with worker(store) as w:
        expected = w.ask(prompt).tokens
    with worker(store) as w:
        client = store.clients[-1]
        client.intact = lambda chunk: False  # type: ignore[method-assign]
        got = w.ask(prompt)
        assert got.tokens == expected and got.cached == 0


def test_without_its_store_a_worker_serves_and_it_stores_again_later() -> None:
    store = FakeStore(up=False)
    prompt = text(100)
    with worker(store, connected=False) as w:
        assert w.parts.store_state() == "down"
        expected = w.ask(prompt).tokens
        store.up = True
        wait_until("connected", lambda: w.parts.holdings.ask_store)
        longer = prompt + text(40, seed=5)
        w.ask(longer)  # what went before is offered first: chunks without parents would be of no use
        w.settle()
    with worker(store) as w:
        got = w.ask(prompt)
        assert got.cached == 96 and got.tokens == expected


def test_a_store_that_dies_costs_nobody_an_answer() -> None:
    store = FakeStore()
    with worker(store) as w:
        keys = [w.submit(text(60 + i, seed=i), 40) for i in range(6)]
        wait_until("some output", lambda: len(w.answers[keys[0]].tokens) > 3)
        store.lose_connections()
        answers = [w.wait(key).tokens for key in keys]
        wait_until("down", lambda: w.parts.store_state() == "down")
        store.up = True
        wait_until("back", lambda: w.parts.store_state() == "connected")
        assert w.stat("store.reconnects") == 1
    assert answers == [cold(text(60 + i, seed=i), 40) for i in range(6)]


def test_a_hung_store_delays_a_request_by_its_deadline_and_no_more() -> None:
    store = FakeStore()
    with worker(store, lookup_deadline_ms=50) as w:
        with w.in_its_midst(text(20, seed=1), 600) as running:
            store.hung = True
            key = w.submit(text(100, seed=2), 4)
            before = len(w.answers[running].tokens)
        wait_until("the other decodes on", lambda: len(w.answers[running].tokens) > before + 20)
        assert w.wait(key).cached == 0
        store.hung = False
        w.wait(running)


def test_a_settled_request_ends_when_the_store_has_all_of_it() -> None:
    store = FakeStore()
    with worker(store, lookup_deadline_ms=50) as w:
        store.hung = True
        key, other = w.submit(text(120, seed=1), 2, settled=True), w.submit(text(50, seed=2), 2)
        w.wait(other)  # who hasn't asked for it doesn't wait
        wait_until("all its tokens", lambda: len(w.answers[key].tokens) == 2)
        assert w.answers[key].finished is None
        store.hung = False
        w.wait(key)
        assert len([chunk for chunk in store.order if chunk.start == 96]) == 2, "its tail, of both groups"


def test_a_settled_request_ends_without_a_store_or_with_one_that_dies() -> None:
    with worker() as w:
        w.ask(text(100), settled=True)
    store = FakeStore()
    with worker(store, lookup_deadline_ms=50) as w:
        store.hung = True
        key = w.submit(text(100, seed=1), 2, settled=True)
        wait_until("all its tokens", lambda: len(w.answers[key].tokens) == 2)
        store.lose_connections()
        store.hung = False
        w.wait(key)
        store.up = True
        wait_until("back", lambda: w.parts.store_state() == "connected")


def test_a_settled_request_ends_where_its_pushes_are_dropped() -> None:
    with worker(FakeStore(), push_queue_bytes=10) as w:
        w.ask(text(100), settled=True)


def test_a_full_store_is_no_obstacle() -> None:
    store = FakeStore(refuse="full")
    with worker(store) as w:
        w.ask(text(100))
        w.settle()
        assert w.stat("push.full") > 0 and not store.chunks


def test_a_small_queue_drops_pushes_and_counts_them() -> None:
    store = FakeStore()
    with worker(store, push_queue_bytes=10) as w:
        w.ask(text(100))
        assert w.stat("push.dropped") > 0 and not store.chunks


def run_together(w: Harness, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    keys = [w.submit(prompt, max_tokens, connection=1 + i % 2) for i, prompt in enumerate(prompts)]
    return [w.wait(key).tokens for key in keys]


def test_many_at_once_on_a_small_device_answer_as_if_alone() -> None:
    prompts = [text(20 + 9 * i, seed=i % 5) for i in range(12)]
    alone = [cold(prompt, 60) for prompt in prompts]
    with worker(FakeStore(), max_tokens=320, max_num_batched_tokens=48) as w:
        assert run_together(w, prompts, 60) == alone
        assert w.stat("preemptions") > 0


def test_a_request_that_was_carried_over_goes_on_where_it_stopped() -> None:
    store = FakeStore()
    prompt = text(70)
    whole = cold(prompt, 50)
    with worker(store) as w:
        w.ask(prompt, 25)
    with worker(store) as w:
        got = w.ask(prompt, 50, emitted=whole[:20], attempt=2)
        assert got.indices == list(range(20, 50))
        assert whole[:20] + got.tokens == whole
        assert got.cached == (70 + 20 - 1) // 16 * 16


def test_sampled_answers_do_not_depend_on_the_batch_or_on_a_carry_over() -> None:
    prompt = text(50)
    more = {"temperature": 1.0, "seed": 1234}
    alone = cold(prompt, 30, **more)
    assert alone != cold(prompt, 30, temperature=1.0, seed=1235)
    with worker(None) as w:
        keys = [w.submit(text(30, seed=i), 40, **more) for i in range(5)]
        assert w.ask(prompt, 30, **more).tokens == alone
        assert alone[:11] + w.ask(prompt, 30, emitted=alone[:11], **more).tokens == alone
        for key in keys:
            w.wait(key)


def test_eos_ends_an_answer_unless_it_is_ignored() -> None:
    prompt = text(10)
    tokens = cold(prompt, 8)
    with worker(None, eos_ids=(tokens[2],)) as w:
        got = w.ask(prompt, 8, ignore_eos=False)
        assert got.tokens == tokens[: tokens.index(tokens[2]) + 1]
        assert got.finished is not None and got.finished.reason == "stop"
        assert w.ask(prompt, 8, ignore_eos=True).tokens == tokens


def test_an_answer_ends_at_the_context() -> None:
    with worker(None, max_context=64) as w:
        got = w.ask(text(60), 100)
        assert len(got.tokens) == 4
        assert got.finished is not None and got.finished.reason == "length"


@pytest.mark.parametrize(
    ("prompt", "more", "words"),
    [
        ([], {}, "empty"),
        ([VOCAB], {}, "out of range"),
        (text(64), {}, "context is 64"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"top_k": -5}, "top_k"),
        ([1], {"logprobs": 999}, "logprobs"),
        ([1], {"max_tokens": 0}, "max_tokens"),
    ],
)
def test_a_bad_request_gets_a_clear_error_and_the_worker_goes_on(
    prompt: list[int], more: dict[str, float], words: str
) -> None:
    with worker(None, max_context=64) as w:
        answer = w.wait(w.submit(prompt, **more))  # type: ignore[arg-type]
        assert answer.finished is not None and answer.finished.reason == "error"
        assert words in answer.finished.error
        assert len(w.ask([1, 2, 3], 2).tokens) == 2


def test_a_prompt_that_the_device_cannot_hold_is_refused_with_the_remedy() -> None:
    with worker(None, max_tokens=256) as w:
        answer = w.wait(w.submit(text(300)))
        assert answer.finished is not None and "device memory" in answer.finished.error


def test_the_queue_is_bounded() -> None:
    with worker(None, max_waiting=2, max_num_seqs=1) as w:
        with w.in_its_midst(text(10), 400) as first:
            keys = [w.submit(text(10 + i), 2) for i in range(5)]
        reasons = [w.wait(key).finished for key in keys]
        assert [f.error for f in reasons if f is not None and f.reason == "error"] == ["busy"] * 3
        w.wait(first)


def test_cancelled_requests_free_their_blocks_wherever_they_are() -> None:
    store = FakeStore()
    with worker(store, max_num_seqs=2) as w:
        keys = [w.submit(text(100 + i, seed=i), 300) for i in range(6)]
        wait_until("running", lambda: w.answers[keys[0]].tokens)
        store.hung = True
        loading = w.submit(text(90, seed=77), 3)
        for key in [*keys, loading]:
            w.cancel(key)
        for key in [*keys, loading]:
            finished = w.wait(key).finished
            assert finished is not None and finished.reason == "cancelled"
        store.hung = False


def test_a_front_end_that_goes_takes_its_requests_along() -> None:
    with worker(None) as w:
        mine, other = w.submit(text(20), 400, connection=1), w.submit(text(21), 30, connection=2)
        wait_until("running", lambda: w.answers[mine].tokens)
        w.disconnect(1)
        assert len(w.wait(other).tokens) == 30
        assert w.wait(mine).finished is not None


def test_a_cancelled_request_stores_its_tail() -> None:
    store = FakeStore()
    prompt = text(52)
    with worker(store) as w:
        key = w.submit(prompt, 500)
        wait_until("decoding", lambda: w.answers[key].tokens)
        w.cancel(key)
        w.wait(key)
    with worker(store) as w:
        assert w.ask(prompt).cached == 48


def test_draining_stores_what_is_under_way() -> None:
    store = FakeStore()
    prompt = text(52)
    harness = Harness(FakeModel(), store)
    harness.start()
    with harness.in_its_midst(prompt, 500) as key:
        harness.parts.inbox.put(Stop())
    harness.stop()
    assert harness.answers[key].finished is None, "its front end goes on elsewhere"
    with worker(store) as w:
        assert w.ask(prompt).cached == 48


def test_salts_share_nothing() -> None:
    store = FakeStore()
    with worker(store) as w:
        w.ask(text(50), salt=b"a")
        assert w.ask(text(50), salt=b"b").cached == 0
        assert w.ask(text(50), salt=b"a").cached == 48


def test_a_failed_load_wakes_an_idle_engine_and_becomes_compute() -> None:
    store = FakeStore()
    with worker(store, lookup_deadline_ms=50) as w:
        store.hung = True
        got = w.wait(w.submit(text(100), 4))  # nobody else says anything to this engine
        store.hung = False
    assert got.cached == 0 and got.tokens == cold(text(100))


def test_of_those_that_wait_the_more_urgent_goes_first() -> None:
    with worker(None, max_num_seqs=1) as w:
        with w.in_its_midst(text(10), 60) as first:
            calm, urgent = w.submit(text(11), 60, priority=3), w.submit(text(12), 3)
            w.cancel(first)
        w.wait(calm)
        assert w.ended == [first, urgent, calm]


def test_logs_know_requests_by_their_names(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), worker(None, max_tokens=320, max_num_batched_tokens=48) as w:
        for number in range(4):
            w.submit(text(60, seed=number), 60, id=f"job-{number}")
        w.wait(w.submit([1], 0, id="wrong", attempt=2))
        for key in list(w.answers):
            w.wait(key)
    assert "request wrong#2 was refused: max_tokens" in caplog.text
    assert re.search(r"request job-\d#1 was preempted at \d+ tokens", caplog.text)
    assert "request job-1#1 ended (length) after 60 tokens" in caplog.text
