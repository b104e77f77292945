"""What the scheduler hands out: limits it keeps, and the plan of one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Limits:
    """Caps of one worker. `batch_tokens` is what one step feeds at most, decode and prefill together;
    `prefill_tokens` what it feeds of one prompt (0: all that is left), so that a short one isn't kept by a long one;
    `fresh_tokens` what it feeds of all `fresh` requests, whose every position has a row of logits.

    A request of priority p stands where one of priority 0 would that came p * `ageing_s` later: whoever waits grows
    more urgent, and nobody is overtaken by those who come later than that.
    """

    batch_tokens: int = 512
    running: int = 16
    waiting: int = 256
    prefill_tokens: int = 0
    fresh_tokens: int = 64
    ageing_s: float = 10.0

    def __post_init__(self) -> None:
        assert self.running > 0 and self.waiting > 0, self
        assert self.prefill_tokens >= 0 and self.fresh_tokens > 0 and self.ageing_s >= 0, self
        # Every running request can decode in every step, so nobody's decoding waits for a prefill.
        assert self.batch_tokens >= self.running, self


@dataclass(frozen=True, slots=True)
class Work:
    """Feed tokens [start, start + count) of one request in this step."""

    request: Request
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def samples(self) -> bool:
        """Whether the step reaches the last known token, so that the next one can be drawn."""
        return self.end == len(self.request.tokens)

    @property
    def scored(self) -> range:
        """Positions of a `fresh` prompt in this step whose logits say how likely the next token of the prompt was."""
        return range(self.start, min(self.end, self.request.prompt_tokens - 1)) if self.request.fresh else range(0)


@dataclass(slots=True)
class Plan:
    """One step. `loads` were admitted and wait for the store; `started` became runnable by this plan.

    `draining` says that somebody lacks blocks which only copies to the store still hold; `blocked` that
    somebody who holds blocks could not go on.
    """

    budget: int
    fresh_budget: int
    works: list[Work] = field(default_factory=list)
    loads: list[Request] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    draining: bool = False
    blocked: bool = False

    def add(self, request: Request, count: int) -> None:
        """Feed the next `count` tokens of `request`."""
        assert 0 < count <= min(self.budget, request.remaining), (
            count,
            self.budget,
            request.remaining,
        )
        self.works.append(Work(request, request.computed, count))
        self.budget -= count
        self.fresh_budget -= count if request.fresh else 0

    def includes(self, request: Request) -> bool:
        """Whether `request` has work in this step."""
        return any(work.request is request for work in self.works)
