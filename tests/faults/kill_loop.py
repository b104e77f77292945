"""SIGKILL of the store, its tier's process or a client at random instants under load, round after round.

    python -m tests.faults.kill_loop --rounds 200 --memory 2GiB --log kills.log

After each kill: no client has seen a wrong byte, every commit that was acknowledged is served or was counted as
evicted, and the store's own check of all bytes finds nothing. Every tenth round and at the end all clients are
killed, and within a tenth of a second nothing is pinned, reserved or quarantined. At the end a start and a clean
stop leave nothing in the pool's directory. Half of the rounds have room for everything, so that not one
acknowledged chunk may be missing; in the other half chunks of a large model push each other out.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import select
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from forebay.config import size
from forebay.kvstore.client import StoreClient
from forebay.kvstore.extents import pool_path
from forebay.kvstore.header import SlotState, decode_header, slot_state
from forebay.kvstore.protocol import CLIENT_ID_BYTES, REQUESTS, Hello, Row
from forebay.testing.standstill import pause, resume
from tests.faults import traffic
from tests.faults.traffic import BIG, BIG_POSITION_BYTES, TINY, Acknowledged

START_S = 60.0
FREED_S_MAX, FREED_S_AT_LAST = 0.1, 10.0
"""The first is the promise, judged by the median in the long form; the second says that it will never be free."""
LOOK_EVERY_S = 0.01
READOPT_S_MAX = 1.0


class KillLoopFailed(AssertionError):
    """A promise was broken; the message says which, in which round, under which seed."""


@dataclass
class Daemon:
    """`forebay store` with a file tier, started again after each kill."""

    folder: Path
    memory: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self.folder / "store.sock"

    @property
    def address(self) -> str:
        return f"unix://{self.socket}"

    @property
    def pool(self) -> Path:
        return pool_path(Path("/dev/shm"), self.socket)

    def start(self) -> float:
        """Start it; seconds until it answered."""
        before = time.monotonic()
        with open(self.folder / "store.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "forebay", "store", "--socket", str(self.socket), "--memory", str(self.memory),
                 "--fs", str(self.folder / "files"), "--fs-quota", "256MiB"],
                stdout=log, stderr=log,
            )  # fmt: skip
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > before + START_S:
                raise KillLoopFailed(f"the store did not start: {self.last_words()}")
            time.sleep(0.002)
        return time.monotonic() - before

    def _answers(self) -> bool:
        """Is a client welcome? Without mapping the pool, which is the client's own time."""
        hello = REQUESTS.encode(Hello(rid=1, client=os.urandom(CLIENT_ID_BYTES), kind="probe"))
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(START_S)
            try:
                probe.connect(str(self.socket))
                probe.sendall(hello)
                return len(probe.recv(16)) > 0
            except OSError:
                return False

    def last_words(self) -> str:
        """The end of its log."""
        return (self.folder / "store.log").read_text(errors="replace")[-2000:]

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def tier(self) -> int | None:
        """Process id of the file tier, None if there is none right now."""
        assert self.process is not None
        pid = self.process.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return None
        return int(children[0]) if children else None


@dataclass
class Clients:
    """Processes of `tests.faults.traffic`, and what was acknowledged to them."""

    address: str
    count: int
    big: int = 0
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    acknowledged: dict[tuple[int, bytes], Acknowledged] = field(default_factory=dict)
    acknowledgements: int = 0
    _started: int = 0

    def __post_init__(self) -> None:
        self._read, self._write = os.pipe()

    def start(self) -> None:
        """As many clients as there should be."""
        while len(self.processes) < self.count:
            self._started += 1
            command = [sys.executable, "-m", "tests.faults.traffic", self.address, str(self._started), str(self.big)]
            self.processes.append(subprocess.Popen([*command, str(self._write)], pass_fds=[self._write]))

    def note(self) -> int:
        """Take in what clients have reported; how many records that were."""
        noted = 0
        while select.select([self._read], [], [], 0)[0]:
            # Records are written whole and a pipe keeps their order: only the end of a read may cut one.
            data = os.read(self._read, 1000 * traffic.RECORD_BYTES)
            data += os.read(self._read, -len(data) % traffic.RECORD_BYTES) if len(data) % traffic.RECORD_BYTES else b""
            for record in traffic.unpack(data):
                self.acknowledged[(record.group, record.key)] = record
                noted += 1
        self.acknowledgements += noted
        return noted

    def pause(self) -> None:
        """All of them stand still."""
        for process in self.processes:
            if process.poll() is None:
                pause(process.pid)

    def resume(self) -> None:
        """All of them go on."""
        for process in self.processes:
            if process.poll() is None:
                resume(process.pid)

    def must_live(self) -> None:
        """Raises KillLoopFailed if one has ended by itself."""
        for process in self.processes:
            if process.poll() is not None:
                raise KillLoopFailed(f"a client ended by itself with status {process.returncode}")

    def kill(self, victim: subprocess.Popen[bytes]) -> None:
        """SIGKILL one of them."""
        victim.kill()
        victim.wait()
        self.processes.remove(victim)

    def kill_all(self) -> None:
        """SIGKILL all of them."""
        self.must_live()
        for victim in list(self.processes):
            self.kill(victim)

    def close(self) -> None:
        """End what is left, and the pipe."""
        for victim in list(self.processes):
            self.kill(victim)
        os.close(self._read)
        os.close(self._write)


class Held:
    """The committed chunks of a store, by what asks for them."""

    def __init__(self) -> None:
        self._chunks: set[tuple[int, bytes]] = set()
        self._longest: dict[tuple[int, bytes], int] = {}

    def add(self, rows: Sequence[Row]) -> None:
        """Take a page of a listing in."""
        for row in rows:
            if row.state.startswith("committed"):
                self._chunks.add((row.group, row.key))
                above = (row.group, row.parent)
                self._longest[above] = max(self._longest.get(above, 0), row.tokens)

    def has(self, group: int, key: bytes, record: Acknowledged | None = None) -> bool:
        """Is this chunk here, or (of a record) a fuller one that begins with it and replaced it?"""
        if (group, key) in self._chunks:
            return True
        return record is not None and self._longest.get((group, record.parent), 0) > record.tokens


def committed_in(pool: Path) -> set[tuple[int, bytes]]:
    """Chunks whose slots a dead store has left marked as committed, read from its files alone."""
    found: set[tuple[int, bytes]] = set()
    for file in sorted(pool.glob("extent-*")):
        with open(file, "rb") as extent, mmap.mmap(extent.fileno(), 0, prot=mmap.PROT_READ) as memory:
            view = memoryview(memory)
            _, _, slot_bytes = struct.unpack_from("<8sQQ", view)
            for at in range(4096, len(view) - slot_bytes + 1, slot_bytes) if slot_bytes else ():
                if slot_state(view[at : at + 64]) is SlotState.COMMITTED:
                    header = decode_header(view[at : at + slot_bytes])
                    found.add((header.group, header.key))
            view.release()
    return found


@dataclass
class Figures:
    """What the loop has done and seen."""

    kills: dict[str, int] = field(default_factory=lambda: {"store": 0, "tier": 0, "client": 0})
    start_s: list[float] = field(default_factory=list)
    readopt_s: list[float] = field(default_factory=list)
    readopt_cpu_s: list[float] = field(default_factory=list)
    freed_s: list[float] = field(default_factory=list)
    readopted: list[int] = field(default_factory=list)
    acknowledged: int = 0
    checked: int = 0
    missing: int = 0
    retired: int = 0
    verified_bytes: int = 0

    def lines(self) -> Iterator[str]:
        """For people."""
        kills = ", ".join(f"{count} of {name}" for name, count in self.kills.items())
        yield f"kills: {kills}; commits acknowledged: {self.acknowledged}"
        yield (
            f"acknowledged chunks looked for after kills: {self.checked}, served: {self.checked - self.missing}, "
            f"evicted: {self.missing} (the stores have counted {self.retired} chunks as taken out, for any reason)"
        )
        yield (
            f"all clients killed {len(self.freed_s)} times: what they held was free after "
            f"{statistics.median(self.freed_s):.3f} s (median), {max(self.freed_s):.3f} s at most"
        )
        yield f"bytes that the store has read and compared after kills: {self.verified_bytes >> 20} MiB"
        if self.readopt_s:
            yield (
                f"re-adoption of up to {max(self.readopted)} chunks: median {statistics.median(self.readopt_s):.3f} s, "
                f"longest {max(self.readopt_s):.3f} s, of CPU {statistics.median(self.readopt_cpu_s):.3f} and "
                f"{max(self.readopt_cpu_s):.3f} s; from exec to the first answer: median "
                f"{statistics.median(self.start_s):.2f} s, longest {max(self.start_s):.2f} s"
            )


class KillLoop:
    """See the module's text."""

    def __init__(self, folder: Path, *, memory: int, clients: int, seed: int, tell: IO[str]) -> None:
        self.seed, self.tell = seed, tell
        self.rng = random.Random(seed)
        self.daemon = Daemon(folder, memory)
        self.clients = Clients(self.daemon.address, clients)
        self.figures = Figures()
        self._retired_before = 0
        self.prompts = memory // BIG_POSITION_BYTES // 2
        """How many prompts of the large model (two chunk positions each) the pool can hold at all."""

    def run(self, rounds: int) -> Figures:
        """All rounds, and the end. Raises KillLoopFailed."""
        self.daemon.start()
        try:
            self._fill()
            for number in range(1, rounds + 1):
                self.clients.big = self.prompts // 2 if number <= rounds // 2 else 4 * self.prompts
                self.clients.start()
                line = self._round(tight=number > rounds // 2)
                if number % 10 == 0 or number == rounds // 2:
                    self._everybody_dies()
                print(f"round {number} of {rounds}: {line}", file=self.tell, flush=True)
            self._end()
        except KillLoopFailed as error:
            raise KillLoopFailed(f"{error} (seed {self.seed})") from error
        finally:
            self.clients.close()
            if self.daemon.process is not None and self.daemon.process.poll() is None:
                self.daemon.process.terminate()
                self.daemon.process.wait(START_S)
        return self.figures

    def _fill(self) -> None:
        """Half of the pool holds the large model's chunks before anything is killed."""
        with StoreClient(self.daemon.address) as client:
            client.register(BIG)
            for number in range(self.prompts // 2):
                for record in traffic.push(client, BIG, traffic.big_tokens(number)):
                    self.clients.acknowledged[(record.group, record.key)] = record

    def _round(self, *, tight: bool) -> str:
        """Load for a while, a kill, and the look at what is left."""
        self._load(0.05 + 0.4 * self.rng.random())
        victim = self.rng.choices(("store", "client", "tier"), (6, 3, 2))[0]
        self.figures.kills[victim] += 1
        if victim == "client":
            self.clients.kill(self.rng.choice(self.clients.processes))
            return "killed a client"
        if victim == "tier":
            pid = self.daemon.tier()
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
            return "killed the tier's process"
        self.daemon.kill()
        return f"killed the store, {self._killed(tight=tight)}"

    def _load(self, seconds: float) -> None:
        """Let clients work, and note what they and the store report."""
        until = time.monotonic() + seconds
        working = False
        while time.monotonic() < until or not working:
            self.clients.must_live()
            self.clients.note()
            working = working or self._somebody_works()
            time.sleep(LOOK_EVERY_S)
            if time.monotonic() > until + START_S:
                raise KillLoopFailed("the clients have stopped working")

    def _somebody_works(self) -> bool:
        """Has anybody looked anything up in this boot?"""
        with StoreClient(self.daemon.address, maps=False) as client:
            return client.stats().values.get("store.lookups", 0) > 0

    def _killed(self, *, tight: bool) -> str:
        """The store is dead: what its pool holds now must be served by the next one."""
        self.clients.pause()
        try:
            self.clients.note()
            left = committed_in(self.daemon.pool)
            self.figures.start_s.append(self.daemon.start())
            held = self._held()
            lost = [chunk for chunk in left if not held.has(*chunk)]
            if lost:
                raise KillLoopFailed(f"{len(lost)} of {len(left)} chunks of the dead store's pool are not served")
            return f"answered after {self.figures.start_s[-1]:.2f} s; {self._missing(held, tight=tight)}"
        finally:
            self.clients.resume()

    def _missing(self, held: Held, *, tight: bool) -> str:
        """Acknowledged chunks that are gone were evicted before the kill, and can't have been where there is room."""
        known = self.clients.acknowledged
        gone = [record for record in known.values() if not held.has(record.group, record.key, record)]
        self.figures.checked += len(known)
        self.figures.missing += len(gone)
        if gone and not tight:
            raise KillLoopFailed(f"{len(gone)} acknowledged chunks are gone, and there was room for all: {gone[:2]}")
        counted = self.figures.retired - self._retired_before
        self._retired_before = self.figures.retired
        if len(gone) > counted:
            raise KillLoopFailed(f"{len(gone)} acknowledged chunks are gone, and {counted} were counted as taken out")
        for record in gone:  # what is gone counts once, and again if it is acknowledged again
            del known[(record.group, record.key)]
        return f"{len(known)} acknowledged chunks are served, {len(gone)} were evicted"

    def _held(self) -> Held:
        """What the new store holds, all of it compared with its checksums, some of it with what was stored."""
        with StoreClient(self.daemon.address, timeout_s=START_S) as client:
            values = client.stats().values
            self.figures.readopt_s.append(values["host.readopt_seconds"])
            self.figures.readopt_cpu_s.append(values["host.readopt_cpu_seconds"])
            self.figures.readopted.append(int(values.get("host.readopted", 0)))
            self.figures.retired = int(values["host.retired_ever"])
            checked = client.check()
            if checked.damaged:
                raise KillLoopFailed(f"damaged after a kill: {checked.damaged[:3]}")
            self.figures.verified_bytes += checked.bytes
            held = Held()
            cursor, more = 0, True
            while more:
                page = client.list_chunks(cursor=cursor, limit=4096)
                held.add(page.rows)
                cursor, more = page.cursor, page.cursor > 0
            for spec in (TINY, BIG):
                client.register(spec)
            for number in self.rng.sample(range(traffic.TINY_PROMPTS), 24):
                traffic.pull(client, TINY, traffic.tiny_tokens(number))
            traffic.pull(client, BIG, traffic.big_tokens(self.rng.randrange(max(self.prompts, 1))))
        return held

    def _everybody_dies(self) -> None:
        """All clients at once: what they held is free a moment later."""
        with StoreClient(self.daemon.address) as client:
            self.clients.kill_all()
            began = time.monotonic()
            while True:
                values = client.stats().values
                took = time.monotonic() - began
                held = [name for name in ("host.reserved_bytes", "host.quarantined_slots") if values[name]]
                pinned = values["host.entries"] - values["host.evictable"]
                busy = values["tier.fs.stores_running"] + values["tier.fs.loads_running"]
                if not held and (pinned == 0 or busy):
                    break
                if took > FREED_S_AT_LAST:
                    raise KillLoopFailed(f"{took:.1f} s after all clients were killed: {held}, {pinned} chunks pinned")
        self.figures.freed_s.append(took)
        self.clients.note()

    def _end(self) -> None:
        """A last kill of the store, a start, a clean stop: nothing is left."""
        self._everybody_dies()
        self.daemon.kill()
        self._killed(tight=True)
        process = self.daemon.process
        assert process is not None
        process.terminate()
        if process.wait(START_S) != 0 or self.daemon.pool.exists() or self.daemon.socket.exists():
            raise KillLoopFailed(f"a clean stop left something behind, status {process.returncode}")
        self.figures.acknowledged = self.clients.acknowledgements


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.kill_loop", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--memory", default="2GiB", help="the pool's size")
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--log", type=Path, help="write the rounds here, and the end to both")
    options = parser.parse_args(arguments)
    memory = size(options.memory)
    with open(options.log, "w") if options.log else open(os.devnull, "w") as log:
        tell = log if options.log else sys.stderr
        given = f"{options.rounds} rounds, {options.memory} of pool, {options.clients} clients, seed {options.seed}"
        print(given, file=log)
        with tempfile.TemporaryDirectory(prefix="kill-loop-") as folder:
            loop = KillLoop(Path(folder), memory=memory, clients=options.clients, seed=options.seed, tell=tell)
            try:
                figures = loop.run(options.rounds)
            except KillLoopFailed as error:
                for out in {log, sys.stdout}:
                    print(f"FAILED: {error}", file=out)
                return 1
        # The longest tells of the machine's other work as well; that CPU time isn't over it either.
        slow = statistics.median(figures.freed_s) > FREED_S_MAX or bool(
            figures.readopt_s
            and (statistics.median(figures.readopt_s) >= READOPT_S_MAX or max(figures.readopt_cpu_s) >= READOPT_S_MAX)
        )
        for out in (log, sys.stdout):
            print("\n".join(figures.lines()), file=out)
            print("re-adoption or letting go took too long" if slow else "no promise was broken", file=out)
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
