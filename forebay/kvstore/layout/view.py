"""The copies between a chunk's payload and one shard's own buffers.

    payload      granule g  [ layer | K/V | head | token | row ]      the same whoever writes
                     |
                     |  heads of this rank, layers of its stage, tokens that it owns
                     v
    buffers      block table[j // block_tokens], token j % block_tokens, in the shard's own order

A rank's token j is its j-th own token of the whole request, as in an engine's block table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.kvstore.geometry import MATCH_UNIT, GroupGeometry
from forebay.kvstore.identity import Namespace
from forebay.kvstore.layout.copies import Axis, Copy, Run, folded, merged, runs_of
from forebay.kvstore.layout.ownership import HeadPart, local_index, local_length, owner, split_heads
from forebay.kvstore.layout.planes import AxisName, Placed, Plane, in_payload, planes_of
from forebay.kvstore.layout.shard import Shard, check_shard


@dataclass(frozen=True, slots=True)
class _Piece:
    """`count` neighbouring tokens: where they are in the payload and in the buffers."""

    granule: int
    token: int
    block: int
    slot: int
    count: int


@dataclass(frozen=True, slots=True)
class _Cut:
    """One plane's part of a shard: bases, the axes that are the same for all tokens, strides of the others."""

    heads: HeadPart
    canonical: int
    local: int
    axes: tuple[Axis, ...]
    granule: int
    block: int
    token: Axis
    element: int


class View:
    """One shard's part of one group: pure arithmetic, made once and used for every chunk.

    Raises ValueError with `check_shard`'s reason for a shape that can't be served.
    """

    def __init__(self, namespace: Namespace, group: int, shard: Shard) -> None:
        why = check_shard(namespace, shard)
        if why:
            raise ValueError(why)
        self.group: GroupGeometry = namespace.groups[group]
        self.shard = shard
        self.layers = shard.stage_layers(self.group)
        divided = shard.divides(self.group)
        self._size, self._rank = (shard.dcp_size, shard.dcp_rank) if divided else (1, 0)
        self._interleave = shard.interleave if divided else 1
        parts = {plane: split_heads(plane.heads, shard.tp_rank, shard.tp_size) for plane in planes_of(self.group)}
        self._buffers = self._placed({plane: part.count for plane, part in parts.items()})
        payload = in_payload(self.group)
        cuts = [self._cut(plane, part, payload) for plane, part in parts.items()] if self.layers else []
        self._read = tuple(cuts)
        self._written = tuple(cut for cut in cuts if self._writes(cut.heads))

    def _placed(self, heads: dict[Plane, int]) -> Placed:
        shard, states = self.shard, self.group.recurrent
        counts: dict[AxisName, int] = {
            "block": max(shard.blocks, 1),
            "layer": len(self.layers),
            "token": 1 if states else shard.block_tokens,
        }
        return Placed(heads, shard.state_order if states else shard.order, counts)

    def _cut(self, plane: Plane, part: HeadPart, payload: Placed) -> _Cut:
        def both(axis: AxisName, count: int) -> Axis:
            if axis not in payload.order:  # a state has no tokens
                return Axis(count, 0, 0)
            return Axis(count, payload.stride(plane, axis), self._buffers.stride(plane, axis))

        layer, head = both("layer", len(self.layers)), both("head", part.count)
        first = self.layers.start * layer.canonical + part.first * head.canonical
        inner = folded(0, 0, plane.width, (both("channel", plane.channels), both("tap", plane.taps), head, layer))
        return _Cut(
            heads=part,
            canonical=payload.base(plane) + first,
            local=self._buffers.base(plane),
            axes=inner.axes,
            granule=payload.stride(plane, "block"),
            block=self._buffers.stride(plane, "block"),
            token=both("token", 1),
            element=inner.length,
        )

    def _writes(self, heads: HeadPart) -> bool:
        """Of the ranks that hold the same bytes, the first one writes them."""
        shard, divided = self.shard, self.shard.divides(self.group)
        if shard.pcp_rank:
            return False
        if shard.dcp_ranks == "tp":
            # Neighbours that share a head have its tokens in turn: the first round of them writes.
            return heads.replica < (shard.dcp_size if divided else 1)
        return heads.replica == 0 and (divided or shard.dcp_rank == 0)

    # --- sizes -----------------------------------------------------------------------------------------

    @property
    def block_bytes(self) -> int:
        """Bytes of one pool block of this rank, over all layers and planes."""
        return self._buffers.total // max(self.shard.blocks, 1)

    @property
    def writes(self) -> bool:
        """Has this rank anything to write? Others that hold the same bytes may do it for it."""
        return bool(self._written)

    def length(self, tokens: int) -> int:
        """How many of a request's first `tokens` tokens this rank holds, so that its table needs blocks for."""
        return local_length(tokens, self._rank, self._size, self._interleave)

    # --- copies ----------------------------------------------------------------------------------------

    def copies(
        self, start: int, tokens: range, *, writing: bool = False, table: Sequence[int] | None = None
    ) -> list[Copy]:
        """What lies where of `tokens` (absolute), of the chunk that begins at `start`.

        `table` maps the request's blocks, in the order of its tokens, to those of the pool (None: they are the
        same; of a recurrent group only its first entry counts). With `writing`, only what this rank is the one
        to write. A state is one piece: `tokens` don't matter to it.
        """
        pieces = self._state(table) if self.group.recurrent else self._pieces(start, tokens, table)
        return merged(
            folded(
                cut.canonical + piece.granule * cut.granule + piece.token * cut.token.canonical,
                cut.local + piece.block * cut.block + piece.slot * cut.token.local,
                cut.element,
                (*cut.axes, cut.token._replace(times=piece.count)),
            )
            for cut in (self._written if writing else self._read)
            for piece in pieces
        )

    def runs(
        self, start: int, tokens: range, *, writing: bool = False, table: Sequence[int] | None = None
    ) -> list[Run]:
        """The same as plain runs, in the payload's order, as few as there can be."""
        return runs_of(self.copies(start, tokens, writing=writing, table=table))

    @staticmethod
    def _state(table: Sequence[int] | None) -> list[_Piece]:
        return [_Piece(0, 0, 0 if table is None else table[0], 0, 1)]

    def _pieces(self, start: int, tokens: range, table: Sequence[int] | None) -> list[_Piece]:
        """Stretches of own tokens that lie together on both sides."""
        assert start % MATCH_UNIT == 0 and start <= tokens.start and tokens.step == 1, (start, tokens)
        pieces: list[_Piece] = []
        token = tokens.start
        while token < tokens.stop:
            stretch = self._interleave - token % self._interleave if self._size > 1 else tokens.stop - token
            if owner(token, self._size, self._interleave) == self._rank:
                self._split(start, token, min(token + stretch, tokens.stop), table, pieces)
            token += stretch
        return pieces

    def _split(self, start: int, token: int, end: int, table: Sequence[int] | None, pieces: list[_Piece]) -> None:
        """Cut a stretch of own tokens at the edges of granules and blocks."""
        block_tokens = self.shard.block_tokens
        while token < end:
            granule, inside = divmod(token - start, MATCH_UNIT)
            block, slot = divmod(local_index(token, self._size, self._interleave), block_tokens)
            count = min(end - token, MATCH_UNIT - inside, block_tokens - slot)
            pieces.append(_Piece(granule, inside, block if table is None else table[block], slot, count))
            token += count
