"""Stop strings end an answer and are never part of it, wherever token boundaries fall."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from forebay.testing import web
from forebay.workers.api.stops import StopFinder
from tests.api.serving import Front

TEXTS = st.text(alphabet="ab", max_size=30)


@given(st.lists(TEXTS, max_size=12), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_what_is_emitted_is_the_text_before_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    finder, out = StopFinder(stops), ""
    for piece in pieces:
        out += finder.feed(piece)
        assert not any(stop in out for stop in stops), "never emitted, not even for a moment"
    out += finder.flush()
    whole = "".join(pieces)
    begins = [at for stop in stops if (at := whole.find(stop)) >= 0]
    assert finder.stopped == bool(begins) and whole.startswith(out)
    assert out == whole if not begins else len(out) in begins


@given(TEXTS, st.integers(1, 5))
def test_text_without_a_stop_comes_out_whole(text: str, size: int) -> None:
    finder = StopFinder(["c", "abc"])
    out = "".join(finder.feed(text[at : at + size]) for at in range(0, len(text), size)) + finder.flush()
    assert out == text and not finder.stopped


def test_a_stop_ends_the_answer_and_its_generation(front: Front) -> None:
    assert front.worker is not None
    front.worker.pace_s = 0.01
    answer = front.complete("|one, two END three and much more", stop=[" END"]).json()
    assert answer["choices"][0]["text"] == "one, two" and answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len("one, two END")
    front.wait_until(lambda: front.worker is not None and len(front.worker.cancelled) == 1)
    assert not front.fleet.calls


def test_a_stop_that_never_comes_is_not_missing_from_the_end(front: Front) -> None:
    assert front.complete("|one, two E", stop=" END").json()["choices"][0]["text"] == "one, two E"


def test_a_streamed_stop_is_never_seen(front: Front) -> None:
    seen = ""
    body = {"prompt": "|one, two END three", "stream": True, "stop": " END", "max_tokens": 50}
    with web.stream("POST", f"{front.url}/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                seen += json.loads(line[6:])["choices"][0]["text"]
                assert " E" not in seen
    assert seen == "one, two"


def test_a_stop_inside_a_multi_byte_character_boundary(front: Front) -> None:
    assert front.complete("|grüße üben", stop="ße").json()["choices"][0]["text"] == "grü"
