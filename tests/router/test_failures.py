"""Whatever workers do, a stream says everything once or ends with an error, and nothing stays counted."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.router.client import BackendFailed, ask
from forebay.router.proxy import MID_STREAM_ATTEMPTS, Refused
from forebay.router.settings import StoreStream, backends_of
from forebay.router.streams import Patience
from forebay.testing.ports import free_port
from forebay.workers.api.errors import ApiError
from tests.router.hostile import ODD_EVENTS, SAID, Hostile, at_rest, body, look, routed, streamed

T = TypeVar("T")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.router.proxy.LOOK_AGAIN_S", 0.002)


def run(work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(60):
            return await work

    return asyncio.run(limited())


async def until(what: Any) -> None:
    while not what():
        await asyncio.sleep(0.002)


ways = st.sampled_from(
    ["fine", "odd usage", "400", "429", "500", "503", "close", "half head", "no http", "odd length", "hang",
     "0 then close", "1 then close", "3 then close", "2 then hang", "1 then odd", "0 then odd", "2 then error"]
)  # fmt: skip
clients = st.sampled_from(["whole", "stream", "stream", "stream", "goes after 1", "goes after 3", "goes at once"])


@settings(max_examples=25, deadline=None)
@given(st.lists(ways, max_size=8), st.lists(ways, max_size=8), st.lists(clients, min_size=1, max_size=6))
def test_whatever_becomes_of_requests_nothing_stays_counted_and_streams_say_all_of_it_once_or_end_with_an_error(
    first: list[str], second: list[str], requests: list[str]
) -> None:
    async def client(router: Any, kind: str) -> None:
        if kind == "whole":
            call = await router.proxy.call("/v1/completions", body(), {})
            assert b"t0t1t2t3t4t5" in await router.proxy.whole(call)
        elif kind == "goes at once":
            task = asyncio.create_task(streamed(router))
            await asyncio.sleep(0.003)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            heard = await streamed(router, None if kind == "stream" else int(kind[-1]))
            if kind == "stream":
                assert heard == [*SAID, "[DONE]"] or (heard[-1] == "error" and heard[:-1] == SAID[: len(heard) - 1])
            else:
                assert heard[:-1] == SAID[: len(heard) - 1]

    async def everything() -> None:
        workers = Hostile(list(first)), Hostile(list(second))
        async with routed(*workers, answer_s=0.08, breaker_s=0.01, breaker_failures=2) as router:
            outcomes = await asyncio.gather(*(client(router, kind) for kind in requests), return_exceptions=True)
            for outcome in outcomes:
                assert outcome is None or isinstance(outcome, ApiError | Refused), repr(outcome)
            at_rest(router)

    run(everything())


@pytest.mark.parametrize("odd", range(len(ODD_EVENTS)))
def test_an_event_that_cannot_be_read_is_a_failure_of_its_worker_and_another_one_goes_on(odd: int) -> None:
    async def story() -> None:
        bad, good = Hostile(["2 then odd"], odd=odd - 1), Hostile(["2 then odd"], odd=odd - 1)
        async with routed(bad, good) as router:
            assert await streamed(router) == [*SAID, "[DONE]"]
            at_rest(router)

    run(story())


def test_a_stream_that_kills_whoever_goes_on_with_it_ends_after_so_many_workers() -> None:
    async def story() -> None:
        worker = Hostile(["2 then close"] + ["0 then close"] * 100)
        async with routed(worker, breaker_failures=1000) as router:
            assert await streamed(router) == ["t0", "t1", "error"]
            assert len(worker.asked) == 1 + MID_STREAM_ATTEMPTS
            at_rest(router)

    run(story())


def test_a_stream_outlives_any_number_of_workers_as_long_as_it_gets_on() -> None:
    patience = Patience(most=3, most_s=10.0)
    for progress in range(1, 50):
        assert patience.lasts(progress, 100.0 * progress, full=False)
    assert all(patience.lasts(49, 4900.0 + at, full=True) for at in range(9)), "full workers are waited for"
    assert not patience.lasts(49, 4910.0, full=True)


def test_a_stream_whose_worker_dies_waits_for_room_at_the_others() -> None:
    async def story() -> None:
        workers = Hostile(hold=asyncio.Event()), Hostile(hold=asyncio.Event())
        async with routed(*workers, per_worker=1) as router:
            streams = [asyncio.create_task(streamed(router)) for _ in range(2)]
            await until(lambda: all(worker.asked for worker in workers) and router.routing.load.decoding.all())
            workers[0].healthy = False
            await look(router)  # w0 is down now, and its stream has nowhere to go
            await until(lambda: router.routing.load.requests.tolist() == [0, 1])
            await asyncio.sleep(0.02)
            assert not any(stream.done() for stream in streams), "it isn't told that all are full"
            workers[1].hold.set()
            assert await asyncio.gather(*streams) == [[*SAID, "[DONE]"]] * 2
            assert b'rejected_total{why="full"} 0.0' in router.render_metrics()
            at_rest(router)

    run(story())


@pytest.mark.parametrize("kind", ["stream", "whole"])
def test_a_worker_that_hangs_before_its_answer_and_goes_down_loses_the_request_to_another(kind: str) -> None:
    async def story() -> None:
        workers = Hostile(["hang"]), Hostile(["hang"])
        async with routed(*workers) as router:
            call = await router.proxy.call("/v1/completions", body(), {})
            work: Any = streamed(router) if kind == "stream" else router.proxy.whole(call)
            task = asyncio.create_task(work)
            await until(lambda: any(worker.asked for worker in workers))
            hung = workers.index(next(worker for worker in workers if worker.asked))
            workers[1 - hung].script.clear()
            workers[hung].healthy = False
            await look(router)
            assert await task and len(workers[1 - hung].asked) == 1
            at_rest(router)

    run(story())


def test_a_hung_worker_that_was_the_only_one_loses_its_requests_when_another_comes() -> None:
    async def story() -> None:
        workers = Hostile(["hang"]), Hostile()
        workers[1].healthy = False
        async with routed(*workers) as router:
            task = asyncio.create_task(streamed(router))
            await until(lambda: workers[0].asked)
            workers[0].healthy = False
            await look(router)
            assert router.routing.load.stats().in_flight == 1, "there is nobody else"
            workers[1].healthy = True
            await look(router)  # w1 is up
            await look(router)
            assert await task == [*SAID, "[DONE]"]
            at_rest(router)

    run(story())


def test_what_the_old_place_of_a_worker_failed_at_is_not_held_against_the_new_one() -> None:
    async def story() -> None:
        old, new = Hostile(hold=asyncio.Event()), Hostile()
        async with routed(old, breaker_failures=1) as router, new.served("w0") as there:
            task = asyncio.create_task(streamed(router))
            await until(router.routing.load.decoding.any)
            await router.place(0, there, None)
            await look(router)
            for answer in list(router.proxy._answers[0]):
                answer.close()
            assert await task == [*SAID, "[DONE]"] and len(new.asked) == 1
            assert router.upstreams.all[0].breaker.opened == 0
            at_rest(router)

    run(story())


def test_a_store_that_is_placed_elsewhere_is_not_listened_to_anew_before_the_old_is_forgotten() -> None:
    def stream(name: str) -> StoreStream:
        return StoreStream(name, f"tcp://127.0.0.1:{free_port()}")

    async def story() -> None:
        async with routed(Hostile(), Hostile()) as router:
            router.upstreams.all[1].backend = backends_of({"w1": {"url": "http://127.0.0.1:1", "store": "s"}})[0]
            router._stores["s"], router._curves["s"] = stream("s"), None
            router._listen_to(router.upstreams.all[1])
            before = router.listeners["s"]
            closing = before.close

            def close() -> None:
                router._listen_to(router.upstreams.all[1])  # what `watch` does meanwhile
                assert router.listeners["s"] is before
                closing()

            before.close = close  # type: ignore[method-assign]
            await router.place(0, router.upstreams.all[0].backend, stream("s"))
            assert "s" not in router.listeners
            router._listen_to(router.upstreams.all[1])
            assert router.listeners["s"] is not before
            await asyncio.to_thread(router.close)

    run(story())


def test_a_worker_that_cannot_be_looked_at_is_down_and_the_others_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with routed(Hostile(), Hostile(), health_s=0.005) as router:
            healthy, looks = router.upstreams._look, [0, 0]

            async def _look(number: int) -> None:
                looks[number] += 1
                if number == 0:
                    raise LookupError("a bug")
                await healthy(number)

            monkeypatch.setattr(router.upstreams, "_look", _look)
            watching = asyncio.create_task(router.upstreams.watch())
            await until(lambda: min(looks) >= 3)
            watching.cancel()
            assert [upstream.up for upstream in router.upstreams.all] == [False, True]

    run(story())
    assert "w0 can't be looked at" in caplog.text


def test_what_is_remembered_of_a_session_and_a_salt_is_of_bounded_size_however_long_they_are() -> None:
    async def story() -> None:
        async with routed(Hostile()) as router:
            salted, session = body(cache_salt="s" * 10_000), {"x-session-id": "i" * 10_000}
            call = await router.proxy.call("/v1/completions", salted, session)
            assert call.asked.prompt.session is not None and len(call.asked.prompt.session) == 32
            other = await router.proxy.call("/v1/completions", body(), {"x-session-id": "i" * 9_999})
            assert other.asked.prompt.session != call.asked.prompt.session
            assert all(len(part) == 32 for name in router.prompts._salts for part in name)
            assert len(router.prompts._salts) == 2 and router.proxy.routing.sessions == 0

    run(story())


@pytest.mark.parametrize("odd", ["", "00" * 16, "xy" * 32])
def test_a_namespace_that_cannot_be_one_is_as_good_as_none(odd: str) -> None:
    async def story() -> None:
        async with routed(Hostile(namespace=odd)) as router:
            assert await streamed(router) == [*SAID, "[DONE]"] and not router.prompts._salts

    run(story())


def test_a_draining_worker_ends_what_it_has_and_is_asked_nothing_else() -> None:
    async def story() -> None:
        workers = Hostile(hold=asyncio.Event()), Hostile()
        async with routed(*workers) as router:
            router.upstreams.all[1].draining = True
            begun = asyncio.create_task(streamed(router))
            await until(router.routing.load.decoding.any)
            router.upstreams.all[0].draining, router.upstreams.all[1].draining = True, False
            for _ in range(4):
                assert await streamed(router) == [*SAID, "[DONE]"]
            assert (len(workers[0].asked), len(workers[1].asked)) == (1, 4)
            assert workers[0].hold is not None
            workers[0].hold.set()
            assert await begun == [*SAID, "[DONE]"]
            router.upstreams.all[1].draining = True
            with pytest.raises(ApiError, match="no worker is ready"):
                await streamed(router)
            at_rest(router)

    run(story())


def test_a_name_that_is_none_is_a_worker_that_cannot_be_reached() -> None:
    for host in ("a..b", "x" * 80):
        with pytest.raises(BackendFailed, match="can't be reached"):
            run(ask(host, 80, "GET", "/health"))
