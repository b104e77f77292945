"""Random histories of one file tier against a model.

Whatever is stored, loaded, damaged, lost, evicted and restarted, in whatever order: no load ever gives other
bytes than were stored under that key, what is undamaged and not reported as removed is served, and what is
on the disk never passes the quota.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay.kvstore.identity import pack_tokens
from forebay.tiers.base import ChunkId, Query
from tests.tiers.fs_rig import FsRig
from tests.tiers.support import Made, Pool, make_chunk

QUOTA = 1 << 20
GRANULES = (16, 4096, 65_536, 100_000, 220_000)
NAMESPACES = (b"1" * 32, b"2" * 32)
NUMBERS = st.integers(0, 9)
PLACES = st.integers(0, 999)
"""Thousandths of a file."""


def chunk_number(number: int) -> Made:
    """Ten chunks of all sizes: some share a parent and their first units, some only a namespace."""
    tokens = [*range(16), *[number] * 16]
    return make_chunk(
        tokens, granule=GRANULES[number % len(GRANULES)], parent=bytes([number % 3]) * 32,
        group=number % 2, namespace=NAMESPACES[number % 2],
    )  # fmt: skip


CHUNKS = [chunk_number(number) for number in range(10)]
BY_ID = {chunk.id: chunk for chunk in CHUNKS}


class FsHistory(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="forebay-property-"))
        self.pool = Pool(2 << 20)
        self.rig = FsRig(self.pool, self.folder / "fs", quota_bytes=QUOTA, quarantine_files=3)
        self.driver = self.rig.open()
        self.damaged: set[ChunkId] = set()
        self.held: set[ChunkId] = set()

    def teardown(self) -> None:
        for chunk in CHUNKS:
            self.load(CHUNKS.index(chunk))
        self.rig.close()
        self.pool.close()
        shutil.rmtree(self.folder)

    def learn(self) -> None:
        """Bring the model up to what the tier has told."""
        self.driver.pump()
        for change in self.driver.changes:
            (self.held.add if change.stored else self.held.discard)(change.chunk)
            if not change.stored:
                self.damaged.discard(change.chunk)
        self.driver.changes.clear()
        self.driver.results.clear()

    def touched_files(self) -> Iterator[Made]:
        return (chunk for chunk in CHUNKS if self.rig.file(chunk).exists())

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=4, unique=True), cold=st.booleans())
    def store(self, numbers: list[int], cold: bool) -> None:
        for chunk in (CHUNKS[number] for number in numbers):
            known = chunk.id in self.held
            result = self.driver.store(chunk, cold=cold)
            assert result.ok, result.reason
            self.learn()
            if not known:
                self.damaged.discard(chunk.id)

    @rule(number=NUMBERS)
    def load(self, number: int) -> None:
        chunk = CHUNKS[number]
        self.learn()
        expected = chunk.id in self.held and chunk.id not in self.damaged
        served = self.driver.serves(chunk)
        assert not (served and chunk.id in self.damaged), "damaged bytes were served"
        assert served or not expected, "an undamaged chunk that is held was not served"
        self.learn()

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=6))
    def look_up(self, numbers: list[int]) -> None:
        wanted = [CHUNKS[number] for number in numbers]
        partial = [
            Query(c.header.group, b"x" * 32, c.header.parent, c.header.tokens[:64] + pack_tokens([77] * 16))
            for c in wanted
        ]
        for query, found in zip(partial, self.driver.lookup(*partial), strict=True):
            if found.outcome == "hit":
                stored = BY_ID[ChunkId(query.group, found.key)]
                assert stored.header.parent == query.parent
                assert found.matched == 16
        self.learn()
        for chunk, found in zip(wanted, self.driver.lookup(*[c.query() for c in wanted]), strict=True):
            if chunk.id in self.held and chunk.id not in self.damaged:
                assert (found.outcome, found.key) == ("hit", chunk.header.key)

    @rule(number=NUMBERS, where=PLACES, bit=st.integers(0, 7))
    def flip_a_bit(self, number: int, where: int, bit: int) -> None:
        path = self.rig.file(CHUNKS[number])
        if not path.exists() or CHUNKS[number].id in self.damaged:
            return
        with path.open("r+b") as file:
            at = os.fstat(file.fileno()).st_size * where // 1000
            (byte,) = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte ^ (1 << bit)]), at)
        self.damaged.add(CHUNKS[number].id)

    @rule(number=NUMBERS, where=PLACES)
    def cut_short(self, number: int, where: int) -> None:
        path = self.rig.file(CHUNKS[number])
        if path.exists():
            os.truncate(path, path.stat().st_size * where // 1000)
            self.damaged.add(CHUNKS[number].id)

    @rule(number=NUMBERS)
    def delete_the_file(self, number: int) -> None:
        path = self.rig.file(CHUNKS[number])
        if path.exists():
            path.unlink()
            self.damaged.add(CHUNKS[number].id)

    @rule(numbers=st.lists(NUMBERS, max_size=4))
    def forget(self, numbers: list[int]) -> None:
        gone = {CHUNKS[number].id for number in numbers}
        self.driver.engine.forget(list(gone), "cleared")
        for chunk in gone:
            assert not self.driver.serves(BY_ID[chunk])
        self.driver.until(lambda: self.driver.value("bytes_leaving") == 0, "removals")
        self.learn()
        assert not gone & self.held

    @rule(namespace=st.sampled_from([*NAMESPACES, b""]))
    def clear(self, namespace: bytes) -> None:
        self.driver.engine.clear(namespace)
        for chunk in CHUNKS:
            if not namespace or chunk.header.namespace == namespace:
                assert not self.driver.serves(chunk)
        self.driver.until(lambda: self.driver.value("bytes_leaving") == 0, "removals")
        self.learn()

    @rule(lose_manifest=st.booleans(), quota=st.sampled_from([QUOTA, QUOTA, 2 * QUOTA]))
    def restart(self, lose_manifest: bool, quota: int) -> None:
        self.rig.close()
        if lose_manifest:
            self.rig.lose_manifest()
        self.driver = self.rig.open(quota_bytes=quota)
        self.driver.until(lambda: self.driver.value("reconciled") == 1, "the walk")
        self.held.clear()
        self.learn()
        # A walk finds damage to headers; damage to payloads waits for the load that finds it.
        self.damaged = {chunk.id for chunk in self.touched_files() if chunk.id in self.damaged}

    @precondition(lambda self: self.damaged)
    @rule()
    def load_what_is_damaged(self) -> None:
        for chunk in list(self.damaged):
            assert not self.driver.serves(BY_ID[chunk])
        self.learn()

    @invariant()
    def the_quota_holds(self) -> None:
        if hasattr(self, "rig"):
            assert self.rig.usage() <= self.rig.options["quota_bytes"]
            assert len(self.rig.quarantined()) <= 3
            manifest = self.rig.tier._shelf.manifest
            self.driver.until(lambda: manifest.totals() == manifest.counted_totals(), "the same totals")


FsHistory.TestCase.settings = settings(
    max_examples=20, stateful_step_count=30, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
TestFsHistory = FsHistory.TestCase
