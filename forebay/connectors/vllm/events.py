"""The store's events in vLLM's own classes."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.distributed import kv_events

from forebay.events.schema import BlockRemoved, BlockStored, KVEvent


def as_vllm(events: Iterable[KVEvent]) -> list[kv_events.KVCacheEvent]:
    """Field by field; what vLLM has no field for (epoch, reason) is left out."""
    return [_converted(event) for event in events if isinstance(event, BlockStored | BlockRemoved)]


def _converted(event: BlockStored | BlockRemoved) -> kv_events.KVCacheEvent:
    if isinstance(event, BlockRemoved):
        return kv_events.BlockRemoved(
            block_hashes=list(event.block_hashes), medium=event.medium, group_idx=event.group_idx,
            locality=event.locality, ownership=event.ownership,
        )  # fmt: skip
    extra = None
    if event.extra_keys is not None:
        extra = [tuple(keys) if keys is not None else None for keys in event.extra_keys]
    return kv_events.BlockStored(
        block_hashes=list(event.block_hashes), parent_block_hash=event.parent_block_hash,
        token_ids=list(event.token_ids), block_size=event.block_size, lora_id=event.lora_id, medium=event.medium,
        lora_name=event.lora_name, extra_keys=extra, group_idx=event.group_idx,
        kv_cache_spec_kind=event.kv_cache_spec_kind,
        kv_cache_spec_sliding_window=event.kv_cache_spec_sliding_window, locality=event.locality,
        ownership=event.ownership, session_id=event.session_id,
    )  # fmt: skip
