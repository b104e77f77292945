"""What a client sees of a streamed completion, whoever serves it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from benchmarks.report import median

TIMEOUT_S = 900.0


class Serving(Protocol):
    """Where to ask, and for which model."""

    @property
    def url(self) -> str:
        """Without a path."""

    @property
    def model(self) -> str:
        """As the server calls it."""


@dataclass(frozen=True)
class Seen:
    """Seconds from sending to the first and to the last token, and how many tokens there were."""

    first_s: float
    last_s: float
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    token_ids: tuple[int, ...] = ()

    @property
    def tokens_s(self) -> float:
        """Tokens a second after the first one."""
        return (self.tokens - 1) / max(self.last_s - self.first_s, 1e-9)


def ask(server: Serving, prompt: Sequence[int], tokens: int, **more: Any) -> Seen:
    """One greedy completion of token ids. Raises AssertionError if it is shorter than asked for."""
    body = {
        "model": server.model, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, **more,
    }  # fmt: skip
    first = last = 0.0
    ids, usage = list[int](), dict[str, Any]()
    start = time.perf_counter()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S, trust_env=False) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            if event.get("choices"):
                last = time.perf_counter() - start
                first = first or last
                ids += event["choices"][0].get("token_ids") or []
            usage = event.get("usage") or usage
    assert usage["completion_tokens"] == tokens, usage
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Seen(first, last, tokens, usage["prompt_tokens"], cached, tuple(ids))


def prefill_tokens_s(server: Serving, prompts: Sequence[Sequence[int]]) -> float:
    """Prompt tokens a second until the first answer token; the median over prompts, one after the other."""
    return median([len(prompt) / ask(server, prompt, 1).first_s for prompt in prompts])


def decode_tokens_s(server: Serving, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Tokens a second of all streams together, all prompts at once: as many times what the median stream comes to
    after its first token."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        seen = list(pool.map(lambda prompt: ask(server, prompt, tokens), prompts))
    return len(prompts) * median([one.tokens_s for one in seen])


def fresh_prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    """Prompts of random ids that share nothing; ids that every vocabulary of the compared models has."""
    rng = random.Random(seed)
    return [[rng.randrange(1000, 200_000) for _ in range(tokens)] for _ in range(count)]
