"""Prefill rates from what was measured: answers of requests that had a worker to themselves."""

from __future__ import annotations

from forebay.scheduler.fleet import Fleet

COMPUTED_MIN = 256
"""Shorter computations tell more of the way there and back than of the device."""
WEIGHT = 0.2
LEAP = 4.0
"""One measurement counts as at most so many times the present rate: a worker that was held up once, and is then shunned
for what was learned of it, would never have the chance to show that it is faster."""


def learn_prefill(fleet: Fleet, worker: int, prompt_tokens: int, cached: int, ttft_s: float) -> bool:
    """A prompt of which `cached` tokens weren't computed had its first token after `ttft_s`. Moves the worker's rate
    a little; returns whether it told anything. Loading, if there was some, counts as computing: a bound from above."""
    computed = prompt_tokens - cached
    if computed < COMPUTED_MIN or ttft_s <= 0:
        return False
    mean = (prompt_tokens + cached) / 2  # attention makes tokens dearer by where they stand
    units = computed * (1 + mean / float(fleet.attention[worker]))
    present = float(fleet.prefill_s[worker])
    measured = min(ttft_s / units, LEAP * present) if present > 0 else ttft_s / units
    fleet.prefill_s[worker] += WEIGHT * (measured - present)
    return True
