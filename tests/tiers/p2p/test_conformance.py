"""What every tier owes, of a p2p tier whose one peer is all that it has: stores are pushed there, loads pulled back.

The peer's own store stands in for what is behind every other tier; how it evicts, forgets and counts isn't this tier's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from forebay.testing.conformance import (
    QUEUE,
    Driver,
    Engine,
    InProcess,
    Made,
    MakeDriver,
    OwnProcess,
    Pool,
    TierConformance,
    drivers,
    make_chunk,
    numbered,
)
from forebay.tiers.host import TierHost
from forebay.tiers.messages import OptionValue
from forebay.tiers.p2p.tier import P2pTier
from tests.tiers.p2p.rig import NAMESPACES, NOWHERE, Host

PEERS = "the peer's store decides what it keeps, and for how long"


class P2pConformance(TierConformance):
    lacks = {  # noqa: RUF012
        "quota": PEERS, "eviction": PEERS, "forget": "what a peer has is the peer's to forget",
        "clear": "what a peer has is the peer's to clear", "told": "a peer doesn't tell what comes and goes there",
        "counts": "it keeps nothing that it could count",
    }  # fmt: skip
    bulk = "auto"

    @pytest.fixture
    def host(self) -> Iterator[Host]:
        made = Host("peer", bulk=self.bulk)
        yield made
        until = time.monotonic() + 60
        while (made.source.lent or made.source.rooms) and time.monotonic() < until:
            time.sleep(0.01)
        assert made.source.lent == 0 and not made.source.rooms, "nothing stays lent or reserved"
        made.close()

    def peer_options(self, host: Host) -> dict[str, OptionValue]:
        return {
            "store": NOWHERE, "peers": host.address, "push_to": "peer", "push_queue_bytes": QUEUE, "bulk": self.bulk,
            "hit_s": 0.0, "miss_s": 0.0, "stall_s": 5.0, "ask_s": 0.5,
        }  # fmt: skip

    def damage(self, driver: Driver, chunk: Made) -> None:
        self.the_host.source.chunks[chunk.id].payload[7] ^= 1

    @contextmanager
    def stalled(self, driver: Driver) -> Iterator[None]:
        self.the_host.source.gate.clear()
        try:
            yield
        finally:
            self.the_host.source.gate.set()


class TestP2pTier(P2pConformance):
    @pytest.fixture(params=["frames"])
    def make_driver(self, pool: Pool, host: Host, request: pytest.FixtureRequest) -> Iterator[MakeDriver]:
        self.the_host = host

        def make(quota: int) -> Engine:
            tier = P2pTier("p2p", self.peer_options(host) | {"bulk": request.param})
            for namespace in NAMESPACES:
                tier.note_namespace(namespace, b"")
            engine = InProcess(tier, pool)
            Driver(pool, engine).until(lambda: bool(tier._engine.up), "the peer")
            return engine

        yield from drivers(pool, make)


class TestP2pTierInItsOwnProcess(P2pConformance):
    @pytest.fixture
    def make_driver(self, pool: Pool, host: Host) -> Iterator[MakeDriver]:
        self.the_host = host

        def make(quota: int) -> Engine:
            engine = OwnProcess(lambda **hooks: TierHost("p2p", "p2p", self.peer_options(host), **hooks), pool)
            for namespace in NAMESPACES:
                engine.host.note_namespace(namespace, b"")
            Driver(pool, engine).until(lambda: engine.stats().values.get("peers_up") == 1, "the peer")
            return engine

        yield from drivers(pool, make)

    def test_a_lookup_answers_while_the_device_stands_still(self, driver: Driver) -> None:
        """As the suite's, but that a peer that hasn't answered three times is left alone for a moment afterwards."""
        chunk = make_chunk()
        driver.store(chunk)
        queries = [chunk.query(), numbered(1).query()]
        with self.stalled(driver):
            for _ in range(5):
                answers = driver.within_patience(lambda: driver.engine.lookup_once(queries))
                assert [answer.outcome for answer in answers] == ["away", "away"]
        driver.until(lambda: driver.has(chunk), "the peer to be asked again")
        assert driver.serves(chunk)
