"""What the engine says to front ends, collected per connection and sent a step at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from forebay.workers.generation import RequestKey
from forebay.workers.protocol import (
    Finished,
    FinishReason,
    FromWorker,
    Outputs,
    PromptScores,
    Started,
    TokenOut,
    TokenScore,
)
from forebay.workers.sampling import Sampled

Batch = dict[int, list[FromWorker]]


class Outbox:
    """Used by the engine's thread; `send` takes what is due, by connection, and must not block."""

    def __init__(self, send: Callable[[Batch], None]) -> None:
        self._send = send
        self._tokens: dict[int, list[TokenOut]] = {}
        self._messages: Batch = {}

    def started(self, key: RequestKey, cached_tokens: int, cached: Mapping[str, int]) -> None:
        """The request's cached prefix is known."""
        self._add(key, Started(id=key.id, attempt=key.attempt, cached_tokens=cached_tokens, cached=dict(cached)))

    def token(self, key: RequestKey, index: int, chosen: Sampled) -> None:
        """One new token."""
        out = TokenOut(key.id, key.attempt, index, chosen.token, chosen.logprob, chosen.top)
        self._tokens.setdefault(key.connection, []).append(out)

    def scores(self, key: RequestKey, start: int, scores: list[TokenScore]) -> None:
        """Scores of the prompt's tokens from `start` on."""
        self._add(key, PromptScores(id=key.id, attempt=key.attempt, start=start, scores=scores))

    def finished(self, key: RequestKey, reason: FinishReason, error: str = "") -> None:
        """The request is over; its last tokens go first."""
        tokens = self._tokens.pop(key.connection, None)
        if tokens:
            self._add(key, Outputs(tokens=tokens))
        self._add(key, Finished(id=key.id, attempt=key.attempt, reason=reason, error=error))

    def flush(self) -> None:
        """Send everything."""
        for connection, tokens in self._tokens.items():
            self._messages.setdefault(connection, []).append(Outputs(tokens=tokens))
        self._tokens = {}
        if self._messages:
            batch, self._messages = self._messages, {}
            self._send(batch)

    def _add(self, key: RequestKey, message: FromWorker) -> None:
        self._messages.setdefault(key.connection, []).append(message)
