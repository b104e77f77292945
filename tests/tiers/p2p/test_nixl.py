"""NIXL where it is installed: another process's pool is read straight into ours."""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest

from forebay.testing.standstill import pause, resume
from tests.kvstore.support import CHUNK
from tests.tiers.p2p.conftest import MakeStore
from tests.tiers.p2p.stores import TOKENS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu12") is None, reason="takes NIXL: pip install forebay[p2p]"
)
NIXL = 'bulk = "nixl"'


def test_memory_that_is_granted_later_is_read_too(make_store: MakeStore) -> None:
    a, b = make_store("a", memory="256MiB"), make_store("b")
    a.begin(a.tier(more=NIXL))
    b.begin(b.tier(a.peer, NIXL))
    a.serving()
    b.sees("a")
    a.until_tier(lambda v: v["nixl_epoch"] == 128)
    b.until_tier(lambda v: v["nixl_peer_epoch_max"] == 128)
    a.fill(TOKENS)
    assert b.lookup(TOKENS).hit == len(TOKENS)
    assert b.value("loads_by_nixl") == b.value("loads_ok") > 0


def test_chunks_are_read_by_nixl_and_by_frames_where_the_peer_has_none(make_store: MakeStore) -> None:
    a, b, c = make_store("a"), make_store("b"), make_store("c")
    a.begin(a.tier(more=NIXL))
    c.begin(c.tier(more='bulk = "frames"'))
    b.begin(b.tier(f"{a.peer}, {c.peer}", NIXL))
    a.fill_when_ready(TOKENS)
    c.fill_when_ready([7] * (2 * CHUNK))
    b.sees("a", "c")
    a.until_tier(lambda v: v["nixl_epoch"] == 8)
    b.until_tier(lambda v: v["nixl_peer_epoch_max"] == 8)
    found = b.lookup(TOKENS)
    assert (found.hit, found.from_tier) == (len(TOKENS), {"p2p": len(TOKENS)})
    values = b.until_tier(lambda v: v["loads_running"] == 0)
    assert values["loads_by_nixl"] == values["loads_ok"] > 0
    assert b.lookup([7] * (2 * CHUNK)).hit == 2 * CHUNK
    assert b.value("loads_by_frames") > 0


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_source_that_dies_or_hangs_is_a_miss_within_the_deadline(make_store: MakeStore, sign: signal.Signals) -> None:
    a, b = make_store("a"), make_store("b")
    a.begin(a.tier(more=NIXL))
    b.begin(b.tier(a.peer, NIXL + '\nstall_s = "300ms"'))
    a.fill_when_ready(TOKENS)
    b.sees("a")
    b.until_tier(lambda v: v["nixl_peers"] == 1)
    assert b.lookup(TOKENS[:CHUNK]).hit == CHUNK
    pid = a.tier_pid
    pause(pid) if sign == signal.SIGSTOP else os.kill(pid, sign)
    try:
        assert b.lookup(TOKENS, deadline_ms=2000).hit == CHUNK
    finally:
        if sign == signal.SIGSTOP:
            resume(pid)
    b.until(lambda v: b.lookup(TOKENS).hit == len(TOKENS), 30)
