"""What the daemon can rely on: jobs finish once and never too early, and no tier stops its loop."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from forebay.errors import AlreadyRunning, ConfigError, ForebayError, NoSpace, NotWritable, ResourceError
from forebay.testing.standstill import pause
from forebay.tiers.base import ClearScope, LoadJob, StoreJob, TierChange
from forebay.tiers.host import HostLimits, TierHost
from forebay.tiers.supervise import Patience
from tests.tiers.hosting import ODD, hosted, process_exists
from tests.tiers.support import Pool, make_chunk, numbered


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    return asyncio.run if request.param == "asyncio" else uvloop.run


# --- death and hanging -------------------------------------------------------------------------------------


def test_a_hung_process_is_killed_and_its_jobs_end_only_after_its_death(
    pool: Pool, run: Callable[..., None]
) -> None:
    async def scenario() -> None:
        async with hosted(pool, "memory") as w:
            pause(w.suspect)
            w.host.store([w.store_job(1, make_chunk())])
            w.host.load([w.load_job(2, make_chunk())])
            await asyncio.sleep(0.3)
            assert w.results == [], "nothing may be reported while the process could still write"
            await w.until(lambda: len(w.results) == 2)
            assert {(r.id, r.ok, r.reason) for r in w.results} == {(1, False, "io"), (2, False, "io")}
            assert w.alive_when_told == [False, False]
            await w.until(lambda: w.host.alive)
            assert w.host.pid != w.suspect
            assert w.host.statistics()["host.hangs"] == 1
            assert w.host.statistics()["host.restarts"] == 1
            assert len(w.downs) == 1

    run(scenario())


def test_a_process_whose_loop_is_stuck_is_replaced(pool: Pool, run: Callable[..., None]) -> None:
    async def scenario() -> None:
        async with hosted(pool, ODD + "Stuck") as w:
            w.host.store([w.store_job(1, make_chunk())])
            await w.until(lambda: w.ids() == [1])
            assert w.alive_when_told == [False]
            await w.until(lambda: w.host.alive)

    run(scenario())


def test_jobs_that_a_living_tier_sits_on_are_ended_by_its_death(pool: Pool, run: Callable[..., None]) -> None:
    async def scenario() -> None:
        async with hosted(pool, ODD + "Sleeping") as w:
            w.host.load([w.load_job(1, make_chunk(), deadline_s=0.2)])
            await w.until(lambda: w.ids() == [1])
            assert (w.results[0].reason, w.alive_when_told) == ("io", [False])

    run(scenario())


def test_a_killed_process_comes_back_with_its_extents_and_namespaces(
    pool: Pool, tmp_path: Path, run: Callable[..., None]
) -> None:
    async def scenario() -> None:
        chunk, directory = make_chunk(), tmp_path / "fs"
        async with hosted(pool, "fs", {"directory": str(directory)}) as w:
            w.host.note_namespace(b"n" * 32, b"what it is")
            w.host.store([w.store_job(1, chunk)])
            await w.until(lambda: w.ids() == [1])
            for number in (10, 11, 12):
                await w.kill_and_wait()
                job = w.load_job(number, chunk)
                w.host.load([job])
                await w.until(lambda: len(w.results) == number - 8)  # noqa: B023 - awaited in this round
                assert w.results[-1].ok, w.results[-1].reason
                at = job.payload_offset
                assert pool.memory[at : at + len(chunk.payload)] == chunk.payload
            assert (directory / "namespaces" / (b"n" * 32).hex()).read_bytes() == b"what it is"

    run(scenario())


def test_restarts_back_off_further_each_time(pool: Pool) -> None:
    async def scenario() -> None:
        pauses: list[float] = []

        async def sleep(seconds: float) -> None:
            if seconds != patience.heartbeat_s:
                pauses.append(seconds)
            await asyncio.sleep(0.01 if seconds != patience.heartbeat_s else seconds)

        patience = Patience(heartbeat_s=0.777, backoff_first_s=1.0, backoff_max_s=5.0)
        async with hosted(pool, ODD + "Suicidal", patience=patience, sleep=sleep) as w:
            for number in range(4):
                w.host.store([w.store_job(number, make_chunk())])
                await w.until(lambda: len(w.results) == number + 1)  # noqa: B023 - awaited in this round
                await w.until(lambda: w.host.alive)
            assert pauses == [1.0, 2.0, 4.0, 5.0]

    asyncio.run(scenario())


def test_a_tier_that_is_lost_while_descriptors_are_short_comes_back_when_there_are_some(
    pool: Pool, run: Callable[..., None]
) -> None:
    async def scenario() -> None:
        patience = Patience(backoff_first_s=0.3, backoff_max_s=0.3)
        async with hosted(pool, "memory", patience=patience) as w:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            try:
                for more in range(8):  # with so many descriptors a start fails at another step each time
                    await w.kill()
                    free = os.dup(pool.descriptor)
                    os.close(free)
                    resource.setrlimit(resource.RLIMIT_NOFILE, (free + more, hard))
                    before = w.host.statistics().get("host.start_failures", 0)
                    await w.until(
                        lambda: w.host.alive or w.host.statistics().get("host.start_failures", 0) > before  # noqa: B023
                    )
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                    await w.until(lambda: w.host.alive)
                    w.suspect = w.host.pid or 0
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert w.host.statistics()["host.start_failures"] >= 4

    run(scenario())


def test_without_a_process_stores_fail_lookups_are_away_and_forgets_wait(pool: Pool, tmp_path: Path) -> None:
    async def scenario() -> None:
        slow = Patience(backoff_first_s=1.0)
        chunk, other = numbered(1), numbered(2)
        async with hosted(pool, "fs", {"directory": str(tmp_path)}, patience=slow) as w:
            w.host.store([w.store_job(1, chunk), w.store_job(2, other)])
            await w.until(lambda: len(w.results) == 2)
            await w.kill()
            w.host.store([w.store_job(3, chunk)])
            assert len(w.results) == 2, "never called from inside"
            await w.until(lambda: len(w.results) == 3)
            assert w.results[-1].reason == "io"
            assert (await w.host.lookup([chunk.query()], 1.0))[0].outcome == "away"
            w.host.forget([chunk.id], "cleared")
            cleared = asyncio.create_task(w.host.clear(b"o" * 32))
            await w.until(lambda: w.host.alive)
            assert await cleared == 0
            found = await w.host.lookup([chunk.query(), other.query()], 1.0)
            assert [f.outcome for f in found] == ["miss", "hit"]

    asyncio.run(scenario())


def test_a_tier_that_gives_up_is_started_anew(pool: Pool) -> None:
    async def scenario() -> None:
        async with hosted(pool, ODD + "Failing") as w:
            w.host.store([w.store_job(1, make_chunk())])
            await w.until(lambda: w.ids() == [1])
            assert not w.results[0].ok
            await w.until(lambda: w.host.alive and w.host.pid != w.suspect)

    asyncio.run(scenario())


def test_stop_reports_what_was_open_and_leaves_no_process(pool: Pool, run: Callable[..., None]) -> None:
    async def scenario() -> None:
        async with hosted(pool, ODD + "Sleeping") as w:
            w.host.store([w.store_job(1, make_chunk())])
            await w.host.stop()
            assert [(r.id, r.ok) for r in w.results] == [(1, False)]
            assert not process_exists(w.suspect)

    run(scenario())


def test_stop_kills_a_process_that_does_not_listen(pool: Pool) -> None:
    async def scenario() -> None:
        patience = Patience(stop_s=0.3, hang_s=60.0)
        async with hosted(pool, "memory", patience=patience) as w:
            pause(w.suspect)
            await w.host.stop()
            assert not process_exists(w.suspect)

    asyncio.run(scenario())


def test_stop_lets_queued_stores_that_have_begun_reach_the_disk(pool: Pool, tmp_path: Path) -> None:
    async def scenario() -> None:
        chunks = [numbered(i, granule=65536) for i in range(8)]
        async with hosted(pool, "fs", {"directory": str(tmp_path)}) as w:
            w.host.store([w.store_job(i, chunk) for i, chunk in enumerate(chunks)])
            await w.host.stop()
            assert sorted(w.ids()) == list(range(8))
            stored = {chunks[r.id].id for r in w.results if r.ok}
        async with hosted(pool, "fs", {"directory": str(tmp_path)}) as w:
            found = await w.host.lookup([chunk.query() for chunk in chunks], 1.0)
            assert {c.id for c, f in zip(chunks, found, strict=True) if f.outcome == "hit"} == stored

    asyncio.run(scenario())


# --- budgets -----------------------------------------------------------------------------------------------


def test_stores_over_the_budget_are_dropped_and_counted_and_loads_have_their_own(pool: Pool) -> None:
    async def scenario() -> None:
        chunks = [numbered(i, granule=16384) for i in range(6)]
        size = chunks[0].length
        limits = HostLimits(store_queue_bytes=3 * size, load_queue_bytes=2 * size)
        async with hosted(pool, ODD + "Sleeping", limits=limits) as w:
            w.host.store([w.store_job(i, chunk) for i, chunk in enumerate(chunks)])
            w.host.load([w.load_job(10 + i, chunk) for i, chunk in enumerate(chunks[:4])])
            assert w.results == [], "never called from inside"
            await w.until(lambda: len(w.results) == 5)
            assert {(r.id, r.reason) for r in w.results} == {(i, "dropped") for i in (3, 4, 5, 12, 13)}
            stats = w.host.statistics()
            assert (stats["host.stores_dropped"], stats["host.loads_dropped"]) == (3, 2)
            assert stats["host.store_queue_bytes"] == 3 * size

    asyncio.run(scenario())


def test_a_process_that_reads_nothing_fills_a_bounded_buffer_and_blocks_nobody(pool: Pool) -> None:
    async def scenario() -> None:
        limits = HostLimits(out_bytes=100_000)
        async with hosted(pool, "memory", limits=limits, patience=Patience(hang_s=60, stop_s=0.1)) as w:
            pause(w.suspect)
            queries = [numbered(i).query() for i in range(100)]
            began = time.monotonic()
            answers = await asyncio.gather(*[w.host.lookup(queries, 0.2) for _ in range(200)])
            assert time.monotonic() - began < 20, "one after another would take 40 s"
            assert {found.outcome for answer in answers for found in answer} == {"retry"}
            assert w.host.statistics()["host.out_bytes"] <= 100_000
            assert w.host.statistics()["host.requests_refused"] > 0
            job = w.store_job(0, make_chunk())
            w.host.store([StoreJob(i, job.chunk, job.parent, 0, job.offset, job.length) for i in range(2000)])
            await w.until(lambda: len(w.results) > 0)
            assert {result.reason for result in w.results} == {"dropped"}
            assert w.host.statistics()["host.jobs_open"] + len(w.results) == 2000

    asyncio.run(scenario())


def test_a_tier_that_is_away_forgets_all_that_it_was_told_to_however_much_that_was(
    pool: Pool, tmp_path: Path
) -> None:
    async def scenario() -> None:
        limits = HostLimits(requests=8)
        options = {"directory": str(tmp_path)}
        async with hosted(pool, "fs", options, limits=limits, patience=Patience(backoff_first_s=1.0)) as w:
            chunks = {name: make_chunk(namespace=name * 32, parent=name * 32) for name in (b"a", b"b", b"c")}
            w.host.store([w.store_job(i, chunk) for i, chunk in enumerate(chunks.values())])
            await w.until(lambda: len(w.results) == 3)
            await w.kill()
            asked = [w.host.clear_scope(ClearScope(b"a" * 32, None, 1, bytes([i]) * 32), 20.0) for i in range(40)]
            waiting = [asyncio.create_task(clear) for clear in (*asked, w.host.clear(b"b" * 32, 20.0))]
            await asyncio.sleep(0)
            assert w.host.statistics()["host.clears_pending"] <= 8
            assert w.host.statistics()["host.clears_widened"] >= 5
            assert None not in await asyncio.gather(*waiting)
            found = await w.host.lookup([chunk.query() for chunk in chunks.values()], 5.0)
            assert [answer.outcome for answer in found] == ["miss", "miss", "hit"]

    asyncio.run(scenario())


def test_too_many_chunks_to_forget_become_all_there_are(pool: Pool, tmp_path: Path) -> None:
    async def scenario() -> None:
        limits, options = HostLimits(forgets=4), {"directory": str(tmp_path)}
        async with hosted(pool, "fs", options, limits=limits, patience=Patience(backoff_first_s=1.0)) as w:
            chunks = [numbered(i) for i in range(8)]
            w.host.store([w.store_job(i, chunk) for i, chunk in enumerate(chunks)])
            await w.until(lambda: len(w.results) == 8)
            await w.kill()
            for chunk in chunks[1:]:
                w.host.forget([chunk.id], "cleared")
            assert w.host.statistics()["host.forgets_widened"] == 1
            assert w.host.statistics()["host.clears_pending"] == 1
            await w.until(lambda: w.host.alive and w.host.statistics()["host.clears_pending"] == 0)
            found = await w.host.lookup([chunk.query() for chunk in chunks], 5.0)
            assert {answer.outcome for answer in found} == {"miss"}

    asyncio.run(scenario())


# --- what tiers do wrong -----------------------------------------------------------------------------------


def test_exceptions_of_a_tier_fail_the_jobs_and_are_counted(pool: Pool) -> None:
    async def scenario() -> None:
        async with hosted(pool, ODD + "Raising") as w:
            w.host.store([w.store_job(1, make_chunk())])
            w.host.load([w.load_job(2, make_chunk())])
            await w.until(lambda: len(w.results) == 2)
            assert {(r.id, r.ok, r.reason) for r in w.results} == {(1, False, "io"), (2, False, "io")}
            assert (await w.host.lookup([make_chunk().query()], 1.0))[0].outcome == "away"
            assert (await w.host.stats()).values["process.exceptions"] == 3
            assert w.host.pid == w.suspect, "the process lives on"

    asyncio.run(scenario())


def test_results_that_come_twice_or_for_nobody_are_told_once(pool: Pool) -> None:
    async def scenario() -> None:
        async with hosted(pool, ODD + "Chatty") as w:
            w.host.store([w.store_job(1, numbered(1)), w.store_job(2, numbered(2))])
            await w.until(lambda: len(w.results) >= 2)
            await w.host.stats()
            assert sorted(w.ids()) == [1, 2]

    asyncio.run(scenario())


def test_a_job_outside_of_the_attached_memory_fails_without_touching_the_tier(pool: Pool) -> None:
    async def scenario() -> None:
        chunk = make_chunk()
        async with hosted(pool, "memory") as w:
            size = len(pool.memory)
            w.host.load([LoadJob(1, chunk.id, 0, size - 100, 200, 1.0), LoadJob(2, chunk.id, 7, 0, 200, 1.0)])
            w.host.store([StoreJob(3, chunk.id, chunk.header.parent, 0, size, 4096)])
            await w.until(lambda: len(w.results) == 3)
            assert {r.reason for r in w.results} == {"io"}

    asyncio.run(scenario())


def test_an_extent_that_is_attached_later_can_be_used(pool: Pool) -> None:
    async def scenario() -> None:
        more = Pool(1 << 20)
        chunk = make_chunk()
        async with hosted(pool, "memory") as w:
            w.host.attach(5, more.descriptor)
            at = more.put(chunk)
            w.host.store([StoreJob(1, chunk.id, chunk.header.parent, 5, at, chunk.length)])
            await w.until(lambda: w.ids() == [1])
            assert w.results[0].ok
        more.close()

    asyncio.run(scenario())


def test_a_hundred_extents_are_attached_at_once(pool: Pool) -> None:
    async def scenario() -> None:
        more = [Pool(64 << 10) for _ in range(100)]
        async with hosted(pool, "memory") as w:
            await w.host.stop()
        host = TierHost("t", "memory", {}, on_finished=w.finished, on_changes=w.changes.extend)
        await host.start({i: extra.descriptor for i, extra in enumerate(more)})
        chunk = make_chunk()
        at = more[99].put(chunk)
        host.store([StoreJob(1, chunk.id, chunk.header.parent, 99, at, chunk.length)])
        await w.until(lambda: w.ids() == [1])
        assert w.results[0].ok
        await host.stop()
        for extra in more:
            extra.close()

    asyncio.run(scenario())


def test_a_callback_that_raises_costs_no_later_message(pool: Pool) -> None:
    async def scenario() -> None:
        async with hosted(pool, "memory") as w:

            def wrong(changes: list[TierChange]) -> None:
                raise RuntimeError("a mistake of the owner")

            w.host._on_changes = wrong
            w.host.store([w.store_job(1, make_chunk())])
            await w.until(lambda: w.ids() == [1])
            assert w.results[0].ok
            assert w.host.statistics()["host.callback_errors"] == 1

    asyncio.run(scenario())


# --- lookups -----------------------------------------------------------------------------------------------


def test_a_lookup_waits_for_an_answer_that_is_not_known_at_once(pool: Pool) -> None:
    async def scenario() -> None:
        chunk = make_chunk()
        async with hosted(pool, ODD + "Slow") as w:
            w.host.store([w.store_job(1, chunk)])
            assert (await w.host.lookup([chunk.query()], 5.0))[0].outcome == "hit"

    asyncio.run(scenario())


def test_a_lookup_that_takes_too_long_is_retry(pool: Pool) -> None:
    async def scenario() -> None:
        async with hosted(pool, ODD + "Never") as w:
            began = time.monotonic()
            assert (await w.host.lookup([make_chunk().query()] * 3, 0.3)) == [
                *await w.host.lookup([make_chunk().query()] * 3, 0.1)
            ]
            assert 0.3 <= time.monotonic() - began < 10

    asyncio.run(scenario())


def test_lookups_in_flight_when_the_process_dies_are_no_misses(pool: Pool) -> None:
    async def scenario() -> None:
        async with hosted(pool, ODD + "Never") as w:
            asked = asyncio.create_task(w.host.lookup([make_chunk().query()], 10.0))
            await asyncio.sleep(0.1)
            os.kill(w.suspect, signal.SIGKILL)
            assert (await asked)[0].outcome in ("away", "retry")

    asyncio.run(scenario())


# --- starting ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "error", "words"),
    [
        ("nosuch", {}, ConfigError, "module:Class"),
        ("forebay.nosuch:Tier", {}, ConfigError, "installed"),
        ("forebay.errors:NoSpace", {}, ConfigError, "SecondaryTier"),
        ("memory", {"quota_bytes": "many"}, ConfigError, "quota_bytes"),
        ("memory", {"qouta_bytes": 1}, ConfigError, "qouta_bytes"),
        ("fs", {"directory": "relative/path"}, ConfigError, "absolute"),
        ("fs", {"directory": "/nonexistent/parent/dir"}, NotWritable, "create that first"),
        ("fs", {"directory": "/dev/null/forebay"}, NotWritable, "choose another directory"),
        (ODD + "Full", {}, NoSpace, "free some"),
        (ODD + "Bug", {}, ResourceError, "log says more"),
    ],
)
def test_a_tier_that_cannot_start_says_why(
    pool: Pool, kind: str, options: dict[str, Any], error: type[ForebayError], words: str
) -> None:
    async def scenario() -> None:
        with pytest.raises(error, match=words):
            async with hosted(pool, kind, options):
                pass

    asyncio.run(scenario())


def test_a_second_store_on_one_state_directory_is_refused(pool: Pool, tmp_path: Path) -> None:
    async def scenario() -> None:
        options = {"directory": str(tmp_path), "state_dir": str(tmp_path / "state")}
        async with hosted(pool, "fs", options):
            with pytest.raises(AlreadyRunning, match="stop it, or give"):
                async with hosted(pool, "fs", options):
                    pass
        async with hosted(pool, "fs", options) as w:
            assert w.host.alive

    asyncio.run(scenario())


# --- ties to the parent ------------------------------------------------------------------------------------


def lock_is_free(path: Path) -> bool:
    with path.open("r") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def open_files(pid: int) -> set[str]:
    """What a process has open. It goes on opening and closing while we look."""
    found = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return found


def test_the_lock_is_held_for_as_long_as_the_process_may_write(pool: Pool, tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "lock"
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        async with hosted(pool, "memory", lock_fd=descriptor) as w:
            assert str(path) in open_files(w.suspect), "the process has the lock itself, not only its parent"
            assert not lock_is_free(path)
        assert lock_is_free(path)

    asyncio.run(scenario())


def test_signals_that_go_to_the_whole_group_are_left_to_the_daemon(pool: Pool) -> None:
    async def scenario() -> None:
        async with hosted(pool, "memory") as w:
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(w.suspect, number)
            await w.host.stats()
            assert w.host.alive
            assert w.host.pid == w.suspect

    asyncio.run(scenario())


def test_a_batch_that_no_frame_holds_is_retry(pool: Pool) -> None:
    async def scenario() -> None:
        async with hosted(pool, "memory") as w:
            query = make_chunk(range(65536), granule=16).query()
            assert {found.outcome for found in await w.host.lookup([query] * 80, 1.0)} == {"retry"}
            assert (await w.host.lookup([query], 1.0))[0].outcome == "miss"

    asyncio.run(scenario())


_PARENT = """
import asyncio, os, sys
from forebay.tiers.host import TierHost
async def main():
    host = TierHost("t", "memory", {}, on_finished=print, on_changes=print)
    await host.start({})
    print(host.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_the_process_dies_with_its_parent(stopped: bool) -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    if stopped:
        pause(pid)  # a process that can't read its socket's end of file
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 60
    while process_exists(pid) and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < end, "the tier's process outlived its parent"
        time.sleep(0.01)


def test_the_process_has_no_torch_and_no_inherited_descriptors(pool: Pool) -> None:
    async def scenario() -> None:
        stray = os.open("/dev/null", os.O_RDONLY)
        os.set_inheritable(stray, True)
        async with hosted(pool, "memory") as w:
            maps = Path(f"/proc/{w.suspect}/maps").read_text()
            assert "torch" not in maps
            links = open_files(w.suspect)
            assert sum(link.startswith("socket:") for link in links) == 1
        os.close(stray)

    asyncio.run(scenario())


