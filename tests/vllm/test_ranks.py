"""Two ranks of one server each move their half of the same chunks, and a server of one rank finds them whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.testing.cluster import Cluster
from tests.vllm.conftest import PATIENT, server
from tests.vllm.prompts import TOLERANCE, distance, longest_hit, sharing
from tests.vllm.servers import Engine, held, running, settle


@pytest.fixture(scope="module")
def two(qwen: Cluster) -> Iterator[Engine]:
    """A server of two ranks: each has one of the model's two K/V heads."""
    one = server(qwen, "two", "--tensor-parallel-size", "2", settings=PATIENT)
    with running(one):
        yield one


def test_ranks_find_what_they_have_stored_together_to_the_last_bit(qwen: Cluster, two: Engine) -> None:
    prompts = sharing(10, seed=41)
    for prompt in prompts:
        two.complete(prompt)
    devices = [two.complete(prompt) for prompt in prompts]
    held(qwen, prompts)
    for prompt, device in zip(prompts, devices, strict=True):
        two.forget_device()
        found = two.complete(prompt)
        assert found.cached_tokens == longest_hit(prompt) and found.logprobs == device.logprobs
    quiet(qwen)


def test_chunks_are_shared_between_numbers_of_ranks_both_ways(qwen: Cluster, two: Engine, engine: Engine) -> None:
    for prompts, writer, reader in ((sharing(5, seed=42), two, engine), (sharing(5, seed=43), engine, two)):
        computed = [writer.complete(prompt) for prompt in prompts]
        held(qwen, prompts)
        for prompt, reply in zip(prompts, computed, strict=True):
            found = reader.complete(prompt)
            assert found.cached_tokens == longest_hit(prompt)
            assert distance(found, reply) < TOLERANCE
    quiet(qwen)


def quiet(cluster: Cluster) -> None:
    values = settle(cluster)
    assert (values["store.leases"], values["host.reserved_bytes"]) == (0, 0)
