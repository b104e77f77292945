from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from forebay.testing import mooncake

Later = Callable[[Callable[[], None]], None]


@pytest.fixture(autouse=True)
def _installed() -> None:
    if why := mooncake.why_not():
        pytest.skip(why)


@pytest.fixture(scope="session")
def later() -> Iterator[Later]:
    """Runs what ends a test's parts beside the next tests: leaving a pool takes the library two seconds."""
    under_way: list[Future[None]] = []
    with ThreadPoolExecutor(8) as executor:
        yield lambda call: under_way.append(executor.submit(call))
        for future in under_way:
            future.result(60)


@pytest.fixture
def master(tmp_path: Path) -> mooncake.Master:
    """A pool's master. Whoever asks for it sees to its end, by `later`."""
    return mooncake.Master(tmp_path).start()
