from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tiers.support import Pool


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()
