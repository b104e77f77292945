"""A consumer that reads arrays by position, as llm-d's indexer does, believes what the store holds.

It takes the topic apart at `@`, wants the fields at their places, loses a whole batch over one bad event, keeps an
engine's hashes beside keys of its own that it makes from tokens, and lets a pod go when its numbers go back.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import zmq

from forebay.events.publisher import END
from tests.events.consumers.world import World

PATIENCE_S = 20


class Positions:
    """One pod's blocks, by a key over tokens; engine hashes lead to them."""

    def __init__(self, endpoint: str, replay: str) -> None:
        self.endpoint, self.replay = endpoint, replay
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.subscribe(b"kv@")
        self.sub.connect(endpoint)
        self.last = -1
        self.keys: dict[int, bytes] = {}
        self.tiers: dict[bytes, set[str]] = {}
        self.pods: set[str] = set()
        self.bad_batches = 0

    def poll(self, world: World) -> None:
        """Take what has come; the world answers replays meanwhile."""
        while self.sub.poll(10):
            topic, seq, payload = self.sub.recv_multipart()
            number = int.from_bytes(seq, "big")
            if number > self.last + 1:
                self._replay(world)
            if number > self.last:
                self._take(topic, number, payload)

    def _replay(self, world: World) -> None:
        dealer = self.context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.connect(self.replay)
        dealer.send_multipart([b"", (self.last + 1).to_bytes(8, "big")])
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            world.pump(0.0)
            if dealer.poll(5):
                _, topic, seq, payload = dealer.recv_multipart()
                if seq == END:
                    break
                if int.from_bytes(seq, "big") > self.last:
                    self._take(topic, int.from_bytes(seq, "big"), payload)
        dealer.close()

    def _take(self, topic: bytes, number: int, payload: bytes) -> None:
        self.last = number
        parts = topic.decode().split("@")
        assert len(parts) == 3 and parts[0] == "kv" and parts[2] == "tiny"
        self.pods.add(parts[1])
        _, events, *_ = msgspec.msgpack.decode(payload)
        try:
            for event in events:
                self._apply(event)
        except (TypeError, ValueError, IndexError, KeyError):
            self.bad_batches += 1

    def _apply(self, event: Sequence[Any]) -> None:
        if event[0] == "BlockStored":
            hashes, parent, tokens, size, medium = event[1], event[2], event[3], event[4], event[6]
            if len(tokens) != len(hashes) * size:
                raise ValueError("tokens don't fit blocks")
            key = b"" if parent is None else self.keys.get(parent)
            for at, engine in enumerate(hashes):
                if key is None:
                    break  # a parent that it never heard of: nothing can be made of it
                key = self.key(key, tokens[at * size : (at + 1) * size])
                self.keys[engine] = key
                self.tiers.setdefault(key, set()).add(str(medium).lower())
        elif event[0] == "BlockRemoved":
            for engine in event[1]:
                self.tiers.get(self.keys.get(engine, b"?"), set()).discard(str(event[2]).lower())
        elif event[0] == "AllBlocksCleared":
            self.tiers.clear()
        else:
            raise ValueError(event[0])

    @staticmethod
    def key(parent: bytes, tokens: Sequence[int]) -> bytes:
        return hashlib.sha256(parent + msgspec.msgpack.encode(list(tokens))).digest()[:8]

    def tiers_of(self, prompt: Sequence[int]) -> list[set[str]]:
        """The tiers of each block of the prompt."""
        key, found = b"", []
        for at in range(0, len(prompt), 16):
            key = self.key(key, prompt[at : at + 16])
            found.append(set(self.tiers.get(key, set())))
        return found


def prefix(tiers: list[set[str]]) -> list[set[str]]:
    """As far as a prompt can be served: beyond the first block that is nowhere nothing counts."""
    end = next((at for at, where in enumerate(tiers) if not where), len(tiers))
    return tiers[:end]


def truth(world: World, prompt: int) -> list[set[str]]:
    memory, files = world.units("host"), world.units("fs")
    return [
        {name for name, held in (("cpu", memory), ("storage", files)) if key in held} for key in world.keys[prompt]
    ]


def agree(world: World, readers: list[Positions]) -> list[list[set[str]]]:
    """Wait until all of them believe what is true, and return that; fails with the difference."""
    expected = [prefix(truth(world, prompt)) for prompt in range(len(world.prompts))]
    until = time.monotonic() + PATIENCE_S
    for reader in readers:
        believed = None
        while believed != expected and time.monotonic() < until:
            world.pump(0.05)
            reader.poll(world)
            believed = [prefix(reader.tiers_of(prompt)) for prompt in world.prompts]
        assert believed == expected
    return expected


@pytest.mark.parametrize("seed", [1, 2])
def test_a_reader_of_positions_believes_what_the_store_holds_after_a_random_run(seed: int) -> None:
    world = World(seed, ["arrays"])
    stream = world.streams["arrays"]
    readers = [Positions(stream.endpoint, stream.replay)]
    try:
        for number in range(60):
            world.step()
            if number == 30:
                readers.append(Positions(stream.endpoint, stream.replay))
            readers[number % len(readers)].poll(world)
        assert world.counts["lost"] > 0
        assert any(agree(world, readers)), "the run should have left something"
        world.restart()
        agree(world, readers)
        assert all(reader.bad_batches == 0 and reader.pods == {"127.0.0.1:8000"} for reader in readers)
    finally:
        for reader in readers:
            reader.context.destroy(linger=0)
        world.close()
