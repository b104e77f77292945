"""Random histories of three file tiers on one directory.

Whoever stores, loads, clears, dies and comes back, in whatever order: a load gives the bytes of its key or nothing,
what was cleared isn't served by whoever cleared it, and what is on the disk never passes the quota.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from forebay.tiers.base import ClearScope
from forebay.tiers.fs import keeper, neighbours
from tests.tiers.fs_several import Several, used
from tests.tiers.support import Pool
from tests.tiers.test_fs_property import CHUNKS, NAMESPACES, NUMBERS

QUOTA = 4 << 20
STORES = st.integers(0, 2)
HISTORIES = int(os.environ.get("FOREBAY_HISTORIES", "12"))


class SharedHistory(RuleBasedStateMachine):
    @initialize(liveness=st.sampled_from(["flock", "heartbeat"]))
    def begin(self, liveness: str) -> None:
        self.paces = (neighbours.POLL_S, keeper.FLUSH_S)
        neighbours.POLL_S, keeper.FLUSH_S = 0.005, 0.01
        self.folder = Path(tempfile.mkdtemp(prefix="forebay-several-"))
        self.pool = Pool(2 << 20)
        self.several = Several(self.pool, self.folder, quota_bytes=QUOTA, liveness=liveness)
        for number in range(3):
            self.several.open(number)

    def teardown(self) -> None:
        if not hasattr(self, "several"):
            return
        for number in list(self.several.rigs):
            for chunk in CHUNKS:
                self.driver(number).serves(chunk)
            assert self.several.tier(number).statistics().values["task_crashes"] == 0
        self.several.shut()
        self.pool.close()
        shutil.rmtree(self.folder)
        neighbours.POLL_S, keeper.FLUSH_S = self.paces

    def driver(self, number: int):  # type: ignore[no-untyped-def]
        if number not in self.several.rigs:
            self.several.open(number)
        return self.several.rigs[number].driver

    @rule(number=STORES, chunk=NUMBERS, cold=st.booleans())
    def store(self, number: int, chunk: int, cold: bool) -> None:
        result = self.driver(number).store(CHUNKS[chunk], cold=cold)
        assert result.ok or result.reason in ("full", "quota", "io"), result

    @rule(number=STORES, chunk=NUMBERS)
    def load(self, number: int, chunk: int) -> None:
        self.driver(number).serves(CHUNKS[chunk])

    @rule(number=STORES, chunk=NUMBERS)
    def store_and_load_elsewhere(self, number: int, chunk: int) -> None:
        if self.driver(number).store(CHUNKS[chunk]).ok:
            self.driver((number + 1) % 3).serves(CHUNKS[chunk])

    @rule(number=STORES, chunks=st.lists(NUMBERS, min_size=1, max_size=5))
    def look_up(self, number: int, chunks: list[int]) -> None:
        wanted = [CHUNKS[chunk] for chunk in chunks]
        for chunk, found in zip(wanted, self.driver(number).lookup(*[c.query() for c in wanted]), strict=True):
            if found.outcome == "hit" and found.key == chunk.header.key:
                assert found.length == chunk.length

    @rule(number=STORES, namespace=st.sampled_from([*NAMESPACES, b""]))
    def clear(self, number: int, namespace: bytes) -> None:
        driver = self.driver(number)
        driver.engine.clear_scope(ClearScope(namespace))
        for chunk in CHUNKS:
            if namespace in (b"", chunk.header.namespace):
                assert not driver.serves(chunk), "it was cleared, and nobody has stored it since"

    @rule(number=STORES, chunk=NUMBERS)
    def delete_a_file(self, number: int, chunk: int) -> None:
        if number in self.several.rigs:
            self.several.file(number, CHUNKS[chunk]).unlink(missing_ok=True)

    @rule(number=STORES)
    def die(self, number: int) -> None:
        if number in self.several.rigs and len(self.several.rigs) > 1:
            self.several.die(number)

    @rule(number=STORES)
    def leave(self, number: int) -> None:
        if number in self.several.rigs and len(self.several.rigs) > 1:
            self.several.close(number)

    @invariant()
    def the_quota_holds(self) -> None:
        if hasattr(self, "several"):
            assert used(self.several.directory) <= QUOTA


SharedHistory.TestCase.settings = settings(
    max_examples=HISTORIES, stateful_step_count=25, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
TestSharedHistory = SharedHistory.TestCase
