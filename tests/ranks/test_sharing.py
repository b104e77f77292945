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
import torch

from forebay.models.traffic import KINDS
from forebay.testing.cluster import wait_for
from forebay.testing.standstill import pause, resume
from tests import checkpoints
from tests.e2e.expected import PrefixOracle
from tests.e2e.reference import greedy_reference
from tests.ranks.conftest import CHUNK, Crowd, Worker, children
from tests.ranks.test_workers import Case, figures, stored
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
EIGHT2 = partial(checkpoints.tiny_llama, num_key_value_heads=2, num_attention_heads=8, hidden_size=96)
MOE8 = partial(checkpoints.tiny_qwen3_moe, num_key_value_heads=1, num_attention_heads=8, hidden_size=96)
LATENT8 = partial(checkpoints.tiny_deepseek_v3, num_key_value_heads=8, num_attention_heads=8, hidden_size=96)
REPLICATED = ("--dcp-q-replicate", "--dcp-comm-backend", "a2a")
FAMILIES = {
    "llama-1": Family(LLAMA1, ((4, flags(4)), ONE, (2, flags(2, 4, "--dcp-comm-backend", "a2a", *SMALL)))),
    "deepseek_v3": Family(checkpoints.tiny_deepseek_v3, (ONE, (2, flags(2, 1, *SMALL)))),
}
if LONG:
    FAMILIES |= {
        "llama-2": Family(EIGHT2, ((8, flags(4)), ONE, (8, flags(2, 8)), (4, flags(2, 2, *SMALL)))),
        "qwen3_moe": Family(MOE8, ((4, flags(4, 4)), ONE, (8, flags(8, 2)), (2, flags(2, 1, *SMALL)))),
        "llama-8": Family(EIGHT, ((8, flags(8)), (4, flags(4)), ONE, (2, flags(2)), (8, flags(4, 2, *SMALL)))),
        "deepseek_v3-more": Family(
            LATENT8,
            ((4, flags(4)), ONE, (8, flags(8, 2)), (4, flags(2, 8)), (4, flags(4, 1, *REPLICATED, *SMALL))),
        ),
        "prompts": Family(
            LLAMA1,
            ((2, flags(2, 1, "--prefill-context-parallel-size", "2")), ONE,
             (1, ("--prefill-context-parallel-size", "3", "--max-num-batched-tokens", "48", *LOAD, *SMALL))),
        ),
        "prompts-latent": Family(
            checkpoints.tiny_deepseek_v3,
            (ONE, (2, flags(2, 1, "--prefill-context-parallel-size", "2", *REPLICATED)),
             (4, flags(2, 2, "--prefill-context-parallel-size", "2", *SMALL))),
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

    @property
    def alone(self) -> Worker:
        """The one that is one process."""
        return next(worker for worker in self.workers if figures(worker).get("ranks", 1) == 1)

    @property
    def sharing(self) -> Worker:
        """One whose ranks share something."""
        return next(worker for worker in self.workers if figures(worker).get("ranks", 1) > 1)


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


def test_a_conversation_goes_from_shape_to_shape_and_back(case: Shapes) -> None:
    """Each turn at a worker of another shape, there and back: all whole units that the turns before have left are hit,
    and each answer is what one process gives that has nothing of it."""
    rng, turns, talk = case.rng(14), [], []
    for worker in (*case.workers, *reversed(case.workers)):
        talk = [*talk, *rng.integers(16, VOCAB, 11).tolist()]
        worker.front.heard.clear()
        heard = worker.front.ask("talk", talk, OUTPUT)
        assert heard.started is not None and heard.started.cached_tokens == case.oracle.cached(talk)
        case.oracle.computed(talk, heard.tokens)
        turns.append((talk, heard.tokens))
        worker.front.settle()
        talk = [*talk, *heard.tokens]
    for talk, tokens in turns:
        case.alone.front.heard.clear()
        assert case.alone.front.ask("again", talk, OUTPUT, salt=b"nobody's %d" % len(talk)).tokens == tokens


def test_a_chunk_of_ranks_that_share_is_that_of_one(case: Shapes, crowd: Crowd) -> None:
    """The same tokens under two salts, computed by one process and by ranks: equal places, equal values."""
    tokens = case.rng(15).integers(16, VOCAB, 2 * CHUNK + 16).tolist()
    found = []
    for worker in (case.alone, case.sharing):
        salt = b"as computed by %d" % worker.pid
        worker.front.heard.clear()
        worker.front.ask("salted", tokens, 1, salt=salt)
        worker.front.settle()
        found.append(stored(worker.front, crowd, tokens, salt))
    one, shared = found
    assert one.keys() == shared.keys() and len(one) >= 3
    for place, values in one.items():
        np.testing.assert_allclose(shared[place], values, rtol=0, atol=1e-12)
        assert np.abs(values).max() > 0.1


def test_a_request_that_is_cancelled_while_ranks_load_it_holds_nothing(case: Shapes) -> None:
    """One rank stands still, so that its slice can't have been copied when the client leaves."""
    prompt = case.rng(16).integers(16, VOCAB, 67).tolist()
    answer = case.alone.front.ask("first", prompt, OUTPUT).tokens
    case.alone.front.settle()
    worker, stopped = case.sharing, children(case.sharing.pid)[-1]
    worker.front.settle()
    pause(stopped)
    try:
        orders = figures(worker)["ranks.orders"]
        worker.front.generate("left", prompt, 64)
        wait_for("the load", lambda: figures(worker)["ranks.orders"] > orders)
        worker.front.cancel("left")
        wait_for("the news", lambda: figures(worker).get("requests.cancelled", 0) > 0)
    finally:
        resume(stopped)
    finished = worker.front.wait("left").finished
    assert finished is not None and finished.reason == "cancelled"

    def held() -> float:
        values = figures(worker)
        states = ("running", "loading", "waiting", "settling")
        blocks = [value for name, value in values.items() if name.startswith("blocks.") and name.endswith(".used")]
        return sum(values[f"requests.{state}"] for state in states) + sum(blocks)

    wait_for("nothing to be held", lambda: held() == 0)
    assert worker.front.ask("again", prompt, OUTPUT).tokens == answer


def test_beside_one_another_and_preempted_they_answer_as_alone(case: Shapes) -> None:
    """Prompts in pieces beside decodes, in a pool that has no room for all answers to grow."""
    alone, small = case.alone, case.workers[-1]
    rng = case.rng(12)
    prompts = [rng.integers(16, VOCAB, n).tolist() for n in (17, 3, 20, 18, 81, 19)]
    for number, prompt in enumerate(prompts):
        small.front.generate(f"m{number}", prompt, 64)
    together = [small.front.wait(f"m{number}").tokens for number in range(len(prompts))]
    assert figures(small)["preemptions"] > 0
    small.front.settle()
    assert [alone.front.ask(f"o{n}", prompt, 64).tokens for n, prompt in enumerate(prompts)] == together


def test_a_decode_sends_no_keys_and_as_much_behind_any_context(case: Shapes) -> None:
    """Real collectives: what rank 0 has sent for eight further tokens, beside a prompt of that length alone."""
    worker = case.workers[-1]
    rng, found = case.rng(13), []
    for length in (20, 44):
        sent = []
        for answer in (1, 9):  # nothing is cached of either prompt
            before = figures(worker)
            worker.front.ask(f"d{length}-{answer}", rng.integers(16, VOCAB, length).tolist(), answer)
            after = figures(worker)
            sent.append({kind: after[f"ranks.{kind}.bytes"] - before[f"ranks.{kind}.bytes"] for kind in KINDS})
            worker.front.settle()
        found.append({kind: sent[1][kind] - sent[0][kind] for kind in KINDS})
    short, long = found
    assert short["context"] == long["context"] == 0
    assert all(short[kind] == long[kind] for kind in ("query", "lse", "out"))
    assert short["out"] > 0 or short["rows"] > 0, "they share something"


# --- in fp32 -------------------------------------------------------------------------------------------------

CLOSE = 1e-4
IN_FP32 = {
    "llama-1": (EIGHT, 8, 8), "llama-2": (EIGHT2, 4, 2), "qwen3_moe": (MOE8, 4, 4), "deepseek_v3": (LATENT8, 8, 4),
}  # fmt: skip


@pytest.mark.skipif(not LONG, reason="the long form: FOREBAY_CONTEXT_RANKS=1")
@pytest.mark.parametrize("family", IN_FP32)
def test_in_fp32_answers_part_only_where_two_tokens_are_as_good(family: str, crowd: Crowd) -> None:
    """Ranks and one process, each computing all by itself: how often they part is printed."""
    make, size, dcp = IN_FP32[family]
    model = make(crowd.folder / f"{family}-fp32")
    names = (f"{family}-fp32-1", f"{family}-fp32-{size}")
    crowd.start(names[0], model, 1, "--dtype", "float32")
    crowd.start(names[1], model, size, *flags(dcp), "--dtype", "float32")
    rng, parted = np.random.default_rng(zlib.crc32(family.encode())), 0
    prompts = [rng.integers(16, VOCAB, n).tolist() for n in (1, 2, 7, 8, 9, 16, 17, 31, 33, 64, 100)]
    for prompt in prompts:
        one, shared = (
            crowd.worker(name).front.ask(f"p{len(prompt)}", prompt, 24, salt=name.encode()).tokens for name in names
        )
        if one != shared:
            parted += 1
            first = next(at for at, pair in enumerate(zip(one, shared, strict=True)) if pair[0] != pair[1])
            assert gap_behind(model, [*prompt, *one[:first]]) <= CLOSE
    print(f"{family}: {parted} of {len(prompts)} answers part where two tokens are as good")
    for name in names:
        crowd.workers.pop(name).end()


def gap_behind(model: Path, tokens: list[int]) -> float:
    """Between the best two logits behind these, by transformers in fp32."""
    from tests.parity.reference import reference_logits  # here: it takes a second to import

    best = reference_logits(model, tokens, torch.float32)[-1].topk(2).values
    return float(best[0] - best[1])
