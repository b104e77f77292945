"""A lookup that two threads share: who asks may lose interest, and then nobody else lets go of what was pinned."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from forebay.connectors.keys import Prefix
from forebay.kvstore.protocol import ChunkRead

HOST = "host"


@dataclass(frozen=True, slots=True)
class Answer:
    """`hit` tokens are pinned under `lease` (0: nothing is) of the store `boot`; `from_tier` as in `Found`."""

    boot: bytes
    lease: int
    hit: int
    chunks: tuple[ChunkRead, ...]
    from_tier: dict[str, int]

    def sources(self, first: int, last: int) -> dict[str, int]:
        """Tokens [first, last) by the tier that they came from; in all exactly so many."""
        left, found = last - first, {}
        for tier, tokens in sorted(self.from_tier.items()):
            if used := min(tokens, left):
                found[tier] = used
                left -= used
        return found | {HOST: left} if left else found


class Question:
    """`give` once, from the connection's thread; `take` or `drop` once, from the asker's."""

    def __init__(self, prefix: Prefix, tenant: str) -> None:
        self.prefix, self.tenant = prefix, tenant
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._answer: Answer | None = None
        self._dropped = False

    @property
    def answered(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> None:
        """Block until it is answered, but not longer."""
        self._event.wait(seconds)

    def give(self, answer: Answer | None) -> bool:
        """Answer; None: the store could not say. False: nobody wants it any more, and what it pins is the caller's."""
        with self._lock:
            if self._dropped:
                return False
            self._answer = answer
        self._event.set()
        return True

    def take(self) -> Answer | None:
        """The answer. It is the caller's from now on."""
        assert self.answered
        with self._lock:
            answer, self._answer = self._answer, None
            return answer

    def drop(self) -> Answer | None:
        """Never mind. An answer that had come already is the caller's to release."""
        with self._lock:
            self._dropped = True
            answer, self._answer = self._answer, None
            return answer
