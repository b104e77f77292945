"""How long a lookup waits for a tier to say what it has."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from forebay.kvstore.cascade import Cascade, TierTraffic
from forebay.kvstore.reader import Reader
from forebay.tiers.base import LoadJob, LookupResult, Query, StoreJob
from tests.kvstore.support import CHUNK, SmallStore


class Asked:
    """A tier that has nothing, and remembers how long it might have taken to say so."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def lookup(self, queries: Sequence[Query], timeout_s: float) -> list[LookupResult]:
        self.seconds.append(timeout_s)
        return [LookupResult("miss")] * len(queries)

    def store(self, jobs: Sequence[StoreJob]) -> None:
        raise AssertionError("nothing is stored")

    def load(self, jobs: Sequence[LoadJob]) -> None:
        raise AssertionError("nothing is loaded")


@pytest.mark.parametrize(("deadline_ms", "seconds"), [(300, 0.3), (2_000, 1.0), (60_000, 6.0)])
def test_a_tier_has_a_second_to_answer_or_a_tenth_of_what_the_client_waits(deadline_ms: int, seconds: float) -> None:
    store, tier = SmallStore(), Asked()
    cascade = Cascade(store.core)
    cascade.tiers["odd"] = TierTraffic("odd", b"t" * 16)
    reader = Reader(store.core, cascade, {"odd": tier}, lambda entry: True)
    asyncio.run(reader.lookup(store.client, store.prompt([1] * CHUNK), deadline_ms, lambda: True))
    assert tier.seconds == [pytest.approx(seconds, rel=0.1)]
