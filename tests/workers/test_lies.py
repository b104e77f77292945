"""What can't be, said by a front end or by a model, costs the request that it is said of and nobody else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from forebay.kernels.batch import Batch
from forebay.kvstore.identity import pack_tokens
from forebay.workers.generation import RequestKey
from forebay.workers.messages import Submit
from forebay.workers.protocol import NO_NUMBER, TO_WORKER, Generate, Sampling
from tests.workers.fake_model import VOCAB, FakeModel
from tests.workers.fake_store import FakeStore
from tests.workers.harness import Answer, Harness

PROMPT = list(range(40))
NAN, INF, FAR = math.nan, math.inf, 2**63 - 1
OVERFLOWS = VOCAB - 10

SAMPLINGS: dict[str, list[Any]] = {
    "max_tokens": [0, -1, FAR], "temperature": [NAN, INF, -1.0, 1e-320], "top_p": [NAN, 0.0, INF, 1e-320],
    "top_k": [-1, FAR], "seed": [-(2**63), 2**64 - 1], "choice": [-1, 2**64 - 1], "logprobs": [-1, 21, FAR],
    "min_p": [NAN, -1.0, 1.0], "min_tokens": [-1, FAR], "repetition_penalty": [NAN, 0.0, 1e-320, 1e-39, INF],
    "presence_penalty": [NAN, -INF], "frequency_penalty": [NAN, INF],
    "logit_bias": [{-1: 1.0}, {-VOCAB - 1: 1.0}, {-(2**63): 0.0}, {FAR: 1.0}, {5: NAN}, {5: -INF}],
    "stop_token_ids": [[-1], [-VOCAB - 1], [2**64 - 1], [1] * 129], "prompt_logprobs": [-1, 21],
    "grammar": ["x", "{}", "x" * 70_000],
}  # fmt: skip
ASKS: dict[str, list[Any]] = {
    "prompt": [b"", b"\1\2\3", pack_tokens([VOCAB]), pack_tokens([1] * 5000)], "attempt": [-1, FAR],
    "emitted": [b"\1", pack_tokens([2**32 - 1]), pack_tokens([1] * 3000)], "salt": [b"x" * 100_000],
    "tenant": ["x" * 1000, "\0", "../..", "é" * 200], "retain_s": [NAN, INF, -1.0, 1e300],
    "priority": [-(2**63), 2**64 - 1], "waited_s": [NAN, INF, -1.0],
}  # fmt: skip
REFUSED = {"logit_bias": 6, "stop_token_ids": 4, "repetition_penalty": 5, "prompt": 4, "min_p": 2}
"""How many of these are refused with a reason; others may be answered."""


class Overflowing(FakeModel):
    """Has no numbers after one token."""

    def forward(self, batch: Batch, kv: Mapping[str, Tensor]) -> Tensor:
        logits = super().forward(batch, kv)
        after = batch.token_ids[batch.logits_rows] == OVERFLOWS
        return torch.where(after[:, None], torch.full_like(logits, NAN), logits)


@pytest.fixture
def house() -> Iterator[Harness]:
    house = Harness(Overflowing(), FakeStore())
    house.start()
    yield house
    house.check_books()
    house.stop()


def said(house: Harness, name: str, value: Any, number: int) -> Answer:
    """The answer to a request one of whose fields has this value, as it comes out of its frame."""
    sampling: dict[str, Any] = {"max_tokens": 4, "min_p": 0.1}
    ask: dict[str, Any] = {"id": f"{name}{number}", "attempt": 1, "prompt": pack_tokens(PROMPT)}
    (sampling if name in SAMPLINGS else ask)[name] = value
    whole = Generate(sampling=Sampling(**sampling), **ask)
    told = TO_WORKER.decode(TO_WORKER.encode(whole)[12:])
    assert isinstance(told, Generate)
    key = RequestKey(1, told.id, told.attempt)
    house.answers[key] = Answer()
    house.parts.inbox.put(Submit(key, told))
    return house.wait(key)


def test_whatever_a_front_end_asks_the_engine_goes_on(house: Harness) -> None:
    expected = house.ask(PROMPT).tokens
    for name, values in (SAMPLINGS | ASKS).items():
        answers = [said(house, name, value, number) for number, value in enumerate(values)]
        errors = [answer.finished.error for answer in answers if answer.finished and answer.finished.error]
        assert len(errors) >= REFUSED.get(name, 0), (name, errors)
        assert house.ask(PROMPT).tokens == expected, name


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0}, {"temperature": 1.0, "min_p": 0.1}, {"prompt_logprobs": 2}])
def test_a_model_that_overflows_ends_that_request_and_no_other(house: Harness, how: dict[str, Any]) -> None:
    alone = house.ask(PROMPT, 8, **how)
    keys = [house.submit(PROMPT, 8, **how)]
    keys.append(house.submit([*PROMPT, OVERFLOWS, *PROMPT[: 3 * bool("prompt_logprobs" in how)]], 8, **how))
    keys.append(house.submit(PROMPT, 8, **how))
    first, broken, last = map(house.wait, keys)
    assert broken.finished is not None and broken.finished.error.startswith(NO_NUMBER) and not broken.tokens
    assert first.tokens == last.tokens == alone.tokens
    assert first.scores == last.scores == alone.scores
