"""KV events: what became true of blocks, in vLLM's own names and order.

A block here is one match unit (16 tokens). Inside the program a block is named by its full 32-byte chain
key; what goes over the wire is decided by a `WireProfile`, because consumers differ: most take the low 64
bits as an unsigned integer and lose the whole batch on anything else, some demand all 32 bytes.

Fields without brackets in vLLM's schema are always present (nil if unknown); optional ones are left out when
they are None. Ours come last, as extra map keys which other decoders ignore: `epoch` (the boot id of the
process that owns the stream, as hex) and `reason`. Not all others do, see `WireProfile.extensions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import msgspec

GPU: Final = "GPU"
CPU: Final = "CPU"
STORAGE: Final = "STORAGE"
MEDIA: Final = frozenset({GPU, CPU, STORAGE})

LOCAL: Final = "LOCAL"
REMOTE: Final = "REMOTE"
LOCALITIES: Final = frozenset({LOCAL, REMOTE})

EVICTED: Final = "evicted"
DEMOTED: Final = "demoted"
QUOTA: Final = "quota"
CORRUPT: Final = "corrupt"
CLEARED: Final = "cleared"
# A compacted history tells the present state instead of what happened; its events say so.
SNAPSHOT: Final = "snapshot"
REASONS: Final = frozenset({EVICTED, DEMOTED, QUOTA, CORRUPT, CLEARED, SNAPSHOT})

BlockHash: TypeAlias = int | bytes


def _nil() -> None:
    # A default made by a factory is written out even when it is None; a plain default is left out.
    return None


class BlockStored(msgspec.Struct, tag_field="type", tag="BlockStored", omit_defaults=True, frozen=True):
    """Consecutive blocks became readable in `medium`. `parent_block_hash` is None at a chain's first block.

    `len(token_ids) == len(block_hashes) * block_size`, or there are no tokens where they are withheld.
    `extra_keys` has one entry a block (None, or what beside tokens went into its key).
    """

    block_hashes: Sequence[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None = msgspec.field(default_factory=_nil)
    medium: str | None = msgspec.field(default_factory=_nil)
    lora_name: str | None = msgspec.field(default_factory=_nil)
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: Any = None
    session_id: str | None = None
    epoch: str | None = None
    reason: str | None = None


class BlockRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved", omit_defaults=True, frozen=True):
    """Blocks can't be read from `medium` any more. Other media are not affected."""

    block_hashes: Sequence[BlockHash]
    medium: str | None = msgspec.field(default_factory=_nil)
    group_idx: int | None = None
    locality: str | None = None
    ownership: Any = None
    epoch: str | None = None
    reason: str | None = None


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", omit_defaults=True, frozen=True):
    """Nothing is held any more. Consumers apply it to every medium of the publisher, so it is rarely right."""

    epoch: str | None = None
    reason: str | None = None


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class WireProfile:
    """How one endpoint speaks.

    `encoding` "array" is vLLM's older positional form; it has no place for locality, epoch and reason.
    `hash_format` "u64" sends the low 64 bits of a key, "bytes32" all of it. With `tokens` False token ids are
    withheld, for streams that leave the trust boundary. With `extensions` False maps have vLLM's keys alone: there are
    consumers that lose the whole batch over a key that they don't know.
    """

    encoding: Literal["map", "array"] = "map"
    hash_format: Literal["u64", "bytes32"] = "u64"
    tokens: bool = True
    extensions: bool = True


def low64(key: bytes) -> int:
    """The low 64 bits of a key: its last 8 bytes, big endian, unsigned."""
    return int.from_bytes(key[-8:], "big")


def is_known(event: KVEvent) -> bool:
    """Whether medium and locality are ones that this schema knows (None: the publisher says nothing).

    A consumer must not index an event that isn't: an unknown medium taken for a fast one is worse than a miss.
    """
    if isinstance(event, AllBlocksCleared):
        return True
    medium = event.medium is None or event.medium in MEDIA
    return medium and (event.locality is None or event.locality in LOCALITIES)
