"""The conformance suite over a real master, with this tier's segment as the whole pool.

As an object: a process of its own for each test would take a minute. `test_mooncake_process.py` has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from forebay.testing import mooncake
from forebay.testing.conformance import QUEUE, Driver, InProcess, Made, MakeDriver, Pool, TierConformance
from forebay.tiers.messages import OptionValue
from forebay.tiers.mooncake.options import SEGMENT_BYTES_MIN, mooncake_options
from forebay.tiers.mooncake.remote import Remote
from forebay.tiers.mooncake.tier import MooncakeTier
from tests.tiers.mooncake.conftest import Later


class TestMooncakeTier(TierConformance):
    kind = "mooncake"
    partial = False
    persistent = False
    lacks = {  # noqa: RUF012
        "clear": "other hosts' chunks of a namespace can't be told by their keys",
        "told": "a removal is told without its header, which nobody keeps",
        "tidy": "the library keeps threads and descriptors of its own",
    }

    @pytest.fixture
    def pool(self, later: Later) -> Pool:
        return Pool()  # closed with its tier

    @pytest.fixture
    def make_driver(self, applies: None, pool: Pool, master: mooncake.Master, later: Later) -> Iterator[MakeDriver]:
        self.master = master
        made: list[Driver] = []

        def make(quota: int) -> Driver:
            made.append(Driver(pool, InProcess(MooncakeTier("tier", self.options(quota)), pool)))
            return made[-1]

        yield make

        def end() -> None:
            try:
                for driver in made:
                    driver.close()
            finally:
                pool.close()
                master.kill()

        later(end)

    def options(self, quota: int) -> dict[str, OptionValue]:
        return {
            "master": str(self.master.address), "segment_bytes": SEGMENT_BYTES_MIN, "quota_bytes": quota,
            "write_queue_bytes": QUEUE,
        }  # fmt: skip

    def damage(self, driver: Driver, chunk: Made) -> None:
        data = bytearray(chunk.block + chunk.payload)
        data[-1] ^= 1
        other = Remote("other", mooncake_options("other", {"master": str(self.master.address), "segment_bytes": 0}))
        assert other._store.upsert(other.key(chunk.id), bytes(data)) == 0
        other.close()

    @contextmanager
    def stalled(self, driver: Driver) -> Iterator[None]:
        self.master.pause()
        try:
            yield
        finally:
            self.master.resume()
