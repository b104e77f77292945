"""A decision, term by term, for people and programs."""

from __future__ import annotations

from typing import Any

from forebay.router.router import Router
from forebay.scheduler.routing import Decision


def explained(decision: Decision, router: Router, took_s: float) -> dict[str, Any]:
    """JSON of a decision: one row a candidate, in seconds and tokens."""
    reach, costs = decision.reach, decision.estimate
    fleet = router.routing.fleet
    rows = []
    for number, upstream in enumerate(router.upstreams.all):
        source = int(reach.source[number])
        rows.append(
            {
                "worker": upstream.backend.name, "up": upstream.up, "draining": upstream.draining,
                "in_flight": int(router.routing.load.requests[number]),
                "device_tokens": int(reach.device[number]), "near_tokens": int(reach.near[number]),
                "far_tokens": int(reach.far[number]), "far_from": None if source < 0 else fleet.stores[source],
                "wait_s": float(costs.wait_s[number]), "load_s": float(costs.load_s[number]),
                "cut_s": float(costs.cut_s[number]), "compute_s": float(costs.compute_s[number]),
                "ttft_s": float(costs.ttft_s[number]), "cached_tokens": int(costs.cached[number]),
                "moves": bool(costs.moves[number]),
            }
        )  # fmt: skip
    return {
        "worker": router.upstreams.all[decision.worker].backend.name, "reason": decision.reason,
        "policy": router.routing.policy.name, "prompt_tokens": decision.prompt.length,
        "tokenised": decision.prompt.tokens is not None, "cached_tokens": decision.cached,
        "move_from": decision.source, "took_ms": 1000 * took_s, "candidates": rows,
    }  # fmt: skip
