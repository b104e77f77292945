"""Every family's tiny checkpoint is served by real processes, its cache kept by a store: answers are the reference's
token for token in fp64, hits exact, and what was loaded came from where it should.

By default two families that differ most from the others: latents of which an index chooses some, and a window with
sinks and quantised experts. All of them with FOREBAY_ALL_FAMILIES=1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from forebay.models.base import CausalLM
from forebay.models.loading import load_model
from forebay.testing.cluster import Cluster
from tests import checkpoints
from tests.e2e.expected import PrefixOracle
from tests.e2e.prompts import sharing_prompts
from tests.e2e.reference import greedy_reference
from tests.e2e.test_identity import CHUNK, OUTPUT, VOCAB, WINDOW, Case, adds_up, figure
from tests.parity.families import FAMILIES
from tests.parity.reference import Runner

QUICK = ("glm_moe_dsa", "gpt_oss")
ALL = bool(os.environ.get("FOREBAY_ALL_FAMILIES"))
COUNT, LONGEST = 8, 110


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One store with a file tier for all families: they differ in their namespaces."""
    folder = tmp_path_factory.mktemp("families")
    made = Cluster(folder, folder, chunk_tokens=CHUNK, threads=1)
    made.start_store()
    yield made
    made.stop()


@dataclass
class Served:
    """A family's case, and how its workers are started and ended."""

    name: str
    case: Case

    def start(self, number: int) -> str:
        """A fresh worker and its front end; returns the front end's name."""
        front = f"{self.name}-front{number}"
        self.case.cluster.start_pair(f"{self.name}-worker{number}", front)
        return front

    def end(self, number: int) -> None:
        """End both."""
        for part in ("front", "worker"):
            assert self.case.cluster.processes[f"{self.name}-{part}{number}"].end() == 0


@pytest.fixture(scope="module", params=list(FAMILIES) if ALL else QUICK)
def served(request: pytest.FixtureRequest, cluster: Cluster) -> Served:
    name = request.param
    path = FAMILIES[name].make(cluster.folder / name)
    plain = checkpoints.to_mxfp4(path) if name == "gpt_oss" else path
    prompts = sharing_prompts(VOCAB, CHUNK, WINDOW, COUNT, seed=11, longest=LONGEST)
    cluster.model = path
    return Served(name, Case(cluster, prompts, greedy_reference(plain, prompts, OUTPUT), PrefixOracle()))


def test_served_through_the_store(served: Served) -> None:
    """Cold on one worker; then on another, whose device has never seen these prompts."""
    case, cluster = served.case, served.case.cluster
    case.ask_all(served.start(1), known=False)
    served.end(1)
    front = served.start(2)
    cached = case.ask_all(front, known=True)
    figures = cluster.figures(front)
    served.end(2)
    from_host, from_device = figure(figures, "cached.host"), figure(figures, "cached.device")
    assert from_host > 0 and adds_up(from_host + from_device, figures, cached)
    assert figure(figures, "loaded.host.bytes") > 0


@pytest.mark.skipif(not ALL, reason="the long form: FOREBAY_ALL_FAMILIES=1")
def test_served_from_files(served: Served) -> None:
    """After the store has ended and started with an empty memory."""
    case, cluster = served.case, served.case.cluster
    assert cluster.processes["store"].end() == 0
    cluster.start_store()
    front = served.start(3)
    cached = case.ask_all(front, known=True)
    figures = cluster.figures(front)
    served.end(3)
    grown = [figure(figures, f"cached.{source}") for source in ("fs", "host", "device")]
    assert grown[0] > 0 and adds_up(sum(grown), figures, cached)
    assert cluster.store_values()["tier.fs.promoted_bytes"] > 0


# --- index keys of eight bits --------------------------------------------------------------------------------


def answer(model: CausalLM, prompt: list[int]) -> list[int]:
    """Greedy, without any cache of ours."""
    runner, answer, new = Runner(model), [], prompt
    with torch.inference_mode():
        for _ in range(OUTPUT):
            answer.append(int(runner.step({0: new})[-1].argmax()))
            new = answer[-1:]
    return answer


@pytest.mark.skipif(not ALL, reason="the long form: FOREBAY_ALL_FAMILIES=1")
def test_scaled_index_keys_are_served_and_hit(cluster: Cluster) -> None:
    """Cold on one rank, then on two: the store has rows with their scales, and every rank gets all of them."""
    cluster.model = checkpoints.tiny_glm_moe_dsa(cluster.folder / "scaled", index_head_dim=32)
    model = load_model(cluster.model, dtype=torch.float64, device=torch.device("cpu"), index_keys="fp8")
    prompts = sharing_prompts(VOCAB, CHUNK, WINDOW, COUNT, seed=12, longest=LONGEST)
    case = Case(cluster, prompts, [answer(model, prompt) for prompt in prompts], PrefixOracle())
    for ranks in (1, 2):
        worker, front = f"scaled-worker{ranks}", f"scaled-front{ranks}"
        cluster.start_worker(worker, extra=("--index-cache-dtype", "fp8", "--tensor-parallel-size", str(ranks)))
        cluster.start_frontend(front, worker)
        case.ask_all(front, known=ranks == 2)
        figures = cluster.figures(front)
        for part in (front, worker):
            assert cluster.processes[part].end() == 0
    assert figure(figures, "cached.host") > 0
