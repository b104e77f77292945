"""Where a prefix comes from, times what goes wrong meanwhile: the answer is the same in every cell.

    {device, host, fs, s3, p2p} x {worker killed, cancelled, preempted, peer killed, store killed}

Real processes, started by the public commands; answers are compared with transformers' in fp64, token for token; a cell
fails if counters don't say that the prefix came from where it should, so that a silent recompute is found.

    FOREBAY_MATRIX_RANKS=1,2,2/2 pytest tests/e2e/test_matrix.py      the long form: also workers of two ranks, and of
                                                                      two that share out positions
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from forebay.testing.cluster import wait_for
from tests.e2e.stage import CHUNK, CROWD_LONG, FRONT, SHORT, SOURCES, TIERS, WORKERS, Asked, Stage

RANKS = os.environ.get("FOREBAY_MATRIX_RANKS", "1").split(",")


@pytest.fixture(scope="module", params=RANKS, ids=lambda ranks: f"tp{ranks.replace('/', '-dcp')}")
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = Stage.build(tmp_path_factory.mktemp("stage"), *map(int, request.param.split("/")))
    yield made
    made.close()


@pytest.fixture(scope="module", params=SOURCES)
def source(request: pytest.FixtureRequest, shared: Stage) -> str:
    shared.play(request.param)
    return str(request.param)


@pytest.fixture
def stage(shared: Stage, source: str) -> Iterator[Stage]:
    yield shared
    shared.able()
    shared.idle()


@contextmanager
def comes_from(stage: Stage, source: str, worker: str, tokens: int) -> Iterator[None]:
    """Inside, so many tokens of prefixes come to this worker, from this source and from nowhere else."""
    names = ("device", "host", *TIERS)
    before = {name: stage.figure(f"cached.{name}", worker) for name in names}
    promoted = stage.cluster.store_values().get(f"tier.{source}.promoted_bytes", 0)
    yield
    grown = {name: stage.figure(f"cached.{name}", worker) - before[name] for name in names}
    assert {name: count for name, count in grown.items() if count} == {source: tokens}
    if source in TIERS:
        assert stage.cluster.store_values()[f"tier.{source}.promoted_bytes"] > promoted


def test_worker_killed(stage: Stage, source: str) -> None:
    asked, resubmitted, again = stage.script.kill_worker, stage.link("resubmitted"), stage.link("recomputed")
    with stage.flowing():
        with stage.at_one_worker(source, asked) as name, comes_from(stage, source, name, asked.stored):
            stream = stage.stream(asked)
            stream.reach(1)
        stage.mid_chunk(stream, asked)
        old = stage.kill(name)
    try:
        assert stream.done() == asked.answer
        # Once; where this machine stands still for over a second, its front end takes that for one more death.
        times = stage.link("resubmitted") - resubmitted
        assert times >= 1
        assert stage.link("recomputed") - again <= times * CHUNK, "all but the open chunk was stored"
    finally:
        stage.start_worker(name)
    assert stage.cluster.processes[name].pid != old


def test_cancelled(stage: Stage, source: str) -> None:
    asked, cancelled = stage.script.cancel, stage.figure("requests.cancelled")
    with stage.at_one_worker(source, asked) as name:
        with comes_from(stage, source, name, asked.stored), stage.flowing():
            stream = stage.stream(asked, leave_after=10)
            stream.join(60)
        assert stream.ids == asked.answer[: len(stream.ids)] and len(stream.ids) >= 10
        wait_for("its end", lambda: stage.figure("requests.cancelled") == cancelled + 1)
        stage.idle()
        with comes_from(stage, "device", name, asked.stored):
            stage.ask(asked, SHORT)


def test_preempted(stage: Stage, source: str) -> None:
    crowd, preempted = stage.script.crowd, stage.figure("preemptions")
    before = {name: stage.figure(f"cached.{source}", name) for name in WORKERS}
    with stage.at_one_worker(source, crowd[0]) as name:
        streams = [stage.stream(asked) for asked in crowd]
        for stream, asked in zip(streams, crowd, strict=True):
            assert stream.done() == asked.answer and len(asked.answer) == CROWD_LONG
    assert stage.figure("preemptions") > preempted, "the device can't hold them all"
    # The first ones come from the source, who was preempted from wherever it is by then.
    assert stage.figure(f"cached.{source}", name) - before[name] >= crowd[0].stored


def test_peer_killed(stage: Stage, source: str) -> None:
    first, second, third = stage.script.kill_peer
    pids = {name: stage.cluster.processes[name].pid for name in WORKERS}
    with stage.at_one_worker(source, first) as name, comes_from(stage, source, name, first.stored):
        stage.ask(first, SHORT)
    with stage.at_one_worker(source, second) as name:
        stage.kill_peer()
        try:
            if source == "p2p":
                assert stage.ask(second, SHORT).cached_tokens == 0, "nobody else has it: it is computed"
            else:
                with comes_from(stage, source, name, second.stored):
                    stage.ask(second, SHORT)
        finally:
            stage.restart_peer()
    with stage.at_one_worker(source, third) as name, comes_from(stage, source, name, third.stored):
        stage.ask(third, SHORT)
    running = {name: stage.cluster.processes[name].pid for name in WORKERS if stage.cluster.processes[name].running}
    assert running == pids, "no worker ended for it"


def test_store_killed(stage: Stage, source: str) -> None:
    asked: Asked = stage.script.kill_store
    readopted = stage.cluster.store_values().get("host.readopted", 0)
    with stage.at_one_worker(source, asked) as name:
        with stage.flowing():
            with comes_from(stage, source, name, asked.stored):
                stream = stage.stream(asked)
                stream.reach(1)
            seen = stage.mid_chunk(stream, asked)
            stage.cluster.settle(FRONT)
            old = stage.kill("store")
        try:
            assert stream.done() == asked.answer, "its worker goes on without"
        finally:
            stage.cluster.start_store()
        assert stage.cluster.processes["store"].pid != old
        values = stage.cluster.store_values()
        assert readopted == 0 < values["host.readopted"]
    stage.able()
    # What was decoded before the deed is in no other worker's device: it comes out of the pool that was taken over.
    turn = Asked(asked.prompt + asked.answer[:seen], asked.answer[seen:])
    other = next(worker for worker in WORKERS if worker != name)
    with stage.only(other):
        before = stage.figure("cached.host", other)
        got = stage.ask(turn, SHORT)
        sealed = len(turn.prompt) // CHUNK * CHUNK
        assert got.cached_tokens >= sealed and stage.figure("cached.host", other) - before >= sealed - asked.stored
