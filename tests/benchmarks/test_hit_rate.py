"""The replay of hit rates: on tiny workloads, by hand, and as a command."""

from __future__ import annotations

import builtins
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hit_rate.__main__ import main
from benchmarks.hit_rate.generated import generate
from benchmarks.hit_rate.plot import curves
from benchmarks.hit_rate.reference import TEXTBOOK, Belady, infinite, textbook
from benchmarks.hit_rate.replay import Replay
from benchmarks.hit_rate.traces import TraceError, load
from benchmarks.hit_rate.workload import BLOCK_TOKENS, Ask, Workload, round_robin, timed, workload
from benchmarks.report import Measure
from forebay.kvstore.policies.registry import POLICY_NAMES


def asks(*blocks: Sequence[object]) -> Workload:
    return workload("by hand", [(float(i), BLOCK_TOKENS * len(names), names) for i, names in enumerate(blocks)])


def random_chains(seed: int, requests: int = 60) -> Workload:
    """Requests down a random tree."""
    rng = random.Random(seed)

    def path() -> list[tuple[int, ...]]:
        node: tuple[int, ...] = ()
        return [node := (*node, rng.randrange(2)) for _ in range(rng.randint(1, 5))]

    return asks(*(path() for _ in range(requests)))


# --- workloads -----------------------------------------------------------------------------------------


def test_blocks_are_numbered_as_they_come_and_know_their_parents() -> None:
    work = asks("abc", "abd", "x")
    assert [list(ask.blocks) for ask in work.asks] == [[0, 1, 2], [0, 1, 3], [4]]
    assert list(work.parents) == [-1, 0, 1, 1, -1] and list(work.starts) == [0, 512, 1024, 1024, 0]
    assert work.tokens == 512 * 7


def session(*times: float) -> list[Ask]:
    return [Ask(now, 512, [1]) for now in times]


def test_sessions_keep_their_own_times_but_for_long_gaps() -> None:
    work = timed("t", [session(5, 10, 5000), session(0, 1)], at_once=2)
    times = {block: [ask.now for ask in work.asks if ask.blocks[0] == block] for block in (0, 1)}
    gaps = sorted(round(b - a, 6) for series in times.values() for a, b in pairwise(series))
    assert gaps == [1, 5, 600]
    assert [ask.now for ask in work.asks] == sorted(ask.now for ask in work.asks)


def test_in_turn_a_finished_session_s_place_goes_to_the_next() -> None:
    work = round_robin("r", [session(0, 1, 2), session(0), session(0, 1)], slots=2)
    assert [ask.blocks[0] for ask in work.asks] == [0, 1, 0, 2, 0, 2]


def test_generated_sessions_are_the_same_for_a_seed_and_grow_along_shared_prefixes() -> None:
    first, again, other = generate(6, 1, False), generate(6, 1, False), generate(6, 2, False)
    assert [list(a.blocks) for a in first.asks] == [list(a.blocks) for a in again.asks]
    assert first.blocks != other.blocks
    assert 0.5 < infinite(first) < 1


# --- reference policies --------------------------------------------------------------------------------


def best_by_trying(work: Workload, capacity: int) -> int:
    """Block hits of the best of all eviction orders, by trying all that keep prefixes whole."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for ask in work.asks:
        after: dict[frozenset[int], int] = {}
        for here, hits in best.items():
            leading = next((i for i, block in enumerate(ask.blocks) if block not in here), len(ask.blocks))
            everything = here | set(ask.blocks)
            for kept in _closed(everything, work, capacity):
                after[kept] = max(after.get(kept, 0), hits + leading)
        best = after
    return max(best.values())


def _closed(blocks: frozenset[int], work: Workload, capacity: int) -> set[frozenset[int]]:
    found, waiting = {blocks}, [blocks]
    while waiting:
        kept = waiting.pop()
        for block in kept:
            if not any(work.parents[other] == block for other in kept) and (smaller := kept - {block}) not in found:
                found.add(smaller)
                waiting.append(smaller)
    return {kept for kept in found if len(kept) <= capacity}


@pytest.mark.parametrize("seed", range(4))
def test_belady_s_optimum_is_the_best_of_all_ways(seed: int) -> None:
    rng = random.Random(seed)
    paths = ["ab", "abc", "abd", "x", "xy"]
    chosen = [rng.choice(paths) for _ in range(9)]
    work = asks(*([name[: i + 1] for i in range(len(name))] for name in chosen))
    for capacity in (1, 2, 3):
        assert Belady(work).hit_rate(capacity) == pytest.approx(
            best_by_trying(work, capacity) * BLOCK_TOKENS / work.tokens
        )


@pytest.mark.parametrize("seed", range(3))
def test_no_policy_beats_the_optimum_and_none_loses_with_room_for_all(seed: int) -> None:
    work = random_chains(seed)
    for capacity in (3, 8, 20):
        best = Belady(work).hit_rate(capacity)
        for name in TEXTBOOK:
            assert textbook(work, name, capacity) <= best + 1e-9
        for name in POLICY_NAMES:
            assert Replay(work, name, capacity).run() <= best + 1e-9
    for name in TEXTBOOK:
        assert textbook(work, name, work.blocks + 1) == infinite(work) == Belady(work).hit_rate(work.blocks)
    for name in POLICY_NAMES:
        for order in ("definition", "daemon"):
            assert Replay(work, name, work.blocks, order).run() == infinite(work)


@pytest.mark.parametrize("seed", range(6))
def test_the_daemon_s_lru_hits_what_a_list_by_recency_hits(seed: int) -> None:
    work = random_chains(seed, 200)
    for capacity in (4, 9, 16):
        assert Replay(work, "lru", capacity).run() == textbook(work, "LRU", capacity)


def test_a_hit_counts_up_to_the_prompt_s_length_and_only_from_its_front() -> None:
    names = ["a", "ab", "abc"]
    work = workload("w", [(0, 1536, names), (1, 1100, names), (2, 1536, ["x", "xy"])])
    assert infinite(work) == 1100 / work.tokens
    # With room for two, the last two that were used are the first two of the chain.
    assert textbook(work, "LRU", 2) == Replay(work, "lru", 2).run() == 1024 / work.tokens


# --- traces --------------------------------------------------------------------------------------------

REQUESTS = [
    {"timestamp": 2000, "input_length": 1000, "output_length": 1, "hash_ids": [0, 2]},
    {"timestamp": 0, "input_length": 700, "output_length": 1, "hash_ids": [0, 1]},
]


def small_blocks(blocks: int) -> list[int]:
    return list(range(1, 8 * blocks + 4))


SESSION = {
    "block_size": 64,
    "requests": [
        {"t": 0.0, "type": "n", "in": 1100, "hash_ids": small_blocks(2)},
        {
            "t": 5.0,
            "type": "subagent",
            "requests": [
                {"t": 0.0, "type": "n", "in": 600, "hash_ids": small_blocks(1)},
                {"t": 9.0, "type": "n", "in": 600, "hash_ids": small_blocks(1)},
            ],
        },
        {"t": 10.0, "type": "n", "in": 1700, "hash_ids": small_blocks(3)},
    ],
}


def written(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def test_requests_are_read_in_order_of_time(tmp_path: Path) -> None:
    work = load(written(tmp_path / "t.jsonl", REQUESTS), 0, None, False)
    assert [(ask.now, ask.tokens, list(ask.blocks)) for ask in work.asks] == [(0, 700, [0, 1]), (2, 1000, [0, 2])]


def test_a_session_s_subagents_come_in_at_their_times_in_whole_blocks(tmp_path: Path) -> None:
    work = load(written(tmp_path / "t.jsonl", [SESSION, SESSION]), 1, 1, True)
    assert "sessions 2 to 2" in work.name
    assert [(ask.tokens, len(ask.blocks)) for ask in work.asks] == [(1100, 2), (600, 1), (1700, 3), (600, 1)]
    assert work.blocks == 3


@pytest.mark.parametrize("text", ["", "{", '{"a": 1}', "[]"])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"t\.jsonl"):
        load(path, 0, None, False)


def test_a_missing_file_or_session_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        load(tmp_path / "none.jsonl", 0, None, False)
    with pytest.raises(TraceError, match="no session 7"):
        load(written(tmp_path / "t.jsonl", [SESSION]), 7, None, False)


def test_without_zstandard_the_error_names_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "zstandard":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "zstandard", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    path = tmp_path / "t.jsonl.zst"
    path.write_bytes(b"")
    with pytest.raises(TraceError, match="pip install zstandard"):
        load(path, 0, None, False)


def test_a_compressed_trace_is_read_as_a_plain_one(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    plain = written(tmp_path / "t.jsonl", REQUESTS)
    packed = tmp_path / "t.jsonl.zst"
    packed.write_bytes(zstandard.ZstdCompressor().compress(plain.read_bytes()))
    assert len(load(packed, 0, None, False).asks) == 2


# --- the command ---------------------------------------------------------------------------------------


def test_the_command_prints_every_policy_at_every_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--sessions", "5", "--capacity", "0.05,0.3", "--json"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = [row["name"] for row in rows]
    per_capacity = [*(f"{name} (textbook)" for name in TEXTBOOK), *POLICY_NAMES, "optimum"]
    assert names == [f"{m} M, {name}" for m in ("0.05", "0.3") for name in per_capacity] + ["infinite"]
    rate = {row["name"]: row["value"] for row in rows}
    assert all(rate[f"{m} M, optimum"] >= rate[f"{m} M, {name}"] for m in ("0.05", "0.3") for name in per_capacity)
    assert rate["0.3 M, optimum"] > rate["0.05 M, optimum"]


def test_the_command_says_what_is_wrong_with_its_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--policies", "fifo"]) == 2
    assert "lru, arc, s3fifo, foresight" in capsys.readouterr().err
    assert main(["--trace", str(tmp_path / "none.jsonl")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_curves_are_taken_from_the_daemon_s_policies_and_the_optimum() -> None:
    measures = [
        Measure("0.5 M, LRU (textbook)", 1.0, "%"),
        Measure("0.5 M, lru", 2.0, "%"),
        Measure("1 M, lru", 3.0, "%"),
        Measure("1 M, optimum", 4.0, "%"),
        Measure("infinite", 5.0, "%"),
    ]
    assert curves(measures) == {"lru": [(0.5, 2.0), (1.0, 3.0)], "optimum": [(1.0, 4.0)]}


def test_a_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curves.png"
    main(["--sessions", "3", "--capacity", "0.1,0.2", "--plot", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_tokens_may_be_weighed_by_what_computing_them_again_costs() -> None:
    work = replace(asks("ab", "ac"), attention_tokens=1024)
    # The first 512 tokens cost 512 + 128, all 1,024 cost 1,024 + 512.
    assert infinite(work) == pytest.approx(640 / (2 * 1536))
    assert Replay(work, "lru", 8).run() == textbook(work, "LRU", 8) == Belady(work).hit_rate(8) == infinite(work)
