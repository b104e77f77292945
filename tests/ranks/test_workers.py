"""Workers of 1, 2 and 4 ranks answer alike, and produce and consume the same chunks: real processes, exact counters.

Tiny checkpoints in fp64: token for token what transformers computes.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from forebay.kvstore.client import StoreClient
from forebay.kvstore.identity import Chain, decode_namespace, pack_tokens, root_key
from tests import checkpoints
from tests.e2e.expected import PrefixOracle
from tests.e2e.prompts import sharing_prompts
from tests.e2e.reference import greedy_reference
from tests.e2e.windowed import tiny_windowed
from tests.ranks.conftest import CHUNK, Crowd, Worker, children, listening
from tests.workers.processes import FrontEnd

VOCAB, WINDOW, OUTPUT, COUNT, LONGEST = 500, 40, 6, 12, 150


@dataclass(frozen=True)
class Family:
    """`sizes`: of the worker that computes first, of the one that goes on, of the one that comes last."""

    make: Callable[[Path], Path]
    sizes: tuple[int, ...]


FAMILIES = {
    "llama": Family(checkpoints.tiny_llama, (2, 1, 4)),
    "qwen3": Family(partial(checkpoints.tiny_qwen3, num_key_value_heads=4), (1, 2)),
    "gemma3": Family(partial(tiny_windowed, num_key_value_heads=2), (2, 1)),
    "deepseek_v3": Family(checkpoints.tiny_deepseek_v3, (2, 1)),
    "qwen3_moe": Family(checkpoints.tiny_qwen3_moe, (1, 2)),
}


@dataclass
class Case:
    """A family's workers by size, prompts with the reference's answers, and what its cache must have."""

    workers: list[Worker]
    prompts: list[list[int]]
    answers: list[list[int]]
    oracle: PrefixOracle
    output: int = OUTPUT

    def ask(self, worker: Worker, which: slice) -> int:
        """Ask these prompts; each answer must be the reference's, each hit exact. Returns the cached tokens."""
        total = 0
        for number, (prompt, answer) in enumerate(zip(self.prompts[which], self.answers[which], strict=True)):
            expected = self.oracle.cached(prompt)
            worker.front.heard.clear()
            heard = worker.front.ask(f"r{number}", prompt, self.output)
            assert heard.tokens == answer, f"{len(prompt)} tokens: another answer"
            assert heard.started is not None and heard.started.cached_tokens == expected, len(prompt)
            self.oracle.computed(prompt, answer)
            total += expected
        worker.front.settle()
        return total


def figures(worker: Worker) -> dict[str, float]:
    return worker.front.stats().values


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, crowd: Crowd) -> Iterator[Case]:
    family, name = FAMILIES[request.param], request.param
    model = family.make(crowd.folder / name)
    names = [f"{name}-{size}" for size in family.sizes]
    for worker, size in zip(names, family.sizes, strict=True):
        crowd.start(worker, model, size)
    prompts = sharing_prompts(VOCAB, CHUNK, WINDOW, COUNT, seed=5, longest=LONGEST)
    answers = greedy_reference(model, prompts, OUTPUT)
    yield Case([crowd.worker(worker) for worker in names], prompts, answers, PrefixOracle())
    for worker in names:
        crowd.workers.pop(worker).end()


def test_every_size_gives_the_same_answers_and_shares_its_chunks(case: Case) -> None:
    first, second, *last = case.workers
    half = COUNT // 2
    case.ask(first, slice(half))
    case.ask(second, slice(half))
    loaded = figures(second)
    assert loaded["cached.host"] > 0 and loaded["loaded.host.bytes"] > 0, "it had computed none of these itself"
    assert loaded.get("push.committed", 0) == 0, "nothing is stored again"
    case.ask(second, slice(half, COUNT))
    case.ask(first, slice(half, COUNT))
    assert figures(first)["cached.host"] > 0, "and back"
    for worker in last:
        case.ask(worker, slice(COUNT))
        assert figures(worker)["cached.host"] > 0
    for worker in case.workers:
        found = figures(worker)
        assert not any(found.get(name, 0) for name in ("loads.corrupt", "loads.failed", "push.lost", "push.unshared"))


def test_a_conversation_goes_on_at_a_worker_of_another_size(case: Case) -> None:
    """Every turn at the next worker: nothing but the last units of the turn before is computed again."""
    rng = random.Random(9)
    talk = [rng.randrange(16, VOCAB) for _ in range(40)]
    for turn in range(4):
        worker = case.workers[turn % len(case.workers)]
        expected = case.oracle.cached(talk)
        assert turn == 0 or expected >= len(talk) - 13 - 2 * 16, "the turn before is all stored"
        worker.front.heard.clear()
        heard = worker.front.ask("talk", talk, OUTPUT)
        assert heard.started is not None and heard.started.cached_tokens == expected
        case.oracle.computed(talk, heard.tokens)
        worker.front.settle()
        talk = [*talk, *heard.tokens, *(rng.randrange(16, VOCAB) for _ in range(13))]


def test_a_chunk_of_two_ranks_is_that_of_one(case: Case, crowd: Crowd) -> None:
    """The same tokens under two salts, each computed by another worker: equal headers, equal bytes but for rounding."""
    tokens = [random.Random(3).randrange(16, VOCAB) for _ in range(2 * CHUNK + 16)]
    payloads = []
    for worker in case.workers[:2]:
        salt = b"as computed by %d" % worker.pid
        worker.front.heard.clear()
        worker.front.ask("salted", tokens, 1, salt=salt)
        worker.front.settle()
        payloads.append(stored(worker.front, crowd, tokens, salt))
    first, second = payloads
    assert first.keys() == second.keys() and len(first) >= 3
    for place, values in first.items():
        np.testing.assert_allclose(values, second[place], rtol=0, atol=1e-12)
        assert np.abs(values).max() > 0.1


def stored(front: FrontEnd, crowd: Crowd, tokens: list[int], salt: bytes) -> dict[tuple[int, int, int], np.ndarray]:
    """What the store has of a prompt: values by group, start and length."""
    namespace = decode_namespace(front.describe().namespace)
    root = root_key(namespace.id, salt)
    limit = len(tokens) // 16 * 16
    keys = Chain(root, tokens, chunk_tokens=CHUNK).chunk_keys(limit // 16)
    with StoreClient(f"{crowd.folder}/store.sock") as client:
        client.register(namespace)
        found = client.lookup(namespace.id, root, pack_tokens(tokens[:limit]), keys, limit=limit)
        assert found.hit == limit
        return {
            (chunk.group, chunk.start, chunk.tokens): np.frombuffer(client.payload(chunk), dtype="<f8").copy()
            for chunk in found.chunks
        }


def test_ranks_listen_on_loopback_alone(case: Case) -> None:
    addresses = []
    for worker in case.workers:
        for pid in (worker.pid, *children(worker.pid)):
            addresses += listening(pid)
    assert addresses and set(addresses) == {"0100007F"}


@pytest.mark.parametrize(
    ("flags", "environment", "said"),
    [
        (["--tensor-parallel-size", "3"], {}, "can't split this model's 4 attention heads and 2 KV heads"),
        (["--tensor-parallel-size", "4", "--decode-context-parallel-size", "4"], {},
         "2 KV heads are, each, on 2 ranks, and only such copies can be dealt out; use 1 or 2, or tensor_parallel_s"),
        (["--tensor-parallel-size", "2"], {"GLOO_SOCKET_IFNAME": "eth7"}, "give --trusted-network eth7"),
    ],
)
def test_what_cannot_be_is_refused_at_once(
    flags: list[str], environment: dict[str, str], said: str, crowd: Crowd
) -> None:
    model = crowd.folder / "refused"
    if not model.exists():
        checkpoints.tiny_llama(model)
    command = [sys.executable, "-m", "forebay", "worker", str(model), "--listen", f"{crowd.folder}/no.sock", *flags]
    known = os.environ | environment
    ended = subprocess.run(command, env=known, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2 and said in ended.stderr, ended.stderr
