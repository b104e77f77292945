"""Checksums of a payload while it comes."""

from __future__ import annotations

from forebay.kvstore.header import ChunkHeader, first_bad_granule
from forebay.tiers.p2p.errors import Damaged


class Verifier:
    """Verifies a payload while it comes. A recurrent state is one granule, and so is verified at its end."""

    def __init__(self, header: ChunkHeader, memory: memoryview) -> None:
        self._checksums, self._memory, self._granule = header.checksums, memory, header.granule_bytes
        self._verified = 0

    def came(self, count: int) -> None:
        """So many bytes are there. Raises Damaged."""
        whole = count // self._granule
        if whole == self._verified:
            return
        at, end = self._verified * self._granule, whole * self._granule
        bad = first_bad_granule(self._memory[at:end], self._granule, self._checksums[8 * self._verified : 8 * whole])
        if bad is not None:
            raise Damaged(f"granule {self._verified + bad} has another checksum than its header says")
        self._verified = whole
