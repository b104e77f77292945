"""Dynamo's RadixTree under the load of `benchmarks.index`; run by it in an environment that has ai-dynamo-runtime.

    python -P index_dynamo.py BLOCKS OWNERS LENGTH LOOKUPS
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

EVENT = 64


def main() -> None:
    """Print one JSON object."""
    import importlib

    # By name: the environment that checks types doesn't have it.
    tree_class = importlib.import_module("dynamo.llm").RadixTree

    blocks, owners, length, count = map(int, sys.argv[1:])
    rng = random.Random(7)
    keys = [rng.getrandbits(62) for _ in range(blocks // length * length)]
    payloads: list[tuple[int, bytes]] = []
    for at in range(0, len(keys), EVENT):
        payloads.append((at // length % owners, _event(keys, at, length, len(payloads))))
    before = _resident()
    tree = tree_class()
    started, began = time.perf_counter(), time.process_time()
    for owner, payload in payloads:
        tree.apply_event(owner, payload)
    tree.find_matches(keys[-length:])  # the tree has a thread of its own: this waits for it
    took, busy = time.perf_counter() - started, time.process_time() - began
    grown = (_resident() - before) / len(keys)
    times = []
    for _ in range(count):
        at = rng.randrange(len(keys) // length) * length
        prompt = keys[at : at + length]
        begun = time.perf_counter()
        tree.find_matches(prompt)
        times.append(time.perf_counter() - begun)
    times.sort()
    told = {"stored": len(keys) / took, "stored_cpu": len(keys) / busy, "rss": grown}
    print(json.dumps(told | {"p50": times[count // 2], "p99": times[count * 99 // 100]}))


def _event(keys: list[int], at: int, length: int, number: int) -> bytes:
    stored: dict[str, Any] = {
        "parent_hash": keys[at - 1] if at % length else None,
        "blocks": [{"block_hash": key, "tokens_hash": key} for key in keys[at : at + EVENT]],
    }
    return json.dumps({"event_id": number, "data": {"stored": stored}}).encode()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


if __name__ == "__main__":
    main()
