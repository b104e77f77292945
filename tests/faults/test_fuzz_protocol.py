"""The control protocol under mutated frames, in the short form. A million: `python -m tests.faults.fuzz_protocol`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from forebay.ipc.framing import HEAD_BYTES
from forebay.kvstore.protocol import REQUESTS, Commit, GetStats, Lookup, Reserve
from tests.faults.fuzz_protocol import Mutator, form_of, fuzz

FRAMES = int(os.environ.get("FOREBAY_FUZZ_FRAMES", "20000"))


def test_mutated_frames_cost_their_senders_connection_at_most(tmp_path: Path) -> None:
    outcome = fuzz(tmp_path, FRAMES, 7, sys.stderr)
    print("\n".join(outcome.lines()))
    assert outcome.frames == FRAMES
    assert FRAMES / 2 < outcome.requests < FRAMES, "most are requests by their form, so that the store's core sees them"
    for kind in ("Found", "Reserved", "Committed", "Registered", "Refused", "Rows", "Stats"):
        assert outcome.counts[f"reply {kind}"] > 0, kind


def test_the_same_seed_gives_the_same_frames_and_all_three_forms() -> None:
    honest = [
        Lookup(rid=1, namespace=b"n" * 32, root=b"r" * 32, tokens=b"t" * 128, keys=b"k" * 32, limit=16),
        Reserve(rid=2, namespace=b"n" * 32, tenant="", chunks=[]), Commit(rid=3, chunks=[]), GetStats(rid=4),
    ]  # fmt: skip
    bodies = [REQUESTS.encode(message)[HEAD_BYTES:] for message in honest]
    frames = [mutator.next() for mutator in (Mutator(bodies, 3), Mutator(bodies, 3)) for _ in range(2000)]
    assert frames[:2000] == frames[2000:]
    assert {form_of(data) for data in frames} == {"request", "garbage", "beginning"}
