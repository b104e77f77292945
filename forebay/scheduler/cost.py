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

import numpy as np
import numpy.typing as npt

from forebay.scheduler.fleet import Fleet, Numbers, Seconds
from forebay.scheduler.reach import Reach


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
    seconds: Seconds = ((end - begin) + (np.square(end) - np.square(begin)) / (2 * fleet.attention)) * fleet.prefill_s
    return seconds


def estimate(
    prompt_tokens: int, reach: Reach, fleet: Fleet, wait_s: Seconds, link_s: Seconds, decoding: Numbers
) -> Estimate:
    """`wait_s` and `link_s` are how long each worker's device and link are taken already; `decoding` how many streams
    it is producing."""
    slower = 1 + fleet.decode_slows * decoding
    here = _candidate(prompt_tokens, reach.device, reach.near, reach.load_s, fleet, wait_s, link_s, slower)
    if not (reach.far > reach.near).any():
        return here
    moved_s = reach.load_s + (reach.far - reach.near) * fleet.move_s
    there = _candidate(prompt_tokens, reach.device, reach.far, moved_s, fleet, wait_s, link_s, slower)
    moves = (reach.far > reach.near) & (there.ttft_s < here.ttft_s)
    return Estimate(
        wait_s,
        np.where(moves, there.load_s, here.load_s),
        np.where(moves, there.cut_s, here.cut_s),
        np.where(moves, there.compute_s, here.compute_s),
        np.where(moves, there.ttft_s, here.ttft_s),
        np.where(moves, there.work_s, here.work_s),
        moves,
        np.where(moves, there.cached, here.cached),
    )


def _candidate(
    prompt_tokens: int, device: Numbers, end: Numbers, load_s: Seconds, fleet: Fleet, wait_s: Seconds,
    link_s: Seconds, slower: Seconds,
) -> Estimate:  # fmt: skip
    loaded = end > device
    load_s = np.where(loaded, load_s + fleet.latency_s, 0.0)
    prefix_s = prefill_seconds(device, end, fleet) * slower
    rest_s = prefill_seconds(end, prompt_tokens, fleet) * slower
    # What is still to come of the load when the device is free, and as much of the computation that it stands for.
    left_s = np.clip(np.where(loaded, link_s, 0.0) + load_s - wait_s, 0.0, None)
    share = np.minimum(1.0, left_s / np.maximum(load_s, 1e-12))
    stands_for = prefix_s * share
    both = np.where(loaded & (left_s > 0), stands_for * left_s / np.maximum(stands_for + left_s, 1e-12), 0.0)
    cut_s = np.where(fleet.overlaps, both, np.minimum(left_s, prefix_s))
    # Of the prefix the device computes what the meeting point leaves to it.
    computed_share = cut_s / np.maximum(prefix_s, 1e-12)
    computed_share = np.where(fleet.overlaps, computed_share, np.where(left_s < prefix_s, 0.0, 1.0)) * loaded
    cached = end - ((end - device) * np.clip(computed_share, 0.0, 1.0)).astype(np.int64)
    work_s = rest_s + prefix_s * np.clip(computed_share, 0.0, 1.0)
    ttft_s = wait_s + cut_s + rest_s
    return Estimate(wait_s, load_s, cut_s, rest_s, ttft_s, work_s, np.zeros(len(fleet), np.bool_), cached)
