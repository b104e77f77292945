"""Real servers, kept for as many tests as can use them: each takes half a minute to start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.testing.cluster import Cluster
from tests.vllm import models
from tests.vllm.servers import Engine, running

EXECUTABLE = Path(os.environ.get("FOREBAY_VLLM", Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "vllm"))


PATIENT = {"lookup_deadline_ms": 60_000, "hung_ms": 120_000}
"""Where a hit is what is tried, a machine that is busy with other things must not make it a miss."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without vLLM these tests are skipped, and say so."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.timeout(900))
            if not EXECUTABLE.exists():
                item.add_marker(pytest.mark.skip(reason="no vLLM here: `make test-vllm` builds its environment"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def qwen(folder: Path) -> Iterator[Cluster]:
    """A store, and a tiny Qwen3 to serve."""
    yield from _cluster(folder, models.qwen3(folder / "qwen3"))


@pytest.fixture(scope="module")
def engine(qwen: Cluster) -> Iterator[Engine]:
    """vLLM with that store."""
    one = server(qwen, "vllm", settings=PATIENT)
    with running(one):
        yield one


def _cluster(folder: Path, model: Path) -> Iterator[Cluster]:
    cluster = Cluster(folder, model, dtype="float32")
    cluster.start_store()
    yield cluster
    cluster.stop()


def server(cluster: Cluster, name: str, *arguments: str, **fields: object) -> Engine:
    """A vLLM server of the cluster's model and store, not started yet."""
    return Engine(
        EXECUTABLE, cluster.model, cluster.folder / f"{name}.log", cluster.store_address, arguments=arguments,
        chunk_tokens=cluster.chunk_tokens, **fields,  # type: ignore[arg-type]
    )  # fmt: skip
