from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.testing import mooncake
from forebay.tiers.mooncake.options import MooncakeOptions, mooncake_options
from forebay.tiers.mooncake.remote import Remote

SHARED_BYTES = 64 << 20


class Borrowed(Remote):
    """A client of the pool that several tiers use in turn, each with a prefix of its own: leaving a pool takes the
    library two seconds. What these tiers lend and register is the owner's business."""

    def __init__(self, owner: Remote, prefix: str) -> None:
        vars(self).update(vars(owner) | {"_prefix": prefix})

    def register(self, memory: memoryview) -> bool:
        return True

    def close(self) -> None:
        pass


class SharedPool:
    """A master, and one client that lends memory for the whole session."""

    def __init__(self, master: mooncake.Master) -> None:
        self.master = master
        options = {"master": str(master.address), "segment_bytes": SHARED_BYTES, "trusted_network": True}
        self.owner = Remote("owner", mooncake_options("owner", options))
        self._serial = itertools.count()

    def borrow(self) -> Callable[[str, MooncakeOptions], Remote]:
        """Makes clients that share one fresh prefix."""
        prefix = f"test-{next(self._serial)}"
        return lambda name, options: Borrowed(self.owner, prefix)


@pytest.fixture(autouse=True)
def _installed() -> None:
    if why := mooncake.why_not():
        pytest.skip(why)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPool]:
    """For tests that do a pool no harm."""
    if why := mooncake.why_not():
        pytest.skip(why)
    with mooncake.Master(tmp_path_factory.mktemp("mooncake"), client_ttl_s=60) as master:
        pool = SharedPool(master)
        yield pool
        pool.owner.close()


@pytest.fixture
def master(tmp_path: Path) -> Iterator[mooncake.Master]:
    """One that a test may kill."""
    with mooncake.Master(tmp_path) as made:
        yield made
