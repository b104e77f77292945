"""Forebay's conformance suite on this tier, as an object and through a process of its own."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager

from forebay.testing.conformance import QUEUE, Driver, Made, TierConformance


class TestSqliteTier(TierConformance):
    """Everything but partial matches."""

    kind = "sqlite_tier:SqliteTier"
    lacks = {"partial": "its index has keys and nothing of what chunks begin with"}  # noqa: RUF012

    def options(self, quota: int) -> dict[str, str | int]:
        return {"path": str(self.folder / "chunks.db"), "quota_bytes": quota, "queue_bytes": QUEUE}

    def damage(self, driver: Driver, chunk: Made) -> None:
        with closing(sqlite3.connect(self.folder / "chunks.db")) as database, database:
            payload = bytes([chunk.payload[0] ^ 1]) + chunk.payload[1:]
            database.execute("UPDATE chunks SET payload = ? WHERE key = ?", (payload, chunk.id.key))

    @contextmanager
    def stalled(self, driver: Driver) -> Iterator[None]:
        """Somebody else has locked the database."""
        with closing(sqlite3.connect(self.folder / "chunks.db", isolation_level=None)) as database:
            database.execute("BEGIN EXCLUSIVE")
            yield
            database.execute("ROLLBACK")
