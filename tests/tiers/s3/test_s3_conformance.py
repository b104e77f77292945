"""The conformance suite on the S3 tier: as an object and in its own process, on real endpoints of three kinds."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest

from forebay.testing.buckets import Server
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
)
from forebay.tiers.host import TierHost
from tests.tiers.s3.rig import options_of, quick_tier

_runs = itertools.count()
ALL = bool(os.environ.get("FOREBAY_S3_ALL"))
"""Run every suite in full; otherwise only that on SeaweedFS is, and of the others the tests that are most their own."""
SOME = (
    "test_what_was_stored_comes_back", "test_every_job_of_a_batch", "test_the_quota_holds", "test_damage_is_a_miss",
    "test_a_load_that_misses_its_deadline", "test_what_was_removed_stays_away", "test_clearing_everything",
    "test_storing_a_chunk_again", "test_a_lookup_of_thousands",
)  # fmt: skip
LONG = ("test_a_lookup_of_thousands",)
"""In this process such a lookup is asked again and again until every key is known: thousands of requests."""


class BucketOf(TierConformance):
    """What the suites share: one prefix and one state directory a test."""

    __test__ = False
    server_fixture: ClassVar[str] = ""
    short: ClassVar[bool] = True
    own_process: ClassVar[bool] = False

    @pytest.fixture(autouse=True)
    def server(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Server:
        in_short = request.node.name.startswith(SOME if self.short else ("test_",))
        if self.server_fixture == "moto" and request.node.name.startswith(LONG):
            pytest.skip("moto's server takes longer than the suite's patience for 3,000 requests")
        if not ALL and not (in_short and (self.own_process or not request.node.name.startswith(LONG))):
            pytest.skip("FOREBAY_S3_ALL=1 runs the whole suite here too")
        found: Server = request.getfixturevalue(self.server_fixture)
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        self.at = found
        self.given = options_of(
            found,
            {
                "prefix": f"suite-{next(_runs)}", "state_dir": str(tmp_path / "state"), "write_queue_bytes": QUEUE,
                "missing_s": 30.0, "failures_max": 1000,
            },
        )
        return found

    @pytest.fixture
    def make_driver(self, pool: Pool, server: Server) -> Iterator[MakeDriver]:
        yield from drivers(pool, lambda quota: self.engine(pool, {**self.given, "quota_bytes": quota}))

    def engine(self, pool: Pool, options: dict[str, object]) -> Engine:
        return InProcess(quick_tier(self.at, options), pool)

    def damage(self, driver: Driver, chunk: Made) -> None:
        client, name = self.at.client(), f"{self.given['prefix']}/chunks/{chunk.id.key.hex()}-{chunk.id.group:02x}"
        data = bytearray(client.get_object(Bucket=self.given["bucket"], Key=name)["Body"].read())
        data[-1] ^= 1
        client.put_object(Bucket=self.given["bucket"], Key=name, Body=bytes(data))

    @contextmanager
    def stalled(self, driver: Driver) -> Iterator[None]:
        self.at.stop_it()
        try:
            yield
        finally:
            self.at.continue_it()


class TestS3TierOnSeaweedFS(BucketOf):
    __test__ = True
    short = False
    server_fixture = "seaweed"


class TestS3TierOnMoto(BucketOf):
    __test__ = True
    server_fixture = "moto"


class TestS3TierOnALessAbleEndpoint(BucketOf):
    """No conditional put, no deletion of several objects at once."""

    __test__ = True
    server_fixture = "juicefs"


class TestS3TierInItsOwnProcess(BucketOf):
    __test__ = True
    own_process = True
    server_fixture = "seaweed"

    def engine(self, pool: Pool, options: dict[str, object]) -> Engine:
        return OwnProcess(lambda **hooks: TierHost("bucket", "s3", options, **hooks), pool)  # type: ignore[arg-type]
