"""A store that is told to stop in the middle of its work stops cleanly."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from pathlib import Path

import pytest

from forebay.kvstore.client import AsyncStoreClient, StoreClient
from forebay.kvstore.extents import PoolFiles
from forebay.kvstore.writers import DEATH_CHECKS_S
from tests.faults.inprocess import SPEC, InProcessDaemon, chunks_of, config, started
from tests.faults.kill_loop import Daemon
from tests.faults.traffic import BIG, big_tokens, push


def test_a_stop_in_the_middle_of_reading_adopted_chunks_leaves_nothing(tmp_path: Path) -> None:
    store = Daemon(tmp_path, 256 << 20)
    store.start()
    with StoreClient(store.address) as client:
        client.register(BIG)
        for number in range(20):
            push(client, BIG, big_tokens(number))
    for _ in range(3):
        store.kill()
        store.start()
    assert store.process is not None
    store.process.send_signal(signal.SIGTERM)
    assert store.process.wait(60) == 0, store.last_words()
    assert not store.pool.exists() and not store.socket.exists()
    assert "Traceback" not in store.last_words()


def test_a_pool_that_cannot_be_looked_at_any_more_does_not_fail_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = PoolFiles(tmp_path / "pool", 1 << 20)
    pool.open()

    def broken(path: object, **more: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("forebay.kvstore.extents.shutil.rmtree", broken)
    for call in ("stat", "lstat"):
        monkeypatch.setattr(os, call, broken)
    pool.close(remove=True)
    monkeypatch.undo()
    assert pool.path.exists() and not pool.locked


def test_a_store_that_has_stopped_touches_its_pool_no_more(tmp_path: Path) -> None:
    async def stop_with_a_writer() -> None:
        (tmp_path / "pool").mkdir()
        daemon = InProcessDaemon(config(tmp_path, files=False))
        run = await started(daemon)
        client = AsyncStoreClient(f"unix://{daemon.config.socket}")
        await client.connect()
        await client.register(SPEC)
        slots = (await client.reserve(SPEC.id, "", chunks_of(list(range(64))))).slots
        assert slots[0].status == "reserved"
        daemon.stop()
        assert await run == 0
        await client.close()  # its slots would be free now
        await asyncio.sleep(2 * sum(DEATH_CHECKS_S))
        assert "store.background_failures" not in daemon.service.core.counters.values

    asyncio.run(stop_with_a_writer())
