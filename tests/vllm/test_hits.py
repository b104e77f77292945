"""A hit in the store is as good as one in the device, to the last bit, and is told exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.kvstore.client import StoreClient
from forebay.kvstore.geometry import GroupGeometry
from forebay.testing.cluster import Cluster
from tests.vllm import models
from tests.vllm.conftest import PATIENT, _cluster, server
from tests.vllm.prompts import TOLERANCE, Prompt, distance, longest_hit, salted, sharing
from tests.vllm.servers import Engine, Reply, held, namespaces, running, settle, wait


def cold(engine: Engine, prompts: list[Prompt]) -> list[Reply]:
    replies = [engine.complete(prompt, cache_salt=salt) for prompt, salt in salted(prompts)]
    assert not any(reply.cached_tokens for reply in replies)
    return replies


def from_device(engine: Engine, prompts: list[Prompt], block: int = 32) -> list[Reply]:
    replies = []
    for prompt in prompts:
        engine.complete(prompt)
        replies.append(engine.complete(prompt))
    assert [reply.cached_tokens for reply in replies] == [longest_hit(prompt, block) for prompt in prompts]
    return replies


def from_store(engine: Engine, prompts: list[Prompt]) -> list[Reply]:
    """Each with nothing in the device. Every hit is exactly as long as it can be, and counted."""
    before = engine.counts()
    replies = []
    for prompt in prompts:
        engine.forget_device()
        replies.append(engine.complete(prompt))
    hits = [longest_hit(prompt) for prompt in prompts]
    assert [reply.cached_tokens for reply in replies] == hits
    after = wait("the last figures", lambda: _settled(engine, sum(hits), before))
    assert after["loads"] - before.get("loads", 0) == len(prompts)
    return replies


def _settled(engine: Engine, tokens: int, before: dict[str, float]) -> dict[str, float] | None:
    after = engine.counts()
    return after if after.get("loads.tokens", 0) - before.get("loads.tokens", 0) == tokens else None


def compare(hits: list[Reply], devices: list[Reply], colds: list[Reply]) -> None:
    """To the last bit with the device; closely with what was computed."""
    assert [hit.logprobs for hit in hits] == [device.logprobs for device in devices]
    assert max(distance(hit, one) for hit, one in zip(hits, colds, strict=True)) < TOLERANCE


def loaded_bytes(engine: Engine) -> float:
    counts = engine.counts().items()
    return sum(value for name, value in counts if name.startswith("rank.loaded.") and name.endswith("bytes"))


def test_100_prompts_of_qwen3_hit_bit_for_bit(qwen: Cluster, engine: Engine) -> None:
    prompts = sharing(100)
    colds, devices = cold(engine, prompts), from_device(engine, prompts)
    held(qwen, prompts)
    bytes_before = loaded_bytes(engine)
    hits = from_store(engine, prompts)
    compare(hits, devices, colds)
    granule = GroupGeometry("full", "full", (0, 1, 2), 2, 32, "float32").granule_bytes
    expected = sum(longest_hit(prompt) for prompt in prompts) // 16 * granule
    assert wait("all bytes", lambda: loaded_bytes(engine) - bytes_before == expected)
    values = settle(qwen)
    assert (values["host.reserved_bytes"], values["store.leases"]) == (0, 0)
    assert by_source(engine, "host") >= sum(longest_hit(prompt) for prompt in prompts)


def test_a_salt_never_hits_anothers(qwen: Cluster, engine: Engine) -> None:
    (prompt,) = sharing(1, seed=2)
    for salt in ({"cache_salt": "a"}, {"cache_salt": "b"}, {}):
        assert engine.complete(prompt, **salt).cached_tokens == 0
        held(qwen, [prompt], salt.get("cache_salt"))
    for salt in ({"cache_salt": "a"}, {"cache_salt": "b"}, {}):
        engine.forget_device()
        assert engine.complete(prompt, **salt).cached_tokens == longest_hit(prompt)
    engine.forget_device()
    assert engine.complete(prompt, cache_salt="c").cached_tokens == 0


def test_answers_are_stored_too_and_the_next_turn_goes_on_from_them(qwen: Cluster, engine: Engine) -> None:
    (prompt,) = sharing(1, seed=3)
    first = engine.complete(prompt, 60)
    held(qwen, [[*prompt, *first.token_ids]])
    engine.forget_device()
    turn = [*prompt, *first.token_ids, 7, 8, 9]
    computed = len(prompt) + len(first.token_ids) - 1
    assert engine.complete(turn).cached_tokens == computed // 16 * 16


@pytest.mark.parametrize("after_s", [0.001, 0.02, 0.1, 0.4, None])
def test_a_client_that_goes_away_leaves_no_pin(qwen: Cluster, engine: Engine, after_s: float | None) -> None:
    (prompt,) = sharing(1, seed=4)
    engine.complete(prompt)
    held(qwen, [prompt])
    engine.forget_device()
    engine.leave(prompt, 1500, after_s)
    values = settle(qwen)
    assert values["store.leases"] == 0
    running_now = 'vllm:num_requests_running{engine="0",model_name="tiny"}'
    assert wait("an idle engine", lambda: not engine.metrics()[running_now])


def test_chunks_are_shared_with_our_own_worker_both_ways(qwen: Cluster, engine: Engine) -> None:
    prompts = sharing(2, seed=5)
    qwen.start_pair("worker", "front")
    theirs = engine.complete(prompts[0])
    held(qwen, prompts[:1])
    ours = qwen.complete("front", list(prompts[0]), 4)
    assert ours.cached_tokens == longest_hit(prompts[0]) and theirs.cached_tokens == 0
    assert ours.token_ids[0] == theirs.token_ids[0]
    first = qwen.complete("front", list(prompts[1]), 4)
    qwen.settle("front")
    engine.forget_device()
    again = engine.complete(prompts[1])
    assert again.cached_tokens == longest_hit(prompts[1]) and again.token_ids[0] == first.token_ids[0]
    for name in ("front", "worker"):
        qwen.processes[name].end()


def test_what_the_files_alone_have_is_a_hit_and_told_as_the_disks(qwen: Cluster, engine: Engine) -> None:
    (prompt,) = sharing(1, seed=9)
    first, again = engine.complete(prompt), engine.complete(prompt)
    held(qwen, [prompt])
    settle(qwen)
    connects = engine.counts()["store.connects"]
    assert qwen.processes["store"].end() == 0  # a clean end gives the memory back
    qwen.start_store()
    wait("the new store", lambda: _connected(engine, connects))
    before = by_source(engine, "disk")
    engine.forget_device()
    found = engine.complete(prompt)
    assert found.cached_tokens == longest_hit(prompt) and found.logprobs == again.logprobs and first.cached_tokens == 0
    assert wait("figures", lambda: by_source(engine, "disk") - before) == longest_hit(prompt)
    assert settle(qwen)["store.leases"] == 0


def _connected(engine: Engine, connects: float) -> bool:
    """vLLM tells its figures when it steps: something short, which isn't stored."""
    engine.complete([1, 2, 3], 1)
    return engine.counts()["store.connects"] > connects


def by_source(engine: Engine, source: str) -> float:
    """Prompt tokens that were found there."""
    metrics = engine.metrics().items()
    return sum(v for name, v in metrics if "cached_by_source_total" in name and f'source="{source}"' in name)


def test_new_weights_miss_whatever_is_stored(qwen: Cluster, engine: Engine) -> None:
    (prompt,) = sharing(1, seed=6)
    engine.complete(prompt)
    held(qwen, [prompt])
    with StoreClient(qwen.store_address) as client:
        before = namespaces(client)
    url = f"{engine.url}/reset_prefix_cache"
    assert engine.client.post(url, params={"reset_external": "true"}).status_code == 200
    assert engine.complete(prompt).cached_tokens == 0
    held(qwen, [prompt], but=before)
    engine.forget_device()
    assert engine.complete(prompt).cached_tokens == longest_hit(prompt), "what the new ones computed"


@pytest.fixture(scope="module")
def gemma(folder: Path) -> Iterator[Cluster]:
    """A store of its own, and a tiny Gemma 3."""
    (folder / "gemma").mkdir()
    yield from _cluster(folder / "gemma", models.gemma3(folder / "gemma" / "model"))


def test_100_prompts_of_gemma3_with_its_windows_hit_bit_for_bit(gemma: Cluster) -> None:
    one = server(gemma, "vllm", settings=PATIENT)
    with running(one):
        prompts = sharing(100, seed=7)
        colds, devices = cold(one, prompts), from_device(one, prompts)
        held(gemma, prompts)
        hits = from_store(one, prompts)
        compare(hits, devices, colds)
        settle(gemma)
        gemma.start_pair("worker", "front")
        ours = gemma.complete("front", list(prompts[0]), 4)
        assert ours.cached_tokens == longest_hit(prompts[0]) and ours.token_ids[0] == hits[0].token_ids[0]


@pytest.fixture(scope="module")
def deepseek(folder: Path) -> Iterator[Cluster]:
    """A store of its own, and a tiny DeepSeek-V3."""
    (folder / "deepseek").mkdir()
    yield from _cluster(folder / "deepseek", models.deepseek(folder / "deepseek" / "model"))


def test_deepseek_is_served_without_the_store_where_vllm_has_no_prefix_cache_for_it(deepseek: Cluster) -> None:
    """Its prefill for latent attention on CPUs lets tokens see those behind them (the logprobs of a prompt's beginning
    change with its end), so nothing that it computes may be stored for anybody."""
    one = server(deepseek, "vllm")
    with running(one, known=False):
        wait("a word about it", lambda: "this model is served without the store" in one.log.read_text())
        (prompt,) = sharing(1, seed=8)
        first, second = one.complete(prompt), one.complete(prompt)
        assert (first.cached_tokens, second.cached_tokens) == (0, 0) and first.logprobs == second.logprobs
        assert not settle(deepseek).get("store.reserved")
