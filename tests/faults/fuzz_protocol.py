"""Mutated frames against a living store, while another client goes on reading and compares every byte.

    python -m tests.faults.fuzz_protocol --frames 1000000 --log fuzz.log

Frames of a real session are changed in their structure (fields, lengths, counts, types), in their bytes behind a right
checksum, and in their bytes altogether. After each batch the store must answer an honest request, or have ended that
connection. It must not crash, log an exception or grow; and the other client's connection is never touched: each of
its answers comes, with the right bytes.
"""

from __future__ import annotations

import argparse
import random
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from forebay.errors import ForebayError, ProtocolError
from forebay.ipc.framing import HEAD_BYTES, FrameBuffer, frame
from forebay.kvstore.client import StoreClient
from forebay.kvstore.protocol import CLIENT_ID_BYTES, REPLIES, REQUESTS, GetStats, Hello, List, Reply, Request, Written
from tests.faults.kill_loop import Daemon
from tests.formats.mutations import messages
from tests.kvstore.running import get, prompt_of, put
from tests.kvstore.support import CHUNK, namespace

MEMORY = 64 << 20
BATCH = 24
ANSWER_S = 30.0
GROWTH_MAX = 192 << 20
"""How much private memory the store may gain: its tables are full by then, 256 namespaces and 65,536 removals too."""
LOG_BYTES_MAX = 1 << 20
FENCE = 1 << 40
INTS = (-1, 0, 1, 15, 16, 255, 4096, 4097, 1 << 31, (1 << 32) + 1, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1)


Form = Literal["request", "garbage", "beginning"]


class FuzzFailed(AssertionError):
    """The store did what it must not; the message says what, under which seed."""


# --- frames ----------------------------------------------------------------------------------------------


def recorded(address: str) -> list[bytes]:
    """Bodies of the frames that a client sends in an honest session, and a sample of every request."""
    bodies: list[bytes] = []
    spec, tokens = namespace(), list(range(3 * CHUNK + 16))
    with StoreClient(address) as client:
        send = client._client._send

        def note(data: bytes) -> None:
            bodies.append(data[HEAD_BYTES:])
            send(data)

        client._client._send = note  # type: ignore[method-assign]
        client.register(spec, "fuzzed")
        put(client, spec, tokens)
        found = get(client, spec, tokens)
        client.release([found.lease])
        prompt = prompt_of(spec, [5] * CHUNK)
        slots = client.reserve(spec.id, "tenant", [prompt.chunk(g, 0) for g in range(2)]).slots
        client.commit([Written(slots[0].reservation, b"\0" * 16)])
        client.abort([slots[1].reservation])
        client.damaged([(0, found.chunks[0].key)])
        client.explain(spec.id, prompt.root, prompt.tokens)
        client.list_chunks(limit=3)
        client.check()
        client.stats()
    bodies.extend(REQUESTS.encode(message)[HEAD_BYTES:] for message in messages(Request))
    return [body for body in bodies if type(REQUESTS.decode(body)) is not Hello]


class Mutator:
    """Endless mutated frames from a few honest bodies. The same seed gives the same frames."""

    def __init__(self, bodies: Sequence[bytes], seed: int) -> None:
        self._rng = random.Random(seed)
        self._bodies = list(bodies)
        self._trees = [msgspec.msgpack.decode(body) for body in bodies]

    def next(self) -> bytes:
        """A frame."""
        kind = self._rng.random()
        if kind < 0.85:
            return frame(self._structured())
        if kind < 0.98:
            return frame(self._bytes(self._rng.choice(self._bodies)))
        return self._bytes(frame(self._rng.choice(self._bodies)))

    def _structured(self) -> bytes:
        tree = self._rng.choice(self._trees)
        for _ in range(self._rng.choice((1, 1, 1, 2, 3))):
            tree = self._changed(tree)
        return msgspec.msgpack.encode(tree)

    def _changed(self, value: Any) -> Any:
        """The value with one thing in it changed, or another value, seldom of another type."""
        rng = self._rng
        if rng.random() < 0.01:
            return rng.choice((None, True, 7, 0.5, "text", b"bytes", [], {}))
        if isinstance(value, dict) and value:
            return self._changed_map(value)
        if isinstance(value, list):
            return self._changed_list(value)
        if isinstance(value, bool) or value is None:
            return rng.choice((True, False))
        if isinstance(value, int):
            near = [other for other in (value + 1, value - 1) if -(1 << 63) <= other < 1 << 64]
            return rng.choice((*INTS, *near, rng.getrandbits(63)))
        if isinstance(value, float):
            return rng.choice((0.0, -1.0, 1e300, float("inf"), float("nan")))
        if isinstance(value, bytes):
            return self._changed_bytes(value)
        value = value if isinstance(value, str) else "text"
        return rng.choice(("", value + "x", "\0", "ä" * rng.randrange(200), value * 50))

    def _changed_map(self, value: dict[Any, Any]) -> dict[Any, Any]:
        rng, found = self._rng, dict(value)
        keys = [key for key in found if key != "type"] or list(found)
        key = rng.choice(keys)
        action = rng.random()
        if action < 0.01:
            del found[key]
        elif action < 0.02:
            found["more"] = 1
        elif action < 0.03 and "type" in found:
            found["type"] = rng.choice(self._trees).get("type", "Lookup")
        elif action < 0.15:
            other = rng.choice(self._trees)
            found[key] = next((other[k] for k in other if type(other[k]) is type(found[key])), found[key])
        else:
            found[key] = self._changed(found[key])
        return found

    def _changed_list(self, value: list[Any]) -> list[Any]:
        rng, found = self._rng, list(value)
        action = rng.random()
        if not found or action < 0.1:
            return rng.choice(([], found[:1] * 300, found * rng.randrange(40)))
        at = rng.randrange(len(found))
        if action < 0.2:
            del found[at]
        elif action < 0.3:
            found.insert(at, found[rng.randrange(len(found))])
        else:
            found[at] = self._changed(found[at])
        return found

    def _changed_bytes(self, value: bytes) -> bytes:
        rng = self._rng
        size = rng.choice((0, 1, 15, 16, 31, 32, 33, 64, len(value) + 64, len(value) // 2))
        return rng.choice(
            (rng.randbytes(size), value[:size], value + b"\0" * 4, value * rng.choice((2, 3, 40)), value[::-1])
        )

    def _bytes(self, data: bytes) -> bytes:
        rng, found = self._rng, bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 4, 16))):
            at = rng.randrange(len(found)) if found else 0
            match rng.randrange(5):
                case 0 | 1:
                    found[at : at + 1] = bytes([(found[at] if found else 0) ^ (1 << rng.randrange(8))])
                case 2:
                    found[at:at] = rng.randbytes(rng.randrange(1, 9))
                case 3:
                    del found[at : at + rng.randrange(1, 9)]
                case _:
                    other = rng.choice(self._bodies)
                    found[at:] = other[rng.randrange(len(other)) :]
        return bytes(found)


# --- the two clients -------------------------------------------------------------------------------------


class Hostile:
    """Connections that send mutated frames, one after another."""

    def __init__(self, path: Path, seed: int) -> None:
        self._path = path
        self._client = random.Random(seed).randbytes(CLIENT_ID_BYTES)
        self._socket: socket.socket | None = None
        self._replies: FrameBuffer[Reply] = FrameBuffer(REPLIES)
        self._fence = FENCE
        self.counts: Counter[str] = Counter()

    def _connected(self) -> socket.socket:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.settimeout(ANSWER_S)
            self._socket.connect(str(self._path))
            self._replies = FrameBuffer(REPLIES)
            # Descriptors that come along are not asked for, so the kernel closes them.
            self._socket.sendall(REQUESTS.encode(Hello(rid=0, client=self._client, kind="fuzz")))
            self.counts["connections"] += 1
        return self._socket

    def send(self, frames: Sequence[bytes], last: Form) -> None:
        """Send frames. What the last one is decides what the store must do: hang up at garbage, and at a frame whose
        rest never comes; otherwise answer what is asked after them, or hang up. Raises FuzzFailed."""
        connection = self._connected()
        self._fence += 1
        ends = last != "request"
        # Every fourth question is one that waits for the tier: what was asked before has answers by then.
        question = GetStats(rid=self._fence) if self._fence % 4 == 0 else List(rid=self._fence, limit=1)
        fence = b"" if ends else REQUESTS.encode(question)
        try:
            connection.sendall(b"".join(frames) + fence)
            if last == "beginning":
                connection.shutdown(socket.SHUT_WR)
            answered = self._answered(connection, self._fence)
        except TimeoutError:
            raise FuzzFailed(f"no answer and no end after {ANSWER_S:.0f} s") from None
        except (BrokenPipeError, ConnectionResetError):
            answered = False
        if answered and ends:
            raise FuzzFailed("what is no request did not end its connection")
        if not answered:
            self.counts["ended, as it must" if ends else "ended for another reason"] += 1
            connection.close()
            self._socket = None

    def _answered(self, connection: socket.socket, fence: int) -> bool:
        while data := connection.recv(1 << 18):
            for reply in self._replies.feed(data):
                self.counts[f"reply {type(reply).__name__}"] += 1
                if reply.rid == fence:
                    return True
        return False

    def close(self) -> None:
        """Hang up."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Witness:
    """A client in a process of its own that stores and reads all the time, and compares every byte."""

    def __init__(self, address: str) -> None:
        command = [sys.executable, "-m", "tests.faults.fuzz_protocol", "--witness", address]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def must_live(self) -> None:
        """Raises FuzzFailed if it has seen something wrong."""
        if self._process.poll() is not None:
            raise FuzzFailed(f"the other client: {self._process.communicate()[0]}")

    def end(self) -> str:
        """What it has seen. Raises FuzzFailed if that was wrong."""
        said, _ = self._process.communicate("", ANSWER_S + 10)
        if self._process.returncode != 0:
            raise FuzzFailed(f"the other client: {said}")
        return said.strip()

    def kill(self) -> None:
        """End it, whatever it does."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def watch(address: str) -> int:
    """The witness's own process: until its standard input ends."""
    spec = namespace(weights=b"y" * 32)
    lookups = hits = 0
    slowest_s = 0.0
    try:
        with StoreClient(address, timeout_s=ANSWER_S) as client:
            client.register(spec)
            while not select.select([sys.stdin], [], [], 0.002)[0]:
                tokens = [lookups % 7] * CHUNK + [lookups % 50] * CHUNK
                began = time.monotonic()
                found = get(client, spec, tokens)
                slowest_s = max(slowest_s, time.monotonic() - began)
                client.release([found.lease])
                lookups += 1
                hits += found.hit == len(tokens)
                if found.hit < len(tokens):  # somebody has cleared it, as he may
                    put(client, spec, tokens)
    except (ForebayError, AssertionError) as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    print(f"{lookups} lookups, {hits} whole hits, no wrong byte, slowest {slowest_s * 1000:.0f} ms")
    return 0


def private_bytes(pid: int) -> int:
    """What a process has of memory that is its own: the pool is everybody's."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


# --- the run ---------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a run did and saw."""

    frames: int = 0
    requests: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    witness: str = ""
    seconds: float = 0.0
    private_first: int = 0
    private_most: int = 0

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"{self.frames} mutated frames in {self.seconds:.0f} s, {self.requests} of them requests by their form"
        yield ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        yield f"the other client: {self.witness}"
        yield f"the store's private memory: {self.private_first >> 20} MiB at first, {self.private_most >> 20} at most"


def fuzz(folder: Path, frames: int, seed: int, tell: IO[str]) -> Outcome:
    """Run it. Raises FuzzFailed."""
    daemon = Daemon(folder, MEMORY)
    daemon.start()
    assert daemon.process is not None
    outcome = Outcome()
    began = time.monotonic()
    mutator, hostile = Mutator(recorded(daemon.address), seed), Hostile(daemon.socket, seed)
    witness = Witness(daemon.address)
    try:
        outcome.private_first = private_bytes(daemon.process.pid)
        _send_all(outcome, mutator, hostile, daemon, witness, frames, tell)
        hostile.close()
        outcome.witness = witness.end()
        outcome.counts = hostile.counts
        outcome.seconds = time.monotonic() - began
        _judge(outcome, daemon)
    except FuzzFailed as error:
        raise FuzzFailed(f"{error} (seed {seed}, after {outcome.frames} frames)\n{daemon.last_words()}") from error
    finally:
        witness.kill()
        if daemon.process.poll() is None:
            daemon.process.terminate()
            daemon.process.wait(60)
    if daemon.pool.exists():
        raise FuzzFailed("a clean stop left the pool")
    return outcome


def _send_all(
    outcome: Outcome, mutator: Mutator, hostile: Hostile, daemon: Daemon, witness: Witness, frames: int, tell: IO[str]
) -> None:
    batch: list[bytes] = []
    told = 0
    while outcome.frames < frames:
        data = mutator.next()
        form = form_of(data)
        outcome.frames += 1
        if form == "request":
            outcome.requests += 1
            batch.append(data)
        if batch and (form != "request" or len(batch) == BATCH or outcome.frames == frames):
            hostile.send(batch, "request")
            batch = []
            must_live(daemon)
        if form != "request":
            hostile.send([data], form)
        if outcome.frames - told >= 2_000:
            witness.must_live()
            assert daemon.process is not None
            outcome.private_most = max(outcome.private_most, private_bytes(daemon.process.pid))
            told = outcome.frames
        if outcome.frames % 50_000 == 0:
            print(f"{outcome.frames} of {frames} frames", file=tell, flush=True)


def form_of(data: bytes) -> Form:
    """What a store takes these bytes for, on a connection that has said Hello."""
    try:
        found = list(FrameBuffer(REQUESTS).feed(data))
    except ProtocolError:
        return "garbage"
    if not found:
        return "beginning"
    return "garbage" if isinstance(found[0], Hello) else "request"


def must_live(daemon: Daemon) -> None:
    """Raises FuzzFailed if the store has ended."""
    assert daemon.process is not None
    if daemon.process.poll() is not None:
        raise FuzzFailed(f"the store has ended with status {daemon.process.returncode}")


def _judge(outcome: Outcome, daemon: Daemon) -> None:
    must_live(daemon)
    if outcome.private_most - outcome.private_first > GROWTH_MAX:
        raise FuzzFailed(f"the store has grown to {outcome.private_most >> 20} MiB")
    with StoreClient(daemon.address) as client:
        until = time.monotonic() + 60
        while True:
            values = client.stats().values
            held = {name: values[name] for name in ("host.reserved_bytes", "host.quarantined_slots") if values[name]}
            if not held:
                break
            if time.monotonic() > until:
                raise FuzzFailed(f"left by connections that are gone: {held}")
            time.sleep(0.05)
        if values.get("store.background_failures"):
            raise FuzzFailed("a background job of the store has failed")
    log = (daemon.folder / "store.log").read_text(errors="replace")
    if len(log) > LOG_BYTES_MAX:
        raise FuzzFailed(f"the store has logged {len(log) >> 10} KiB: its clients can fill the disk")
    if "Traceback" in log or "should not" in log:
        at = max(log.find("Traceback"), 0)
        raise FuzzFailed(f"the store has logged an exception:\n{log[max(0, at - 300) : at + 2500]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if anything went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.fuzz_protocol", description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--log", type=Path)
    parser.add_argument("--witness", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.witness:
        return watch(options.witness)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        try:
            lines = [f"seed {options.seed}", *fuzz(Path(folder), options.frames, options.seed, sys.stderr).lines()]
        except FuzzFailed as error:
            lines = [f"FAILED: {error}"]
    print("\n".join(lines))
    if options.log:
        options.log.write_text("\n".join(lines) + "\n")
    return int(lines[0].startswith("FAILED"))


if __name__ == "__main__":
    sys.exit(main())
