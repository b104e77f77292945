"""Which chunks a step's requests have chosen rows of, and which of those are in no memory. For the rank that schedules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from forebay.kernels.batch import BLOCK_TOKENS
from forebay.workers.hot.cold import ColdRows


@dataclass(slots=True)
class Named:
    """Of one request: `chunks`, by position in the prompt, and those `missing` that have a row which is nowhere."""

    chunks: dict[int, None] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)


class Naming:
    """`colds` are the hot requests of a step, by their places in it, with the chunks that tiers have of each. Of who
    can't lack anything, the choice of the `last` layer that chooses tells enough."""

    def __init__(self, colds: Mapping[int, ColdRows | None], chunk_tokens: int, last: int) -> None:
        self.named = {at: Named() for at in colds}
        self._colds, self._chunk_tokens, self._last = colds, chunk_tokens, last

    def note(self, leader: int, at: int, positions: Tensor, resident: Tensor, host: Tensor) -> None:
        """A layer has chosen `positions` int64 [q, K] for a request, whose pages are at `resident` and `host` int64
        [pages]; -1 for none."""
        cold, named = self._colds[at], self.named[at]
        watched = cold is not None and cold.watched
        if not watched and leader != self._last:
            return
        pages = (positions[positions >= 0] // BLOCK_TOKENS).unique()
        named.chunks |= dict.fromkeys((pages * BLOCK_TOKENS // self._chunk_tokens).tolist())
        if watched:
            nowhere = pages[(resident[pages] < 0) & (host[pages] < 0)]
            named.missing.update((nowhere * BLOCK_TOKENS // self._chunk_tokens).tolist())

    def comes(self, at: int) -> bool:
        """Is all that a request lacks in tiers?"""
        cold, missing = self._colds[at], self.named[at].missing
        return cold is not None and bool(missing) and cold.cold.issuperset(missing)
