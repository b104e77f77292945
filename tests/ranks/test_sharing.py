"""Workers whose ranks share out positions answer as one process does, from chunks that anybody wrote: real processes.

Tiny checkpoints in fp64: token for token what transformers computes. What the store has knows no ranks, so workers of
every shape go on with each other's chunks, from every tier.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from forebay.models.traffic import KINDS
from forebay.testing.cluster import wait_for
from tests import checkpoints
from tests.e2e.expected import PrefixOracle
from tests.e2e.reference import greedy_reference
from tests.ranks.conftest import Crowd
from tests.ranks.test_workers import Case, figures
from tests.workers.processes import start_store, store_values

LONG = bool(os.environ.get("FOREBAY_CONTEXT_RANKS"))
"""Families, sizes and lengths that CI has no time for."""

VOCAB, OUTPUT = 500, 4


LOAD = ("--prefixes", "load")
"""What files have is loaded, however short it is."""


def flags(dcp: int, interleave: int = 1, *more: str) -> tuple[str, ...]:
    return (
        "--decode-context-parallel-size", str(dcp), "--cp-kv-cache-interleave-size", str(interleave),
        "--max-num-batched-tokens", "48", *LOAD, *more,
    )  # fmt: skip


SMALL = ("--max-tokens", "256")
"""A pool with no room for several prompts at a time."""


@dataclass(frozen=True)
class Family:
    """Workers in the order in which they are asked: tensor parallel size, and what else they are told. One of them is
    alone, the last one is `SMALL`."""

    make: Callable[[Path], Path]
    workers: tuple[tuple[int, tuple[str, ...]], ...]


ONE = (1, LOAD)
LLAMA1 = partial(checkpoints.tiny_llama, num_key_value_heads=1)
EIGHT = partial(checkpoints.tiny_llama, num_key_value_heads=1, num_attention_heads=8, hidden_size=96)
FAMILIES = {
    "llama-1": Family(LLAMA1, ((4, flags(4)), ONE, (2, flags(2, 4, "--dcp-comm-backend", "a2a", *SMALL)))),
    "deepseek_v3": Family(checkpoints.tiny_deepseek_v3, (ONE, (2, flags(2, 1, *SMALL)))),
}
if LONG:
    FAMILIES |= {
        "llama-2": Family(checkpoints.tiny_llama, (ONE, (4, flags(2, 2, *SMALL)))),
        "qwen3_moe": Family(
            partial(checkpoints.tiny_qwen3_moe, num_key_value_heads=1),
            ((4, flags(4, 4)), ONE, (2, flags(2, 1, *SMALL))),
        ),
        "llama-8": Family(EIGHT, ((8, flags(8)), (4, flags(4)), ONE, (2, flags(2)), (8, flags(4, 2, *SMALL)))),
        "deepseek_v3-more": Family(
            checkpoints.tiny_deepseek_v3,
            ((4, flags(4)), ONE, (4, flags(2, 8)),
             (4, flags(4, 1, "--dcp-q-replicate", "--dcp-comm-backend", "a2a", *SMALL))),
        ),
        "prompts": Family(
            LLAMA1,
            ((2, flags(2, 1, "--prefill-context-parallel-size", "2")), ONE,
             (1, ("--prefill-context-parallel-size", "3", "--max-num-batched-tokens", "48", *LOAD, *SMALL))),
        ),
    }


def lengths() -> list[int]:
    """On both sides of every owner's boundary: of single positions up to the first blocks, of blocks behind that."""
    if LONG:
        return [*range(1, 36), *range(61, 68), *range(94, 100), 129, 150]
    return [1, 2, 3, 5, 9, 15, 16, 17, 31, 32, 33, 49, 66, 97, 130]


@dataclass
class Shapes(Case):
    """Workers of different shapes. `seed` is their own: several families have the same weights, and one store."""

    seed: int = 0

    def rng(self, purpose: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, purpose))


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, crowd: Crowd) -> Iterator[Shapes]:
    family, name = FAMILIES[request.param], request.param
    model = family.make(crowd.folder / name)
    names = [f"{name}-{number}" for number in range(len(family.workers))]
    for worker, (size, more) in zip(names, family.workers, strict=True):
        crowd.start(worker, model, size, *more)
    seed = zlib.crc32(name.encode())
    rng = np.random.default_rng(seed)
    longest = rng.integers(16, VOCAB, 200).tolist()
    # Half of them begin alike, so that later ones hit what earlier ones have stored.
    every = [longest[:n] if index % 2 else rng.integers(16, VOCAB, n).tolist() for index, n in enumerate(lengths())]
    prompts = [every[index] for index in rng.permutation(len(every))]
    answers = greedy_reference(model, prompts, OUTPUT)
    yield Shapes([crowd.worker(worker) for worker in names], prompts, answers, PrefixOracle(), OUTPUT, seed)
    for worker in names:
        crowd.workers.pop(worker).end()


def test_every_shape_gives_the_same_answers_and_shares_its_chunks(case: Shapes) -> None:
    first, *others = case.workers
    half = len(case.prompts) // 2
    case.ask(first, slice(half))
    for worker in others:
        case.ask(worker, slice(half))
        loaded = figures(worker)
        assert loaded["cached.host"] > 0 and loaded.get("push.committed", 0) == 0, "nothing is computed again"
    for worker in (others[0], first, *others[1:]):
        case.ask(worker, slice(half, None))
    for worker in case.workers:
        found = figures(worker)
        assert not any(found.get(name, 0) for name in ("loads.corrupt", "loads.failed", "push.lost", "push.unshared"))


def test_hits_come_from_files_whoever_wrote_them(case: Shapes, crowd: Crowd) -> None:
    """The store is started again, and its memory is empty: a worker of another shape has computed them."""
    first, *others = case.workers
    rng = case.rng(11)
    prompts = [rng.integers(16, VOCAB, n).tolist() for n in (67, 97)]
    computed = [first.front.ask(f"c{n}", prompt, OUTPUT).tokens for n, prompt in enumerate(prompts)]
    first.front.settle()
    wait_for("files", lambda: not sum(v for k, v in store_values(crowd.folder).items() if k.endswith("stores_running")))
    assert crowd.store.end() == 0
    for worker in case.workers:
        wait_for("a worker without a store", lambda worker=worker: worker.front.stats().store == "down")
    crowd.store = start_store(crowd.folder)
    for worker in others:
        worker.front.settle()
        before = figures(worker).get("cached.fs", 0)
        assert [worker.front.ask(f"f{n}", prompt, OUTPUT).tokens for n, prompt in enumerate(prompts)] == computed
        worker.front.settle()
        if worker is others[0]:
            assert figures(worker)["cached.fs"] - before == 64 + 96


def test_beside_one_another_and_preempted_they_answer_as_alone(case: Shapes) -> None:
    """Prompts in pieces beside decodes, in a pool that has no room for all answers to grow."""
    alone, small = next(w for w in case.workers if figures(w).get("ranks", 1) == 1), case.workers[-1]
    rng = case.rng(12)
    prompts = [rng.integers(16, VOCAB, n).tolist() for n in (17, 3, 20, 18, 81, 19)]
    for number, prompt in enumerate(prompts):
        small.front.generate(f"m{number}", prompt, 64)
    together = [small.front.wait(f"m{number}").tokens for number in range(len(prompts))]
    assert figures(small)["preemptions"] > 0
    small.front.settle()
    assert [alone.front.ask(f"o{n}", prompt, 64).tokens for n, prompt in enumerate(prompts)] == together


def test_a_decode_sends_no_keys_and_as_much_behind_any_context(case: Shapes) -> None:
    """Real collectives: what rank 0 has sent for each further token."""
    worker = case.workers[-1]
    rng, found = case.rng(13), []
    for length in (20, 44):  # in one piece each: nothing is cached when they are computed
        before = figures(worker)
        worker.front.ask(f"d{length}", rng.integers(16, VOCAB, length).tolist(), 9)
        after = figures(worker)
        found.append({kind: after[f"ranks.{kind}.bytes"] - before[f"ranks.{kind}.bytes"] for kind in KINDS})
        worker.front.settle()
    short, long = found
    assert short["context"] == long["context"] == 0
    assert all(short[kind] == long[kind] for kind in ("query", "lse", "out"))
    assert short["out"] > 0 or short["rows"] > 0, "they share something"
