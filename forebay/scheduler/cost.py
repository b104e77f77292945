"""The estimated time to first token of a prompt at every worker, term by term.

    wait      what is queued at the worker before it
    load      [device, near) from its tiers; or [device, far), the rest moved from another store
    cut       the prefix [device, end of load) is computed from the front while it is loaded from the back, until
              the two meet: n tokens that take C to compute and L to load take C * L / (C + L)
    compute   the rest of the prompt

While a request waits, its loads go on, so a long queue hides them: what is left to load when its turn comes is
L - wait. Both candidates, computing where the prefix is and moving it to where there is time, are costed for every
worker, and the cheaper one counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.scheduler.fleet import Fleet, Numbers, Seconds
from forebay.scheduler.loops import compiled_loops
from forebay.scheduler.reach import Reach

_TINY = 1e-12
"""Instead of nothing, to divide by."""
CLEARLY = 1 - 1e-9
"""Nothing is moved for a rounding error."""


@dataclass(slots=True)
class Estimate:
    """Seconds, one entry a worker. `ttft_s` is wait + cut + compute of the better candidate; `moves` where that is
    to move the prefix; `work_s` what the worker's device will be busy for; `cached` tokens that it won't compute."""

    wait_s: Seconds
    load_s: Seconds
    cut_s: Seconds
    compute_s: Seconds
    ttft_s: Seconds
    work_s: Seconds
    moves: npt.NDArray[np.bool_]
    cached: Numbers


def prefill_seconds(begin: Numbers, end: Numbers | int, fleet: Fleet) -> Seconds:
    """What computing the tokens [begin, end) takes: attention makes later ones dearer."""
    tokens = end - begin
    seconds: Seconds = tokens * (1 + (end + begin) / (2 * fleet.attention)) * fleet.prefill_s
    return seconds


def estimate(
    prompt_tokens: int, reach: Reach, fleet: Fleet, wait_s: Seconds, link_s: Seconds, decoding: Numbers
) -> Estimate:
    """`wait_s` and `link_s` are how long each worker's device and link are taken already; `decoding` how many streams
    it is producing."""
    loops = compiled_loops()
    if loops is not None:
        return Estimate(
            wait_s,
            *loops.estimate(
                prompt_tokens, reach.device, reach.near, reach.far, reach.load_s, wait_s, link_s, decoding,
                fleet.attention, fleet.prefill_s, fleet.move_s, fleet.latency_s, fleet.decode_slows, fleet.overlaps,
            ),
        )  # fmt: skip
    slower = 1 + fleet.decode_slows * decoding
    beyond = reach.far - reach.near
    if not beyond.any():
        return _candidates(prompt_tokens, reach.device, reach.near, reach.load_s, fleet, wait_s, link_s, slower)
    # Both candidates at once, one a row: to compute where the prefix is, and to move it.
    ends, loads_s = np.stack([reach.near, reach.far]), np.stack([reach.load_s, reach.load_s + beyond * fleet.move_s])
    both = _candidates(prompt_tokens, reach.device, ends, loads_s, fleet, wait_s, link_s, slower)
    moves = both.ttft_s[1] < both.ttft_s[0] * CLEARLY

    def better(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        chosen: npt.NDArray[Any] = np.where(moves, rows[1], rows[0])
        return chosen

    return Estimate(
        wait_s, better(both.load_s), better(both.cut_s), better(both.compute_s), better(both.ttft_s),
        better(both.work_s), moves, better(both.cached),
    )  # fmt: skip


def _candidates(
    prompt_tokens: int, device: Numbers, end: Numbers, load_s: Seconds, fleet: Fleet, wait_s: Seconds,
    link_s: Seconds, slower: Seconds,
) -> Estimate:  # fmt: skip
    loaded = end > device
    load_s = (load_s + fleet.latency_s) * loaded
    prefix_s = prefill_seconds(device, end, fleet) * slower
    rest_s = prefill_seconds(end, prompt_tokens, fleet) * slower
    # What is still to come of the load when the device is free, and as much of the computation that it stands for.
    left_s = np.maximum(link_s * loaded + load_s - wait_s, 0.0)
    stands_for = prefix_s * np.minimum(left_s / np.maximum(load_s, _TINY), 1.0)
    cut_s = stands_for * left_s / np.maximum(stands_for + left_s, _TINY)
    # Of the prefix the device computes what the meeting point leaves to it.
    share = np.minimum(cut_s / np.maximum(prefix_s, _TINY), 1.0)
    if not fleet.all_overlap:
        cut_s = np.where(fleet.overlaps, cut_s, np.minimum(left_s, prefix_s))
        share = np.where(fleet.overlaps, share, loaded & (left_s >= prefix_s))
    cached = end - ((end - device) * share).astype(np.int64)
    ttft_s = wait_s + cut_s + rest_s
    return Estimate(
        wait_s, load_s, cut_s, rest_s, ttft_s, rest_s + prefix_s * share, np.zeros(len(fleet), np.bool_), cached
    )
