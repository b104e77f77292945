"""Every family's cache comes back from a bucket and from a peer, exact, into a store that has nothing in memory.

The long form of test_serving.py, minutes for each tier: FOREBAY_ALL_FAMILIES=1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.testing.cluster import Cluster, wait_for
from tests import checkpoints
from tests.e2e.backends import Backend, Bucket, Peer
from tests.e2e.expected import PrefixOracle
from tests.e2e.prompts import sharing_prompts
from tests.e2e.reference import greedy_reference
from tests.e2e.test_identity import CHUNK, OUTPUT, VOCAB, WINDOW, Case, adds_up, figure
from tests.parity.families import FAMILIES
from tests.parity.test_serving import ALL, LONGEST, Served

pytestmark = [
    pytest.mark.skipif(not ALL, reason="the long form: FOREBAY_ALL_FAMILIES=1"),
    pytest.mark.timeout(1800),
]
COUNT = 4


@pytest.fixture(params=[Bucket, Peer], ids=lambda kind: kind.name)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    kind: Callable[[Path], Backend] = request.param
    made = kind(tmp_path / "backend")
    yield made
    made.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, tmp_path, chunk_tokens=CHUNK, threads=1, lookup_deadline="60s")
    yield made
    made.stop()


def restart(cluster: Cluster, backend: Backend) -> None:
    """The store starts over this backend, with nothing in memory."""
    if "store" in cluster.processes:
        assert cluster.processes["store"].end() == 0
    cluster.tiers = backend.tiers(cluster.store_address)
    cluster.start_store()
    wait_for("the tier", lambda: backend.ready(cluster.store_values()))


def test_every_family_is_hit_from_this_tier(cluster: Cluster, backend: Backend) -> None:
    restart(cluster, backend)
    served: dict[str, Served] = {}
    for name, family in FAMILIES.items():
        path = family.make(cluster.folder / name)
        plain = checkpoints.to_mxfp4(path) if name == "gpt_oss" else path
        prompts = sharing_prompts(VOCAB, CHUNK, WINDOW, COUNT, seed=11, longest=LONGEST)
        cluster.model = path
        served[name] = Served(name, Case(cluster, prompts, greedy_reference(plain, prompts, OUTPUT), PrefixOracle()))
        served[name].case.ask_all(served[name].start(1), known=False)
        served[name].end(1)
    restart(cluster, backend)
    assert cluster.store_values()["host.bytes_used"] == 0, "nothing is in memory"
    for name, one in served.items():
        cluster.model = cluster.folder / name
        front = one.start(2)
        cached = one.case.ask_all(front, known=True)
        figures = cluster.figures(front)
        one.end(2)
        found = {source: figure(figures, f"cached.{source}") for source in (backend.name, "host", "device")}
        assert found[backend.name] > 0 and adds_up(sum(found.values()), figures, cached), name
    assert cluster.store_values()[f"tier.{backend.name}.promoted_bytes"] > 0
