"""Prompts that share prefixes, and how answers are compared: by logprobs, since a random model's text says little."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from tests.vllm.servers import Reply

TOLERANCE = 1e-4
UNIT = 16
Prompt = tuple[int, ...]


def sharing(count: int, block_tokens: int = 32, seed: int = 1) -> list[Prompt]:
    """Prompts of which ten at a time begin alike. The longest prefix that leaves a token is the same in units of 16 and
    in blocks, so that a hit of the store and one of the device are equally long."""
    rng = random.Random(seed)
    prompts: list[Prompt] = []
    while len(prompts) < count:
        if len(prompts) % 10 == 0:
            front = tuple(rng.randrange(4, 500) for _ in range(rng.randrange(40, 220)))
        whole = rng.randrange(3, 9) * block_tokens + rng.randrange(1, UNIT + 1)
        rest = max(whole - len(front), 0)
        if rest:
            prompts.append((*front, *(rng.randrange(4, 500) for _ in range(rest))))
    return prompts


def longest_hit(prompt: Sequence[int], unit: int = UNIT) -> int:
    """The most of a prompt that can be found, if one token is left to compute."""
    return (len(prompt) - 1) // unit * unit


def distance(one: Reply, other: Reply) -> float:
    """Between the logprobs of the first position: the largest difference of what both name. Later positions may follow
    other tokens."""
    first, second = one.logprobs[0], other.logprobs[0]
    both = first.keys() & second.keys()
    assert len(both) >= len(first) - 1, (first, second)
    return max(abs(first[token] - second[token]) for token in both)


def salted(prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, str]]:
    """Each with a salt of its own: nothing is found for any of them."""
    yield from ((prompt, f"cold {index}") for index, prompt in enumerate(prompts))
