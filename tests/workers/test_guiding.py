"""A grammar is never left, whoever goes on with an answer; and a prompt's tokens are scored as a cold run would."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import numpy as np
import pytest

from forebay.errors import ConfigError
from forebay.workers import guiding
from forebay.workers.guiding import Compiler, Guide, Guides
from forebay.workers.sampling import score
from tests.workers.fake_model import VOCAB
from tests.workers.fake_store import FakeStore
from tests.workers.harness import wait_until, worker
from tests.workers.test_engine import cold, text

llguidance = pytest.importorskip("llguidance", reason="the extra `guided` isn't installed")

EOS = VOCAB - 1
SCHEMA = {
    "type": "object", "required": ["count", "kind", "flags"], "additionalProperties": False,
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["apple", "pear"]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
}  # fmt: skip
GRAMMAR = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})


class Bytes:
    """Byte b is token b + 2; the others are special."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id - 2]) if 2 <= token_id < 258 else b""

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        return [byte + 2 for byte in text.encode()]


@pytest.fixture(scope="module")
def guides() -> Guides:
    return Guides(Bytes(), VOCAB, [EOS])


def said(tokens: list[int]) -> str:
    return b"".join(map(Bytes().token_bytes, tokens)).decode()


def ask(w: Any, prompt: list[int], **more: Any) -> list[int]:
    more.setdefault("grammar", GRAMMAR)
    got = w.ask(prompt, 100, ignore_eos=False, **more)
    assert got.finished is not None and got.finished.reason == "stop"
    tokens: list[int] = got.tokens
    return tokens


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_every_answer_is_an_object_of_the_schema(guides: Guides, temperature: float) -> None:
    with worker(None, guides=guides) as w:
        kinds = set()
        for seed in range(12):
            answer = json.loads(said(ask(w, text(20, seed=seed), temperature=temperature, seed=seed)))
            assert list(answer) == ["count", "kind", "flags"] and 0 <= answer["count"] <= 999
            assert answer["kind"] in ("apple", "pear") and 1 <= len(answer["flags"]) <= 3
            assert all(isinstance(flag, bool) for flag in answer["flags"])
            kinds.add(answer["kind"])
        assert len(kinds) == 2, "the model still chooses"


def test_whoever_goes_on_with_a_guided_answer_says_the_same(guides: Guides) -> None:
    prompt = text(40)
    with worker(None, guides=guides) as w:
        whole = ask(w, prompt)
        for done in range(1, len(whole)):
            assert whole[:done] + ask(w, prompt, emitted=whole[:done]) == whole


def test_guided_or_not_they_share_what_is_cached(guides: Guides) -> None:
    prompt = text(60)
    store = FakeStore()
    with worker(store, guides=guides) as w:
        free = w.ask(prompt, 6).tokens
        guided = ask(w, prompt)
    with worker(store, guides=guides) as w:
        got = w.ask(prompt, 100, ignore_eos=False, grammar=GRAMMAR)
        assert got.cached == 48 and got.tokens == guided
        assert w.ask(prompt, 6).tokens == free == cold(prompt, 6)


def test_a_grammar_that_is_none_or_that_nobody_asked_for_is_refused(guides: Guides) -> None:
    broken = llguidance.LLMatcher.grammar_from_json_schema({"type": "fruit"})
    with worker(None, guides=guides) as w:
        finished = w.wait(w.submit([1, 2, 3], 9, grammar=broken)).finished
        assert finished is not None and "fruit" in finished.error
        finished = w.wait(w.submit([1, 2, 3], 9, grammar=GRAMMAR, emitted=[5])).finished
        assert finished is not None and finished.reason == "error", "what was emitted breaks the grammar"
        assert len(w.ask([1, 2, 3], 2).tokens) == 2
    with worker(None) as w:
        finished = w.wait(w.submit([1, 2, 3], 9, grammar=GRAMMAR)).finished
        assert finished is not None and "structured_outputs" in finished.error


class Slow(Guides):
    """Compiles when it is told to."""

    def __init__(self, ready: Guides) -> None:
        self.ready, self.go = ready, threading.Event()

    def guide(self, grammar: str, emitted: Any = ()) -> Guide | str:
        assert self.go.wait(20)
        return self.ready.guide(grammar, emitted)


def test_a_grammar_that_takes_long_holds_up_nobody_else_and_can_be_cancelled(guides: Guides) -> None:
    slow = Slow(guides)
    with worker(None, guides=slow) as w:
        keys = [w.submit(text(20), 100, grammar=GRAMMAR, ignore_eos=False) for _ in range(3)]
        gone = w.submit(text(20), 100, grammar=GRAMMAR, connection=2)
        assert len(w.ask(text(30), 5).tokens) == 5
        assert w.stat("requests.compiling") == 4
        w.cancel(keys[1])
        w.disconnect(2)
        for key in (keys[1], gone):
            finished = w.wait(key).finished
            assert finished is not None and finished.reason == "cancelled"
        slow.go.set()
        assert w.wait(keys[0]).tokens == w.wait(keys[2]).tokens != []
        assert w.stat("requests.compiling") == 0


def test_grammars_that_wait_are_bounded(guides: Guides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guiding, "COMPILING_MAX", 2)
    slow = Slow(guides)
    heard: list[Any] = []
    compiler = Compiler(slow, heard.append)
    assert compiler.offer("first", GRAMMAR, [])
    wait_until("the first is being compiled", lambda: len(compiler) == 0)
    assert [compiler.offer(number, GRAMMAR, []) for number in range(3)] == [True, True, False]
    slow.go.set()
    wait_until("all of them", lambda: len(heard) == 3)
    assert [compiled.request for compiled in heard] == ["first", 0, 1] and all(c.guide for c in heard)


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"forebay\[guided\]"):
        Guides(Bytes(), VOCAB, [EOS])


def test_the_mask_lets_through_what_the_grammar_does_and_nothing_else(guides: Guides) -> None:
    guide = guides.guide(llguidance.LLMatcher.grammar_from_regex("[ab]c"))
    assert isinstance(guide, Guide)
    for letters in ("ab", "c"):
        row = np.zeros(VOCAB)
        guide.mask(row)
        assert said(np.flatnonzero(np.isfinite(row)).tolist()) == letters and not guide.complete
        guide.accept(Bytes().encode(letters)[0])
    assert guide.complete and not guide.error


# --- scores of prompts ---------------------------------------------------------------------------------------


def scores_of(prompt: list[int], top: int, **settings: Any) -> dict[int, Any]:
    with worker(None, **settings) as w:
        return w.ask(prompt, 2, prompt_logprobs=top).scores


def test_every_token_of_a_prompt_but_the_first_is_scored_by_the_logits_before_it() -> None:
    prompt = text(90)
    got = scores_of(prompt, 3)
    assert sorted(got) == list(range(1, 90))
    for at in (1, 16, 63, 64, 65, 89):  # the answer to each prefix, forced to be the prompt's next token
        with worker(None) as w:
            forced = w.ask(prompt[:at], 1, logprobs=3, logit_bias={prompt[at]: 100.0})
        assert forced.tokens == [prompt[at]] and forced.logprobs == [got[at].logprob]
    assert got == scores_of(prompt, 3, max_num_batched_tokens=16), "in steps of any size"


def test_scores_are_the_same_whatever_is_cached_and_the_answer_too() -> None:
    prompt = text(100)
    store = FakeStore()
    with worker(store) as w:
        plain = w.ask(prompt, 4).tokens
        got = w.ask(prompt, 4, prompt_logprobs=0)
        assert got.cached == 0 and len(got.scores) == 99 and got.tokens == plain
        assert w.ask(prompt, 4).cached == 96


def test_scores_survive_a_small_device_with_preemptions() -> None:
    prompts = [text(20 + 9 * i, seed=i % 5) for i in range(8)]
    alone = [scores_of(prompt, 1) for prompt in prompts]
    with worker(FakeStore(), max_tokens=320, max_num_batched_tokens=48) as w:
        keys = [w.submit(prompt, 60, prompt_logprobs=1) for prompt in prompts]
        assert [w.wait(key).scores for key in keys] == alone


def test_a_score_is_that_of_the_row() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3]))
    told = score(logits, 2, 1)
    assert told.logprob == pytest.approx(np.log(0.2)) and told.rank == 3 and told.top[0][0] == 1
