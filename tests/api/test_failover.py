"""A worker may die at any time: the stream goes on at the next one, with no token missing or said twice."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.kvstore.identity import unpack_tokens
from forebay.testing import web
from forebay.workers.protocol import Finished, Generate, Outputs, TokenOut
from tests.api.scripted import ScriptedWorker
from tests.api.serving import Front

TEXT = "the quick brown fox jumps over the lazy dog"


class Reader(threading.Thread):
    """Reads a streamed completion."""

    def __init__(self, front: Front, prompt: str, **more: Any) -> None:
        super().__init__(daemon=True)
        self.text, self.errors, self.finish, self.ids, self.usage = "", [], None, [], None
        self._url = f"{front.url}/v1/completions"
        self._body = {
            "prompt": prompt, "max_tokens": 100, "stream": True, "return_token_ids": True,
            "stream_options": {"include_usage": True}, **more,
        }  # fmt: skip
        self.status = 0
        self.start()

    def run(self) -> None:
        with web.stream("POST", self._url, json=self._body, timeout=30) as answer:
            self.status = answer.status_code
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self.errors.append(event["error"])
                    continue
                self.usage = event.get("usage") or self.usage
                for choice in event["choices"]:
                    self.text += choice["text"]
                    self.ids += choice["token_ids"]
                    self.finish = choice["finish_reason"] or self.finish

    def done(self) -> None:
        self.join(30)
        assert not self.is_alive()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "worker.sock"


@pytest.fixture
def halting(tmp_path: Path, path: Path) -> Iterator[Front]:
    """A front end whose worker stops after 10 tokens."""
    with Front(tmp_path, worker=ScriptedWorker(path, hold=10)) as front:
        yield front


def test_a_stream_goes_on_at_the_next_worker(halting: Front, path: Path) -> None:
    reader = Reader(halting, "x" * 100 + "|" + TEXT)
    halting.wait_until(lambda: len(reader.ids) == 10)
    successor = ScriptedWorker(path)
    halting.replace_worker(successor)
    reader.done()
    assert reader.text == TEXT and reader.finish == "stop" and not reader.errors
    (ask,) = successor.asked
    assert halting.worker is successor and ask.waited_s > 0, "its age goes along"
    assert ask.attempt == 2 and list(unpack_tokens(ask.emitted)) == [ord(letter) + 2 for letter in TEXT[:10]]
    assert reader.usage["prompt_tokens_details"]["cached_tokens"] == 48, "the first attempt's"


def test_the_successor_gets_the_same_seed_salt_and_sampling(halting: Front, path: Path) -> None:
    reader = Reader(halting, "|" + TEXT, temperature=0.7, cache_salt="mine")
    halting.wait_until(lambda: len(reader.ids) == 10)
    assert halting.worker is not None
    (first,) = halting.worker.asked
    successor = ScriptedWorker(path)
    halting.replace_worker(successor)
    reader.done()
    (second,) = successor.asked
    assert (first.sampling, first.salt, first.tenant, first.prompt) == (
        second.sampling, second.salt, second.tenant, second.prompt,
    )  # fmt: skip
    assert first.salt


def test_a_hung_worker_is_left_when_its_heartbeats_stop(halting: Front, path: Path) -> None:
    reader = Reader(halting, "|" + TEXT)
    halting.wait_until(lambda: len(reader.ids) == 10)
    hung = halting.worker
    assert hung is not None
    hung.mute = True
    began = time.monotonic()
    halting.wait_until(lambda: not halting.fleet.connected)
    assert 1.0 < time.monotonic() - began < 10.0
    assert halting.get("/health").status_code == 503
    halting.replace_worker(ScriptedWorker(path))
    reader.done()
    assert reader.text == TEXT and halting.fleet.links[0].counters.hangs >= 1


def test_output_of_a_dead_attempt_is_dropped(halting: Front, path: Path) -> None:
    reader = Reader(halting, "|" + TEXT)
    halting.wait_until(lambda: len(reader.ids) == 10)
    successor = ScriptedWorker(path, pace_s=0.01)

    def haunt(ask: Generate) -> None:
        late = TokenOut(ask.id, ask.attempt - 1, 10, ord("!") + 2)
        successor.say(Outputs(tokens=[late]))
        successor.say(Finished(id=ask.id, attempt=ask.attempt - 1, reason="stop"))

    successor.on_ask = haunt
    halting.replace_worker(successor)
    reader.done()
    assert reader.text == TEXT


def test_a_token_that_came_already_is_not_said_twice(halting: Front, path: Path) -> None:
    reader = Reader(halting, "|" + TEXT)
    halting.wait_until(lambda: len(reader.ids) == 10)
    successor = ScriptedWorker(path, pace_s=0.01)
    successor.on_ask = lambda ask: successor.say(Outputs(tokens=[TokenOut(ask.id, ask.attempt, 9, ord("?") + 2)]))
    halting.replace_worker(successor)
    reader.done()
    assert reader.text == TEXT


def test_a_missing_token_starts_another_attempt(halting: Front, path: Path) -> None:
    reader = Reader(halting, "|" + TEXT)
    halting.wait_until(lambda: len(reader.ids) == 10)
    successor = ScriptedWorker(path, pace_s=0.01)

    def skip(ask: Generate) -> None:
        if len(successor.asked) == 1:
            successor.say(Outputs(tokens=[TokenOut(ask.id, ask.attempt, 11, ord("?") + 2)]))

    successor.on_ask = skip
    halting.replace_worker(successor)
    reader.done()
    assert reader.text == TEXT and [ask.attempt for ask in successor.asked][:2] == [2, 3]


def test_stop_strings_and_characters_are_found_across_the_death(halting: Front, path: Path) -> None:
    text = "the quickß, brown"  # token 10 is the first half of the sharp s
    reader = Reader(halting, "|" + text, stop=["ß, br"])
    halting.wait_until(lambda: len(reader.ids) == 10)
    halting.replace_worker(ScriptedWorker(path))
    reader.done()
    assert reader.text == "the quick" and reader.finish == "stop"


def test_a_full_successor_is_asked_again_until_it_takes_the_stream(halting: Front, path: Path) -> None:
    reader = Reader(halting, "|" + TEXT)
    halting.wait_until(lambda: len(reader.ids) == 10)
    successor = ScriptedWorker(path, refuse="busy")
    halting.replace_worker(successor)
    halting.wait_until(lambda: len(successor.asked) >= 2)
    successor.refuse = ""
    reader.done()
    assert reader.text == TEXT and not reader.errors


def test_an_unstreamed_answer_survives_too(halting: Front, path: Path) -> None:
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(halting.complete("|" + TEXT)))
    asking.start()
    halting.wait_until(lambda: halting.worker is not None and halting.worker.asked)
    halting.replace_worker(ScriptedWorker(path))
    asking.join(30)
    assert answers[0].json()["choices"][0]["text"] == TEXT


def test_without_a_successor_the_stream_ends_with_an_error(tmp_path: Path, path: Path) -> None:
    with Front(tmp_path, give_up_s=0.5, worker=ScriptedWorker(path, hold=10)) as front:
        reader = Reader(front, "|" + TEXT)
        front.wait_until(lambda: len(reader.ids) == 10)
        assert front.worker is not None
        front.run(front.worker.die())
        front.worker = None
        reader.done()
        assert reader.text == TEXT[:10] and "no worker" in reader.errors[0]["message"]
        assert not front.fleet.calls
        assert front.complete("|x").status_code == 503


def test_a_successor_with_another_model_does_not_go_on(halting: Front, path: Path) -> None:
    reader = Reader(halting, "|" + TEXT)
    halting.wait_until(lambda: len(reader.ids) == 10)
    halting.replace_worker(ScriptedWorker(path, model="other"))
    reader.done()
    assert "other" in reader.errors[0]["message"] and reader.text == TEXT[:10]


def test_a_client_that_leaves_frees_its_generation(halting: Front) -> None:
    body = {"prompt": "|" + TEXT, "stream": True, "max_tokens": 100}
    with web.stream("POST", f"{halting.url}/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    halting.wait_until(lambda: not halting.fleet.calls)
    halting.wait_until(lambda: halting.worker is not None and len(halting.worker.cancelled) == 1)


def test_a_client_that_leaves_before_the_first_token_frees_its_generations(halting: Front) -> None:
    assert halting.worker is not None
    halting.worker.hold = 0
    for stream in (True, False):
        body = {"prompt": "|" + TEXT, "stream": stream, "n": 2}
        with pytest.raises(httpx.ReadTimeout):
            web.post(f"{halting.url}/v1/completions", json=body, timeout=0.3)
        halting.wait_until(lambda: not halting.fleet.calls)
