"""What every worker has in hand, from the requests that were sent to it: nothing is polled, so nothing is stale.

Every request goes through `routed` and `ended`, whatever becomes of it, and most through `first_token` between.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from forebay.scheduler.fleet import Numbers, Seconds


@dataclass(slots=True)
class _Ticket:
    worker: int
    work_s: float
    tokens: int
    decoding: bool = False


@dataclass(frozen=True, slots=True)
class LoadStats:
    """Gauges."""

    in_flight: int
    most: int
    least: int
    max_in_flight: int


class Load:
    """In-flight requests of `workers` workers, at most `max_in_flight` (who asks for more sees `full`).

    `requests`, `decoding` and `tokens` (prompt tokens that wait to be computed) have one entry a worker.
    """

    def __init__(self, workers: int, *, max_in_flight: int = 1 << 16) -> None:
        self.max_in_flight = max_in_flight
        self.requests: Numbers = np.zeros(workers, np.int64)
        self.decoding: Numbers = np.zeros(workers, np.int64)
        self.tokens: Numbers = np.zeros(workers, np.int64)
        self._queued_s: Seconds = np.zeros(workers)
        self._head_s: Seconds = np.zeros(workers)
        self._since: Seconds = np.zeros(workers)
        self._link_until: Seconds = np.zeros(workers)
        self._queues: list[deque[int]] = [deque() for _ in range(workers)]
        self._tickets: dict[int, _Ticket] = {}
        self._next = 0

    @property
    def full(self) -> bool:
        """No more requests may be in flight."""
        return len(self._tickets) >= self.max_in_flight

    def wait_s(self, now: float) -> Seconds:
        """For each worker: the estimated work before it comes to a new request."""
        done = np.minimum(np.maximum(now - self._since, 0.0), self._head_s)
        return np.maximum(self._queued_s - done, 0.0)

    def link_s(self, now: float) -> Seconds:
        """For each worker: how long its link is taken by loads that were begun."""
        return np.maximum(self._link_until - now, 0.0)

    def routed(self, worker: int, now: float, *, work_s: float, load_s: float, tokens: int) -> int:
        """A request goes to `worker`; returns its ticket. It takes the device `work_s` and the link `load_s`."""
        assert not self.full, "nobody asked whether there is room"
        ticket, self._next = self._next, self._next + 1
        self._tickets[ticket] = _Ticket(worker, work_s, tokens)
        self.requests[worker] += 1
        self.tokens[worker] += tokens
        self._queued_s[worker] += work_s
        self._link_until[worker] = max(self._link_until[worker], now) + load_s
        self._queues[worker].append(ticket)
        if len(self._queues[worker]) == 1:
            self._head(worker, now)
        return ticket

    def first_token(self, ticket: int, now: float) -> None:
        """Its prompt is computed. A ticket that has ended changes nothing."""
        found = self._tickets.get(ticket)
        if found is not None and not found.decoding:
            found.decoding = True
            self._leave_queue(ticket, found, now)
            self.decoding[found.worker] += 1

    def ended(self, ticket: int, now: float) -> None:
        """It is over, well or not. Idempotent."""
        found = self._tickets.pop(ticket, None)
        if found is None:
            return
        if found.decoding:
            self.decoding[found.worker] -= 1
        else:
            self._leave_queue(ticket, found, now)
        self.requests[found.worker] -= 1

    def stats(self) -> LoadStats:
        """Present figures."""
        return LoadStats(len(self._tickets), int(self.requests.max()), int(self.requests.min()), self.max_in_flight)

    def _leave_queue(self, ticket: int, found: _Ticket, now: float) -> None:
        queue = self._queues[found.worker]
        was_head = queue[0] == ticket
        queue.remove(ticket)
        self.tokens[found.worker] -= found.tokens
        self._queued_s[found.worker] = max(0.0, self._queued_s[found.worker] - found.work_s) if queue else 0.0
        if was_head:
            self._head(found.worker, now)

    def _head(self, worker: int, now: float) -> None:
        queue = self._queues[worker]
        self._head_s[worker] = self._tickets[queue[0]].work_s if queue else 0.0
        self._since[worker] = now
