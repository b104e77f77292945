"""A client that stores and reads known prompts for ever, compares every byte, and reports acknowledged commits.

    python -m tests.faults.traffic ADDRESS SEED BIG ACKS    ACKS: descriptor of a pipe that takes the records

It is made to be killed: nothing here cleans up. Wrong bytes end it with status 3.
"""

from __future__ import annotations

import os
import random
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from forebay.errors import StoreError
from forebay.kvstore.client import StoreClient
from forebay.kvstore.header import granule_checksums
from forebay.kvstore.identity import MATCH_UNIT, GroupGeometry, Namespace
from forebay.kvstore.lookup import Prompt
from forebay.kvstore.protocol import NewChunk, Written
from tests.kvstore.running import prompt_of
from tests.kvstore.support import namespace

WRONG_BYTES = 3
TINY_PROMPTS = 192
TINY = namespace()
# As large as those of a real small model: 768 KiB and 3.75 MiB a chunk.
BIG = Namespace(
    weights=b"b" * 32,
    groups=(
        GroupGeometry("full", "full", tuple(range(3)), 1, 256, "bfloat16"),
        GroupGeometry("window", "window", tuple(range(3, 18)), 1, 256, "bfloat16", 512),
    ),
)
BIG_POSITION_BYTES = 5 << 20
"""What one chunk position of both groups takes of the pool, at most."""
_TILE = random.Random(1).randbytes(1 << 16)
_RECORD = struct.Struct("<BB32s32sI")
RECORD_BYTES = _RECORD.size


@dataclass(frozen=True)
class Acknowledged:
    """One chunk whose commit the store has confirmed. `big` names its namespace."""

    big: bool
    group: int
    key: bytes
    parent: bytes
    tokens: int


def pack(record: Acknowledged) -> bytes:
    """A record as it goes through the pipe: far below what a pipe takes in one piece."""
    return _RECORD.pack(record.big, record.group, record.key, record.parent, record.tokens)


def unpack(data: bytes) -> Iterator[Acknowledged]:
    """The records in `data`. A killed writer leaves no half of one: each is one write to a pipe."""
    for big, *rest in _RECORD.iter_unpack(data):
        yield Acknowledged(bool(big), *rest)


def payload(spec: Namespace, group: int, key: bytes, tokens: int) -> bytes:
    """The bytes that belong under a key: each granule begins with the key, the group and its own number."""
    size = spec.groups[group].granule_bytes
    granules = []
    for index in range(tokens // MATCH_UNIT):
        head = key + bytes([group]) + index.to_bytes(4, "little")
        granules.append((head + _TILE * (size // len(_TILE) + 1))[:size])
    return b"".join(granules)


def tiny_tokens(number: int) -> list[int]:
    """Prompt `number` of the small model: one of 16 beginnings, one to six chunks, then perhaps a tail."""
    family, length, tail = number % 16, 1 + number // 16 % 6, number % 3
    return [family] * 32 + [1000 + number] * (32 * (length - 1) + MATCH_UNIT * min(tail, 1))


def big_tokens(number: int) -> list[int]:
    """Prompt `number` of the large model: two chunks."""
    return [5000 + number] * 512


def chunks_of(spec: Namespace, prompt: Prompt) -> list[NewChunk]:
    """Every chunk of a prompt in every group, parents first."""
    return [prompt.chunk(g, p) for p in range(prompt.positions) for g in range(len(spec.groups))]


def push(client: StoreClient, spec: Namespace, tokens: list[int]) -> list[Acknowledged]:
    """Store what the store doesn't have of a prompt; returns what it has acknowledged."""
    chunks = chunks_of(spec, prompt_of(spec, tokens))
    written, stored = [], []
    for chunk, slot in zip(chunks, client.reserve(spec.id, "", chunks).slots, strict=True):
        if slot.status != "reserved":
            continue
        count = len(chunk.tokens) // 4
        data = payload(spec, chunk.group, chunk.key, count)
        client.room(slot, len(data))[:] = data
        sums = granule_checksums(memoryview(data), spec.groups[chunk.group].granule_bytes)
        written.append(Written(slot.reservation, sums))
        stored.append(Acknowledged(spec is BIG, chunk.group, chunk.key, chunk.parent, count))
    if not written or client.commit(written).committed != len(written):
        return []  # which of them were taken isn't known, so none is claimed
    return stored


def pull(client: StoreClient, spec: Namespace, tokens: list[int], deadline_ms: int = 0) -> int:
    """Look a prompt up and compare what is served; returns the hit. Raises AssertionError on a wrong byte."""
    prompt = prompt_of(spec, tokens)
    found = client.lookup(spec.id, prompt.root, prompt.tokens, prompt.keys, limit=len(tokens), deadline_ms=deadline_ms)
    try:
        for chunk in found.chunks:
            copy = bytes(client.payload(chunk))
            if client.intact(chunk):  # else the slot has been given away meanwhile, and this is a miss
                assert copy == payload(spec, chunk.group, chunk.key, chunk.tokens), chunk
    finally:
        client.release([found.lease])
    return found.hit


def drive(address: str, seed: int, big: int, acks: int) -> None:
    """Store and read for ever; with `big` > 0 also prompts of the large model with numbers below it."""
    rng = random.Random(seed)
    while True:
        try:
            with StoreClient(address) as client:
                client.register(TINY)
                client.register(BIG)
                while True:
                    is_big = big > 0 and rng.random() < 0.05
                    spec = BIG if is_big else TINY
                    tokens = big_tokens(rng.randrange(big)) if is_big else tiny_tokens(rng.randrange(TINY_PROMPTS))
                    for record in push(client, spec, tokens):
                        os.write(acks, pack(record))
                    pull(client, spec, tokens, deadline_ms=rng.choice((0, 0, 50)))
        except StoreError:
            time.sleep(0.01)


if __name__ == "__main__":
    try:
        drive(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    except AssertionError as error:
        print(f"a client saw wrong bytes: {error}", file=sys.stderr)
        os._exit(WRONG_BYTES)
