"""What a prefix cache must answer, from the sequence of requests alone: the oracle of exact `cached_tokens`."""

from __future__ import annotations

from dataclasses import dataclass, field

UNIT = 16


def common_prefix(left: list[int], right: list[int]) -> int:
    """Tokens that two sequences share from the start."""
    for at, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return at
    return min(len(left), len(right))


@dataclass
class PrefixOracle:
    """Remembers everything that was computed. Nothing is ever evicted in these tests, and every group is
    stored for every position, so the hit is the longest common prefix in whole units."""

    sequences: list[list[int]] = field(default_factory=list)

    def cached(self, prompt: list[int]) -> int:
        """Tokens of `prompt` that are stored; at least one token is always computed."""
        best = max((common_prefix(known, prompt) for known in self.sequences), default=0)
        return min(best // UNIT * UNIT, (len(prompt) - 1) // UNIT * UNIT)

    def computed(self, prompt: list[int], output: list[int]) -> None:
        """A request is done: KV exists for all but its last token, and is kept in whole units."""
        fed = (prompt + output)[:-1]
        self.sequences.append(fed[: len(fed) // UNIT * UNIT])
