"""What the store tells about itself: figures, listings, and why a prefix ends where it does."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from forebay.kvstore.cascade import Cascade
from forebay.kvstore.core import StoreCore
from forebay.kvstore.entry import Entry, EntryId
from forebay.kvstore.header import SlotState
from forebay.kvstore.identity import MATCH_UNIT, GroupGeometry, Namespace
from forebay.kvstore.lookup import Match, Prompt
from forebay.kvstore.match import last_state, state_bit
from forebay.kvstore.protocol import KeptBy, Row, TierReach
from forebay.tiers.base import LookupResult

_REMOVED = {
    "evicted": "evicted to make room",
    "quota": "evicted because its tenant was at its quota",
    "replaced": "replaced by a fuller chunk",
    "corrupt": "found corrupt and taken out",
    "cleared": "cleared on request",
}


def gauges(core: StoreCore, cascade: Cascade) -> dict[str, float]:
    """Present levels and all counters, by dotted name."""
    slots = core.place.slots
    values: dict[str, float] = {
        "host.bytes_budget": slots.total_bytes,
        "host.bytes_used": slots.used_bytes,
        "host.extents": len(slots.extents),
        "host.entries": len(core.table),
        "host.evictable": core.place.accounts.evictable_entries,
        "host.reserved_bytes": core.reserved_bytes,
        "host.promoting_bytes": core.promoting_bytes,
        "host.aside_bytes": core.aside.bytes,
        "host.aside_bytes_budget": core.aside.budget,
        "host.aside_lent_chunks": len(core.aside.lent),
        "host.quarantined_slots": core.quarantined_slots,
        "host.quarantined_bytes": core.quarantined_bytes,
        "host.kept": len(core.place.kept),
        "store.leases": len(core.leases),
        "store.chores": len(core.chores),
        "store.clears": len(cascade.clearing),
        "pins.keeps": len(core.pins),
        "pins.owners": len(core.pins.totals),
        "pins.hard_bytes": core.pins.hard_bytes,
        "pins.hard_bytes_budget": core.pins.hard_budget,
        "pins.retain_bytes_budget": core.pins.retain_budget,
        "host.removed_remembered": len(core.removed),
        "store.namespaces": len(core.namespaces),
        "process.rss_bytes": _rss_bytes(),
    }
    for name, value in core.policies.gauges(account.policy for account in core.place.accounts).items():
        values[f"policy.{name}"] = value
    for tier in cascade.tiers.values():
        values[f"tier.{tier.name}.storing_bytes"] = tier.store_bytes
        values[f"tier.{tier.name}.stores_running"] = len(tier.stores)
        values[f"tier.{tier.name}.loads_running"] = len(tier.loads)
    return values | core.counters.values


def _rss_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def namespace_rows(core: StoreCore, *, counts: bool = True) -> list[dict[str, str]]:
    """One description a namespace, for people; without `counts` it doesn't say how much is held."""
    rows = []
    for namespace_id, namespace in core.namespaces.items():
        use = core.use.of(namespace_id)
        held = {"chunks": str(use.chunks), "bytes": str(use.payload)} if counts else {}
        rows.append(
            {
                "id": namespace_id.hex(),
                "label": core.labels.get(namespace_id, ""),
                "chunk_tokens": str(namespace.chunk_tokens),
                "compute": namespace.compute,
                "groups": ", ".join(f"{g.name} ({len(g.layers)} layers, {g.dtype})" for g in namespace.groups),
            }
            | held
        )
    return rows


def row(entry: Entry, kept: list[KeptBy]) -> Row:
    """One line of a listing."""
    state = entry.state.name.lower() + ("" if entry.verified else ", unread")
    return Row(
        entry.namespace, entry.group, entry.key, entry.parent, entry.start, entry.token_count,
        entry.payload_length, entry.tenant, state, entry.pins, sorted(entry.tiers), kept,
    )  # fmt: skip


def explain(
    core: StoreCore, found: Match, tiers: Mapping[str, Sequence[Sequence[LookupResult]]], *, others: bool = True
) -> list[TierReach]:
    """How far each tier reaches in each group. `tiers` has one row of results a group. Without `others` nothing is
    told of chains that begin elsewhere, which may be another tenant's."""
    prompt = found.prompt
    reaches = []
    for group, geometry in enumerate(prompt.namespace.groups):
        tokens, end = _end(prompt, geometry, found.rows[group])
        reaches.append(TierReach("host", geometry.name, tokens, *_why_host(core, prompt, group, end, others)))
        for name, rows in tiers.items():
            matched = [result.matched if result.outcome == "hit" else 0 for result in rows[group]]
            reach = [state_bit(tokens) if tokens else 0 for tokens in matched] if geometry.recurrent else matched
            tokens, end = _end(prompt, geometry, reach)
            reaches.append(TierReach(name, geometry.name, tokens, *_why_tier(prompt, rows[group], end)))
    return reaches


def _end(prompt: Prompt, group: GroupGeometry, reach: Sequence[int]) -> tuple[int, int | None]:
    """Contiguous tokens from the front, and the chunk position where they end (None: they don't). Of states: where
    the last one is."""
    size = prompt.namespace.chunk_tokens
    if group.recurrent:
        last = last_state(reach, size, prompt.longest)
        return last, None if last == prompt.longest else last // size
    for position, tokens in enumerate(reach):
        if tokens < min(size, prompt.longest - position * size):
            return position * size + tokens, position
    return prompt.longest, None


def _complete(prompt: Prompt) -> tuple[str, str]:
    if prompt.longest == 0:
        return "too short", f"it has no whole unit of {MATCH_UNIT} tokens"
    return "complete", "the whole prompt is stored"


def _why_tier(prompt: Prompt, row: Sequence[LookupResult], end: int | None) -> tuple[str, str]:
    if end is None:
        return _complete(prompt)
    if row[end].outcome == "retry":
        return "slow", "the tier did not answer in time"
    if row[end].outcome == "away":
        return "away", "the tier can't say at present"
    return "missing", f"it has no chunk that goes on from token {end * prompt.namespace.chunk_tokens}"


def _why_host(core: StoreCore, prompt: Prompt, group: int, end: int | None, others: bool) -> tuple[str, str]:
    if end is None:
        return _complete(prompt)
    chunk = prompt.chunk(group, end)
    entry = core.table.get(group, chunk.key)
    if entry is not None and entry.state is SlotState.RESERVED:
        return "in flight", "a worker is writing this chunk right now"
    if entry is not None and entry.state is SlotState.PROMOTING:
        return "in flight", "a tier is bringing this chunk right now"
    reason = core.removed.get(EntryId(group, chunk.key))
    if reason is not None:
        return reason, _REMOVED.get(reason, reason)
    if end == 0:
        # Every prompt of a tenant begins at one root: that others begin otherwise explains nothing.
        return _why_nothing(core, prompt, others)
    if core.table.has_children(group, chunk.parent):
        return "diverges", f"a stored chunk goes on from token {chunk.start} with other tokens"
    return "never seen", f"nothing was stored that goes on from token {chunk.start} (or it was forgotten)"


def _why_nothing(core: StoreCore, prompt: Prompt, others: bool) -> tuple[str, str]:
    for namespace_id, root in core.table.roots_of(prompt.tokens) if others else ():
        if namespace_id != prompt.namespace_id:
            fields = ", ".join(_differing(prompt.namespace, core.namespaces[namespace_id]))
            return "other namespace", f"the same beginning is stored under another namespace; what differs: {fields}"
        if root != prompt.root:
            return "salt", "the same beginning is stored under another salt or tenant"
    return "never seen", "no prompt with this beginning was stored (or it was forgotten)"


def _differing(left: Namespace, right: Namespace) -> list[str]:
    return [name for name in left.__struct_fields__ if getattr(left, name) != getattr(right, name)]
