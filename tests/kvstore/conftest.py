"""A running store for the tests of the daemon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kvstore.running import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    running = Store(tmp_path)
    running.start()
    yield running
    if running.process is not None and running.process.poll() is None:
        assert running.stop() == 0
        assert not running.pool.exists(), "a clean stop leaves nothing behind"
