"""Batches of events to bytes and back: `[ts, [events], dp_rank]` in msgpack, one event a map or an array.

Events are encoded and decoded one by one, so that one that can't be costs only itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from forebay.events.errors import EventDecodeError, EventEncodeError
from forebay.events.schema import (
    REMOTE,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KVEvent,
    WireProfile,
    is_known,
    low64,
)

_U64 = 2**64 - 1


class _StoredRow(msgspec.Struct, array_like=True, tag="BlockStored", frozen=True):
    block_hashes: Sequence[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _RemovedRow(msgspec.Struct, array_like=True, tag="BlockRemoved", frozen=True):
    block_hashes: Sequence[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedRow(msgspec.Struct, array_like=True, tag="AllBlocksCleared", frozen=True):
    pass


class _Envelope(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_Row: TypeAlias = _StoredRow | _RemovedRow | _ClearedRow

_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(_Envelope)
_maps: msgspec.msgpack.Decoder[KVEvent] = msgspec.msgpack.Decoder(KVEvent)
_rows: msgspec.msgpack.Decoder[_Row] = msgspec.msgpack.Decoder(_Row)


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """A payload, and how many of the events could not be put into it (`first_error` says why)."""

    payload: bytes
    refused: int = 0
    first_error: str = ""


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """What a payload said.

    `events` holds every event that could be decoded, in order; `unknown` the positions of those whose medium
    or locality isn't known here (see `usable`); `undecodable` counts the ones that are lost.
    """

    ts: float
    events: tuple[KVEvent, ...]
    dp_rank: int | None
    undecodable: int = 0
    unknown: frozenset[int] = frozenset()

    @property
    def usable(self) -> tuple[KVEvent, ...]:
        """The events that may be indexed: all but the unknown ones."""
        if not self.unknown:
            return self.events
        return tuple(event for at, event in enumerate(self.events) if at not in self.unknown)

    @property
    def epoch(self) -> str | None:
        """The boot id that the batch's last event with one names."""
        return next((event.epoch for event in reversed(self.events) if event.epoch is not None), None)


def encode_batch(
    ts: float,
    events: Sequence[KVEvent],
    dp_rank: int | None = 0,
    profile: WireProfile | None = None,
) -> EncodedBatch:
    """Encode what can be encoded. Never raises for an event; those that can't be are counted."""
    profile = profile or WireProfile()
    done: list[msgspec.Raw] = []
    refused, first_error = 0, ""
    for event in events:
        try:
            done.append(msgspec.Raw(encode_event(event, profile)))
        except EventEncodeError as error:
            refused += 1
            first_error = first_error or str(error)
    payload = _encoder.encode([float(ts), done, dp_rank])
    return EncodedBatch(payload, refused, first_error)


def encode_event(event: KVEvent, profile: WireProfile) -> bytes:
    """One event in this profile. Raises EventEncodeError."""
    try:
        if profile.encoding == "array":
            return _encoder.encode(_row(event, profile))
        return _encoder.encode(_map(event, profile))
    except (TypeError, ValueError, OverflowError, AttributeError, msgspec.MsgspecError) as error:
        raise EventEncodeError(f"{type(event).__name__} can't be encoded: {error}") from error


def decode_batch(payload: bytes) -> DecodedBatch:
    """Decode a payload of maps, arrays or both. Raises EventDecodeError if it isn't a batch at all."""
    try:
        envelope = _envelopes.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise EventDecodeError(f"not an event batch: {error}") from error
    events: list[KVEvent] = []
    unknown: set[int] = set()
    for raw in envelope.events:
        event = _decode_event(raw)
        if event is None:
            continue
        if not is_known(event):
            unknown.add(len(events))
        events.append(event)
    lost = len(envelope.events) - len(events)
    return DecodedBatch(envelope.ts, tuple(events), envelope.data_parallel_rank, lost, frozenset(unknown))


def _map(event: KVEvent, profile: WireProfile) -> KVEvent:
    if not profile.extensions:
        event = msgspec.structs.replace(event, epoch=None, reason=None)
    if isinstance(event, AllBlocksCleared):
        return event
    hashes = _hashes(event.block_hashes, profile)
    if isinstance(event, BlockRemoved):
        return msgspec.structs.replace(event, block_hashes=hashes)
    tokens = _tokens(event, profile)
    parent = _parent(event, profile)
    return msgspec.structs.replace(event, block_hashes=hashes, parent_block_hash=parent, token_ids=tokens)


def _row(event: KVEvent, profile: WireProfile) -> _Row:
    if isinstance(event, AllBlocksCleared):
        return _ClearedRow()
    if event.locality == REMOTE:
        # Without its locality a consumer would take it for a local one.
        raise EventEncodeError("the array encoding has no place for locality REMOTE; use maps")
    hashes = _hashes(event.block_hashes, profile)
    if isinstance(event, BlockRemoved):
        return _RemovedRow(hashes, event.medium, event.group_idx)
    return _StoredRow(
        hashes,
        _parent(event, profile),
        _tokens(event, profile),
        event.block_size,
        event.lora_id,
        event.medium,
        event.lora_name,
        event.extra_keys,
        event.group_idx,
        event.kv_cache_spec_kind,
        event.kv_cache_spec_sliding_window,
    )


def _hashes(hashes: Sequence[BlockHash], profile: WireProfile) -> list[BlockHash]:
    if profile.hash_format == "u64":
        return [_low(item) for item in hashes]
    return [_full(item) for item in hashes]


def _parent(event: BlockStored, profile: WireProfile) -> BlockHash | None:
    parent = event.parent_block_hash
    return None if parent is None else _hashes((parent,), profile)[0]


def _tokens(event: BlockStored, profile: WireProfile) -> Sequence[int]:
    if not _consistent(event):
        raise EventEncodeError(
            f"{len(event.token_ids)} tokens for {len(event.block_hashes)} blocks of {event.block_size}"
        )
    return event.token_ids if profile.tokens else []


def _low(item: BlockHash) -> int:
    return low64(item) if isinstance(item, bytes) else item & _U64


def _full(item: BlockHash) -> bytes:
    if isinstance(item, bytes) and len(item) == 32:
        return item
    raise EventEncodeError("a profile of 32-byte hashes needs the full 32-byte keys")


def _consistent(event: BlockStored) -> bool:
    """Tokens and blocks agree, or the tokens are withheld."""
    if event.block_size < 0:
        return False
    return not event.token_ids or len(event.token_ids) == len(event.block_hashes) * event.block_size


def _decode_event(raw: msgspec.Raw) -> KVEvent | None:
    try:
        data = memoryview(raw)
        is_array = bool(data) and (0x90 <= data[0] <= 0x9F or data[0] in (0xDC, 0xDD))
        event = _from_row(_rows.decode(raw)) if is_array else _maps.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return _normal(event)


def _from_row(row: _Row) -> KVEvent:
    match row:
        case _StoredRow():
            return BlockStored(*(getattr(row, name) for name in _StoredRow.__struct_fields__))
        case _RemovedRow():
            return BlockRemoved(row.block_hashes, row.medium, row.group_idx)
        case _:
            return AllBlocksCleared()


def _normal(event: KVEvent) -> KVEvent | None:
    """Signed hashes as the unsigned ones that they stand for; None for an event that contradicts itself."""
    if isinstance(event, AllBlocksCleared):
        return event
    hashes = [_unsigned(item) for item in event.block_hashes]
    if isinstance(event, BlockRemoved):
        return msgspec.structs.replace(event, block_hashes=hashes)
    if not _consistent(event):
        return None
    parent = event.parent_block_hash
    return msgspec.structs.replace(
        event, block_hashes=hashes, parent_block_hash=None if parent is None else _unsigned(parent)
    )


def _unsigned(item: BlockHash) -> BlockHash:
    return item & _U64 if isinstance(item, int) else item
