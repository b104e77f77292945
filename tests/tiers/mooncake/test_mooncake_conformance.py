"""The conformance suite over a real master and a pool that outlives the tier, as other hosts' memory does.

As an object: `test_mooncake_hosts.py` has a tier in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from forebay.testing.conformance import (
    QUEUE,
    Driver,
    InProcess,
    Made,
    MakeDriver,
    Pool,
    TierConformance,
    drivers,
)
from forebay.tiers.messages import OptionValue
from forebay.tiers.mooncake.tier import MooncakeTier
from tests.tiers.mooncake.conftest import SharedPool


class TestMooncakeTier(TierConformance):
    kind = "mooncake"
    partial = False
    lacks = {  # noqa: RUF012
        "clear": "other hosts' chunks of a namespace can't be told by their keys",
        "told": "a removal is told without its header, which nobody keeps",
        "counts": "after a restart it doesn't know what it had stored before",
    }

    @pytest.fixture
    def make_driver(self, applies: None, pool: Pool, shared: SharedPool) -> Iterator[MakeDriver]:
        self.shared = shared
        self.remote = shared.borrow()
        yield from drivers(
            pool, lambda quota: InProcess(MooncakeTier("tier", self.options(quota), remote=self.remote), pool)
        )

    def options(self, quota: int) -> dict[str, OptionValue]:
        return {
            "master": str(self.shared.master.address), "trusted_network": True, "segment_bytes": 0,
            "quota_bytes": quota, "write_queue_bytes": QUEUE,
        }  # fmt: skip

    def damage(self, driver: Driver, chunk: Made) -> None:
        data = bytearray(chunk.block + chunk.payload)
        data[-1] ^= 1
        other = self.remote("other", None)  # type: ignore[arg-type]
        assert other._store.upsert(other.key(chunk.id), bytes(data)) == 0

    @contextmanager
    def stalled(self, driver: Driver) -> Iterator[None]:
        self.shared.master.pause()
        try:
            yield
        finally:
            self.shared.master.resume()
