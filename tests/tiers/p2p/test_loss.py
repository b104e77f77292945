"""Sources that die or hang, before a transfer and in the middle of one."""

from __future__ import annotations

import os
import signal
import time

import pytest

from forebay.testing.standstill import pause, resume
from tests.kvstore.support import CHUNK
from tests.tiers.p2p.conftest import MakeStore
from tests.tiers.p2p.stores import CHUNKS, TOKENS


def test_a_source_that_is_killed_is_a_miss_and_serves_again_when_it_is_back(make_store: MakeStore) -> None:
    a, b = make_store("a"), make_store("b")
    a.begin(a.tier())
    b.begin(b.tier(a.peer))
    a.fill_when_ready(TOKENS)
    b.sees("a")
    assert b.lookup(TOKENS[:CHUNK]).hit == CHUNK
    a.kill()
    assert b.lookup(TOKENS, deadline_ms=3000).hit == CHUNK
    a.start(a.tier())
    a.serving()
    b.sees("a")
    a.until(lambda v: v["host.readopted"] == CHUNKS)
    b.until(lambda v: b.lookup(TOKENS).hit == len(TOKENS))


def test_a_source_that_hangs_is_a_miss_within_the_deadline_and_soon_not_even_asked(make_store: MakeStore) -> None:
    a, b = make_store("a"), make_store("b")
    a.begin(a.tier())
    b.begin(b.tier(a.peer, 'ask_s = "200ms"'))
    a.fill_when_ready(TOKENS)
    b.sees("a")
    pid = a.tier_pid
    pause(pid)
    try:
        for serial in range(4):
            began = time.monotonic()
            assert b.lookup([*TOKENS[:CHUNK], *[serial] * CHUNK], deadline_ms=1000).hit == 0
            assert time.monotonic() - began < 10
        b.until_tier(lambda v: v["peers_up"] == 0)
    finally:
        resume(pid)
    b.sees("a")
    b.until(lambda v: b.lookup(TOKENS).hit == len(TOKENS))


@pytest.mark.parametrize(("bulk", "sign"), [("auto", signal.SIGSTOP), ("frames", signal.SIGKILL)])
def test_a_source_that_goes_in_the_middle_of_transfers_costs_the_rest_alone(
    make_store: MakeStore, bulk: str, sign: signal.Signals
) -> None:
    """Loads of many chunks are under way when it goes; what came is whole, what didn't is a miss, nothing is stuck."""
    long = list(range(1, 64 * CHUNK + 1))
    a, b = make_store("a"), make_store("b")
    a.begin(a.tier(more=f'bulk = "{bulk}"'))
    b.begin(b.tier(a.peer, f'bulk = "{bulk}"\nstall_s = "300ms"\nloads_at_once = 1'))
    a.fill_when_ready(long)
    b.sees("a")
    pid = a.tier_pid
    with b.looking_up(long, deadline_ms=4000) as answer:
        b.until(lambda v: v.get("tier.p2p.loads_ok", 0) >= 3)
        pause(pid) if sign == signal.SIGSTOP else os.kill(pid, sign)
        try:
            found = answer()
            hit = b.lookup(long, deadline_ms=0).hit
            assert found.hit <= hit < len(long) or hit == len(long)
            b.until_tier(lambda v: v["loads_running"] == 0 and v["load_queue_bytes"] == 0)
        finally:
            if sign == signal.SIGSTOP:
                resume(pid)
    a.until(lambda v: v.get("tier.p2p.source.connected", 0) == 1)
    b.sees("a")
    b.until(lambda v: b.lookup(long).hit == len(long))
