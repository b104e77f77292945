"""How long a stream stands still when its worker is killed, stopped or drained: measured where the client reads.

    python -m tests.e2e.failover --rounds 10

Two workers of a tiny model in fp64, one front end, one store, all started by the public commands. Each round is one
stream, in whose middle something is done to the worker that has it; its tokens are compared with transformers'.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from forebay.testing.cluster import Cluster, wait_for
from forebay.testing.standstill import pause, resume
from tests.checkpoints import tiny_qwen3
from tests.e2e.paced import Pace
from tests.e2e.reference import greedy_reference
from tests.e2e.streams import Stream

CHUNK, PROMPT, LENGTH = 32, 70, 240
ACT_AT = 4 * CHUNK - PROMPT % CHUNK + CHUNK // 2
"""Tokens of the answer after which something is done: in the middle of a chunk, whose predecessors are stored."""
LATE_S = 0.1
"""What the old worker had said may still come so long after the deed."""
ONE_THREAD = ("--threads", "1")
WORKERS = ("worker1", "worker2")
FRONT = "front"


@dataclass(frozen=True)
class Outcome:
    """One stream. `still_s` is from the deed to the first token of the worker that went on; `recomputed` what that one
    computed although its predecessor had."""

    deed: str
    still_s: float
    recomputed: int
    right: bool


def make(folder: Path, write: Callable[[Path], Any] = tiny_qwen3) -> Cluster:
    """A cluster with both workers behind one front end."""
    write(folder / "model")
    cluster = Cluster(folder, folder / "model", chunk_tokens=CHUNK, module=pace_of(folder).module)
    cluster.start_store()
    for name in WORKERS:
        cluster.start_worker(name, extra=ONE_THREAD)
    cluster.start_frontend(FRONT, *WORKERS)
    both_able(cluster)
    return cluster


def pace_of(folder: Path) -> Pace:
    """How fast the workers of a cluster in this folder are."""
    return Pace(folder / "pace")


def both_able(cluster: Cluster) -> None:
    """Wait until the front end would use either worker, and both have the store."""

    def able() -> bool:
        workers = cluster.health(FRONT)["workers"].values()
        return all(worker["state"] == "ok" and worker["store"] == "connected" for worker in workers)

    wait_for("both workers", able)


def holder(cluster: Cluster) -> str:
    """The worker that has calls."""
    held = [name for name, worker in cluster.health(FRONT)["workers"].items() if worker["calls"]]
    assert len(held) == 1, held
    return held[0]


def drain(cluster: Cluster, name: str, *more: str, code: int = 0) -> str:
    """Run `forebay drain`; what it printed."""
    command = [sys.executable, "-m", "forebay", "drain", cluster.socket(name), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@contextmanager
def deed_done(cluster: Cluster, deed: str, name: str) -> Iterator[None]:
    """Do it; after the block, undo it or start another worker, and wait until both can be used."""
    process = cluster.processes[name]
    if deed == "kill":
        process.end(signal.SIGKILL)
    elif deed == "stop":
        pause(process.pid)
    else:
        drain(cluster, name)
    try:
        yield
    finally:
        if deed == "kill":
            cluster.start_worker(name, extra=ONE_THREAD)
        elif deed == "stop":
            resume(process.pid)
        else:
            drain(cluster, name, "--undo")
        both_able(cluster)


def carry_over(
    cluster: Cluster, deed: str, prompt: list[int], wanted: list[int], *, paced: bool = False
) -> Outcome:
    """One stream with one deed in its middle; `paced` it can't end before that is done, and stands still longer."""
    before, pace = cluster.figures(FRONT), pace_of(cluster.folder)
    if paced:
        pace.flow()
    stream = Stream(cluster, FRONT, prompt, len(wanted))
    stream.reach(1)
    name = holder(cluster)
    stream.reach(ACT_AT)
    if paced:
        pace.wait()
    acted, seen = monotonic(), len(stream.ids)
    with deed_done(cluster, deed, name):
        pace.free()
        stream.done()
    assert seen < len(wanted) - 10, "the deed came too late"
    grown = {key: value - before.get(key, 0.0) for key, value in cluster.figures(FRONT).items()}
    gaps = [(after - earlier, after) for earlier, after in zip(stream.times, stream.times[1:], strict=False)
            if after > acted and earlier < acted + LATE_S]  # fmt: skip
    recomputed = int(grown["forebay_link_recomputed"])
    return Outcome(deed, max(gaps)[1] - acted, recomputed, stream.ids == wanted)


def prompt_of(number: int) -> list[int]:
    """Prompts that share nothing."""
    return [(17 * number + 13 * at) % 480 + 8 for at in range(PROMPT)]


def main() -> int:
    """Measure; 1 if a token was wrong or a kill or stop took 2 s or more to be noticed and gone on from."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="streams of each kind")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="failover") as name:
        cluster = make(Path(name))
        try:
            prompts = [prompt_of(number) for number in range(rounds)]
            answers = greedy_reference(cluster.model, prompts, LENGTH)
            worst = 0.0
            print(f"{'':8}{'streams':>8}{'wrong':>7}{'stood still, s: median':>24}{'most':>8}{'recomputed, most':>18}")
            for deed in ("kill", "stop", "drain"):
                found = [carry_over(cluster, deed, *pair) for pair in zip(prompts, answers, strict=True)]
                still = [outcome.still_s for outcome in found]
                wrong = sum(not outcome.right for outcome in found)
                again = max(outcome.recomputed for outcome in found)
                print(f"{deed:8}{rounds:8}{wrong:7}{statistics.median(still):24.3f}{max(still):8.3f}{again:18}",
                      flush=True)  # fmt: skip
                worst = max(worst, *still, 2.0 * bool(wrong))
        finally:
            cluster.stop()
    return int(worst >= 2.0)


if __name__ == "__main__":
    sys.exit(main())
