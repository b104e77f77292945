"""The file tier behind a slow link: bytes come at the pace that is asked for, in order, or late."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.errors import ConfigError
from forebay.testing import throttled
from forebay.testing.throttled import Link, Shipment, ThrottledFiles
from forebay.tiers.base import ChunkId, LoadJob, LookupResult, Query
from forebay.tiers.fs.tier import FsTier


class Timeline:
    """Time that passes by sleeping; `pace` may be changed at any moment of it."""

    def __init__(self, pace: float, changes: dict[float, float] | None = None) -> None:
        self.now = 0.0
        self._pace, self._changes = pace, changes or {}
        self.arrived = threading.Semaphore(0)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-6)

    def pace(self) -> float:
        due = [at for at in self._changes if at <= self.now]
        return self._changes[max(due)] if due else self._pace


@pytest.fixture
def ship() -> Iterator[Callable[..., list[tuple[int, bool, float]]]]:
    """Send lengths through a link; which came, whether in time, and when."""
    links = []

    def through(time: Timeline, lengths: list[int], until: float = 1e9) -> list[tuple[int, bool, float]]:
        seen: list[tuple[int, bool, float]] = []

        def wake() -> None:
            seen.extend((shipment.job.id, arrived, round(time.now, 2)) for shipment, arrived in links[-1].take())
            time.arrived.release()

        links.append(Link(time.pace, wake, time.clock, time.sleep))
        with links[-1]._change:  # all of them are there before the first goes
            for number, length in enumerate(lengths):
                job = LoadJob(number, ChunkId(0, b"k"), 0, 0, length, 1.0)
                links[-1]._queue.append(Shipment(job, length, until))
            links[-1]._change.notify()
        for _ in lengths:
            assert time.arrived.acquire(timeout=20)
        assert links[-1].waiting_bytes == 0
        return seen

    yield through
    for link in links:
        link.close()


def test_one_comes_after_the_other_at_the_pace(ship: Callable[..., list[tuple[int, bool, float]]]) -> None:
    assert ship(Timeline(1000.0), [1000, 500, 2000]) == [(0, True, 1.0), (1, True, 1.5), (2, True, 3.5)]


def test_without_a_limit_nothing_takes_time(ship: Callable[..., list[tuple[int, bool, float]]]) -> None:
    assert [(one, arrived) for one, arrived, _ in ship(Timeline(float("inf")), [10**9] * 2)] == [(0, True), (1, True)]


def test_a_pace_that_changes_counts_from_then_on(ship: Callable[..., list[tuple[int, bool, float]]]) -> None:
    ((_, arrived, when),) = ship(Timeline(1000.0, {1.0: 100.0}), [1100])
    assert arrived and when == pytest.approx(2.0, abs=0.05)


def test_what_a_stalled_link_has_is_late(ship: Callable[..., list[tuple[int, bool, float]]]) -> None:
    assert ship(Timeline(0.0), [100, 100], until=3.0) == [(0, False, 3.0), (1, False, 3.0)]


def test_it_says_that_it_needs_a_pace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs pace"):
        ThrottledFiles("slow", {"directory": str(tmp_path)})


def test_it_remembers_lengths_of_so_many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttled, "LENGTHS_MAX", 5)
    options = {"directory": str(tmp_path / "d"), "quota_bytes": 1 << 26, "pace": str(tmp_path / "pace")}
    tier = ThrottledFiles("slow", options)
    try:
        queries = [Query(0, bytes([number]) * 32, b"", b"") for number in range(9)]
        found = [LookupResult("hit", query.key, 16, 16, 7) for query in queries]
        monkeypatch.setattr(FsTier, "lookup", lambda self, asked: found)
        tier.lookup(queries)
        assert list(tier._lengths) == [ChunkId(0, query.key) for query in queries[-5:]]
    finally:
        tier.close()
