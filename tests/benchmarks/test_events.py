"""The fan-out's measurement counts what leaves and what arrives."""

from __future__ import annotations

from benchmarks.events import BATCH, batches, measure
from forebay.events.schema import BlockRemoved, BlockStored


def test_every_workers_stream_sends_what_the_store_told_and_it_arrives() -> None:
    row = measure(2, 0.2, 1)
    assert row.sent_batches > 0 and row.received_batches > 0
    assert abs(row.sent_events_per_s - 2 * row.source_events_per_s) < 1e-6 * row.sent_events_per_s
    assert 8 < row.bytes_per_block < 200, "a hash and 16 token ids, or a hash alone"


def test_what_is_stored_is_removed_again() -> None:
    stored, removed = batches(1)
    assert len(stored) == len(removed) == BATCH
    for one, other in zip(stored, removed, strict=True):
        assert isinstance(one, BlockStored) and isinstance(other, BlockRemoved)
        assert one.block_hashes == other.block_hashes
