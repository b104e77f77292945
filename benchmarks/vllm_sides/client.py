"""What a client sees of a request, and what its server spent on it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from benchmarks.vllm_sides.sides import Side


@dataclass(frozen=True)
class Seen:
    """One streamed request: seconds to its first token and in all, tokens that were found, and CPU seconds of the
    server's processes if nothing else was asked meanwhile."""

    first_s: float
    all_s: float
    prompt_tokens: int
    cached_tokens: int
    token_ids: tuple[int, ...]
    cpu_s: float = 0.0


def ask(side: Side, prompt: Sequence[int], tokens: int = 1) -> Seen:
    """One greedy completion of token ids."""
    body = {
        "model": "m", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    first, ids, usage = 0.0, list[int](), dict[str, Any]()
    cpu, start = side.cpu_s(), time.perf_counter()
    with side.client.stream("POST", f"{side.url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if event["choices"]:
                first = first or time.perf_counter() - start
                ids += event["choices"][0].get("token_ids") or []
            usage = event.get("usage") or usage
    took = time.perf_counter() - start
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Seen(first, took, usage["prompt_tokens"], cached, tuple(ids), side.cpu_s() - cpu)


def at_once(side: Side, prompts: Sequence[Sequence[int]], tokens: int, clients: int) -> list[Seen]:
    """Requests by so many clients at a time, in order."""
    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(lambda prompt: ask(side, prompt, tokens), prompts))


def random_prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    """Prompts that share nothing."""
    rng = random.Random(seed)
    return [[rng.randrange(1000, 200_000) for _ in range(tokens)] for _ in range(count)]
