from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from forebay.testing.conformance import Pool
from tests.tiers.p2p.stores import PeerStore

MakeStore = Callable[..., PeerStore]


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[MakeStore]:
    """Stores by name; each is stopped cleanly at the end, if it still runs."""
    made: list[PeerStore] = []

    def make(name: str, **arguments: str) -> PeerStore:
        made.append(PeerStore(tmp_path / name, name, **arguments))
        return made[-1]

    yield make
    for store in made:
        if store.process is not None and store.process.poll() is None:
            assert store.stop() == 0
            assert not store.pool.exists()


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()


@pytest.fixture
def open_all() -> Iterator[ExitStack]:
    """Closes what is given to it, the latest first."""
    with ExitStack() as stack:
        yield stack
