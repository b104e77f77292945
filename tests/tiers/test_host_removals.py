"""What a tier was told to remove goes, whatever becomes of its process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from forebay.testing.standstill import pause
from forebay.tiers.host import HostLimits
from tests.tiers.hosting import ODD, hosted
from tests.tiers.support import Pool, make_chunk, numbered


def test_what_a_process_was_told_to_forget_and_died_before_is_forgotten_by_the_next(
    pool: Pool, tmp_path: Path
) -> None:
    async def scenario() -> None:
        chunk, other = numbered(1), numbered(2)
        async with hosted(pool, "fs", {"directory": str(tmp_path)}) as w:
            w.host.store([w.store_job(1, chunk), w.store_job(2, other)])
            await w.until(lambda: len(w.results) == 2)
            pause(w.suspect)
            w.host.forget([chunk.id], "cleared")
            assert w.host.statistics()["host.forgets_pending"] == 1
            await w.kill_and_wait()
            found = await w.host.lookup([chunk.query(), other.query()], 5.0)
            assert [answer.outcome for answer in found] == ["miss", "hit"]
            assert w.host.statistics()["host.forgets_pending"] == 0

    asyncio.run(scenario())


def test_what_a_living_process_leaves_unforgotten_is_bounded(pool: Pool, tmp_path: Path) -> None:
    async def scenario() -> None:
        options = {"directory": str(tmp_path)}
        async with hosted(pool, "fs", options, limits=HostLimits(forgets=4)) as w:
            chunks = [numbered(i) for i in range(8)]
            w.host.store([w.store_job(i, chunk) for i, chunk in enumerate(chunks)])
            await w.until(lambda: len(w.results) == 8)
            pause(w.suspect)
            for chunk in chunks[1:]:
                w.host.forget([chunk.id], "cleared")
                assert w.host.statistics()["host.forgets_pending"] <= 4
            assert w.host.statistics()["host.forgets_widened"] == 1
            await w.kill_and_wait()
            await w.until(lambda: w.host.statistics()["host.clears_pending"] == 0)
            found = await w.host.lookup([chunk.query() for chunk in chunks], 5.0)
            assert {answer.outcome for answer in found} == {"miss"}

    asyncio.run(scenario())


@pytest.mark.parametrize("clear", [True, False])
def test_a_tier_that_fails_to_remove_is_switched_off_until_it_can(pool: Pool, tmp_path: Path, clear: bool) -> None:
    async def scenario() -> None:
        held, chunk = tmp_path / "held", numbered(1)
        options = {"directory": str(tmp_path / "fs"), "held": str(held)}
        async with hosted(pool, ODD + "Clinging", options) as w:
            w.host.store([w.store_job(1, chunk)])
            await w.until(lambda: len(w.results) == 1)
            held.touch()
            cleared = asyncio.create_task(w.host.clear(b"", 15.0)) if clear else None
            if not clear:
                w.host.forget([chunk.id], "cleared")
            await w.until(lambda: w.host.statistics().get("host.deaths", 0) >= 2)
            held.unlink()
            pending = "host.clears_pending" if clear else "host.forgets_pending"
            await w.until(lambda: w.host.alive and w.host.statistics()[pending] == 0)
            assert cleared is None or await cleared == 1
            assert (await w.host.lookup([chunk.query()], 5.0))[0].outcome == "miss"

    asyncio.run(scenario())


def test_a_clear_that_takes_longer_than_a_hang_is_none_and_other_work_goes_on(pool: Pool) -> None:
    async def scenario() -> None:
        chunk = make_chunk()
        async with hosted(pool, ODD + "Thorough") as w:
            w.host.store([w.store_job(1, chunk)])
            await w.until(lambda: w.ids() == [1])
            clearing = [asyncio.create_task(w.host.clear(b"", 20.0)) for _ in range(2)]
            await asyncio.sleep(0)
            found = await w.host.lookup([chunk.query()], 5.0)
            assert found[0].outcome == "hit" and not clearing[0].done(), "the clear is still going on"
            assert await asyncio.gather(*clearing) == [1, 0]
            assert w.host.pid == w.suspect, "nobody took it for hanging"

    asyncio.run(scenario())


def test_a_clear_that_waits_holds_up_no_other_and_is_asked_for_again_after_a_death(pool: Pool, tmp_path: Path) -> None:
    async def scenario() -> None:
        there, chunk = tmp_path / "there", make_chunk()
        async with hosted(pool, ODD + "Patient", {"there": str(there)}) as w:
            w.host.store([w.store_job(1, chunk)])
            await w.until(lambda: w.ids() == [1])
            waiting = asyncio.create_task(w.host.clear(b"", 20.0))
            await asyncio.sleep(0)
            assert await w.host.clear(chunk.header.namespace, 20.0) == 1
            assert not waiting.done()
            await w.kill_and_wait()
            assert await w.host.clear(chunk.header.namespace, 20.0) == 0
            assert w.host.statistics()["host.clears_pending"] == 1
            there.touch()
            assert await waiting == 0
            assert w.host.statistics()["host.clears_pending"] == 0

    asyncio.run(scenario())
