"""The store's core: reservations, commits, pins, evictions. Pure: no I/O, clock, thread or randomness.

    reserve            commit               pin / release            evict
    FREE --> RESERVED --------> COMMITTED <--------------> pinned
      ^          |  PROMOTING --^    |
      |          v                   v
      +---- quarantine    RETIRED ---+      (out of sight; free when the last reader lets go)

    In quarantine is a slot without an entry that somebody may still be writing.

Memory is reached through an injected `PoolMemory`, which writes slot headers; facts go out through `tell`.
The daemon calls it from one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from forebay.kvstore.entry import Entry, EntryId, SlotRef
from forebay.kvstore.facts import Counters, HostFact, PoolMemory
from forebay.kvstore.header import ChunkHeader, SlotState, encode_header, header_bytes
from forebay.kvstore.identity import MATCH_UNIT, Namespace
from forebay.kvstore.index import ChunkTable
from forebay.kvstore.layout import needed_from, payload_bytes
from forebay.kvstore.limits import Limits
from forebay.kvstore.namespaces import NamespaceUse
from forebay.kvstore.placement import Placement
from forebay.kvstore.policies.base import EvictionPolicy
from forebay.kvstore.policies.lru import Lru
from forebay.kvstore.protocol import NewChunk, Slot
from forebay.kvstore.slots import slot_bytes_for
from forebay.kvstore.tenancy import TenantRule


@dataclass(slots=True)
class Client:
    """What one connection holds. It ends with the connection. `namespaces` are those that it has registered."""

    id: bytes
    namespaces: set[bytes] = field(default_factory=set)
    leases: dict[int, list[Entry]] = field(default_factory=dict)
    reservations: dict[int, Entry] = field(default_factory=dict)


class StoreCore:
    """All state of a store. Public attributes are for reading; `on_forgotten` is told of namespaces that had to
    make room for others."""

    def __init__(
        self,
        memory: PoolMemory,
        *,
        tell: Callable[[HostFact], None],
        limits: Limits | None = None,
        first_generation: int = 1,
        new_policy: Callable[[], EvictionPolicy] = Lru,
        tenants: Mapping[str, TenantRule] | None = None,
    ) -> None:
        self.memory = memory
        self.limits = limits or Limits()
        self.counters = Counters()
        self.table = ChunkTable()
        self.namespaces: dict[bytes, Namespace] = {}
        self.use = NamespaceUse()
        self.on_forgotten: Callable[[bytes], None] = lambda namespace_id: None
        self.labels: dict[bytes, str] = {}
        self.quarantine: dict[bytes, list[SlotRef]] = {}
        self.removed: OrderedDict[EntryId, str] = OrderedDict()
        self.place = Placement(
            evict=self.retire, cut=memory.cut, new_policy=new_policy, rules=tenants or {},
            accounts_max=self.limits.tenants,
        )  # fmt: skip
        self.reserved_bytes = 0
        self.promoting_bytes = 0
        self._tell = tell
        self._generation = first_generation
        self._serial = 0

    # --- namespaces ------------------------------------------------------------------------------------

    def register(self, namespace: Namespace, label: str = "", client: Client | None = None) -> bytes:
        """Make a namespace known, and in use for as long as `client` is there; returns its id.

        Where there are too many, the one that has been idle for longest is forgotten. Raises ValueError if a chunk
        of it can't fit an extent, or if all others are in use.
        """
        if namespace.id not in self.namespaces:
            self._check_fits(namespace)
            while len(self.namespaces) >= self.limits.namespaces:
                self._forget_namespace()
        self.remember(namespace)
        if label:
            self.labels[namespace.id] = label
        if client is not None and namespace.id not in client.namespaces:
            client.namespaces.add(namespace.id)
            self.use.joined(namespace.id)
        return namespace.id

    def remember(self, namespace: Namespace) -> None:
        """Know a namespace, of an earlier boot perhaps, without anybody using it."""
        self.namespaces[namespace.id] = namespace
        self.use.known(namespace.id)

    def _forget_namespace(self) -> None:
        oldest = self.use.forget_oldest_idle()
        if oldest is None:
            raise ValueError(
                f"{self.limits.namespaces} namespaces are registered already, and all have chunks or users: clear some"
            )
        del self.namespaces[oldest]
        self.labels.pop(oldest, None)
        self.counters.add("store.namespaces_forgotten")
        self.on_forgotten(oldest)

    def _check_fits(self, namespace: Namespace) -> None:
        largest = max(slot_bytes_for(g, namespace.chunk_tokens, namespace.chunk_tokens) for g in namespace.groups)
        size = min((e.size for e in self.place.slots.extents.values()), default=0)
        if largest > size - 4096:
            raise ValueError(
                f"a chunk takes {largest} bytes, an extent has {size}: start the store with a larger --extent "
                "(and --memory), or the worker with fewer --chunk-tokens"
            )

    # --- writing ---------------------------------------------------------------------------------------

    def reserve(self, client: Client, namespace_id: bytes, tenant: str, chunk: NewChunk) -> Slot:
        """A slot that `client` may write this chunk into, or why not."""
        namespace = self.namespaces[namespace_id]
        known = self.table.get(chunk.group, chunk.key)
        if known is not None and known.state is not SlotState.COMMITTED:
            return Slot("busy")
        if known is not None or self._covered(chunk):
            return Slot("exists")
        if len(client.reservations) >= self.limits.reservations_per_client:
            return self._refuse("full")
        if not self._within(self.reserved_bytes, self.limits.reserved_share, namespace, chunk):
            return self._refuse("full")
        entry = self._new_entry(namespace, namespace_id, tenant, chunk, SlotState.RESERVED, client.id)
        if entry is None:
            return self._refuse("full")
        self._serial += 1
        client.reservations[self._serial] = entry
        self.reserved_bytes += entry.slot_bytes
        self.counters.add("store.reserved")
        return Slot(
            "reserved", self._serial, entry.slot.extent, entry.slot.offset, entry.payload_offset, entry.generation
        )

    def _refuse(self, status: str) -> Slot:
        assert status == "full"
        self.counters.add("store.refused_full")
        return Slot("full")

    def _covered(self, chunk: NewChunk) -> bool:
        return any(
            child.tokens.startswith(chunk.tokens) and child.extra == chunk.extra
            for child in self.table.children(chunk.group, chunk.parent)
        )

    def _within(self, used: int, share: float, namespace: Namespace, chunk: NewChunk) -> bool:
        wanted = self._slot_bytes(namespace, chunk)
        return used + wanted <= max(share * self.place.slots.total_bytes, wanted)

    @staticmethod
    def _slot_bytes(namespace: Namespace, chunk: NewChunk) -> int:
        group = namespace.groups[chunk.group]
        return slot_bytes_for(group, len(chunk.tokens) // 4, namespace.chunk_tokens, len(chunk.extra))

    def _new_entry(
        self, namespace: Namespace, namespace_id: bytes, tenant: str, chunk: NewChunk, state: SlotState, owner: bytes
    ) -> Entry | None:
        slot_bytes = self._slot_bytes(namespace, chunk)
        slot = self.place.take(slot_bytes, tenant)
        if slot is None:
            return None
        self._generation += 1
        tokens = len(chunk.tokens) // 4
        entry = Entry(
            namespace=namespace_id, group=chunk.group, key=chunk.key, parent=chunk.parent, start=chunk.start,
            tokens=chunk.tokens, extra=chunk.extra, tenant=tenant, slot=slot, slot_bytes=slot_bytes,
            payload_offset=slot.offset + header_bytes(tokens, len(chunk.extra)),
            payload_length=payload_bytes(namespace.groups[chunk.group], tokens),
            generation=self._generation, state=state, pins=1,
        )  # fmt: skip
        # The writer's name is in the slot before it may write, so that a restarted daemon knows whom to ask.
        self.memory.write_header(slot, self._header_block(entry, state, owner))
        self.table.insert(entry)
        self.place.settle(entry)
        self.use.stored(entry)
        return entry

    @staticmethod
    def _header_block(entry: Entry, state: SlotState, owner: bytes = b"") -> bytes:
        header = ChunkHeader(
            namespace=entry.namespace, group=entry.group, key=entry.key, parent=entry.parent, start=entry.start,
            tokens=entry.tokens, tenant=entry.tenant, extra=entry.extra, payload_length=entry.payload_length,
            checksums=entry.checksums, owner=owner,
        )  # fmt: skip
        return encode_header(header, state=state, generation=entry.generation)

    def header_block(self, entry: Entry) -> bytes:
        """The chunk's header as it goes to tiers and events."""
        return self._header_block(entry, entry.state)

    def commit(self, client: Client, reservation: int, checksums: bytes) -> Entry | None:
        """Make a written chunk visible; None if the reservation is gone or the checksums don't fit.

        The entry comes back pinned once; the caller releases it when cascading is arranged.
        """
        entry = client.reservations.pop(reservation, None)
        if entry is None:
            return None
        self.reserved_bytes -= entry.slot_bytes
        if len(checksums) != 8 * (entry.token_count // MATCH_UNIT):
            self._discard(entry)
            return None
        entry.checksums = checksums
        self._publish(entry)
        self.counters.add("store.committed")
        self.counters.add("store.committed_bytes", entry.payload_length)
        return entry

    def _publish(self, entry: Entry) -> None:
        """RESERVED or PROMOTING becomes COMMITTED: header first, state last, facts after that."""
        unfinished = entry.state
        self.memory.write_header(entry.slot, self._header_block(entry, unfinished))
        entry.state = SlotState.COMMITTED
        self.memory.mark(entry.slot, SlotState.COMMITTED, entry.generation)
        self.table.commit(entry)
        self.removed.pop(entry.id, None)
        self._announce(entry)
        self._supersede_shorter(entry)
        self._demote_passed(entry)

    def _announce(self, entry: Entry) -> None:
        if not entry.announced:
            entry.announced = True
            self._tell(HostFact(True, entry))

    def shorter_siblings(self, entry: Entry) -> list[Entry]:
        """Committed chunks whose tokens are a proper prefix of this one's."""
        return [
            child
            for child in self.table.children(entry.group, entry.parent)
            if child is not entry and entry.tokens.startswith(child.tokens) and entry.extra == child.extra
        ]

    def _supersede_shorter(self, entry: Entry) -> None:
        shorter = self.shorter_siblings(entry)
        entry.replaces = max(shorter, key=lambda child: child.end).key if shorter else b""
        for child in shorter:
            self.retire(child, "replaced")

    def _demote_passed(self, entry: Entry) -> None:
        """A window chunk that the chain's frontier has left behind goes first when room is needed.

        No hit at the frontier reads it; only a prompt that branches off further back would.
        """
        group = self.namespaces[entry.namespace].groups[entry.group]
        if group.window is None:
            return
        edge, ancestor = needed_from(group, entry.end), entry
        while ancestor.start > 0 and ancestor.end > edge:
            parent = self.table.get(entry.group, ancestor.parent)
            if parent is None or parent.state is not SlotState.COMMITTED or parent.end > ancestor.start:
                return  # the chain's head isn't here (or, in a pool that was tampered with, is no head)
            ancestor = parent
        if ancestor is not entry and ancestor.end <= edge:
            self.place.demote(ancestor)

    def abort(self, client: Client, reservation: int) -> None:
        """The client has stopped writing and gives the slot back."""
        entry = client.reservations.pop(reservation, None)
        if entry is not None:
            self.reserved_bytes -= entry.slot_bytes
            self._discard(entry)

    # --- promotion -------------------------------------------------------------------------------------

    def reserve_promotion(self, namespace_id: bytes, chunk: NewChunk, owner: bytes, tenant: str = "") -> Entry | None:
        """A slot for a tier to fill, within the promotions' share; None if there is no room. It is `tenant`'s, who
        asks for it, until the chunk's own header says whose it is."""
        namespace = self.namespaces[namespace_id]
        if not self._within(self.promoting_bytes, self.limits.promoting_share, namespace, chunk):
            return None
        entry = self._new_entry(namespace, namespace_id, tenant, chunk, SlotState.PROMOTING, owner)
        if entry is not None:
            self.promoting_bytes += entry.slot_bytes
        return entry

    def promoted(self, entry: Entry, header: ChunkHeader, tier: str) -> None:
        """The tier has filled and verified it: visible from now on, pinned once."""
        assert entry.state is SlotState.PROMOTING and header.key == entry.key and header.end == entry.end
        self.promoting_bytes -= entry.slot_bytes
        entry.checksums = header.checksums
        self.place.belongs_to(entry, header.tenant)
        entry.tokens, entry.extra = header.tokens, header.extra
        entry.tiers.add(tier)
        self._publish(entry)
        self.counters.add(f"tier.{tier}.promoted")
        self.counters.add(f"tier.{tier}.promoted_bytes", entry.payload_length)

    def promotion_failed(self, entry: Entry) -> None:
        """The tier has stopped writing without success: the slot is free again."""
        self.promoting_bytes -= entry.slot_bytes
        self._discard(entry)

    # --- re-adoption -----------------------------------------------------------------------------------

    def saw_generation(self, generation: int) -> None:
        """The pool holds this generation: new ones are greater."""
        self._generation = max(self._generation, generation)

    def adopt(self, entry: Entry) -> None:
        """Take a chunk of an earlier boot in. It is unverified, so it is not announced yet."""
        assert entry.state is SlotState.COMMITTED and not entry.verified and entry.pins == 0
        self.place.slots.claim(entry.slot)
        self.table.insert(entry)
        self.place.settle(entry)
        self.place.released(entry)
        self.use.stored(entry)
        self.counters.add("host.readopted")

    def verified(self, entry: Entry, intact: bool) -> None:
        """The result of reading an adopted chunk. It is announced now, or never served."""
        if entry.verified or entry.state is not SlotState.COMMITTED:
            return
        if intact:
            entry.verified = True
            self._announce(entry)
        else:
            self.damaged(entry)

    # --- pins ------------------------------------------------------------------------------------------

    def pin(self, entry: Entry) -> None:
        """Keep an entry's bytes in place until `unpin`."""
        if entry.pins == 0:
            self.place.pinned(entry)
        entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        """One pin less. The last one makes the entry evictable, or frees it if it was retired meanwhile."""
        assert entry.pins > 0, "every unpin has its pin"
        if entry.pins == 1 and entry.state is SlotState.RETIRED:
            self._free(entry)
            return
        entry.pins -= 1
        if entry.pins == 0:
            self.place.released(entry)

    def lease(self, client: Client, entries: list[Entry]) -> int:
        """Pin entries for a client in one step; returns the lease's id, 0 if it may hold no more."""
        if not entries or len(client.leases) >= self.limits.leases_per_client:
            return 0
        for entry in entries:
            self.pin(entry)
        self._serial += 1
        client.leases[self._serial] = entries
        return self._serial

    def release(self, client: Client, leases: Iterable[int]) -> None:
        """End leases. Deepest chunks are released first, so that a chain's head is the last to be evicted."""
        for lease in leases:
            for entry in sorted(client.leases.pop(lease, ()), key=lambda e: -e.start):
                self.unpin(entry)

    def drop_client(self, client: Client, *, writing: bool) -> None:
        """The connection is gone. With `writing` its process lives and may still write: quarantine."""
        self.release(client, list(client.leases))
        for namespace_id in client.namespaces:
            self.use.left(namespace_id)
        client.namespaces.clear()
        for entry in client.reservations.values():
            self.reserved_bytes -= entry.slot_bytes
            if writing:
                self.quarantine.setdefault(client.id, []).append(entry.slot)
            self._discard(entry, keep_slot=writing)
        client.reservations.clear()

    def end_quarantine(self, owner: bytes) -> int:
        """`owner` is dead, or says that it writes nothing any more; returns how many slots came free."""
        slots = self.quarantine.pop(owner, [])
        for slot in slots:
            self._free_mark(slot)
            self.place.drop_slot(slot)
        return len(slots)

    # --- removal ---------------------------------------------------------------------------------------

    def retire(self, entry: Entry, reason: str) -> None:
        """Take a committed entry out of sight at once; its slot is free once nobody pins it."""
        self._withdraw(entry, reason)
        if entry.pins == 0:
            self._free(entry)

    def _discard(self, entry: Entry, *, keep_slot: bool = False) -> None:
        """Drop an unfinished entry. With `keep_slot` its slot goes to quarantine."""
        assert entry.state in (SlotState.RESERVED, SlotState.PROMOTING)
        self.table.remove(entry)
        entry.state = SlotState.FREE
        self._free(entry, keep_slot=keep_slot)

    def _withdraw(self, entry: Entry, reason: str) -> None:
        assert entry.state is SlotState.COMMITTED, entry.state
        # The mark in the pool goes first: after a crash in between, the chunk is gone rather than wrong.
        # Readers compare the generation, so it stays until the slot is free.
        self.memory.mark(entry.slot, SlotState.RETIRED, entry.generation)
        self.table.remove(entry)
        entry.state = SlotState.RETIRED
        self.counters.add(f"host.removed_{reason}")
        self.removed[entry.id] = reason
        while len(self.removed) > self.limits.removed_remembered:
            self.removed.popitem(last=False)
        if entry.announced:
            self._tell(HostFact(False, entry, reason))

    def _free(self, entry: Entry, *, keep_slot: bool = False) -> None:
        if not keep_slot:
            self._free_mark(entry.slot)
        self.place.leave(entry, keep_slot=keep_slot)
        self.use.gone(entry)
        entry.state = SlotState.FREE

    def _free_mark(self, slot: SlotRef) -> None:
        self._generation += 1
        self.memory.mark(slot, SlotState.FREE, self._generation)

    def damaged(self, entry: Entry) -> None:
        """The entry's bytes are wrong: it is never served again."""
        self.counters.add("host.corrupt")
        self.retire(entry, "corrupt")

    def clear(self, namespace_id: bytes) -> int:
        """Forget every chunk of a namespace, or of all if empty; pinned ones lose their slot later."""
        gone = [e for e in self.table if e.state is SlotState.COMMITTED and namespace_id in (b"", e.namespace)]
        for entry in gone:
            self.retire(entry, "cleared")
        return len(gone)
