"""A chunk's payload: how long it is, which part of it a hit needs.

A payload is a sequence of granules of `MATCH_UNIT` tokens. Inside a granule of rows: layer, then K/V, then head,
then token, then the row. Hence a prefix of tokens is a prefix of bytes, and a suffix of whole units a suffix.
A recurrent group's chunk has one granule, whatever its length: the state after its last token.

    chunk    [ header, padded to 4 KiB | granule 0 | granule 1 | ... ]
    granule  [ layer 0: K [heads, 16, dim] | V [heads, 16, dim] | layer 1: ... ]
    state    [ layer 0: state [heads, dim, dim] | conv: part 0 [heads, taps, channels] | part 1 ... | layer 1: ... ]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.kvstore.geometry import MATCH_UNIT, GroupGeometry

if TYPE_CHECKING:
    from forebay.kvstore.identity import Namespace

ALIGNMENT = 4096
"""Headers are padded to this, and slots are multiples of it: what O_DIRECT wants."""


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def round_down(value: int, multiple: int) -> int:
    """The greatest multiple of `multiple` that is at most `value`."""
    return value // multiple * multiple


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [offset, offset + length) of a payload."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


def granule_count(group: GroupGeometry, tokens: int) -> int:
    """Granules, hence checksums, of a chunk of `tokens` tokens, a multiple of the unit."""
    assert tokens % MATCH_UNIT == 0 and tokens > 0, tokens
    return 1 if group.recurrent else tokens // MATCH_UNIT


def payload_bytes(group: GroupGeometry, tokens: int) -> int:
    """Payload of a chunk of `tokens` tokens, a multiple of the unit."""
    return granule_count(group, tokens) * group.granule_bytes


def token_span(group: GroupGeometry, start: int, end: int) -> Span:
    """Payload bytes of the units that cover tokens [start, end), counted from the chunk's first token.

    A state isn't made of tokens: its span is the whole payload, and serves nothing but the chunk's end.
    """
    assert 0 <= start < end, (start, end)
    if group.recurrent:
        return Span(0, group.granule_bytes)
    first, last = start // MATCH_UNIT, -(-end // MATCH_UNIT)
    return Span(first * group.granule_bytes, (last - first) * group.granule_bytes)


def needed_from(group: GroupGeometry, position: int) -> int:
    """First token, rounded down to the unit, whose chunk a query at `position` needs from this group.

    Full attention needs all. A window of W positions includes the query itself, so W - 1 before it. A recurrent
    group needs the chunk that ends at `position`, so the token before it.
    """
    if group.recurrent:
        return round_down(max(0, position - 1), MATCH_UNIT)
    if group.window is None:
        return 0
    return round_down(max(0, position - group.window + 1), MATCH_UNIT)


def needs_all(group: GroupGeometry) -> bool:
    """Does a hit need every chunk before it, rather than those just before its end?"""
    return group.window is None and not group.recurrent


def extends(group: GroupGeometry) -> bool:
    """Does a longer chunk hold all that a shorter one with the same beginning does?

    Rows do. A state at another position is another state: neither makes the other superfluous.
    """
    return not group.recurrent


def chunk_start(position: int, namespace: Namespace) -> int:
    """Start of the chunk that token `position` lies in."""
    return round_down(position, namespace.chunk_tokens)
