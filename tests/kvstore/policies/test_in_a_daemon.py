"""The policy that sees lookups, in a real daemon: it is told of them, and learns sessions from that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.kvstore.client import StoreClient
from tests.kvstore import running
from tests.kvstore.running import Store, get, put
from tests.kvstore.support import CHUNK, namespace


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    changed = running.SCRIPT.replace("extent=2 << 20", "extent=2 << 20, policy='foresight', attention_tokens=30000")
    monkeypatch.setattr(running, "SCRIPT", changed)
    store = Store(tmp_path)
    store.start()
    yield store
    assert store.stop() == 0


def test_a_daemon_learns_sessions_from_the_lookups_that_it_answers(store: Store) -> None:
    spec = namespace()
    with StoreClient(store.address) as client:
        client.register(spec)
        for turn in range(3):
            for session in range(4):
                tokens = [session] * (CHUNK * (turn + 2))
                found = get(client, spec, tokens)
                assert found.hit == (CHUNK * (turn + 1) if turn else 0)
                client.release([found.lease])
                put(client, spec, tokens)
        values = client.stats().values
        assert values["policy.sessions"] == 4, "each turn goes on from the one before"
        assert values["policy.awaited"] == 4, "the last chunk of each; what hit isn't awaited any more"
        assert values["policy.kinds"] > 4
