"""The hot buffers' benchmark: its policies rank as they must, its LRU is the resolver's, and more requests fit."""

from __future__ import annotations

import torch

from benchmarks.hisparse import locality_trace, misses_belady, misses_fifo, misses_lru
from benchmarks.hisparse_books import Books, tiny_glm
from forebay.kernels.hot import Ask, new_regions, resolve

K, LENGTH = 32, 2048


def test_lru_misses_less_than_fifo_and_never_less_than_the_best_there_could_be() -> None:
    for seed in range(3):
        trace = locality_trace(LENGTH, K, 150, seed)
        best, lru, fifo = (count(trace, 2 * K) for count in (misses_belady, misses_lru, misses_fifo))
        assert best <= lru < fifo


def test_its_lru_is_the_resolver_s() -> None:
    trace = locality_trace(LENGTH, K, 60)
    regions, pages = new_regions(1, 2 * K), (LENGTH + 60) // 16 + 1
    regions.blocks[0] = torch.arange(2 * K // 16)
    away, host = torch.full((1, pages), -1), torch.arange(pages)[None]
    swaps = 0
    for step in trace.steps:
        ask = Ask(torch.tensor([[list(step)]]), torch.tensor([0]), away, host)
        swaps += int(resolve(regions, ask).swaps)
    assert swaps == misses_lru(trace, 2 * K)


def test_several_times_as_many_long_contexts_are_under_way() -> None:
    info, device, context = tiny_glm(), 64 << 20, 32_768
    ordinary = Books(info, device, context, hot=False).fill(12)
    hot = Books(info, device, context, hot=True).fill(12)
    assert ordinary > 0 and hot >= 3 * ordinary
