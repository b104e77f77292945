"""What every byte must be: an identity of its own for each unit of tokens, and bytes that follow from it.

Nothing here uses the store's own keys for content, so a key that forgets something (a salt, an adapter) shows as
wrong bytes. Every write has a version: a reader must see one version that was committed under the key, whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.kvstore.identity import MATCH_UNIT, GroupGeometry

UnitIds = tuple[bytes, ...]
NEVER = float("inf")


def unit_ids(namespace: int, salt: bytes, extra: bytes, token_ids: Sequence[int]) -> UnitIds:
    """One identity for each whole unit: it stands for everything before its end that decides the bytes there."""
    identity = hashlib.blake2b(repr((namespace, salt, extra)).encode(), digest_size=16).digest()
    found = []
    for at in range(0, len(token_ids) - MATCH_UNIT + 1, MATCH_UNIT):
        unit = repr(tuple(token_ids[at : at + MATCH_UNIT])).encode()
        identity = hashlib.blake2b(identity + unit, digest_size=16).digest()
        found.append(identity)
    return tuple(found)


def written_units(group: GroupGeometry, units: UnitIds) -> UnitIds:
    """What a chunk of these units has bytes of: each of them, or of a state the last one alone."""
    return units[-1:] if group.kind == "recurrent" else units


def granule(group: int, unit: bytes, version: int, size: int) -> bytes:
    """The bytes of one unit in one group, as this version of the write computed them."""
    return hashlib.shake_128(b"%d/%d/" % (group, version) + unit).digest(size)


@dataclass
class Write:
    """One write of one chunk: which units, a granule's size, and when its commit was acknowledged (virtual seconds)."""

    units: UnitIds
    size: int
    namespace: bytes = b""
    acknowledged_at: float = NEVER


@dataclass
class Oracle:
    """Every chunk that was ever committed, by (group, key) and version."""

    writes: dict[tuple[int, bytes], dict[int, Write]] = field(default_factory=dict)
    versions: int = 0
    _bytes: dict[tuple[int, int, bytes], bytes] = field(default_factory=dict)

    def new_version(self) -> int:
        """A number for the next write."""
        self.versions += 1
        return self.versions

    def payload(self, group: int, units: UnitIds, version: int, size: int) -> bytes:
        """A chunk's bytes; `size` is a granule's."""
        return b"".join(self._granule(group, unit, version, size) for unit in units)

    def _granule(self, group: int, unit: bytes, version: int, size: int) -> bytes:
        name = (group, version, unit)
        found = self._bytes.get(name)
        if found is None:
            found = self._bytes[name] = granule(group, unit, version, size)
        return found

    def commits(self, group: int, key: bytes, version: int, write: Write) -> None:
        """A commit is about to be sent: from now on readers may see this version."""
        self.writes.setdefault((group, key), {})[version] = write

    def version_of(self, group: int, key: bytes, data: bytes, units: UnitIds | None = None) -> int | None:
        """Which committed version of the chunk begins with these bytes; None if they are none's.

        `units` are those that the reader wanted there; None takes the chunk's own.
        """
        for version, write in self.writes.get((group, key), {}).items():
            count = len(data) // write.size
            wanted = write.units[:count]
            if units is not None and wanted != units[:count]:
                continue
            if data == self.payload(group, wanted, version, write.size):
                return version
        return None
