"""What tests of ranks with hot buffers have in common."""

from __future__ import annotations

from tests.ranks.conftest import Worker
from tests.ranks.test_workers import figures

HOT = ("--hot-buffers", "--hot-buffer-rows", "96", "--hot-buffer-pool-tokens", "240")
"""Room for one request with a hot buffer: 240 tokens' rows, where prompts have 300."""


def same_decisions(worker: Worker, ranks: int = 2) -> None:
    """Rows were copied, as many on every rank, from the same places to the same places."""
    found = figures(worker)
    assert found["hot.misses"] > 0 and found["hot.misses_elsewhere"] == (ranks - 1) * found["hot.misses"]
    assert found["hot.ranks_parted"] == 0


def nothing_void(worker: Worker) -> None:
    """Every rank has found all that it was told of: nothing was computed anew."""
    found = figures(worker)
    assert found.get("hot.void_elsewhere", 0) == found.get("hot.put_off", 0) == 0


def nothing_held(worker: Worker) -> None:
    worker.front.settle()
    found = figures(worker)
    for gauge in ("requests", "regions", "host_pages", "leases", "pages_lent", "promised"):
        assert found[f"hot.{gauge}"] == 0, gauge
