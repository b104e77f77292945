"""Every value of one number at a time, where the search of the properties only samples."""

from __future__ import annotations

import random

import numpy as np
import pytest

from forebay.kvstore.geometry import RowField
from forebay.kvstore.identity import GroupGeometry, Namespace
from forebay.kvstore.layout import Shard, View, local_index, local_length, owner, payload_bytes
from tests.kvstore.layout import oracle
from tests.kvstore.layout.shapes import Engine
from tests.kvstore.layout.test_views import read_and_compare

FULL = GroupGeometry("full", "full", (0, 1), 2, 5, "bfloat16")
LATENT = GroupGeometry("mla", "latent", (0, 1), 1, 3, "float8_e4m3fn", beside=(RowField("scale", 1, "float32"),))
SPEC = Namespace(b"w", (FULL, LATENT), chunk_tokens=64)
INTERLEAVES = (1, 2, 4, 8, 16, 32, 64)


@pytest.mark.parametrize("interleave", INTERLEAVES)
@pytest.mark.parametrize("size", range(1, 9))
def test_tokens_go_round_like_cards(size: int, interleave: int) -> None:
    held: list[list[int]] = [[] for _ in range(size)]
    for token in range(400):
        rank = owner(token, size, interleave)
        assert local_index(token, size, interleave) == len(held[rank]), "a rank's own tokens are dense and in order"
        held[rank].append(token)
        assert [local_length(token + 1, r, size, interleave) for r in range(size)] == [len(hand) for hand in held]
    # A block is the same stretch of the prompt on every rank.
    for hand in held:
        for block in range(0, len(hand), interleave):
            whole = hand[block : block + interleave]
            assert {token // (size * interleave) for token in whole} == {block // interleave}


@pytest.mark.parametrize("interleave", INTERLEAVES)
@pytest.mark.parametrize("size", range(1, 9))
def test_context_parallel_ranks_cover_every_byte_once(size: int, interleave: int) -> None:
    for group, geometry in enumerate(SPEC.groups):
        times = np.zeros(payload_bytes(geometry, 64), int)
        for rank in range(size):
            shard = Shard(dcp_rank=rank, dcp_size=size, interleave=interleave, block_tokens=64)
            for run in View(SPEC, group, shard).runs(128, range(128, 192), writing=True):
                times[run.canonical : run.canonical + run.length] += 1
        assert (times == 1).all()


@pytest.mark.parametrize("block_tokens", range(1, 65))
def test_pages_of_every_size(block_tokens: int) -> None:
    chance = random.Random(block_tokens)
    orders = (Shard().order, ("layer", "tensor", "block", "token", "head", "field"))
    for group, geometry in enumerate(SPEC.groups):
        truth = oracle.truth_of(geometry, 128, block_tokens)
        payload = oracle.payload_of(truth, 64, 128)
        ranks = tuple(Shard(block_tokens=block_tokens, blocks=1, order=order) for order in orders)
        read_and_compare(SPEC, group, Engine(ranks), truth, payload, (64, 128), chance)
