"""Canonical layout: where the bytes of a chunk are, whoever wrote them.

A chunk's payload is a sequence of granules of `MATCH_UNIT` tokens. Inside a granule of an attention group:
layer, then K/V, then head, then token, then dim. Hence a prefix of tokens is a prefix of bytes, and a
suffix of whole units a suffix.

    chunk    [ header, padded to 4 KiB | granule 0 | granule 1 | ... ]
    granule  [ layer 0: K [heads, 16, dim] | V [heads, 16, dim] | layer 1: ... ]
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.kvstore.identity import MATCH_UNIT, GroupGeometry, Namespace

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


def payload_bytes(group: GroupGeometry, tokens: int) -> int:
    """Payload of a chunk of `tokens` tokens, a multiple of the unit."""
    assert tokens % MATCH_UNIT == 0 and tokens > 0, tokens
    return tokens // MATCH_UNIT * group.granule_bytes


def token_span(group: GroupGeometry, start: int, end: int) -> Span:
    """Payload bytes of the units that cover tokens [start, end), counted from the chunk's first token."""
    assert 0 <= start < end, (start, end)
    first, last = start // MATCH_UNIT, -(-end // MATCH_UNIT)
    return Span(first * group.granule_bytes, (last - first) * group.granule_bytes)


def needed_from(group: GroupGeometry, position: int) -> int:
    """First token, rounded down to the unit, whose KV a query at `position` needs from this group.

    Full attention needs all. A window of W positions includes the query itself, so W - 1 before it.
    """
    if group.window is None:
        return 0
    return round_down(max(0, position - group.window + 1), MATCH_UNIT)


def chunk_start(position: int, namespace: Namespace) -> int:
    """Start of the chunk that token `position` lies in."""
    return round_down(position, namespace.chunk_tokens)
