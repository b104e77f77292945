"""What changes the logits of one request before a token is chosen: grammar, bias, minimum length, penalties.

In this order, which is vLLM's. All state follows from the ids of prompt and output, so a successor of a dead worker,
which is given both, goes on with the same state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from forebay.workers.guiding import Guide
from forebay.workers.protocol import Sampling

Logits = NDArray[np.float32] | NDArray[np.float64]
Ids = NDArray[np.int64]


class Adjustment:
    """The adjustments of one request. Owned by the engine's thread.

    `ends` are the tokens that end the answer; `emitted` are output tokens of earlier attempts.
    """

    def __init__(
        self, sampling: Sampling, prompt: Sequence[int], emitted: Sequence[int], ends: Iterable[int],
        guide: Guide | None = None,
    ) -> None:  # fmt: skip
        self.guide = guide
        self._sampling = sampling
        self._ends = np.array(sorted(ends), dtype=np.int64)
        self._bias_ids = np.array(list(sampling.logit_bias), dtype=np.int64)
        self._bias = np.array(list(sampling.logit_bias.values()), dtype=np.float64)
        repeats = sampling.repetition_penalty != 1
        self._prompt: Ids = np.unique(np.array(prompt, dtype=np.int64)) if repeats else np.zeros(0, dtype=np.int64)
        self._counts: dict[int, int] = {}
        self._emitted = 0
        for token in emitted:
            self._count(token)

    def append(self, token: int) -> None:
        """One more output token."""
        self._count(token)
        if self.guide is not None:
            self.guide.accept(token)

    def apply(self, logits: Logits) -> Logits:
        """Adjusted logits [vocab], a copy. A token that can't come has -inf; at least one can come."""
        row = logits.copy()
        if self.guide is not None:
            self.guide.mask(row)
        row[self._bias_ids] += self._bias.astype(row.dtype)
        self._keep_going(row)
        self._penalise(row)
        return row

    def _count(self, token: int) -> None:
        self._emitted += 1
        self._counts[token] = self._counts.get(token, 0) + 1

    def _keep_going(self, row: Logits) -> None:
        """No end before the minimum length, unless a grammar allows nothing else."""
        if self._emitted >= self._sampling.min_tokens or not len(self._ends):
            return
        ends = row[self._ends]
        row[self._ends] = -np.inf
        if not np.isfinite(row.max()):
            row[self._ends] = ends

    def _penalise(self, row: Logits) -> None:
        sampling = self._sampling
        output = np.fromiter(self._counts, dtype=np.int64, count=len(self._counts))
        if sampling.repetition_penalty != 1:
            seen = np.union1d(self._prompt, output)
            found = row[seen]
            row[seen] = np.where(found > 0, found / sampling.repetition_penalty, found * sampling.repetition_penalty)
        if (sampling.frequency_penalty or sampling.presence_penalty) and len(output):
            counts = np.fromiter(self._counts.values(), dtype=np.float64, count=len(self._counts))
            less = counts * sampling.frequency_penalty + sampling.presence_penalty
            row[output] -= less.astype(row.dtype)


def wanted(sampling: Sampling) -> bool:
    """Whether these parameters adjust logits at all; most requests' don't, and are sampled as they come."""
    return bool(
        sampling.grammar or sampling.logit_bias or sampling.min_tokens or sampling.repetition_penalty != 1
        or sampling.presence_penalty or sampling.frequency_penalty
    )  # fmt: skip
