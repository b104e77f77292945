"""Several servers on one store: what one has computed another one finds, if it is the same, and only then."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from forebay.kvstore.client import StoreClient
from forebay.testing.cluster import Cluster
from tests.vllm import models
from tests.vllm.conftest import PATIENT, server
from tests.vllm.prompts import TOLERANCE, Prompt, distance, longest_hit, sharing
from tests.vllm.servers import Engine, Reply, held, namespaces, running, settle


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return sharing(10, seed=11)


@pytest.fixture(scope="module")
def known(qwen: Cluster, engine: Engine, prompts: list[Prompt]) -> list[Reply]:
    """What the first server has answered after device hits; all of it is in the store."""
    for prompt in prompts:
        engine.complete(prompt)
    replies = [engine.complete(prompt) for prompt in prompts]
    held(qwen, prompts)
    return replies


def test_a_second_server_computes_nothing_that_the_first_one_has(
    qwen: Cluster, prompts: list[Prompt], known: list[Reply]
) -> None:
    other = server(qwen, "second", settings=PATIENT)
    with running(other):
        for prompt, reply in zip(prompts, known, strict=True):
            found = other.complete(prompt)
            assert found.cached_tokens == longest_hit(prompt)
            assert found.logprobs == reply.logprobs
        settle(qwen)


def test_blocks_of_another_size_hit_the_same_chunks(qwen: Cluster, prompts: list[Prompt], known: list[Reply]) -> None:
    other = server(qwen, "wider", block_size=128, settings=PATIENT)
    with running(other):
        for prompt, reply in zip(prompts, known, strict=True):
            other.forget_device()
            found = other.complete(prompt)
            assert found.cached_tokens == longest_hit(prompt)
            assert distance(found, reply) < TOLERANCE
        settle(qwen)


def test_another_dtype_misses(qwen: Cluster, prompts: list[Prompt], known: list[Reply]) -> None:
    other = server(qwen, "narrow", "--dtype", "bfloat16", settings=PATIENT)
    with StoreClient(qwen.store_address) as client:
        before = namespaces(client)
    with running(other):
        assert other.complete(prompts[0]).cached_tokens == 0
        held(qwen, prompts[:1], but=before)
        other.forget_device()
        assert other.complete(prompts[0]).cached_tokens == longest_hit(prompts[0]), "its own it finds"


def test_other_weights_under_the_same_name_miss(
    qwen: Cluster, prompts: list[Prompt], known: list[Reply], folder: Path
) -> None:
    weights = qwen.model / "model.safetensors"
    kept = weights.with_suffix(".kept")
    shutil.copy2(weights, kept)
    shutil.copy2(models.qwen3(folder / "other", seed=5) / "model.safetensors", weights)
    try:
        other = server(qwen, "other")
        with running(other):
            reply = other.complete(prompts[0])
            assert reply.cached_tokens == 0 and distance_or_none(reply, known[0]) != 0.0
    finally:
        shutil.copy2(kept, weights)


def distance_or_none(one: Reply, other: Reply) -> float | None:
    """None if the answers don't even name the same tokens."""
    both = one.logprobs[0].keys() & other.logprobs[0].keys()
    return max(abs(one.logprobs[0][token] - other.logprobs[0][token]) for token in both) if both else None
