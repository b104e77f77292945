"""Canonical layout: where the bytes of a chunk are, whoever wrote them, and where a shard's part of them is.

    chunks      a chunk's payload: granules, what a hit needs, sizes
    planes      the order of a group's axes, in a payload or in a shard's own buffers
    ownership   which tokens, heads and layers are whose
    shard       what a rank says of itself, and why it may be refused
    copies      regular copies, and the plain runs that they stand for
    view        the copies between a chunk and one shard's buffers

Nothing here touches memory or knows a device: offsets, counts and strides are all that there is.
"""

from forebay.kvstore.layout.chunks import (
    ALIGNMENT,
    Span,
    chunk_start,
    extends,
    granule_count,
    needed_from,
    needs_all,
    payload_bytes,
    round_down,
    round_up,
    token_span,
)
from forebay.kvstore.layout.copies import Axis, Copy, Run, runs_of
from forebay.kvstore.layout.ownership import even_stages, local_index, local_length, owner
from forebay.kvstore.layout.planes import STATE_ORDER, TOKEN_ORDER
from forebay.kvstore.layout.shard import Shard, check_shard
from forebay.kvstore.layout.view import View

__all__ = [
    "ALIGNMENT",
    "STATE_ORDER",
    "TOKEN_ORDER",
    "Axis",
    "Copy",
    "Run",
    "Shard",
    "Span",
    "View",
    "check_shard",
    "chunk_start",
    "even_stages",
    "extends",
    "granule_count",
    "local_index",
    "local_length",
    "needed_from",
    "needs_all",
    "owner",
    "payload_bytes",
    "round_down",
    "round_up",
    "runs_of",
    "token_span",
]
