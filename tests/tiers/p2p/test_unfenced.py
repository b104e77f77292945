"""A NIXL transfer that can't be revoked: nobody may call its slot free before this process is dead."""

from __future__ import annotations

import sys
import threading
import time
import types
from contextlib import closing
from typing import Any

import pytest

from forebay.testing.conformance import Pool, make_chunk
from forebay.tiers.base import ChunkId, LoadJob
from forebay.tiers.errors import TierFailed
from forebay.tiers.p2p import nixl
from forebay.tiers.p2p.errors import PeerLost, TooLate, Unfenced
from forebay.tiers.p2p.fetch import Fetcher, Wanted, Ways
from tests.tiers.p2p.rig import Asker, Host


class NeverDone:
    """An agent whose transfers go on for ever, as with a peer that was stopped."""

    def __init__(self, *_: Any) -> None:
        self.released = 0
        self.state = "PROC"

    def __getattr__(self, name: str) -> Any:
        return lambda *_: b"agent" if name == "get_agent_metadata" else None

    def transfer(self, handle: object) -> str:
        return self.state

    check_xfer_state = transfer

    def release_xfer_handle(self, handle: object) -> None:
        self.released += 1


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> nixl.NixlAgent:
    module = types.ModuleType("never_done")
    module.nixl_agent = NeverDone  # type: ignore[attr-defined]
    module.nixl_agent_config = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "never_done", module)
    monkeypatch.setattr(nixl, "MODULES", ("never_done",))
    return nixl.NixlAgent("me", loopback=False)


def test_a_transfer_that_goes_on_for_ever_is_given_up_in_time_and_said_to_be_dangerous(agent: nixl.NixlAgent) -> None:
    memory = memoryview(bytearray(1 << 20))
    began = time.monotonic()
    with pytest.raises(Unfenced):
        agent.read_soon("peer", 4096, memory, began + 0.1, 5.0).result(30)
    with pytest.raises(Unfenced):
        agent.read_soon("peer", 4096, memory, began + 60, 0.1).result(30)
    assert time.monotonic() - began < 20
    assert agent._agent.released == 2 == agent.counts["given_up"]
    with pytest.raises(TooLate):
        agent.read_soon("peer", 4096, memory, began, 0.1).result(30)
    agent._agent.state = "ERR"
    with pytest.raises(PeerLost):
        agent.read_soon("peer", 4096, memory, time.monotonic() + 5, 0.1).result(30)
    agent.close()


def test_such_a_job_has_no_result_and_the_process_ends(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch(self: Fetcher, wanted: Wanted, ways: Ways) -> None:
        raise Unfenced("a transfer was given up")

    chunk = make_chunk()
    with closing(Host("peer")) as host, closing(Asker(pool, host.address)) as asker:
        host.source.put(chunk)
        asker.sees("peer")
        monkeypatch.setattr(Fetcher, "fetch", fetch)
        asker.tier.submit_load(LoadJob(1, ChunkId(0, chunk.header.key), 0, 4096, len(chunk.payload), 5.0))
        until = time.monotonic() + 60
        while asker.tier._failure is None and time.monotonic() < until:
            time.sleep(0.005)
        with pytest.raises(TierFailed, match="given up"):
            asker.tier.get_finished_jobs()
        asker.tier.close()
        assert not asker.tier._finished, "the daemon tells it, once the process is dead"
        asker.tier._failure = None


def test_what_waits_for_one_peer_is_read_together_and_what_is_late_not_at_all(
    agent: nixl.NixlAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "BATCH_BYTES", 3 << 20)
    agent._agent.state = "DONE"
    begun: list[list[int]] = []
    monkeypatch.setattr(agent, "_begin", lambda peer, batch: begun.append([read.address for read in batch]))
    gate = threading.Event()
    agent.thread.submit(gate.wait)
    memory = memoryview(bytearray(1 << 20))
    due = time.monotonic() + 60
    asked = [agent.read_soon("peer", number, memory, due, 5.0) for number in range(4)]
    late = agent.read_soon("peer", 4, memory, time.monotonic(), 5.0)
    other = agent.read_soon("other", 5, memory, due, 5.0)
    unwanted = agent.read_soon("other", 6, memory, due, 5.0)
    unwanted.cancel()
    gate.set()
    for read in (*asked, other):
        read.result(30)
    with pytest.raises(TooLate):
        late.result(30)
    assert begun == [[0, 1, 2], [3], [5]] and agent.counts["transfers"] == 3
    agent.close()


def test_what_waits_when_it_is_closed_is_told(agent: nixl.NixlAgent) -> None:
    gate = threading.Event()
    agent.thread.submit(gate.wait)
    waiting = agent.read_soon("peer", 0, memoryview(bytearray(16)), time.monotonic() + 60, 5.0)
    agent.close()
    gate.set()
    later = [agent.read_soon("peer", 0, memoryview(bytearray(16)), time.monotonic() + 60, 5.0) for _ in range(2)]
    for read in (waiting, *later):
        with pytest.raises(PeerLost, match="closed"):
            read.result(30)
