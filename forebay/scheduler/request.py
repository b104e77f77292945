"""What the scheduler knows of one request. A request's state is its tokens: all else can be dropped."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum


class RequestState(Enum):
    """WAITING holds no blocks; LOADING and RUNNING do; a FINISHED one may until its load has ended. LOADING waits for
    its load; one with a `cut` runs as well while the rest is being loaded."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence that is being generated.

    `tokens` are all that are known (prompt, then output); the KV of the first `computed` of them is on the
    device. A request is due for sampling when all known tokens have been fed. A smaller `priority` goes
    first, but who has waited longer gains on it (see `Limits.ageing_s`). A `fresh` one takes nothing from any
    cache: the logits of its every position are wanted, so every position is computed.

    While `loading`, somebody may still write into its blocks: they stay. One with a `cut` is computed from its front
    while it is loaded from its back, and asks before each step how far it may go (`Memory.claim`). `step_tokens` is the
    most that one step may feed of it (0: no limit of its own); its memory sets it. `most` is how many tokens it can
    come to have, output included.
    """

    key: Hashable
    tokens: list[int]
    prompt_tokens: int
    priority: int = 0
    fresh: bool = False
    cut: bool = False
    loading: bool = False
    standing: float = 0.0
    order: int = -1
    computed: int = 0
    step_tokens: int = 0
    most: int = 0
    state: RequestState = field(default=RequestState.WAITING)

    def __post_init__(self) -> None:
        assert 0 < self.prompt_tokens <= len(self.tokens), (self.prompt_tokens, len(self.tokens))
        self.most = max(self.most, len(self.tokens))

    @property
    def rank(self) -> tuple[float, int]:
        """Place in every queue: smaller goes first. `standing` and `order` are given at submission, and kept: with
        time all that wait age alike, so nothing is ever sorted anew."""
        return (self.standing, self.order)

    @property
    def remaining(self) -> int:
        """Known tokens that have not been fed yet."""
        return len(self.tokens) - self.computed
