"""The router's parts by themselves: streams that change hands, breakers, settings, memories."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forebay.errors import ConfigError
from forebay.router.breaker import Breaker, BreakerState
from forebay.router.settings import RouterConfig, backends_of, check, inline, stores_of
from forebay.router.streams import DONE, Relay, SseParser, StreamBroken


def chunk(text: str, ids: list[int] | None, index: int = 0, finish: str | None = None, name: str = "a") -> bytes:
    choice: dict[str, Any] = {"index": index, "text": text, "finish_reason": finish}
    if ids is not None:
        choice["token_ids"] = ids
    return json.dumps({"id": name, "created": 1, "model": "m", "choices": [choice]}).encode()


def said(event: bytes | None) -> Any:
    return None if event is None else json.loads(event.removeprefix(b"data: "))


def test_events_are_found_however_a_body_is_cut() -> None:
    body = b'data: {"a": 1}\n\ndata: {"b":\ndata: 2}\r\n\r\n: comment\n\ndata: [DONE]\n\n'
    for step in range(1, len(body)):
        parser = SseParser()
        found = [event for at in range(0, len(body), step) for event in parser.feed(body[at : at + step])]
        assert found == [b'{"a": 1}', b'{"b":\n2}', b"[DONE]"], step


def test_a_client_gets_what_it_asked_for_and_the_relay_keeps_the_rest() -> None:
    relay = Relay(1, wants_ids=False, wants_usage=False)
    event = said(relay.pass_on(chunk("hi", [5, 6])))
    assert event["choices"] == [{"index": 0, "text": "hi", "finish_reason": None}]
    usage = {"id": "a", "choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}
    assert relay.pass_on(json.dumps(usage).encode()) is None
    assert (relay.emitted, relay.cached, relay.prompt_tokens) == ([[5, 6]], 4, 9)
    assert relay.resumable and relay.pass_on(b"[DONE]") == DONE and relay.done and not relay.resumable
    curious = Relay(1, wants_ids=True, wants_usage=True)
    assert said(curious.pass_on(chunk("hi", [5])))["choices"][0]["token_ids"] == [5]
    assert said(curious.pass_on(json.dumps(usage).encode()))["usage"]["prompt_tokens"] == 9


def test_a_successors_chunks_carry_the_first_ones_name_and_end_no_choice_twice() -> None:
    relay = Relay(2, wants_ids=False, wants_usage=False)
    relay.pass_on(chunk("x", [1], 0))
    relay.pass_on(chunk("done", [2], 1, "stop"))
    assert said(relay.pass_on(chunk("y", [3], 0, name="b")))["id"] == "a"
    assert relay.pass_on(chunk("", [], 1, "stop", name="b")) is None, "this choice had ended"
    assert relay.emitted == [[1, 3], [2]]


def test_an_opening_is_said_once() -> None:
    relay = Relay(1, wants_ids=False, wants_usage=False)
    opening = json.dumps({"id": "a", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}).encode()
    assert relay.pass_on(opening) is not None and relay.pass_on(opening) is None


def test_calls_of_tools_and_reasoning_pass_whoever_streams_them_and_without_ids_are_not_resumed() -> None:
    relay = Relay(1, wants_ids=False, wants_usage=False)
    opening = {"index": 0, "delta": {"role": "assistant", "content": ""}}
    call = {"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{"}}]}}
    more = {"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}}
    thought = {"index": 0, "delta": {"reasoning_content": "hm"}}
    for choice in (opening, thought, call, more):
        event = said(relay.pass_on(json.dumps({"id": "a", "choices": [choice]}).encode()))
        assert event is not None and event["choices"] == [choice]
    assert not relay.resumable


def test_text_without_its_tokens_cannot_be_resumed() -> None:
    relay = Relay(1, wants_ids=False, wants_usage=False)
    relay.pass_on(chunk("said", None))
    assert relay.begun and not relay.resumable


def test_an_error_in_a_stream_is_told_apart() -> None:
    with pytest.raises(StreamBroken, match="no worker"):
        Relay(1, False, False).pass_on(b'{"error": {"message": "no worker came back"}}')


def test_a_breaker_opens_rests_tries_once_and_closes() -> None:
    breaker = Breaker(failures=3, rest_s=5.0)
    for _ in range(2):
        breaker.failed(0.0)
    assert breaker.allows(0.0)
    breaker.succeeded()
    for _ in range(3):
        breaker.failed(1.0)
    assert breaker.state(1.0) is BreakerState.OPEN and not breaker.allows(5.9) and breaker.opened == 1
    assert breaker.state(6.0) is BreakerState.HALF_OPEN and breaker.allows(6.0)
    breaker.sent(6.0)
    assert not breaker.allows(6.0), "one at a time"
    breaker.gave_up()
    assert breaker.allows(6.0)
    breaker.sent(6.0)
    breaker.failed(6.0)
    assert not breaker.allows(10.9) and breaker.allows(11.0)
    breaker.sent(11.0)
    breaker.succeeded()
    assert breaker.state(11.0) is BreakerState.CLOSED


def test_settings_are_read_and_wrong_ones_named() -> None:
    made = backends_of(
        {"w0": {"url": "http://127.0.0.1:8000", "store": "s", "prefill_s": 0.5, "load_s": [0, 1, 2, 3]}, "w1": "http://h"}
    )
    assert (made[0].port, made[0].rates.prefill_s, made[0].rates.load_s) == (8000, 0.5, (0.0, 1.0, 2.0, 3.0))
    assert (made[1].host, made[1].port) == ("h", 80)
    assert inline("a=http://x:1, b=http://y:2") == {"a": "http://x:1", "b": "http://y:2"}
    for wrong, named in (
        ({"w": "https://x"}, "url"), ({"w": {"url": "http://x", "tpyo": 1}}, "tpyo"), ({"": "http://x"}, "name"),
        ({"w": {"url": "http://x", "load_s": [1]}}, "load_s"), ({}, "0 workers"),
        ({"w": {"url": "http://x", "load_s": 1}}, "load_s"),
        ({"w": {"url": "http://x", "load_s": list("abcd")}}, "load_s"),
        ({"w": {"url": "http://x", "prefill_s": "fast"}}, "prefill_s"),
        ({"w": {"url": "http://x", "move_s": -1}}, "move_s"),
        ({"w": {"url": "http://x", "overlaps": "no"}}, "overlaps"), ({"w": {"url": "http://x:99999"}}, "[Pp]ort"),
        ({"w": {"url": "http://x", "block_tokens": 0}}, "block_tokens"),
        ({"w": {"url": "http://x", "block_tokens": "16"}}, "block_tokens"),
        ({"w": {"url": "http://x", "events": "127.0.0.1:5557"}}, "tcp://"),
        ({"w": {"url": "http://x", "events": 5}}, "tcp://"),
        ({"w": {"url": "http://x", "events": "tcp://h:1", "replay": "tcp://h"}}, "replay"),
        ({"w": {"url": "http://x", "replay": "tcp://h:1"}}, "replay without events"),
        ({"w": {"url": "http://x", "store": 5}}, "store takes text"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=named):
            backends_of(wrong)
    with pytest.raises(ValueError, match="events"):
        stores_of({"s": {}})
    with pytest.raises(ConfigError, match="no table"):
        check(RouterConfig(made))
    with pytest.raises(ConfigError, match="'w0' is a worker and a store"):
        check(RouterConfig(made[:1], stores_of({"w0": {"events": "tcp://h:1"}})))
