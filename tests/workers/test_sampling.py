"""Choosing tokens: the right distribution, and the same choice for the same (seed, choice, position)."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from forebay.workers.protocol import Sampling
from forebay.workers.sampling import check_sampling, heaviest, sample, uniform

LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.25, 0.05])).astype(np.float32)


def draws(count: int = 4000, **more: float) -> dict[int, float]:
    """Shares of the tokens over many positions."""
    sampling = Sampling(max_tokens=1, **more)  # type: ignore[arg-type]
    found = Counter(sample(LOGITS, sampling, position).token for position in range(count))
    return {token: n / count for token, n in found.items()}


def test_at_temperature_0_the_likeliest_wins_and_of_equals_the_first() -> None:
    greedy = Sampling(max_tokens=1, temperature=0)
    assert sample(LOGITS, greedy, 0).token == 1
    assert sample(np.array([1, 3, 3, 2], dtype=np.float32), greedy, 0).token == 1


def test_draws_follow_the_distribution() -> None:
    shares = draws()
    for token, probability in enumerate([0.1, 0.4, 0.2, 0.25, 0.05]):
        assert shares[token] == pytest.approx(probability, abs=0.03)


def test_temperature_sharpens() -> None:
    weights = np.array([0.1, 0.4, 0.2, 0.25, 0.05]) ** 2
    for token, share in draws(temperature=0.5).items():
        assert share == pytest.approx(weights[token] / weights.sum(), abs=0.03)


def test_top_k_keeps_the_k_heaviest() -> None:
    shares = draws(top_k=2)
    assert set(shares) == {1, 3}
    assert shares[1] == pytest.approx(0.4 / 0.65, abs=0.03)


def test_top_p_keeps_the_fewest_that_reach_p() -> None:
    assert set(draws(top_p=0.39)) == {1}
    assert set(draws(top_p=0.41)) == {1, 3}
    assert set(draws(top_p=0.86)) == {0, 1, 2, 3}
    assert set(draws(top_p=1e-9)) == {1}


def test_top_p_over_a_large_flat_vocabulary_cuts_where_it_should() -> None:
    flat = np.zeros(20_000, dtype=np.float32)
    sampling = Sampling(max_tokens=1, top_p=0.5)
    assert max(sample(flat, sampling, p).token for p in range(50)) < 10_000
    assert len({sample(flat, sampling, p).token for p in range(50)}) > 40


def test_a_choice_depends_on_seed_choice_and_position_alone() -> None:
    base = uniform(7, 0, 100)
    assert base == uniform(7, 0, 100)
    assert len({base, uniform(8, 0, 100), uniform(7, 1, 100), uniform(7, 0, 101)}) == 4
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)


def test_random_numbers_are_uniform_over_positions() -> None:
    values = [uniform(3, 0, position) for position in range(4000)]
    assert min(values) >= 0 and max(values) < 1
    assert sum(values) / len(values) == pytest.approx(0.5, abs=0.02)


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    got = sample(LOGITS, Sampling(max_tokens=1, temperature=0.3, top_k=1, logprobs=3), 5)
    assert got.token == 1 and got.logprob == pytest.approx(math.log(0.4), abs=1e-6)
    assert [token for token, _ in got.top] == [1, 3, 2]
    assert [value for _, value in got.top] == pytest.approx([math.log(0.4), math.log(0.25), math.log(0.2)], abs=1e-6)


def test_logprobs_0_reports_the_chosen_token_alone() -> None:
    got = sample(LOGITS, Sampling(max_tokens=1, temperature=0, logprobs=0), 0)
    assert got.logprob is not None and got.top == []
    assert sample(LOGITS, Sampling(max_tokens=1, temperature=0), 0).logprob is None


def test_tokens_that_are_ruled_out_are_never_drawn() -> None:
    logits = np.array([-np.inf, 0.0, -np.inf, 0.0], dtype=np.float32)
    sampling = Sampling(max_tokens=1)
    assert {sample(logits, sampling, p).token for p in range(200)} == {1, 3}


def test_of_equally_heavy_values_the_smaller_index_comes_first() -> None:
    assert heaviest(np.array([1.0, 2.0, 2.0, 0.0, 2.0]), 2).tolist() == [1, 2]
    assert heaviest(np.array([1.0, 2.0]), 9).tolist() == [1, 0]


@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_no_number_is_no_parameter(name: str) -> None:
    assert name in str(check_sampling(Sampling(max_tokens=1, **{name: float("nan")})))  # type: ignore[arg-type]
    assert check_sampling(Sampling(max_tokens=1)) is None
