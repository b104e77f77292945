"""Rank 0's copier: what it is asked to copy every rank copies, its own slice each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forebay.workers.ranks.client import LeadClient
from forebay.workers.ranks.crew import Crew
from forebay.workers.ranks.messages import Load
from forebay.workers.ranks.slices import Slices, checksums


class LeadCopier:
    """See `forebay.workers.copying.Copier`. `group` is its place among the groups."""

    def __init__(self, crew: Crew, client: LeadClient, group: int, slices: Slices) -> None:
        self.granule_bytes = slices.granule_bytes
        self.slices = slices
        self._crew, self._client, self._group = crew, client, group

    def load(self, source: memoryview, checksums: bytes, blocks: Sequence[int]) -> int:
        """Have all ranks copy; then verify, once for all of them: what was read is what lies there, as long as the
        slot's generation is still the same, for which the caller asks next."""
        order = Load(self._crew.progress.steps, self._group, self._client.place_of(source), list(blocks))
        answers = self._crew.order(order, meanwhile=lambda: self.slices.load(source, blocks))
        self._client.agreed(answers)
        return _good(source, checksums, self.granule_bytes)

    def store(self, blocks: Sequence[int], room: memoryview) -> bytes:
        """Of a group that this rank alone writes."""
        self.slices.store(blocks, room)
        return checksums(room, self.granule_bytes)


def _good(source: memoryview, expected: bytes, granule_bytes: int) -> int:
    found = np.frombuffer(checksums(source, granule_bytes), dtype="<u8")
    same = found == np.frombuffer(expected, dtype="<u8")
    return len(found) if same.all() else int(same.argmin())
