from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiers.fs_rig import FsRig
from tests.tiers.support import Pool


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()


@pytest.fixture
def rig(pool: Pool, tmp_path: Path) -> Iterator[FsRig]:
    made = FsRig(pool, tmp_path / "fs")
    yield made
    made.close()
