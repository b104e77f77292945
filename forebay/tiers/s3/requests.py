"""Every request goes through here: circuit breaker, retries from the budget, metrics, failures in our own words."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from forebay.tiers.s3.breaker import Breaker
from forebay.tiers.s3.budget import RetryBudget
from forebay.tiers.s3.complaints import complain
from forebay.tiers.s3.failures import Kind, RequestFailed, failure_of
from forebay.tiers.s3.metrics import RequestMetrics

T = TypeVar("T")

PAUSE_FIRST_S = 0.05
PAUSE_MAX_S = 2.0


@dataclass
class Requests:
    """Runs requests on the caller's thread. `jitter` is from 0 to 1; `sleep` blocks."""

    where: str
    breaker: Breaker
    budget: RetryBudget
    attempts: int
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = random.random
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    closing: bool = False
    """Nothing is tried again any more."""

    def run(self, operation: str, request: Callable[[], T], until: float | None = None) -> T:
        """What `request` returns. Tries again while the failure may pass, the budget has something left and `until`
        (on the clock) hasn't come. Raises RequestFailed; anything else is a mistake in here and passes through."""
        attempt = 1
        while True:
            try:
                return self._once(operation, request)
            except RequestFailed as failure:
                if attempt >= self.attempts or not failure.kind.passing or self.closing:
                    raise
                pause = min(PAUSE_MAX_S, PAUSE_FIRST_S * 2 ** (attempt - 1)) * (0.5 + self.jitter())
                if (until is not None and self.clock() + pause >= until) or not self.budget.take():
                    raise
            self.sleep(pause)
            attempt += 1

    def _once(self, operation: str, request: Callable[[], T]) -> T:
        if not self.breaker.admit():
            raise RequestFailed(Kind.OPEN, "the circuit is open: the service has failed again and again")
        began = self.clock()
        outcome = "ok"
        try:
            answer = request()
        except Exception as error:
            failure = failure_of(error)
            if failure is None:
                outcome = "given_up"  # whoever asked has lost interest: that says nothing about the service
                self.breaker.abandoned()
                raise
            outcome = failure.kind.value
            self._judge(operation, failure)
            raise failure from None  # what the library says may hold more than is anybody's business
        else:
            self.breaker.succeeded()
            self.budget.succeeded()
            return answer
        finally:
            self.metrics.request(operation, outcome, self.clock() - began)

    def _judge(self, operation: str, failure: RequestFailed) -> None:
        if failure.kind.answered:
            self.breaker.succeeded()
            return
        self.breaker.failed()
        complain(f"s3 {operation} {failure.kind.value}", "%s: %s failed: %s", self.where, operation, failure)

    def values(self) -> dict[str, float]:
        """Counters and gauges."""
        return {
            **self.metrics.values(),
            "retries": float(self.budget.taken), "retries_refused": float(self.budget.refused),
            "retry_budget_left": self.budget.left, "breaker_state": float(self.breaker.state),
            "breaker_opened": float(self.breaker.opened), "breaker_rejected": float(self.breaker.rejected),
        }  # fmt: skip
