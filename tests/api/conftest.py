"""A front end over a scripted worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.scripted import ScriptedWorker
from tests.api.serving import Front


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    with Front(tmp_path, worker=ScriptedWorker(tmp_path / "worker.sock")) as front:
        yield front
