"""Engines of different shapes meet in one running store."""

from __future__ import annotations

import random

import numpy as np
import pytest

from forebay.errors import RequestRefused
from forebay.kvstore.client import StoreClient
from forebay.kvstore.header import first_bad_granule, granule_checksums
from forebay.kvstore.identity import GroupGeometry, Namespace
from forebay.kvstore.layout import Shard, payload_bytes
from forebay.kvstore.protocol import Written
from tests.kvstore.layout import oracle
from tests.kvstore.layout.shapes import Engine
from tests.kvstore.layout.test_refusals import CONV, INDEXER
from tests.kvstore.layout.test_views import Rank
from tests.kvstore.running import Store, prompt_of

SPEC = Namespace(
    b"hybrid",
    (
        GroupGeometry("full", "full", (0, 3), 2, 7, "bfloat16"),
        GroupGeometry("index", "indexer", (0, 3), 1, 9, "float8_e4m3fn", beside=INDEXER.beside),
        GroupGeometry("state", "recurrent", (1, 2), 6, 4, "float32", value_dim=3, conv=CONV),
    ),
    chunk_tokens=32,
)
TOKENS = list(range(48))
PAGES = ("layer", "tensor", "block", "token", "head", "field")

WRITER = Engine(tuple(Shard(tp_rank=t, tp_size=2, pp_rank=p, pp_size=2, stages=(1, 3)) for p in (0, 1) for t in (0, 1)))
READER = Engine(
    tuple(
        Shard(
            tp_rank=t, tp_size=6, dcp_rank=d, dcp_size=3, interleave=4, block_tokens=12, blocks=1, order=PAGES,
            undivided=("state",), state_order=("tensor", "layer", "block", "tap", "field", "head", "channel"),
        )
        for t in range(6)
        for d in range(3)
    )
)  # fmt: skip


def write(client: StoreClient, engine: Engine, truths: list[oracle.Truth], chance: random.Random) -> None:
    """All ranks copy their part of each chunk into its slot; it is committed when the last one has."""
    prompt = prompt_of(SPEC, TOKENS)
    chunks = [prompt.chunk(group, position) for position in range(2) for group in range(3)]
    written = []
    for chunk, slot in zip(chunks, client.reserve(SPEC.id, "", chunks).slots, strict=True):
        end = chunk.start + len(chunk.tokens) // 4
        room = client.room(slot, payload_bytes(SPEC.groups[chunk.group], end - chunk.start))
        for shard in engine.ranks:
            rank = Rank(SPEC, chunk.group, shard, end, chance)
            pool = rank.expected(truths[chunk.group], range(end))
            for at, local, length in rank.view.runs(
                chunk.start, range(chunk.start, end), writing=True, table=rank.table
            ):
                room[at : at + length] = pool[local : local + length]
        granule = SPEC.groups[chunk.group].granule_bytes
        written.append(Written(slot.reservation, granule_checksums(room, granule)))
    assert client.commit(written).committed == len(chunks)


def test_what_one_engine_stores_another_one_of_any_shape_loads(store: Store) -> None:
    chance = random.Random(5)
    with StoreClient(store.address) as client:
        for engine in (WRITER, READER):
            for shard in engine.ranks:
                assert client.register(SPEC, shard=shard) == SPEC.id
        # The state differs from position to position; the one that a hit needs is that at its end.
        truths = [oracle.truth_of(group, 48, seed) for seed, group in enumerate(SPEC.groups)]
        write(client, WRITER, truths, chance)
        prompt = prompt_of(SPEC, TOKENS)
        found = client.lookup(SPEC.id, prompt.root, prompt.tokens, prompt.keys, limit=48)
        assert found.hit == 48
        assert sorted((c.group, c.start, c.tokens) for c in found.chunks) == [
            (0, 0, 32), (0, 32, 16), (1, 0, 32), (1, 32, 16), (2, 32, 16),
        ]  # fmt: skip
        for shard in READER.ranks:
            for group in range(3):
                rank = Rank(SPEC, group, shard, 48, chance)
                pool = np.full(rank.view.block_bytes * rank.blocks, oracle.UNTOUCHED, np.uint8)
                for chunk in (c for c in found.chunks if c.group == group):
                    payload = client.payload(chunk)
                    assert first_bad_granule(payload, SPEC.groups[group].granule_bytes, client.checksums(chunk)) is None
                    tokens = range(chunk.start, chunk.start + chunk.tokens)
                    for at, local, length in rank.view.runs(chunk.start, tokens, table=rank.table):
                        pool[local : local + length] = np.frombuffer(payload, np.uint8, length, at)
                assert pool.tobytes() == rank.expected(truths[group], range(48))


def test_a_rank_that_can_t_be_served_is_refused_when_it_registers(store: Store) -> None:
    with StoreClient(store.address) as client:
        with pytest.raises(RequestRefused, match=r"group 'full': tp_size 3 must divide its 2 kv_heads"):
            client.register(SPEC, shard=Shard(tp_size=3))
        with pytest.raises(RequestRefused, match=r"dcp_size 2: name the group in undivided"):
            client.register(SPEC, shard=Shard(dcp_size=2))
        prompt = prompt_of(SPEC, TOKENS)
        with pytest.raises(RequestRefused, match=r"isn't registered here"):
            client.lookup(SPEC.id, prompt.root, prompt.tokens, prompt.keys, limit=48)
