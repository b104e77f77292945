"""The hot buffers of one rank: who has which slots of a region, in every layer that chooses.

Layers that choose for themselves have slots of their own, in the same blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from forebay.kernels.hot import Regions, forget_pages, forget_region, new_regions


class Buffers:
    """So many `regions` of `rows` slots. `sharers` are the layers that choose, by their place in the group, each with
    those that take its choice, itself included."""

    def __init__(
        self, sharers: Mapping[int, tuple[int, ...]], regions: int, rows: int, device: torch.device | None = None
    ) -> None:
        self.sharers = sharers
        made = [new_regions(regions, rows, device) for _ in sharers]
        self._of = {leader: replace(one, blocks=made[0].blocks) for leader, one in zip(sharers, made, strict=True)}

    def of(self, leader: int) -> Regions:
        """The slots of all regions in a layer that chooses, and in those that share its choice."""
        return self._of[leader]

    def open(self, region: int, blocks: Sequence[int]) -> None:
        """A region is another request's, in these blocks: empty, whatever it was before."""
        for regions in self._of.values():
            forget_region(regions, region)
            regions.blocks[region] = torch.tensor(list(blocks), dtype=torch.int64)

    def forget(self, pages: Sequence[int]) -> None:
        """No slot holds rows of these host pages any more."""
        for regions in self._of.values():
            forget_pages(regions, torch.tensor(list(pages), dtype=torch.int64, device=regions.held.device))
