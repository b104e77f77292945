"""Whatever shape writes a chunk, and whatever shape reads it, the bytes are the same."""

from __future__ import annotations

import os
import random
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.kvstore.identity import GroupGeometry, Namespace, check_namespace
from forebay.kvstore.layout import Copy, Run, Shard, View, check_shard, payload_bytes, runs_of
from tests.kvstore.layout import oracle, shapes

EXAMPLES = int(os.environ.get("FOREBAY_LAYOUT_EXAMPLES", "100"))
"""A longer search: FOREBAY_LAYOUT_EXAMPLES=5000 pytest --timeout=0 tests/kvstore/layout/test_views.py"""


class Rank:
    """One rank's view and pool."""

    def __init__(self, namespace: Namespace, group: int, shard: Shard, tokens: int, chance: random.Random) -> None:
        recurrent = namespace.groups[group].kind == "recurrent"
        used = (
            1 if recurrent else -(-len(oracle.own_tokens(namespace.groups[group], shard, tokens)) // shard.block_tokens)
        )
        self.blocks = used + 2
        self.shard = msgspec.structs.replace(shard, blocks=self.blocks)
        assert check_shard(namespace, self.shard) is None
        self.table = chance.sample(range(self.blocks), max(used, 1))
        self.tokens = tokens
        self.view = View(namespace, group, self.shard)

    def expected(self, truth: oracle.Truth, held: range) -> bytes:
        return oracle.buffers_of(truth, self.shard, self.tokens, held, self.table, self.blocks)


def check_runs(runs: list[Run], payload: int, buffers: int) -> None:
    """In order, inside of both sides, apart from each other on both, and none that could be one with the next."""
    for side, size in ((0, payload), (1, buffers)):
        end = 0
        for run in sorted(runs, key=lambda run: run[side]):
            assert end <= run[side] and run.length > 0
            end = run[side] + run.length
        assert end <= size
    assert runs == sorted(runs)
    for one, other in pairwise(runs):
        assert (one.canonical + one.length, one.local + one.length) != (other.canonical, other.local)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Namespace, shapes.Engine, shapes.Engine, int, int, random.Random]:
    namespace = draw(shapes.namespaces())
    assert check_namespace(namespace) is None
    position = draw(st.integers(0, 2))
    units = draw(st.integers(1, namespace.chunk_tokens // 16))
    writer, reader = draw(shapes.engines(namespace)), draw(shapes.engines(namespace))
    return namespace, writer, reader, position, units, random.Random(draw(st.integers(0, 1000)))


@settings(max_examples=EXAMPLES, derandomize=True)
@given(cases())
def test_what_one_shape_writes_any_other_reads(
    case: tuple[Namespace, shapes.Engine, shapes.Engine, int, int, random.Random],
) -> None:
    namespace, writer, reader, position, units, chance = case
    start = position * namespace.chunk_tokens
    end = start + 16 * units
    for group, geometry in enumerate(namespace.groups):
        truth = oracle.truth_of(geometry, end, chance.randrange(1000))
        wanted = oracle.payload_of(truth, start, end)
        assert len(wanted) == payload_bytes(geometry, end - start)
        written, times = np.zeros(len(wanted), np.uint8), np.zeros(len(wanted), np.uint8)
        for shard in writer.ranks:
            rank = Rank(namespace, group, shard, end, chance)
            pool = np.frombuffer(rank.expected(truth, range(end)), np.uint8)
            runs = rank.view.runs(start, range(start, end), writing=True, table=rank.table)
            assert rank.view.writes or not runs
            check_runs(runs, len(written), len(pool))
            for at, local, length in runs:
                written[at : at + length] = pool[local : local + length]
                times[at : at + length] += 1
        assert (times == 1).all(), "every byte is written by exactly one rank"
        assert written.tobytes() == wanted
        read_and_compare(namespace, group, reader, truth, wanted, (start, end), chance)


def read_and_compare(
    namespace: Namespace, group: int, reader: shapes.Engine, truth: oracle.Truth, payload: bytes,
    bounds: tuple[int, int], chance: random.Random,
) -> None:  # fmt: skip
    """Every rank takes any stretch of the chunk's tokens, and nothing else of its pool changes."""
    start, end = bounds
    for shard in reader.ranks:
        rank = Rank(namespace, group, shard, end, chance)
        first = chance.choice([start, chance.randrange(start, end)])
        held = range(first, chance.choice([end, chance.randrange(first, end) + 1]))
        pool = np.full(rank.view.block_bytes * rank.blocks, oracle.UNTOUCHED, np.uint8)
        runs = rank.view.runs(start, held, table=rank.table)
        check_runs(runs, len(payload), len(pool))
        for at, local, length in runs:
            pool[local : local + length] = np.frombuffer(payload, np.uint8, length, at)
        assert pool.tobytes() == rank.expected(truth, held)


@pytest.mark.parametrize("heads", range(1, 9))
@pytest.mark.parametrize("tp", range(1, 9))
def test_every_tp_size_serves_every_number_of_heads_or_says_no(tp: int, heads: int) -> None:
    spec = Namespace(b"w", (GroupGeometry("full", "full", (0, 1), heads, 5, "bfloat16"),), chunk_tokens=32)
    why = check_shard(spec, Shard(tp_size=tp))
    if heads % tp and tp % heads:
        assert why == f"group 'full': tp_size {tp} must divide its {heads} kv_heads or be a multiple of them"
        return
    assert why is None
    covered = np.zeros(payload_bytes(spec.groups[0], 32), int)
    for rank in range(tp):
        view = View(spec, 0, Shard(tp_rank=rank, tp_size=tp))
        for run in view.runs(0, range(32), writing=True):
            covered[run.canonical : run.canonical + run.length] += 1
        assert sum(run.length for run in view.runs(0, range(32))) == len(covered) // min(heads, tp)
    assert (covered == 1).all()


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_latents_and_index_keys_are_stored_once_whatever_the_tp_size(tp: int) -> None:
    spec = Namespace(b"w", (GroupGeometry("mla", "latent", (0, 1), 1, 5, "bfloat16"),), chunk_tokens=32)
    writers = [rank for rank in range(tp) if View(spec, 0, Shard(tp_rank=rank, tp_size=tp)).writes]
    assert writers == [0]
    for rank in range(tp):
        view = View(spec, 0, Shard(tp_rank=rank, tp_size=tp, block_tokens=32))
        assert sum(run.length for run in view.runs(0, range(32))) == payload_bytes(spec.groups[0], 32)


def test_a_block_that_is_a_granule_is_one_plain_copy() -> None:
    spec = Namespace(b"w", (GroupGeometry("full", "full", tuple(range(12)), 4, 64, "bfloat16"),))
    view, granule = View(spec, 0, Shard()), spec.groups[0].granule_bytes
    assert view.runs(256, range(256, 512), table=list(range(99, 67, -1))) == [
        Run(g * granule, (83 - g) * granule, granule) for g in range(16)
    ]
    assert view.copies(256, range(256, 512)) == [Copy(0, 16 * granule, 16 * granule)]


def test_a_tp_rank_s_heads_are_one_run_a_granule_layer_and_tensor() -> None:
    spec = Namespace(b"w", (GroupGeometry("full", "full", (0, 1, 2), 8, 64, "bfloat16"),))
    view = View(spec, 0, Shard(tp_rank=1, tp_size=4))
    runs = view.runs(0, range(256))
    assert len(runs) == 16 * 3 * 2 and {run.length for run in runs} == {2 * 16 * 64 * 2}
    (copy,) = view.copies(0, range(256))
    assert copy.length == 4096 and [axis.times for axis in copy.axes] == [96]


def test_interleaved_tokens_into_token_major_pages_are_one_strided_copy_a_block() -> None:
    """The shape of a common engine: a tensor a layer of [K/V, blocks, tokens, heads, dim], tokens dealt singly."""
    spec = Namespace(b"w", (GroupGeometry("full", "full", (0, 1), 4, 64, "bfloat16"),))
    order = ("layer", "tensor", "block", "token", "head", "field")
    shard = Shard(tp_size=2, dcp_size=2, dcp_rank=1, blocks=8, order=order)
    copies = View(spec, 0, shard).copies(0, range(256))
    assert len(copies) == 1 and copies[0].length == 128
    assert len(View(spec, 0, shard).copies(0, range(256), table=[7, 2, 5, 4, 0, 1, 3, 6])) <= 8


@settings(max_examples=EXAMPLES, derandomize=True)
@given(cases())
def test_strided_copies_say_the_same_as_plain_runs(
    case: tuple[Namespace, shapes.Engine, shapes.Engine, int, int, random.Random],
) -> None:
    namespace, engine, _, position, units, chance = case
    start = position * namespace.chunk_tokens
    tokens = range(start, start + 16 * units)
    rank = Rank(namespace, 0, chance.choice(engine.ranks), tokens.stop, chance)
    copies = rank.view.copies(start, tokens, table=rank.table)
    moved: dict[int, int] = {}
    for copy in copies:
        assert copy.length > 0 and all(axis.times > 1 for axis in copy.axes)
        for canonical, local in by_hand(copy):
            assert canonical not in moved
            moved[canonical] = local
    runs = rank.view.runs(start, tokens, table=rank.table)
    assert runs == runs_of(copies)
    assert moved == {run.canonical + i: run.local + i for run in runs for i in range(run.length)}
    assert sum(copy.total for copy in copies) == len(moved)


def by_hand(copy: Copy) -> list[tuple[int, int]]:
    """Every byte that a strided copy moves, by nested loops."""
    places = [(copy.canonical, copy.local)]
    for axis in copy.axes:
        places = [(c + i * axis.canonical, place + i * axis.local) for c, place in places for i in range(axis.times)]
    return [(c + i, place + i) for c, place in places for i in range(copy.length)]
