"""Workers whose ranks share out positions answer as one process does, from chunks that anybody wrote: real processes.

Tiny checkpoints in fp64: token for token what transformers computes. What the store has knows no ranks, so workers of
every shape go on with each other's chunks, from every tier.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests import checkpoints
from tests.e2e.expected import PrefixOracle
from tests.e2e.reference import greedy_reference
from tests.ranks.conftest import Crowd
from tests.ranks.test_workers import Case, figures

LONG = bool(os.environ.get("FOREBAY_CONTEXT_RANKS"))
"""Families, sizes and lengths that CI has no time for."""

VOCAB, OUTPUT = 500, 4


def flags(dcp: int, interleave: int = 1, *more: str) -> tuple[str, ...]:
    return (
        "--decode-context-parallel-size", str(dcp), "--cp-kv-cache-interleave-size", str(interleave),
        "--max-num-batched-tokens", "48", *more,
    )  # fmt: skip


@dataclass(frozen=True)
class Family:
    """Workers in the order in which they are asked: tensor parallel size, and what else they are told."""

    make: Callable[[Path], Path]
    workers: tuple[tuple[int, tuple[str, ...]], ...]


ONE = (1, ())
LLAMA1 = partial(checkpoints.tiny_llama, num_key_value_heads=1)
EIGHT = partial(checkpoints.tiny_llama, num_key_value_heads=1, num_attention_heads=8, hidden_size=96)
FAMILIES = {
    "llama-1": Family(LLAMA1, ((4, flags(4)), ONE, (2, flags(2, 4, "--dcp-comm-backend", "a2a")))),
    "deepseek_v3": Family(checkpoints.tiny_deepseek_v3, (ONE, (4, flags(4)))),
}
if LONG:
    FAMILIES |= {
        "llama-2": Family(checkpoints.tiny_llama, ((4, flags(2, 2)), ONE, (4, ()))),
        "qwen3_moe": Family(
            partial(checkpoints.tiny_qwen3_moe, num_key_value_heads=1), ((4, flags(4, 4)), ONE, (2, flags(2)))
        ),
        "llama-8": Family(EIGHT, ((8, flags(8)), (4, flags(4)), (8, flags(4, 2)), (2, flags(2)), ONE)),
        "deepseek_v3-more": Family(
            checkpoints.tiny_deepseek_v3,
            ((4, flags(2, 8)), ONE, (4, flags(4, 1, "--dcp-q-replicate", "--dcp-comm-backend", "a2a"))),
        ),
    }


def lengths() -> list[int]:
    """On both sides of every owner's boundary: of single positions up to the first blocks, of blocks behind that."""
    if LONG:
        return [*range(1, 36), *range(61, 68), *range(94, 100), 129, 150]
    return [1, 2, 3, 5, 9, 15, 16, 17, 31, 32, 33, 49, 66, 97, 130]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, crowd: Crowd) -> Iterator[Case]:
    family, name = FAMILIES[request.param], request.param
    model = family.make(crowd.folder / name)
    names = [f"{name}-{number}" for number in range(len(family.workers))]
    for worker, (size, more) in zip(names, family.workers, strict=True):
        crowd.start(worker, model, size, *more)
    rng = np.random.default_rng(7)
    longest = rng.integers(16, VOCAB, 200).tolist()
    # Half of them begin alike, so that later ones hit what earlier ones have stored.
    every = [longest[:n] if index % 2 else rng.integers(16, VOCAB, n).tolist() for index, n in enumerate(lengths())]
    prompts = [every[index] for index in rng.permutation(len(every))]
    answers = greedy_reference(model, prompts, OUTPUT)
    yield Case([crowd.worker(worker) for worker in names], prompts, answers, PrefixOracle(), OUTPUT)
    for worker in names:
        crowd.workers.pop(worker).end()


def test_every_shape_gives_the_same_answers_and_shares_its_chunks(case: Case) -> None:
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
