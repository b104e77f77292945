"""Stores with p2p tiers, as their command starts them, on this host's loopback."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from forebay.kvstore.client import StoreClient
from forebay.kvstore.header import granule_checksums
from forebay.kvstore.protocol import Found, NewChunk, Slot, Written
from forebay.testing.ports import free_port
from tests.kvstore.running import flip_a_bit, payload_of, prompt_of
from tests.kvstore.support import CHUNK, namespace
from tests.kvstore.test_daemon_tiers import TierStore

TOKENS = list(range(1, 4 * CHUNK + 1))
CHUNKS = 8
"""Of TOKENS, in both groups."""


def write(client: StoreClient, chunk: NewChunk, slot: Slot) -> Written:
    """Write a reserved chunk's bytes, without committing it."""
    assert slot.status == "reserved", slot
    data = payload_of(namespace(), chunk.group, chunk.key, len(chunk.tokens) // 4)
    client.room(slot, len(data))[:] = data
    granule = namespace().groups[chunk.group].granule_bytes
    return Written(slot.reservation, granule_checksums(memoryview(data), granule))


class PeerStore(TierStore):
    """A store that listens for peers."""

    def __init__(self, folder: Path, name: str, memory: str = "16MiB") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder, memory)
        self.name = name
        self.port = free_port()

    @property
    def peer(self) -> str:
        """As others name it."""
        return f"{self.name}=127.0.0.1:{self.port}"

    def tier(self, peers: str = "", more: str = "") -> str:
        return (
            f'[tiers.p2p]\nkind = "p2p"\nstore = "{self.address}"\nlisten = "127.0.0.1:{self.port}"\n'
            f'peers = "{peers}"\n{more}\n'
        )

    def begin(self, tiers: str, prefix: Sequence[str] = ()) -> None:
        """Start without waiting for it; `prefix` comes before the command (a network namespace)."""
        self.config.write_text(tiers)
        arguments = ["--socket", str(self.socket), "--memory", self.memory, "--extent", "2MiB"]
        command = [sys.executable, "-m", "forebay", "store", "--config", str(self.config), *arguments]
        self.process = subprocess.Popen([*prefix, *command])

    def end(self) -> None:
        """Stop it cleanly, if it runs."""
        if self.process is not None and self.process.poll() is None:
            assert self.stop() == 0
            assert not self.pool.exists()

    def sees(self, *names: str) -> None:
        """Wait until these peers are up."""
        self.until(lambda v: all(v.get(f"tier.p2p.peer.{name}.up") for name in names))

    def serving(self) -> None:
        """Wait until its tier is a client of it."""
        self.until(lambda v: v.get("tier.p2p.source.connected", 0) == 1)

    def value(self, name: str) -> float:
        return self.until(lambda v: True).get(f"tier.p2p.{name}", 0)

    def until_tier(self, true: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """Figures of the tier alone, once this is true of them."""
        prefix = "tier.p2p."
        values = self.until(lambda v: true({k.removeprefix(prefix): x for k, x in v.items() if k.startswith(prefix)}))
        return {k.removeprefix(prefix): x for k, x in values.items() if k.startswith(prefix)}

    # --- what is in it ---------------------------------------------------------------------------------

    def fill_some(self, tokens: list[int], positions: Sequence[int]) -> None:
        """Store the chunks at some positions of a prompt, in both groups."""
        with StoreClient(self.address) as client:
            client.register(namespace())
            for position in positions:
                self._commit(client, tokens, position)

    @contextmanager
    def filling(self, tokens: list[int]) -> Iterator[Callable[[], None]]:
        """A worker in the middle of a prompt: each call commits the next chunks, and begins those after them."""
        prompt = prompt_of(namespace(), tokens)
        with StoreClient(self.address) as client:
            client.register(namespace())

            def stages() -> Iterator[None]:
                for position in range(prompt.positions):
                    chunks = [prompt.chunk(group, position) for group in (0, 1)]
                    slots = client.reserve(namespace().id, "", chunks).slots
                    written = [write(client, chunk, slot) for chunk, slot in zip(chunks, slots, strict=True)]
                    yield
                    assert client.commit(written).committed == 2
                yield

            steps = stages()
            next(steps)
            yield lambda: next(steps)

    def _commit(self, client: StoreClient, tokens: list[int], position: int) -> None:
        prompt = prompt_of(namespace(), tokens)
        chunks = [prompt.chunk(group, position) for group in (0, 1)]
        slots = client.reserve(namespace().id, "", chunks).slots
        written = [write(client, chunk, slot) for chunk, slot in zip(chunks, slots, strict=True)]
        assert client.commit(written).committed == 2

    def damage(self, tokens: list[int], position: int) -> None:
        """Flip a bit of a chunk's payload in the pool."""
        prompt = prompt_of(namespace(), tokens)
        with StoreClient(self.address) as client:
            client.register(namespace())
            held = client.hold([prompt.query(0, position)], lease_ms=10_000)
            flip_a_bit(self, held.chunks[0])

    @property
    def tier_pid(self) -> int:
        """Process of the p2p tier."""
        with StoreClient(self.address, maps=False) as client:
            (tier,) = client.stats().tiers
        return int(tier["pid"])

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        self.stop(signal.SIGKILL)

    def fill_when_ready(self, tokens: list[int]) -> None:
        """Fill it once it has started and its tier serves."""
        self.serving()
        self.fill(tokens)

    @contextmanager
    def looking_up(self, tokens: list[int], deadline_ms: int) -> Iterator[Callable[[], Found]]:
        """A lookup on a thread of its own; the call waits for its answer."""
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(self.lookup, tokens, deadline_ms)
            yield lambda: asked.result(60)

    @contextmanager
    def full_of_reservations(self) -> Iterator[None]:
        """Nobody else gets room while this is open."""
        with StoreClient(self.address) as client:
            client.register(namespace())
            serial = 0
            while True:
                serial += 1
                chunk = prompt_of(namespace(), [1000 + serial] * CHUNK).chunk(0, 0)
                (slot,) = client.reserve(namespace().id, "", [chunk]).slots
                if slot.status == "full":
                    break
            yield
