from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.testing.buckets import JuiceFS, Moto, SeaweedFS, Server
from tests.tiers.s3.rig import S3Rig
from tests.tiers.support import Pool

BUCKET = "forebay-tests"
_prefixes = itertools.count()


def _server(kind: type[Server], folder: Path) -> Iterator[Server]:
    absent = kind.absent()
    if absent:
        pytest.skip(absent)
    with kind(folder) as server:
        server.make_bucket(getattr(kind, "volume", BUCKET))
        yield server


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _server(SeaweedFS, tmp_path_factory.mktemp("seaweedfs"))


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _server(Moto, tmp_path_factory.mktemp("moto"))


@pytest.fixture(scope="session")
def juicefs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _server(JuiceFS, tmp_path_factory.mktemp("juicefs"))


@pytest.fixture
def prefix() -> str:
    """Below which nothing is yet."""
    return f"test-{next(_prefixes)}"


MakeRig = Callable[..., S3Rig]


@pytest.fixture
def make_rig(pool: Pool, prefix: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRig]:
    """Makes tiers in this process; the environment has the server's credentials."""
    made: list[S3Rig] = []

    def make(server: Server, **options: object) -> S3Rig:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        made.append(S3Rig(pool, server, {"prefix": prefix, **options}))
        return made[-1]

    yield make
    for rig in made:
        rig.close()
