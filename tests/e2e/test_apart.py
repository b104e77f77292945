"""Prefill and decode by different workers of one host: they meet in the store's pool, and nothing is copied twice.

The prefill side has two ranks, the decode side one. The front end decides by what isn't cached yet. Every answer is
transformers', token for token; who computed what is read from counters.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator

import pytest

from forebay.testing.cluster import Cluster, wait_for
from forebay.testing.standstill import pause, resume
from tests.e2e.failover import ONE_THREAD, pace_of
from tests.e2e.reference import greedy_reference
from tests.e2e.streams import Stream
from tests.e2e.test_identity import CHUNK, VOCAB
from tests.e2e.windowed import tiny_windowed

SPLIT_AT, OUTPUT, UNIT = 64, 40, 16
FRONT, DECODE, PREFILL = "front", "decode", "prefill"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("apart")
    tiny_windowed(folder / "model")
    made = Cluster(folder, folder / "model", chunk_tokens=CHUNK, module=pace_of(folder).module)
    made.start_store()
    made.start_worker(DECODE, extra=ONE_THREAD)
    made.start_worker(PREFILL, extra=(*ONE_THREAD, "--tensor-parallel-size", "2"))
    apart = ("--prefill", made.socket(PREFILL), "--store", made.store_address, "--split-at", str(SPLIT_AT))
    made.start_frontend(FRONT, DECODE, extra=apart)
    able(made)
    yield made
    made.stop()


def able(cluster: Cluster) -> None:
    """Wait until both can be used."""

    def both() -> bool:
        workers = cluster.health(FRONT)["workers"].values()
        return all(worker["state"] == "ok" and worker["store"] == "connected" for worker in workers)

    wait_for("both sides", both)


def fresh(seed: int, length: int) -> list[int]:
    """A prompt of its own."""
    rng = random.Random(seed)
    return [rng.randrange(16, VOCAB) for _ in range(length)]


class Watch:
    """How figures have grown since it was made."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._before = cluster, cluster.figures(FRONT)

    def grown(self, name: str, worker: str = "") -> int:
        key = f'forebay_worker_{name}{{worker="{worker}"}}' if worker else f"forebay_{name}"
        return int(self._cluster.figures(FRONT).get(key, 0) - self._before.get(key, 0))


def test_a_long_prompt_is_computed_by_one_and_decoded_by_the_other(cluster: Cluster) -> None:
    prompt, watch = fresh(1, 150), Watch(cluster)
    (wanted,) = greedy_reference(cluster.model, [prompt], OUTPUT)
    copied = cluster.store_values().get("tier.fs.promoted_bytes", 0)
    assert cluster.complete(FRONT, prompt, OUTPUT).token_ids == wanted
    assert watch.grown("split_local") == 1 and watch.grown("link_moved") >= 1
    assert watch.grown("tokens_prefilled", PREFILL) == len(prompt)
    assert watch.grown("tokens_decoded", PREFILL) == 0
    # It finds all but the unit that is open, in memory that both have mapped.
    assert watch.grown("cached_host", DECODE) == len(prompt) // UNIT * UNIT
    assert watch.grown("tokens_prefilled", DECODE) <= UNIT
    assert watch.grown("tokens_decoded", DECODE) >= OUTPUT - 2
    assert cluster.store_values().get("tier.fs.promoted_bytes", 0) == copied


def test_a_short_one_and_one_that_is_cached_stay_together(cluster: Cluster) -> None:
    short, known, watch = fresh(2, SPLIT_AT - 1), fresh(1, 150), Watch(cluster)
    wanted = greedy_reference(cluster.model, [short, known], OUTPUT)
    assert cluster.complete(FRONT, short, OUTPUT).token_ids == wanted[0]
    assert cluster.complete(FRONT, known, OUTPUT).token_ids == wanted[1]
    assert watch.grown("tokens_prefilled", PREFILL) == 0
    assert watch.grown("split_cached") == 1 and watch.grown("link_moved") == 0


def test_the_next_turn_is_prefilled_on_what_was_decoded(cluster: Cluster) -> None:
    first = fresh(3, 100)
    (answer,) = greedy_reference(cluster.model, [first], OUTPUT)
    assert cluster.complete(FRONT, first, OUTPUT).token_ids == answer
    cluster.settle(FRONT)
    turn, watch = [*first, *answer, *fresh(4, 90)], Watch(cluster)
    (wanted,) = greedy_reference(cluster.model, [turn], OUTPUT)
    assert cluster.complete(FRONT, turn, OUTPUT).token_ids == wanted
    reused = (len(first) + len(answer) - 1) // UNIT * UNIT
    assert watch.grown("split_local") == 1
    assert sum(watch.grown(f"cached_{source}", PREFILL) for source in ("device", "host")) == reused
    assert watch.grown("cached_host", PREFILL) > 0, "what the other side decoded came through the store"
    assert watch.grown("tokens_prefilled", PREFILL) == len(turn) - reused


def test_a_prefill_side_that_stops_in_the_middle_is_done_without(cluster: Cluster) -> None:
    prompt, watch = fresh(5, 150), Watch(cluster)
    (wanted,) = greedy_reference(cluster.model, [prompt], OUTPUT)
    pid = cluster.processes[PREFILL].pid
    pause(pid)
    try:
        assert cluster.complete(FRONT, prompt, OUTPUT).token_ids == wanted
        assert watch.grown("link_resubmitted") >= 1 and watch.grown("tokens_prefilled", DECODE) >= len(prompt)
    finally:
        resume(pid)
    able(cluster)


def test_a_decode_side_that_is_killed_is_replaced_by_the_prefill_side(cluster: Cluster) -> None:
    prompt, length, watch = fresh(6, 150), 160, Watch(cluster)
    (wanted,) = greedy_reference(cluster.model, [prompt], length)
    pace = pace_of(cluster.folder)
    pace.flow()
    stream = Stream(cluster, FRONT, prompt, length)
    stream.reach(CHUNK)
    pace.wait()
    cluster.processes[DECODE].end(signal.SIGKILL)
    pace.free()
    assert stream.done() == wanted
    assert watch.grown("split_local") == 1 and watch.grown("tokens_decoded", PREFILL) > 0
    alone = Watch(cluster)
    other = fresh(7, 150)
    (expected,) = greedy_reference(cluster.model, [other], 8)
    assert cluster.complete(FRONT, other, 8).token_ids == expected
    assert alone.grown("split_alone") == 1 and alone.grown("link_moved") == 0
    cluster.start_worker(DECODE, extra=ONE_THREAD)
    able(cluster)
