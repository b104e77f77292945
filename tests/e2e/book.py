"""What a mixed load asks, and what must be answered: written down before anything is killed.

Greedy answers are transformers'. Sampled, penalised and guided ones are those of a worker of ours without any store,
asked one after the other: what caches, batches, moves and deaths must not change. Any prefix of an answer is the answer
to the same request with a smaller `max_tokens`; and a prompt that goes on with a piece of its greedy or sampled
answer has the rest of it as its own, since random numbers depend on the position alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from forebay.testing.cluster import Cluster
from tests.e2e.reference import greedy_reference

VOCAB, LENGTH = 500, 64
KINDS = ("greedy", "greedy", "sampled", "penalised", "guided")
REGEX = "(ab|cd|[0-9]){4,30}"


@dataclass(frozen=True)
class Entry:
    """One request and its answer. `goes_on`: a piece of the answer may be made part of the prompt."""

    kind: str
    prompt: list[int]
    settings: dict[str, Any]
    answer: list[int]

    @property
    def goes_on(self) -> bool:
        return self.kind in ("greedy", "sampled")


@dataclass
class Book:
    """All entries."""

    entries: list[Entry] = field(default_factory=list)

    def draw(self, rng: random.Random) -> Entry:
        """One of them, perhaps a later turn of it."""
        entry = rng.choice(self.entries)
        if not entry.goes_on or rng.random() < 0.5:
            return entry
        at = rng.randrange(1, len(entry.answer) - 4)
        return Entry(entry.kind, entry.prompt + entry.answer[:at], entry.settings, entry.answer[at:])


def settings_of(kind: str, rng: random.Random) -> dict[str, Any]:
    """What a request of this kind says of its sampling."""
    match kind:
        case "sampled":
            return {"temperature": 0.9, "top_k": 40, "min_p": 0.01, "seed": rng.randrange(1 << 30)}
        case "penalised":
            return {
                "temperature": 0.7, "seed": rng.randrange(1 << 30), "repetition_penalty": 1.2,
                "frequency_penalty": 0.2, "presence_penalty": 0.1, "logit_bias": {"9": -50},
            }  # fmt: skip
        case "guided":
            return {"structured_outputs": {"regex": REGEX}, "ignore_eos": False}
    return {}


def write_book(cluster: Cluster, quiet: str, rng: random.Random, count: int, *, guided: bool) -> Book:
    """`count` entries; `quiet` is the front end of a worker without a store."""
    bases = [[rng.randrange(16, VOCAB) for _ in range(length)] for length in (40, 100, 180)]
    kinds = [kind for kind in KINDS if guided or kind != "guided"]
    drafts = []
    for number in range(count):
        base = rng.choice(bases)
        prompt = base[: rng.randrange(1, len(base))] + [rng.randrange(16, VOCAB) for _ in range(rng.randrange(1, 40))]
        kind = kinds[number % len(kinds)]
        drafts.append((kind, prompt, settings_of(kind, rng)))
    greedy = greedy_reference(cluster.model, [prompt for kind, prompt, _ in drafts if kind == "greedy"], LENGTH)
    book, told = Book(), iter(greedy)
    for kind, prompt, settings in drafts:
        ours = kind != "greedy"
        answer = cluster.complete(quiet, prompt, LENGTH, **settings).token_ids if ours else next(told)
        book.entries.append(Entry(kind, prompt, settings, answer))
    return book
