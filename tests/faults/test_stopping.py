"""A store that is told to stop in the middle of its work stops cleanly."""

from __future__ import annotations

import signal
from pathlib import Path

from forebay.kvstore.client import StoreClient
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
