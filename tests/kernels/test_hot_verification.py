"""A verification reads as many rows of positions as there are guesses, and one more: their union is resolved at once.

A region of (guesses + 2) K rows holds any such union, and K rows of the one before it, however adverse the stream.
"""

from __future__ import annotations

import random

import pytest
import torch

from forebay.kernels.chosen import resident_slots
from forebay.kernels.hot import Ask, Mirror, copy_rows, new_regions, resolve
from forebay.kernels.sparse import sparse_latent_attention
from forebay.workers.hot.settings import default_rows
from tests.kernels.naive_hot import STREAMS, NaiveRegion, naive_resolve, stream

K, PAGES, STEPS = 16, 24, 12


def verifications(rng: random.Random, name: str, guesses: int, slots: int) -> list[list[list[int]]]:
    """Of each step the positions of guesses + 1 rows. Some guesses read what the row before them has read, some what
    nobody has."""
    streams = [stream(name, rng, PAGES * 16, K, slots) for _ in range(guesses + 1)]
    steps = []
    for _ in range(STEPS):
        rows = [next(one) for one in streams]
        for row in range(1, len(rows)):
            if rng.random() < 0.5:
                rows[row] = rng.sample(rows[row - 1], K)
        steps.append(rows)
    return steps


@pytest.mark.parametrize("guesses", [1, 2, 3])
@pytest.mark.parametrize("name", STREAMS)
def test_any_union_is_resolved_as_the_naive_model_says_beside_a_set_of_the_last_one(name: str, guesses: int) -> None:
    rng, slots = random.Random(guesses), default_rows(K, guesses)
    assert slots == (guesses + 2) * K
    regions, naive = new_regions(1, slots), NaiveRegion(slots)
    blocks = rng.sample(range(100), slots // 16)
    regions.blocks[0] = torch.tensor(blocks)
    resident, host = [-1] * PAGES, rng.sample(range(PAGES), PAGES)
    before: set[int] = set()
    for rows in verifications(rng, name, guesses, slots):
        ask = Ask(torch.tensor([rows]), torch.tensor([0]), torch.tensor([resident]), torch.tensor([host]))
        plan = resolve(regions, ask)
        flat = [position for row in rows for position in row]
        step = naive_resolve(naive, blocks, flat, resident, host)
        assert plan.rows[0].flatten().tolist() == step.rows and int(plan.swaps) == len(step.swaps)
        assert regions.held[0].tolist() == naive.held and regions.order[0].tolist() == naive.order
        union = {host[position // 16] * 16 + position % 16 for position in flat if position >= 0}
        held = set(regions.held[0].tolist())
        assert union <= held and len(before & held) >= min(K, len(before))
        before = union


def test_a_region_without_that_room_may_keep_nothing() -> None:
    """What the room for one more set is for: after a step of only new rows there is nothing left of the last one."""
    slots, host = 3 * K, torch.arange(PAGES)[None]
    regions = new_regions(1, slots)
    regions.blocks[0] = torch.arange(slots // 16)
    resident, region = torch.full((1, PAGES), -1), torch.tensor([0])
    for step in range(2):
        rows = torch.arange(step * slots, (step + 1) * slots).view(1, 3, K)
        resolve(regions, Ask(rows, region, resident, host))
    assert not set(range(slots)) & set(regions.held[0].tolist())


@pytest.mark.parametrize("guesses", [1, 3])
def test_attention_of_a_verification_has_the_bits_of_full_residency(guesses: int) -> None:
    """All rows of a step at once, some pages on the device, in every layer that shares the choice."""
    layers, width, rank = 2, 24, 16
    noise, rng = torch.Generator().manual_seed(guesses), random.Random(guesses)
    whole = torch.randn(PAGES, layers, 1, 1, 16, width, generator=noise)
    pool = torch.cat((torch.full_like(whole, torch.nan), torch.zeros_like(whole)))
    memory = whole.view(-1).view(torch.uint8)
    mirror = Mirror(memory, torch.arange(PAGES) * (len(memory) // PAGES))
    slots = default_rows(K, guesses)
    regions, here = new_regions(1, slots), torch.arange(PAGES)[None]
    regions.blocks[0] = torch.tensor(rng.sample(range(PAGES, 2 * PAGES), slots // 16))
    misses = 0
    for rows in verifications(rng, "walk", guesses, slots):
        resident = torch.where(torch.rand(1, PAGES, generator=noise) < 0.3, here, -1)
        pool[resident[resident >= 0]] = whole[resident[resident >= 0]]
        selected, q = torch.tensor([rows]), torch.randn(guesses + 1, 3, width, generator=noise)
        plan = resolve(regions, Ask(selected, torch.tensor([0]), resident, here))
        misses += int(plan.swaps)
        expected = resident_slots(here, torch.zeros(guesses + 1, dtype=torch.int64), selected[0])
        for layer in range(layers):
            copy_rows(plan, mirror, pool, layer)
            found = sparse_latent_attention(q, pool, layer, plan.rows[0], scale=0.2, rank=rank)
            assert torch.equal(found, sparse_latent_attention(q, whole, layer, expected, scale=0.2, rank=rank))
    assert misses > 0
