"""Two workers behind one front end: whatever is done to the one that has a stream, the other one ends it.

Every answer is transformers', token for token; at most one chunk is computed a second time, as counters show.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from forebay.testing.cluster import Cluster, wait_for
from forebay.testing.standstill import pause, resume
from tests.e2e import failover
from tests.e2e.failover import ACT_AT, CHUNK, FRONT, LENGTH, ONE_THREAD, carry_over, drain, holder, prompt_of
from tests.e2e.paced import Pace
from tests.e2e.reference import greedy_reference
from tests.e2e.streams import Stream

DEEDS = ("kill", "stop", "drain")
Answers = list[tuple[list[int], list[int]]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = failover.make(tmp_path_factory.mktemp("failover"))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def answers(cluster: Cluster) -> Answers:
    prompts = [prompt_of(number) for number in range(len(DEEDS) + 2)]
    return list(zip(prompts, greedy_reference(cluster.model, prompts, LENGTH), strict=True))


@pytest.fixture
def pace(cluster: Cluster) -> Iterator[Pace]:
    made = failover.pace_of(cluster.folder)
    yield made
    made.free()


@pytest.mark.parametrize("deed", DEEDS)
def test_a_stream_goes_on_with_no_token_missing_or_said_twice(cluster: Cluster, answers: Answers, deed: str) -> None:
    before = cluster.figures(FRONT)
    outcome = carry_over(cluster, deed, *answers[DEEDS.index(deed)], paced=True)
    after = cluster.figures(FRONT)
    print(f"{deed}: stood still for {outcome.still_s:.2f} s, {outcome.recomputed} tokens computed again")
    assert outcome.right
    grown = {name: after[f"forebay_link_{name}"] - before[f"forebay_link_{name}"] for name in ("resubmitted", "moved")}
    # Once; where this machine stands still for over a second, its front end takes that for one more death.
    times = sum(grown.values())
    assert grown["moved" if deed == "drain" else "resubmitted"] >= 1
    assert outcome.recomputed <= times * CHUNK
    if deed == "drain" and times == 1:
        assert outcome.recomputed <= 16, "what was drained is stored to its last unit"


def test_a_worker_that_wakes_in_mid_stream_adds_nothing_to_it(
    cluster: Cluster, answers: Answers, pace: Pace
) -> None:
    prompt, wanted = answers[len(DEEDS)]
    pace.flow()
    stream = Stream(cluster, FRONT, prompt, LENGTH)
    stream.reach(ACT_AT)
    pace.wait()
    name = holder(cluster)
    stopped = cluster.processes[name]
    pause(stopped.pid)
    try:
        wait_for("the other one", lambda: holder(cluster) != name)
    finally:
        resume(stopped.pid)
        pace.free()
    assert stream.done() == wanted
    failover.both_able(cluster)
    nothing_runs(cluster)


def nothing_runs(cluster: Cluster) -> None:
    """A client may have the end of its answer before the front end has counted it."""
    wait_for("no call to be under way", lambda: cluster.figure(FRONT, "requests.running") == 0, 20)


def test_draining_empties_a_worker_and_says_so(cluster: Cluster, answers: Answers) -> None:
    name = failover.WORKERS[0]
    assert "has nothing left" in drain(cluster, name)
    for prompt, wanted in answers[:3]:
        assert cluster.complete(FRONT, prompt, 8).token_ids == wanted[:8]
    assert cluster.health(FRONT)["workers"][name]["state"] == "draining"
    nothing_runs(cluster)
    assert "takes requests again" in drain(cluster, name, "--undo")
    failover.both_able(cluster)


def test_a_drained_worker_may_end_by_itself_with_its_requests_elsewhere(
    cluster: Cluster, answers: Answers, pace: Pace
) -> None:
    prompt, wanted = answers[-1]
    pace.flow()
    stream = Stream(cluster, FRONT, prompt, LENGTH)
    stream.reach(ACT_AT)
    pace.wait()
    name = holder(cluster)
    assert "has ended" in drain(cluster, name, "--stop")
    pace.free()
    popen = cluster.processes[name].popen
    assert popen is not None and popen.wait(30) == 0
    assert stream.done() == wanted
    assert "no worker answers" in drain_refused(cluster, name)
    cluster.start_worker(name, extra=ONE_THREAD)
    failover.both_able(cluster)


def drain_refused(cluster: Cluster, name: str) -> str:
    import subprocess
    import sys

    command = [sys.executable, "-m", "forebay", "drain", cluster.socket(name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    return done.stderr


def test_the_last_worker_keeps_its_requests_until_the_time_is_up(
    cluster: Cluster, answers: Answers, pace: Pace
) -> None:
    """Last: one worker is ended for good."""
    one, other = failover.WORKERS
    cluster.processes[other].end(signal.SIGTERM)
    prompt, wanted = answers[0]
    pace.wait()
    stream = Stream(cluster, FRONT, prompt, 2 * LENGTH)
    stream.reach(2)
    assert "still has 1 requests" in drain(cluster, one, "--timeout", "300ms", code=1)
    pace.free()
    drain(cluster, one, "--undo")
    assert stream.done()[:LENGTH] == wanted
