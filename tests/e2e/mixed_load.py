"""Everything at once, for as long as one likes, while workers and stores are killed: no wrong token, no leak, no hang.

    python -m tests.e2e.mixed_load --seconds 60 --seed 1
    python -m tests.e2e.mixed_load --seconds 3600 --seed 7 --log docs/logs/mixed-load.log
    python -m tests.e2e.mixed_load --seconds 20 --seed 1 --mutant repeats       must fail

Two workers behind one front end over one store with files and a peer. Clients ask for what `book.py` wrote down:
prompts that share prefixes, later turns, streamed or whole, with any length, sampled, penalised, guided, of several
priorities and salts; some leave in the middle. Meanwhile workers are killed, stopped, drained, and the store and its
peer are killed. At the end nothing may be held by anybody, and no process may have more descriptors after another round
of requests than before it. Exit code 1 if anything was wrong; what, and when, is printed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forebay.kvstore.extents import pool_path
from forebay.testing import web
from forebay.testing.cluster import Cluster, wait_for
from forebay.testing.standstill import pause, resume
from forebay.workers.control import WorkerControl
from tests.e2e.backends import Files, Peer
from tests.e2e.book import Book, Entry, write_book
from tests.e2e.mutants import MUTANTS
from tests.e2e.streams import Stream
from tests.e2e.windowed import tiny_windowed

FRONT, QUIET, WORKERS = "front", "quiet", ("worker1", "worker2")
CHUNK, ENTRIES, CLIENTS = 32, 20, 5
HUNG_S = 60.0
PAUSE_S = (1.0, 4.0)
SALTS = (None, None, "one", "other")
GUIDED = find_spec("llguidance") is not None


@dataclass
class Tally:
    """What happened. Any entry of `wrong` fails the run; clients go on until it is `over`."""

    began: float = field(default_factory=time.monotonic)
    wrong: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    slowest_s: float = 0.0
    over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    say: Callable[[str], None] = print

    def fail(self, what: str) -> None:
        """Something is wrong."""
        with self.lock:
            self.wrong.append(what)
        self.note(f"WRONG: {what}")

    def note(self, what: str) -> None:
        """A line with its second."""
        self.say(f"{time.monotonic() - self.began:8.1f} s  {what}")

    def count(self, name: str, tokens: int = 0, took_s: float = 0.0) -> None:
        """One more of something."""
        with self.lock:
            self.done[name] += 1
            self.tokens += tokens
            self.slowest_s = max(self.slowest_s, took_s)


@dataclass(eq=False)
class Client(threading.Thread):
    """Asks one thing after the other until all is over, or `rounds` times."""

    cluster: Cluster
    book: Book
    tally: Tally
    seed: int
    rounds: int | None = None

    def __post_init__(self) -> None:
        super().__init__(daemon=True)
        self._rng = random.Random(self.seed)

    def run(self) -> None:
        for number in itertools.count():
            over = self.tally.over.is_set() if self.rounds is None else number == self.rounds
            if over or self.tally.wrong:
                return
            began = time.monotonic()
            try:
                self._one(self.book.draw(self._rng))
            except Exception as error:  # whatever it is, the run must hear of it
                self.tally.fail(f"a client failed: {type(error).__name__} {error}")
            if time.monotonic() - began > HUNG_S:
                self.tally.fail(f"a request took {time.monotonic() - began:.0f} s")

    def _one(self, entry: Entry) -> None:
        rng = self._rng
        length = rng.randrange(1, len(entry.answer) + 1)
        more = {"priority": rng.randrange(-2, 3), "cache_salt": rng.choice(SALTS), **entry.settings}
        more = {name: value for name, value in more.items() if value is not None}
        mode = rng.choices(("stream", "whole", "leave"), (5, 3, 2))[0]
        began = time.monotonic()
        if mode == "whole":
            got = self._whole(entry, length, more)
        else:
            leave = rng.randrange(1, length + 1) if mode == "leave" else None
            stream = Stream(self.cluster, FRONT, entry.prompt, length, leave, **more)
            stream.join(HUNG_S)
            if stream.is_alive():
                self.tally.fail(f"a stream hangs after {len(stream.ids)} of {length} tokens")
                return
            if stream.error is not None:
                self.tally.fail(f"a stream ended with: {stream.error}")
                return
            got = stream.ids
        short = mode != "leave" and len(got) != min(length, len(entry.answer))
        if short or got != entry.answer[: len(got)]:
            self.tally.fail(f"{entry.kind}, {mode}, {len(entry.prompt)} tokens: got {got}, not {entry.answer[:length]}")
        self.tally.count(f"{entry.kind} {mode}", len(got), time.monotonic() - began)

    def _whole(self, entry: Entry, length: int, more: dict[str, Any]) -> list[int]:
        body = self.cluster.body(entry.prompt, length, **more)
        answer = web.post(f"{self.cluster.url(FRONT)}/v1/completions", json=body, timeout=HUNG_S)
        if answer.status_code != 200:
            raise AssertionError(f"{answer.status_code} {answer.text[:200]}")
        return list(answer.json()["choices"][0]["token_ids"])


@dataclass
class Load:
    """The processes, and what is done to them."""

    folder: Path
    tally: Tally
    rng: random.Random
    mutant: str | None = None
    entries: int = ENTRIES

    def __post_init__(self) -> None:
        tiny_windowed(self.folder / "model")
        self.cluster = Cluster(self.folder, self.folder / "model", chunk_tokens=CHUNK, memory="48MiB")
        self.files, self.peer = Files(self.folder / "fs"), Peer(self.folder / "peer")
        address = self.cluster.store_address
        self.cluster.tiers = self.files.tiers(address) + self.peer.tiers(address)

    def start(self) -> Book:
        """Start everything, and write the book on a worker that is ended again."""
        cluster = self.cluster
        cluster.start_store()
        self._worker(QUIET, store=False)
        cluster.start_frontend(QUIET + "-front", QUIET)
        book = write_book(cluster, QUIET + "-front", self.rng, self.entries, guided=GUIDED)
        for name in (QUIET + "-front", QUIET):
            assert cluster.processes.pop(name).end() == 0
        cluster.module = "forebay" if self.mutant is None else f"tests.e2e.mutants {self.mutant}"
        for name in WORKERS:
            self._worker(name)
        cluster.start_frontend(FRONT, *WORKERS)
        self.able()
        return book

    def _worker(self, name: str, *, store: bool = True) -> None:
        more = ("--structured-outputs",) if GUIDED else ()
        self.cluster.start_worker(name, store=store, extra=("--threads", "1", "--max-tokens", "1024", *more))

    def able(self) -> None:
        """Wait until both workers can be used, and have their store."""

        def both() -> bool:
            workers = self.cluster.health(FRONT)["workers"].values()
            return all(worker["state"] == "ok" and worker["store"] == "connected" for worker in workers)

        wait_for("both workers", both)

    # --- deeds -----------------------------------------------------------------------------------------

    def kill_worker(self) -> None:
        """SIGKILL a worker; another one comes at once."""
        name = self.rng.choice(WORKERS)
        self.cluster.processes[name].end(signal.SIGKILL)
        self._worker(name)

    def stop_worker(self) -> None:
        """SIGSTOP a worker, for a moment or for longer than its front end waits."""
        pid = self.cluster.processes[self.rng.choice(WORKERS)].pid
        pause(pid)
        time.sleep(self.rng.choice((0.2, 1.0, 2.5)))
        resume(pid)

    def drain_worker(self) -> None:
        """Drain a worker, and undo it or replace it."""
        name = self.rng.choice(WORKERS)
        with WorkerControl(self.cluster.socket(name)) as control:
            control.drain(True)
            wait_for("nothing to be left", lambda: control.left().nothing, HUNG_S)
            if self.rng.random() < 0.5:
                control.drain(False)
                return
            control.leave()
        popen = self.cluster.processes[name].popen
        assert popen is not None and popen.wait(30) == 0, "a drained worker ends well"
        self._worker(name)

    def kill_store(self) -> None:
        """SIGKILL the store; its successor takes over the pool."""
        self.cluster.processes["store"].end(signal.SIGKILL)
        time.sleep(self.rng.random())
        self.cluster.start_store()

    def kill_peer(self) -> None:
        """SIGKILL the store's peer."""
        os.kill(self.peer.process.pid, signal.SIGKILL)
        self.peer.process.wait(30)
        time.sleep(self.rng.random())
        self.peer.start()

    def deeds(self, until: float) -> None:
        """One deed after the other, each kind at least once. Both workers are there before one is harmed: some worker
        always is."""
        deck: list[Callable[[], None]] = []
        done = 0
        while not self.tally.wrong and (time.monotonic() < until or not done or deck):
            if not deck:  # every kind comes again and again, in another order
                deck = [self.kill_worker, self.kill_worker, self.stop_worker, self.drain_worker, self.kill_store,
                        self.kill_peer]  # fmt: skip
                self.rng.shuffle(deck)
            deed, done = deck.pop(), done + 1
            self.tally.note(deed.__name__.replace("_", " "))
            try:
                deed()
                self.able()
            except AssertionError as error:
                self.tally.fail(f"{deed.__name__}: {error}")
            self.tally.count(deed.__name__)
            time.sleep(self.rng.uniform(*PAUSE_S))

    # --- the end ---------------------------------------------------------------------------------------

    def check_idle(self) -> None:
        """Nobody may hold anything."""
        held: dict[str, float] = {}

        def nothing() -> bool:
            held.clear()
            figures, values = self.cluster.figures(FRONT), self.cluster.store_values()
            ours = ("forebay_worker_requests_", "forebay_worker_blocks_", "forebay_calls")
            ends = ("_running", "_loading", "_waiting", "_compiling", "_settling", "_used", "_draining", "_calls")
            for key, value in figures.items():
                if value and key.startswith(ours) and key.partition("{")[0].endswith(ends):
                    held[key] = value
            host = ("reserved_bytes", "promoting_bytes", "quarantined_slots")
            names = ("store.leases", "pins.keeps", *(f"host.{name}" for name in host))
            held.update({name: values[name] for name in names if values[name]})
            return not held

        try:
            wait_for("nothing to be held", nothing, 30)
        except AssertionError:
            self.tally.fail(f"still held when all is done: {held}")

    def check_descriptors(self, book: Book) -> None:
        """Another round of requests leaves no process with more descriptors."""
        counts = []
        for round_ in range(3):
            seeds = range(10_000 + 10 * round_, 10_000 + 10 * round_ + CLIENTS)
            run_all([Client(self.cluster, book, self.tally, seed, rounds=6) for seed in seeds])
            self.cluster.settle(FRONT)
            self.check_idle()
            time.sleep(0.5)
            counts.append({name: descriptors(process.pid) for name, process in self.cluster.processes.items()})
        for name in counts[0]:
            first, second, third = (count[name] for count in counts)
            if first < second < third:  # pools may fill once; what grows with every round is never given back
                self.tally.fail(f"{name} has {first}, {second}, {third} descriptors after one round more each")

    def check_files(self) -> None:
        """All that is stored is whole."""
        done = subprocess.run(
            [sys.executable, "-m", "forebay", "fsck", "--socket", str(self.folder / "store.sock")],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        if done.returncode != 0:
            self.tally.fail(f"fsck: {done.stdout[-500:]} {done.stderr[-500:]}")

    def end(self) -> None:
        """Stop everything; nothing may stay behind."""
        self.cluster.stop()
        self.peer.close()
        left = [path for path in (pool_path(Path("/dev/shm"), self.folder / "store.sock"),) if path.exists()]
        left += list(self.folder.glob("*.sock"))
        if left:
            self.tally.fail(f"left behind: {', '.join(map(str, left))}")


def descriptors(pid: int) -> int:
    """Open descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def run_all(clients: list[Client]) -> None:
    """Start them and wait for their ends."""
    for client in clients:
        client.start()
    for client in clients:
        client.join(3 * HUNG_S)


def run(seconds: float, seed: int, mutant: str | None, say: Callable[[str], None], entries: int = ENTRIES) -> Tally:
    """The whole thing, in a folder of its own."""
    rng, tally = random.Random(seed), Tally(say=say)
    folder = Path(tempfile.mkdtemp(prefix="mixed"))
    load = Load(folder, tally, rng, mutant, entries)
    try:
        book = load.start()
        tally.note(f"{len(book.entries)} entries are written, guided ones {'too' if GUIDED else 'not: no llguidance'}")
        until = time.monotonic() + seconds
        clients = [Client(load.cluster, book, tally, seed * 100 + number) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        load.deeds(until)
        tally.over.set()
        for client in clients:
            client.join(2 * HUNG_S)
            if client.is_alive():
                tally.fail("a client hangs")
        if not tally.wrong:
            load.able()
            load.check_idle()
            load.check_descriptors(book)
            load.check_files()
            links = (item for item in load.cluster.figures(FRONT).items() if item[0].startswith("forebay_link_"))
            tally.note(f"front end: { {key.removeprefix('forebay_link_'): value for key, value in links if value} }")
    finally:
        load.end()
        if tally.wrong and mutant is None:
            tally.note(f"logs of the processes are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return tally


def main() -> int:
    """Run; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="how long (default: 60)")
    parser.add_argument("--seed", type=int, default=1, help="what happens when (default: 1)")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="start the processes with a planted mistake")
    parser.add_argument("--log", type=Path, help="file that gets every line too")
    options = parser.parse_args()

    def say(line: str) -> None:
        print(line, flush=True)
        if options.log is not None:
            with open(options.log, "a", encoding="utf-8") as log:
                log.write(line + "\n")

    say(f"mixed load: {options.seconds:g} s, seed {options.seed}" + (f", {options.mutant}" if options.mutant else ""))
    tally = run(options.seconds, options.seed, options.mutant, say)
    for name, count in sorted(tally.done.items()):
        say(f"    {name.replace('_', ' '):24}{count:8}")
    say(f"{tally.tokens} tokens compared, the slowest request took {tally.slowest_s:.1f} s, {len(tally.wrong)} wrong")
    return int(bool(tally.wrong))


if __name__ == "__main__":
    sys.exit(main())
