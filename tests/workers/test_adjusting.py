"""Penalties, bias, minimum length and cuts: the same numbers as transformers', from the ids alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as reference

from forebay.workers.adjusting import Adjustment, Logits, wanted
from forebay.workers.protocol import Sampling
from forebay.workers.sampling import candidates, check_sampling, sample, score
from tests.workers.harness import worker
from tests.workers.test_engine import cold, text

VOCAB = 40
PROMPT, OUTPUT = [3, 5, 5, 7], [5, 9, 9, 9, 11]


def row(seed: int = 0) -> Logits:
    return np.random.default_rng(seed).normal(0, 3, VOCAB)


def adjusted(logits: Logits, **more: Any) -> Logits:
    sampling = Sampling(max_tokens=100, **more)
    return Adjustment(sampling, PROMPT, OUTPUT, ends={1, 2}).apply(logits)


def processed(processor: Any, logits: Logits, ids: list[int]) -> Logits:
    """What one of transformers' processors makes of a row."""
    found: Logits = processor(torch.tensor([ids]), torch.from_numpy(logits.copy())[None])[0].numpy()
    return found


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_the_repetition_penalty_is_transformers(penalty: float) -> None:
    expected = processed(reference.RepetitionPenaltyLogitsProcessor(penalty), row(), [*PROMPT, *OUTPUT])
    assert adjusted(row(), repetition_penalty=penalty) == pytest.approx(expected, abs=1e-12)


def test_frequency_and_presence_penalties_count_the_output_alone() -> None:
    """OpenAI's formula: logit - count * frequency_penalty - (count > 0) * presence_penalty."""
    got = adjusted(row(), frequency_penalty=0.3, presence_penalty=-0.7)
    counts = np.bincount(OUTPUT, minlength=VOCAB)
    assert got == pytest.approx(row() - 0.3 * counts + 0.7 * (counts > 0), abs=1e-12)


def test_a_bias_is_added_as_transformers_adds_it() -> None:
    bias = {3: -100.0, 20: 4.5, 0: 1.0}
    processor = reference.SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    assert adjusted(row(), logit_bias=bias) == pytest.approx(processed(processor, row(), [*PROMPT, *OUTPUT]), abs=1e-6)


def test_an_answer_of_less_than_its_minimum_does_not_end() -> None:
    for least, produced in ((4, 5), (5, 5), (6, 5)):
        processor = reference.MinNewTokensLengthLogitsProcessor(len(PROMPT), least, [1, 2], device="cpu")
        expected = processed(processor, row(), [*PROMPT, *OUTPUT])
        assert adjusted(row(), min_tokens=least) == pytest.approx(expected), (least, produced)


@pytest.mark.parametrize(
    ("settings", "warpers"),
    [
        ({"min_p": 0.2}, [reference.MinPLogitsWarper(0.2)]),
        (
            {"temperature": 0.7, "min_p": 0.05},
            [reference.TemperatureLogitsWarper(0.7), reference.MinPLogitsWarper(0.05)],
        ),
        ({"temperature": 1.3, "top_k": 7}, [reference.TemperatureLogitsWarper(1.3), reference.TopKLogitsWarper(7)]),
        ({"top_p": 0.8}, [reference.TopPLogitsWarper(0.8)]),
        (
            {"min_p": 0.01, "top_k": 12, "top_p": 0.9},
            [reference.MinPLogitsWarper(0.01), reference.TopKLogitsWarper(12), reference.TopPLogitsWarper(0.9)],
        ),
    ],
)  # fmt: skip
def test_what_is_drawn_from_is_what_transformers_would_draw_from(settings: dict[str, Any], warpers: list[Any]) -> None:
    for seed in range(20):
        logits = row(seed)
        scores = torch.from_numpy(logits.copy())[None]
        for warper in warpers:
            scores = warper(torch.tensor([PROMPT]), scores)
        expected = torch.softmax(scores[0], -1).numpy()
        tokens, weights = candidates(logits, Sampling(max_tokens=1, **settings))
        assert tokens.tolist() == np.flatnonzero(expected).tolist()
        assert weights / weights.sum() == pytest.approx(expected[tokens], rel=1e-9)


def test_the_row_itself_is_left_alone_and_logprobs_are_those_of_the_raw_one() -> None:
    logits = row()
    sampling = Sampling(max_tokens=9, temperature=0, logit_bias={7: 100.0}, logprobs=1)
    chosen = sample(logits, sampling, 9, Adjustment(sampling, PROMPT, OUTPUT, ends=()))
    assert np.array_equal(logits, row()) and chosen.token == 7
    raw = logits - np.log(np.exp(logits).sum())
    assert chosen.logprob == pytest.approx(raw[7]) and chosen.top[0] == pytest.approx((int(raw.argmax()), raw.max()))


def test_state_follows_from_the_ids_whoever_appended_them() -> None:
    settings: dict[str, Any] = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "min_tokens": 7}
    sampling = Sampling(max_tokens=100, **settings)
    grown = Adjustment(sampling, PROMPT, [], ends={1})
    for token in OUTPUT:
        grown.append(token)
    given = Adjustment(sampling, PROMPT, OUTPUT, ends={1})
    assert np.array_equal(grown.apply(row()), given.apply(row()))


def test_a_prompts_tokens_are_scored_with_their_rank() -> None:
    logits = row()
    raw = logits - np.log(np.exp(logits).sum())
    order = np.argsort(-logits)
    for rank, token in enumerate(order.tolist(), 1):
        told = score(logits, token, 2)
        assert told.rank == rank and told.logprob == pytest.approx(raw[token])
        assert [other for other, _ in told.top] == order[:2].tolist()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_p", 1.5), ("min_tokens", 101), ("min_tokens", -1), ("repetition_penalty", 0.0), ("presence_penalty", 3.0),
        ("frequency_penalty", float("nan")), ("logit_bias", {5: 101.0}), ("logit_bias", {5: float("nan")}),
        ("stop_token_ids", [1] * 1000), ("prompt_logprobs", 99), ("grammar", "x" * 100_000),
    ],
)  # fmt: skip
def test_parameters_that_cannot_be_meant_are_refused_by_name(name: str, value: Any) -> None:
    refusal = check_sampling(Sampling(max_tokens=100, **{name: value}))
    assert refusal is not None and name in refusal.replace("the grammar", "grammar")


def test_most_requests_are_sampled_as_they_come() -> None:
    assert not wanted(Sampling(max_tokens=5, temperature=0.5, top_p=0.9, min_p=0.1, logprobs=3, stop_token_ids=[4]))
    assert wanted(Sampling(max_tokens=5, min_tokens=1)) and wanted(Sampling(max_tokens=5, presence_penalty=0.1))


ADJUSTED: dict[str, Any] = {
    "temperature": 0.8, "seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2,
    "min_p": 0.02, "logit_bias": {4: 2.0, 9: -100.0},
}  # fmt: skip


def test_adjusted_answers_do_not_depend_on_the_batch_or_on_a_carry_over() -> None:
    prompt = text(50)
    alone = cold(prompt, 30, **ADJUSTED)
    assert alone != cold(prompt, 30, temperature=0.8, seed=5) and 9 not in alone
    with worker(None) as w:
        keys = [w.submit(text(30, seed=i), 40, **ADJUSTED) for i in range(5)]
        assert w.ask(prompt, 30, **ADJUSTED).tokens == alone
        assert alone[:11] + w.ask(prompt, 30, emitted=alone[:11], **ADJUSTED).tokens == alone
        for key in keys:
            w.wait(key)


def test_a_tokens_of_the_requests_own_ends_it_also_where_the_models_are_ignored() -> None:
    prompt = text(10)
    tokens = cold(prompt, 12)
    with worker(None) as w:
        got = w.ask(prompt, 12, stop_token_ids=[tokens[4]])
        assert got.tokens == tokens[: tokens.index(tokens[4]) + 1]
        assert got.finished is not None and got.finished.reason == "stop"


def test_the_minimum_keeps_the_end_away_until_it_is_reached() -> None:
    prompt = text(10)
    first = cold(prompt, 1)[0]
    with worker(None, eos_ids=(first,)) as w:
        assert len(w.ask(prompt, 8, ignore_eos=False).tokens) == 1
        assert len(w.ask(prompt, 8, ignore_eos=False, min_tokens=5).tokens) >= 5


def test_ids_that_no_token_has_are_refused() -> None:
    with worker(None) as w:
        for more in ({"logit_bias": {5000: 1.0}}, {"stop_token_ids": [5000]}):
            finished = w.wait(w.submit([1, 2, 3], 2, **more)).finished
            assert finished is not None and "5000 is out of range" in finished.error
