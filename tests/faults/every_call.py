"""One scenario, and each of its system calls and manifest transactions failing in turn.

    python -m tests.faults.every_call [--every 1] [--log FILE]

The scenario starts a store with a file tier, fills its memory over the brim, reads back from files, restarts it and
reads again. Each call fails once as each kind of fault (an error, a full disk, a hang, a short or wrong read or
write, a broken connection). After that nothing may be left: no pin, reservation, slot, descriptor, temporary file or
uncounted byte; and the store serves right bytes or misses, and takes new chunks.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import lstat
from pathlib import Path

from forebay.errors import ForebayError
from forebay.kvstore.client import AsyncStoreClient
from forebay.kvstore.service import StoreService
from forebay.tiers.fs.device import Device
from forebay.tiers.fs.fsck import check_directory
from forebay.tiers.fs.options import FsOptions
from forebay.tiers.fs.paths import Paths
from forebay.tiers.fs.tier import FsTier
from tests.faults.calls import KINDS, OF_MANIFEST, READS, WRITES, Calls, Fault, Kind
from tests.faults.inprocess import (
    HURRY,
    SPEC,
    InProcessDaemon,
    ThreadChild,
    config,
    pool_of,
    pull,
    push,
    settled,
    started,
)
from tests.tiers.fs_rig import disk_usage

PROMPTS = [[number] * 32 + [100 + number] * 64 for number in range(4)]
TAIL = [200] * 32 + [201] * 16
FULLER = [200] * 32 + [201] * 32
AFTERWARDS = [900] * 64
DEADLINE_MS = 400
RUNS_A_PROCESS = 60
PROGRESS = 100


@dataclass
class Run:
    """One run of the scenario. `refused`: why the store would not start, if so."""

    calls: Calls
    refused: str = ""
    hits: int = 0


def run(folder: Path, fault: Fault | None) -> Run:
    """The scenario with a fault. Raises AssertionError if anything is wrong or left."""
    (folder / "pool").mkdir()
    before = descriptors()
    calls = Calls((folder / "pool", folder / "files"), fault)
    found = Run(calls)
    with calls:
        asyncio.run(_scenario(folder, found))
    calls.stop()
    nothing_is_left(folder, fault)
    gc.collect()
    after = descriptors()
    assert after <= before, f"descriptors are left: {after - before}"
    return found


async def _scenario(folder: Path, found: Run) -> None:
    for boot in range(2):
        daemon = InProcessDaemon(config(folder), HURRY)
        ThreadChild.unhang = staticmethod(found.calls.release)
        found.calls.on_reset = daemon.reset
        try:
            ended = await started(daemon)
        except ForebayError as error:
            found.refused = str(error)  # it says why, and a second try has to work
            assert boot or not exists(pool_of(folder)), "a store that could not start has left its pool"
            daemon = InProcessDaemon(config(folder), HURRY)
            ended = await started(daemon)
        await _use(daemon.service, folder, found, first=boot == 0)
        await _stop(daemon, ended, folder)
    found.calls.stop()
    daemon = InProcessDaemon(config(folder))
    ended = await started(daemon)
    await _serves(daemon.service, folder)
    await _stop(daemon, ended, folder)


async def _stop(daemon: InProcessDaemon, ended: asyncio.Task[int], folder: Path) -> None:
    daemon.stop()
    assert await asyncio.wait_for(ended, 90) == 0
    assert not exists(pool_of(folder)), "a clean stop has left the pool"


async def _use(service: StoreService, folder: Path, found: Run, *, first: bool) -> None:
    client = AsyncStoreClient(str(folder / "store.sock"))
    try:
        await client.connect()
        await client.register(SPEC)
        if first:
            await push(client, TAIL)
            await push(client, FULLER)
            for prompt in PROMPTS:
                await push(client, prompt)
                await settled(service)  # or what a small pool may keep pinned for its tier is used up
        for prompt in (FULLER, *PROMPTS):
            found.hits += (await pull(client, prompt, DEADLINE_MS)).hit
    except ForebayError:
        pass  # the connection may be refused or lost; what it held must not be
    finally:
        await client.close()
    await at_rest(service)


async def at_rest(service: StoreService) -> None:
    """Nothing is pinned, reserved or under way, and every used slot has its entry."""
    await settled(service)
    until = time.monotonic() + 60
    while service.connections or service.core.chores or service.core.quarantined_bytes:
        assert time.monotonic() < until, (service.connections, service.core.quarantined_bytes)
        await asyncio.sleep(0.01)
        service.tick()
    core = service.core
    assert core.reserved_bytes == core.promoting_bytes == 0
    assert [entry for entry in core.table if entry.pins] == []
    assert sum(core.place.busy.values()) == 0
    assert core.place.slots.used_bytes == sum(entry.slot_bytes for entry in core.table)
    assert not service.cascade.loading and all(t.store_bytes == 0 for t in service.cascade.tiers.values())


async def _serves(service: StoreService, folder: Path) -> None:
    """Without further faults the store takes chunks and serves them, and its files take and give them too."""
    while len(service.core.place.slots.extents) < config(folder).extents:
        await asyncio.sleep(0.002)  # a pool that is still growing may keep less pinned for its tier
    client = AsyncStoreClient(str(folder / "store.sock"))
    await client.connect()
    await client.register(SPEC)
    assert await push(client, AFTERWARDS) == 2
    assert (await pull(client, AFTERWARDS)).hit == 64
    await settled(service)
    for entry in list(service.core.table):
        service.core.retire(entry, "evicted")
    assert (await pull(client, AFTERWARDS, 5000)).hit == 64, "from files"
    await client.close()
    await at_rest(service)


def exists(path: Path) -> bool:
    """Is it there? By a call that is bound already, and so neither counted nor failed."""
    try:
        lstat(path)
    except FileNotFoundError:
        return False
    return True


def nothing_is_left(folder: Path, fault: Fault | None) -> None:
    """The files are what their account says, each is whole, and none is unfinished."""
    directory = folder / "files"
    tier = FsTier("f", {"directory": str(directory), "quota_bytes": 16 << 20}, device=_plain)
    try:
        until = time.monotonic() + 60
        while not tier.statistics().values["reconciled"] or tier._shelf.ledger.leaving:
            assert time.monotonic() < until, "the files were not compared with the manifest"
            time.sleep(0.002)
        assert tier._shelf.ledger.used == disk_usage(directory), "the account differs from the disk"
        assert tier._shelf.ledger.reserved == 0
    finally:
        tier.close()
    report = check_directory(directory, repair=False)
    assert report.leftovers == [] and (report.unindexed, report.vanished) == (0, 0)
    # What a disk has stored otherwise than it was told is found when it is read, by a load or by this check.
    assert report.clean or (fault is not None and fault.kind == "wrong"), report.problems


def _plain(paths: Paths, options: FsOptions) -> Device:
    return Device(paths, options.odirect, fsync=False)


def descriptors() -> Counter[str]:
    """What this process has open, by what it is."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{name}").split("[")[0].split(":")[0]] += 1
        except OSError:
            continue  # the listing's own
    return found


def kinds_for(name: str) -> tuple[Kind, ...]:
    """What can befall such a call."""
    if name in READS + WRITES:
        return KINDS
    return ("EIO", "ENOSPC", "hang", "reset") if name in OF_MANIFEST or name != "mmap" else ("EIO", "ENOSPC", "reset")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if anything went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.every_call", description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="fail only every Nth call, each as one kind of fault")
    parser.add_argument("--only", help="NAME:NUMBER:KIND, one fault")
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time")
    parser.add_argument("--log", type=Path)
    options = parser.parse_args(arguments)
    outcome = inject(options.every, options.only, options.jobs)
    lines = [*outcome.lines()]
    print("\n".join(lines))
    if options.log:
        options.log.write_text("\n".join(lines) + "\n")
    return int(bool(outcome.failures))


def planned(names: Mapping[str, int], every: int) -> list[Fault]:
    """Every so manieth call, each as one kind of fault in turn; with 1, each as each kind.

    A walk over 256 folders is 256 calls that are alike: every thirtieth of those is enough.
    """
    calls = [
        (name, number)
        for name, count in sorted(names.items())
        for number in range(0, count, 30 if name == "listdir" else 1)
    ]
    if every == 1:
        return [Fault(name, number, kind) for name, number in calls for kind in kinds_for(name)]
    return [
        Fault(name, number, kinds_for(name)[turn % len(kinds_for(name))])
        for turn, (name, number) in enumerate(calls[::every])
    ]


@dataclass
class Outcome:
    """What a series of runs found."""

    calls: int
    runs: Counter[str]
    missed: int
    refused: int
    failures: list[str]

    def lines(self) -> list[str]:
        """For people."""
        kinds = ", ".join(f"{count} as {kind}" for kind, count in self.runs.items())
        return [
            f"{self.calls} calls in the scenario; {self.runs.total()} faults: {kinds}",
            f"{self.refused} starts were refused with a reason and worked the next time; {self.missed} faults were "
            "not met, since a run took fewer calls",
            *(self.failures or ["nothing was left, and every store served on"]),
        ]


def inject(every: int = 1, only: str | None = None, jobs: int = 1) -> Outcome:
    """Count the scenario's calls, then fail every so manieth; with 1, each as each kind of fault.

    Most of a run is waiting, so several processes at a time (`jobs`) cost little.
    """
    with tempfile.TemporaryDirectory() as folder:
        names = run(Path(folder), None).calls.names
    outcome = Outcome(names.total(), Counter(), 0, 0, [])
    plan = [fault for fault in planned(names, 1) if str(fault) == only] if only else planned(names, every)
    if jobs == 1:
        for fault in plan:
            _note(outcome, fault, _attempt(fault))
        return outcome
    # What a run leaves behind in its process isn't the store's: a fresh one now and then keeps it small.
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=RUNS_A_PROCESS) as pool:
        for number, (fault, attempt) in enumerate(zip(plan, pool.imap(_attempt, plan), strict=True), start=1):
            _note(outcome, fault, attempt)
            if number % PROGRESS == 0:
                print(f"{number} of {len(plan)} faults, {len(outcome.failures)} failures", file=sys.stderr, flush=True)
        pool.close()  # daemons that ran in them have left them deaf to SIGTERM, so they have to end by themselves
        pool.join()
    return outcome


@dataclass(frozen=True)
class Attempt:
    """How one run with a fault ended; `failure` in words."""

    met: bool = False
    refused: bool = False
    failure: str = ""


def _attempt(fault: Fault) -> Attempt:
    logging.disable(logging.CRITICAL)
    try:
        with tempfile.TemporaryDirectory() as folder:
            done = run(Path(folder), fault)
    except Exception as error:
        return Attempt(failure=f"{fault}: {type(error).__name__}: {error}")
    finally:
        logging.disable(logging.NOTSET)
    return Attempt(met=done.calls.hit, refused=bool(done.refused))


def _note(outcome: Outcome, fault: Fault, attempt: Attempt) -> None:
    outcome.runs[fault.kind] += 1
    if attempt.failure:
        outcome.failures.append(attempt.failure)
        print(attempt.failure, file=sys.stderr, flush=True)
        return
    outcome.missed += not attempt.met
    outcome.refused += attempt.refused


if __name__ == "__main__":
    sys.exit(main())
