"""A store's announcements under a random run, on several streams at once, beside what is really held.

Chunks come and go in memory and files, batches are lost on their way, the store is killed and starts again with what
its files have, and now and then nothing happens for a while. Consumers may join at any time.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from forebay.events.anchored import Anchored
from forebay.events.projection import HOST_TIER, Projection
from forebay.events.publisher import EventPublisher, PublisherLimits, StreamOptions
from forebay.events.schema import CPU, LOCAL, STORAGE, BlockStored, KVEvent, WireProfile
from forebay.events.units import UnitChunk
from forebay.kvstore.identity import chain, pack_tokens
from tests.events.support import LOOPBACK, ROOT

UNITS, CHUNK_UNITS = 8, 2
RESTART_AFTER = 20
RECONNECT_S = 1.0
TOPIC = "kv@127.0.0.1:8000@tiny"
PROFILES = {
    "maps": WireProfile(),
    "arrays": WireProfile(encoding="array"),
    "strict": WireProfile(hash_format="bytes32", extensions=False),
}
TOPICS = {"strict": ""}


@dataclass(frozen=True)
class Reach:
    """How far a prompt's prefix goes, in blocks: in memory, and then on in files."""

    memory: int
    files: int


def make_prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts of `UNITS` blocks that share beginnings of various lengths."""
    prompts: list[list[int]] = []
    for _ in range(count):
        shared = rng.choice(prompts)[: 16 * CHUNK_UNITS * rng.randrange(UNITS // CHUNK_UNITS)] if prompts else []
        prompts.append([*shared, *(rng.randrange(1, 32_000) for _ in range(16 * UNITS - len(shared)))])
    return prompts


class Stream:
    """One endpoint: a publisher that can be closed and made again on its ports."""

    def __init__(self, profile: WireProfile, topic: str) -> None:
        self.profile, self.topic = profile, topic
        self.endpoint = self.replay = LOOPBACK
        self.publisher: EventPublisher
        self.next_seq = 0
        self.is_strict = not profile.extensions
        self.is_anchored = self.is_strict or profile.encoding == "array"
        self.anchored = Anchored()

    def start(self, epoch: str, snapshot: Callable[[], Iterator[BlockStored]]) -> None:
        limits = PublisherLimits(ring_batches=8, heartbeat_seconds=0.2)
        self.anchored = Anchored()
        options = StreamOptions(
            epoch=epoch, first_seq=0 if self.is_strict else self.next_seq, profile=self.profile, limits=limits,
            contiguous=self.is_strict,
        )  # fmt: skip
        self.publisher = EventPublisher(
            self.endpoint, topic=self.topic, replay=self.replay, options=options,
            snapshot=self.anchored.snapshot if self.is_anchored else snapshot,
        )  # fmt: skip
        assert self.publisher.replay_endpoint is not None
        self.endpoint, self.replay = self.publisher.endpoint, self.publisher.replay_endpoint

    def stop(self) -> None:
        # As a start from the wall clock: above all numbers that were used.
        self.next_seq = self.publisher.stats().next_seq + 1_000_000
        self.publisher.close()


class World:
    """One namespace of one store. Everything happens on the caller's thread."""

    def __init__(self, seed: int, profiles: Sequence[str]) -> None:
        self.rng = random.Random(seed)
        self.prompts = make_prompts(self.rng, 6)
        self.keys = [chain(ROOT, pack_tokens(prompt)) for prompt in self.prompts]
        self.held: dict[str, set[bytes]] = {HOST_TIER: set(), "fs": set()}
        self.streams = {name: Stream(PROFILES[name], TOPICS.get(name, TOPIC)) for name in profiles}
        self.epochs = itertools.count(1)
        self.counts = dict.fromkeys(("stored", "removed", "lost", "restarts"), 0)
        self._chunks = {
            keys[at + CHUNK_UNITS - 1]: (index, at)
            for index, keys in enumerate(self.keys) for at in range(0, UNITS, CHUNK_UNITS)
        }  # fmt: skip
        self._start()

    # --- what happens ------------------------------------------------------------------------------------

    def step(self) -> None:
        """Something, at random."""
        tier = self.rng.choice([HOST_TIER, HOST_TIER, "fs"])
        key = self.rng.choice(list(self._chunks))
        roll = self.rng.random()
        if roll < 0.55:
            self.store(tier, key)
        elif roll < 0.85:
            self.remove(tier)
        elif roll < 0.93:
            self.lose(lambda: self.store(tier, key))
        elif roll < 0.96:
            self.pump(0.3)
        else:
            self.restart()
        self.pump(0.01)

    def store(self, tier: str, key: bytes) -> None:
        self.counts["stored"] += 1
        self.held[tier].add(key)
        self._publish(self.projection.chunk_stored(tier, self.chunk(key)))

    def remove(self, tier: str) -> None:
        if self.held[tier]:
            key = self.rng.choice(sorted(self.held[tier]))
            self.counts["removed"] += 1
            self.held[tier].discard(key)
            self._publish(self.projection.chunk_removed(tier, 0, key, "evicted"))

    def lose(self, what: Callable[[], None]) -> None:
        """What `what` publishes reaches nobody live."""
        self.counts["lost"] += 1
        sends = {name: stream.publisher._send for name, stream in self.streams.items()}
        for stream in self.streams.values():
            stream.publisher._send = lambda frames: None  # type: ignore[method-assign]
        what()
        for name, stream in self.streams.items():
            stream.publisher._send = sends[name]  # type: ignore[method-assign]

    def restart(self) -> None:
        """Killed: memory is lost, or half of it; files stay.

        Who knows no epochs sees this by numbers that go back, so it has to hear one that does (see docs/events.md).
        """
        strict = [stream for stream in self.streams.values() if stream.is_strict]
        if any(stream.publisher.stats().next_seq < RESTART_AFTER for stream in strict):
            return
        self.counts["restarts"] += 1
        self.held[HOST_TIER] = {key for key in self.held[HOST_TIER] if self.rng.random() < 0.5}
        for stream in self.streams.values():
            stream.stop()
        self._start()

    def pump(self, seconds: float) -> None:
        """Serve replays and heartbeats for a while."""
        until = time.monotonic() + seconds
        while True:
            for stream in self.streams.values():
                stream.publisher.tick(time.time())
                while stream.publisher.poll_replay():
                    pass
            if time.monotonic() >= until:
                return
            time.sleep(0.005)

    def close(self) -> None:
        for stream in self.streams.values():
            stream.publisher.close()

    # --- what is true ------------------------------------------------------------------------------------

    def chunk(self, key: bytes) -> UnitChunk:
        index, at = self._chunks[key]
        keys = self.keys[index]
        tokens = pack_tokens(self.prompts[index][16 * at : 16 * (at + CHUNK_UNITS)])
        return UnitChunk(0, keys[at - 1] if at else None, tuple(keys[at : at + CHUNK_UNITS]), tokens)

    def units(self, tier: str) -> set[bytes]:
        """The blocks that the tier holds."""
        return {key for end in self.held[tier] for key in self.chunk(end).keys}

    def reach(self, prompt: int) -> Reach:
        memory, files = self.units(HOST_TIER), self.units("fs")
        keys = self.keys[prompt]
        in_memory = sum(1 for _ in itertools.takewhile(memory.__contains__, keys))
        return Reach(in_memory, sum(1 for _ in itertools.takewhile(files.__contains__, keys[in_memory:])))

    def truth(self) -> set[tuple[str, str, bytes]]:
        """Medium, locality and key of every block that is held."""
        return {(CPU, LOCAL, key) for key in self.units(HOST_TIER)} | {
            (STORAGE, LOCAL, key) for key in self.units("fs")
        }

    def _start(self) -> None:
        self.projection = Projection(["full"])
        epoch = f"{next(self.epochs):032x}"
        for stream in self.streams.values():
            stream.start(epoch, self.projection.snapshot)
        if any(stream.is_strict for stream in self.streams.values()):
            self.pump(RECONNECT_S)
        # What a store finds when it starts it announces as it does everything else, chunk by chunk.
        for tier, keys in self.held.items():
            for key in sorted(keys):
                self._publish(self.projection.chunk_stored(tier, self.chunk(key)))

    def _publish(self, events: Sequence[KVEvent]) -> None:
        for stream in self.streams.values():
            told = stream.anchored.take(events) if stream.is_anchored else events
            stream.publisher.publish(told, time.time())
