"""The wire protocol between a store and its clients: typed messages, batches only.

Every request carries `rid`, chosen by the client; replies carry it back and may come in any order. Bulk
bytes never travel here: they are copied through the mapped extents. `docs/protocol.md` tells the story.
One file because it is one vocabulary: whoever reads a message wants those beside it.
"""

from __future__ import annotations

from typing import Literal, Union

import msgspec

from forebay.ipc.framing import Codec
from forebay.kvstore.layout import Shard
from forebay.tiers.base import Query

PROTOCOL_VERSION = 1
CLIENT_ID_BYTES = 16
LOOKUP_TOKENS_MAX = 2 << 20
LOOKUP_CHUNKS_MAX = 1 << 14
"""Both bound what one question may take: its tokens, and the places that are looked at one by one."""
EXTRA_BYTES_MAX = 4096
WRITERS_MAX = 64
"""Connections that may write one chunk together."""
BATCH_ITEMS_MAX = 4096
DEADLINE_S_MAX = 600.0
"""No request waits longer for tiers, whatever it asks for: what it holds meanwhile must come free."""


class Message(msgspec.Struct, frozen=True, tag=True, tag_field="type", forbid_unknown_fields=True, kw_only=True):
    """Base of all messages: a map with `type` first."""


# --- session -------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of a connection. A client that comes back with its old `client` thereby says that
    none of its writes from before is still under way. `client` names a process, `group` the engine that it belongs
    to (empty: none): connections of one group may join each other's leases. A connection with a `tenant` is a view
    of that tenant: it lists, explains and counts what is the tenant's, and may do nothing else."""

    rid: int
    client: bytes
    kind: str
    version: int = PROTOCOL_VERSION
    group: bytes = b""
    tenant: str | None = None


class Welcome(Message, frozen=True):
    """Answer to Hello. The client's lock descriptor comes with it: whoever holds it open is alive."""

    rid: int
    boot: bytes
    extent_bytes: int
    version: int = PROTOCOL_VERSION


class GetExtents(Message, frozen=True):
    """Ask for extents' descriptors: those with an id of at least `after`, DESCRIPTORS_MAX a reply."""

    rid: int
    after: int = 0


class Extents(Message, frozen=True):
    """Extent ids in ascending order; their descriptors come with the frame, in this order."""

    rid: int
    extents: list[int]
    more: bool


class Register(Message, frozen=True):
    """Make a namespace known. `namespace` is its canonical encoding, `label` a name for people and topics, `shard`
    the rank that will write and read it: a shape that can't be served is refused here, with what to change."""

    rid: int
    namespace: bytes
    label: str = ""
    shard: Shard | None = None


class Registered(Message, frozen=True):
    """Answer to Register: the namespace's id."""

    rid: int
    namespace: bytes


class Refused(Message, frozen=True):
    """The request was understood and not done. `code` (version, namespace, tenant, limits, budget, unknown, busy,
    internal) is for programs, `message` for people."""

    rid: int
    code: str
    message: str


# --- reading -------------------------------------------------------------------------------------------


class Lookup(Message, frozen=True):
    """Find and pin the longest prefix that all groups can serve.

    `root` is where the chain of `tokens` (u32 LE) begins, `keys` are those at the ends of its chunks, joined: each
    whole chunk, and the last whole unit of the open one. `limit` caps the hit (a prompt must compute at least one
    token). `deadline_ms` is how long tiers may take to promote, at most DEADLINE_S_MAX; 0 answers from memory at once.
    `lease_ms` is how long the promise is wanted at most (0: what is usual); it ends before if it is released. `tenant`
    is for whom: what tiers bring is at its expense, and counts are kept by it. It has no influence on what is found.

    `tokens` may begin at a chunk start `tokens_from`: whole chunks are found by their keys alone, and a hit reads no
    others. Should an answer depend on tokens before that, the store says so (`Found.wants`).
    """

    rid: int
    namespace: bytes
    root: bytes
    tokens: bytes
    keys: bytes
    limit: int
    deadline_ms: int = 0
    extra: bytes = b""
    lease_ms: int = 0
    tenant: str = ""
    tokens_from: int = 0


class ChunkRead(msgspec.Struct, frozen=True, array_like=True):
    """One pinned chunk. Its `length` bytes are at `payload_offset` of the extent; `generation` is compared
    after the copy. What else there is to know, checksums above all, is in the slot's header, which begins at
    `slot_offset`. Valid until the lease is released. `promoted` names the tier that had to bring it for this lookup."""

    group: int
    start: int
    tokens: int
    extent: int
    slot_offset: int
    payload_offset: int
    length: int
    generation: int
    key: bytes
    promoted: str = ""


class Found(Message, frozen=True):
    """`hit` tokens are served by `chunks`, pinned under `lease` (0: nothing is pinned).

    `from_tier` counts the hit's tokens that a tier had to promote, by tier name. `pending` says that more
    would have come had the deadline been longer. `lease_ms` is how long the promise holds unless it is renewed (Join).
    `wants` of 0 or more is no answer yet: ask again, with the tokens from there on.
    """

    rid: int
    boot: bytes
    lease: int
    hit: int
    chunks: list[ChunkRead]
    from_tier: dict[str, int]
    pending: bool = False
    lease_ms: int = 0
    wants: int = -1


class Warm(Message, frozen=True):
    """Bring chunks into memory from whatever tier has them, for whoever asks for them next. Nothing stays pinned.

    `keys` (joined) are those at the ends of whole chunks of one chain, from its `root` on: no tokens are needed. The
    answer comes when all that is needed is there, or after `deadline_ms`; what is then under way still comes.
    """

    rid: int
    namespace: bytes
    root: bytes
    keys: bytes
    deadline_ms: int
    extra: bytes = b""
    tenant: str = ""


class Warmed(Message, frozen=True):
    """How many tokens from the chain's beginning memory can serve now, and of how many each tier brought something;
    `pending`: more is under way."""

    rid: int
    boot: bytes
    hit: int
    from_tier: dict[str, int]
    pending: bool


class Survey(Message, frozen=True):
    """How far would tiers reach with a prompt beyond what memory has? Fields as in Lookup, with all tokens. Nothing is
    brought, nothing pinned; tiers have `deadline_ms` to answer."""

    rid: int
    namespace: bytes
    root: bytes
    tokens: bytes
    keys: bytes
    limit: int
    deadline_ms: int
    extra: bytes = b""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A chunk position of a group that `tier` would have to bring: `length` bytes, with the header."""

    group: int
    position: int
    tier: str
    length: int


class Surveyed(Message, frozen=True):
    """Memory serves `hit` tokens now; with `places` brought as well it would serve `reach`. No promise."""

    rid: int
    boot: bytes
    hit: int
    reach: int
    places: list[Place]


class Fetch(Message, frozen=True):
    """Bring single places of a prompt into memory from whatever tier has them, and pin them, whether or not they add up
    to a hit. A hit of `limit` tokens is what they are for.

    `wanted` are (group, chunk position), in the order in which they are of use: where one can't be had, the later ones
    aren't brought. `tokens` are known from `tokens_from` on, which all of them lie behind. Whole chunks of the group
    for which room was set `aside` under that lease are brought into it. The rest as in Lookup.
    """

    rid: int
    namespace: bytes
    root: bytes
    tokens: bytes
    keys: bytes
    limit: int
    wanted: list[tuple[int, int]]
    deadline_ms: int
    extra: bytes = b""
    tenant: str = ""
    tokens_from: int = 0
    aside: int = 0


class Fetched(Message, frozen=True):
    """Those of the wanted chunks that are there, pinned under `lease` (0: none); `pending`: more is under way.

    `gone` are places that nobody has: memory lacks them, and every tier has said that it does, too. What is neither
    there nor gone may come if it is asked for again: there may be no room, or a tier doesn't answer.
    """

    rid: int
    boot: bytes
    lease: int
    chunks: list[ChunkRead]
    pending: bool = False
    gone: list[tuple[int, int]] = []


class Join(Message, frozen=True):
    """Hold leases of this connection's group as well, or renew one's own; `lease_ms` as in Lookup.

    A lease ends when the last connection that holds it has released it, is closed, or has run out of time.
    """

    rid: int
    leases: list[int]
    lease_ms: int = 0


class Shared(msgspec.Struct, frozen=True, array_like=True):
    """A lease that was joined: what in it is still pinned, in the order to which Part refers."""

    lease: int
    hit: int
    chunks: list[ChunkRead]


class Joined(Message, frozen=True):
    """The leases that could be joined; the others have ended, or belong to another group."""

    rid: int
    boot: bytes
    leases: list[Shared]
    lease_ms: int


class Hold(Message, frozen=True):
    """Pin single chunks, as tiers are asked for them: whatever memory has, in any group, whether or not it adds up to a
    hit. No tier is asked. `lease_ms` as in Lookup. It is how another host's store reads here."""

    rid: int
    queries: list[Query]
    lease_ms: int = 0


class Held(Message, frozen=True):
    """The chunks that are pinned under `lease` (0: none), and for each query its place among them, or -1."""

    rid: int
    boot: bytes
    lease: int
    chunks: list[ChunkRead]
    places: list[int]


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Some chunks of a lease, by their places in the answer that gave it."""

    lease: int
    chunks: list[int]


class Release(Message, frozen=True):
    """Give leases back, whole or in parts. No answer; what isn't known is ignored (it ended with a restart)."""

    leases: list[int]
    parts: list[Part] = []


class Damaged(Message, frozen=True):
    """A reader found these chunks' bytes wrong. They are taken out, counted and announced. No answer."""

    chunks: list[tuple[int, bytes]]


# --- writing -------------------------------------------------------------------------------------------


class NewChunk(msgspec.Struct, frozen=True, array_like=True):
    """A chunk that a client wants to store: tokens [start, start + len/4) under `parent`, ending at `key`."""

    group: int
    key: bytes
    parent: bytes
    start: int
    tokens: bytes
    extra: bytes = b""


class Reserve(Message, frozen=True):
    """Ask for room for chunks of one tenant, parents first.

    With `retain_s` they are kept so long once they are there, also if they were there before: they go only when
    everything else has gone, within the tenant's budget.

    With `writers` each chunk is written by so many connections of this one's group, each a part of it (the heads of its
    rank, say): each of them reserves it and gets the same place.

    What fits into room that was set `aside` under this lease, of the connection or of another one of its group, takes
    it from there: see SetAside.
    """

    rid: int
    namespace: bytes
    tenant: str
    chunks: list[NewChunk]
    retain_s: float = 0.0
    writers: int = 1
    aside: int = 0


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """Where one reserved chunk goes, or why it doesn't.

    `exists`: it, or a fuller chunk with the same beginning, is stored; `busy`: somebody else is writing it;
    `full`: no room could be made within the budget.

    `kept`: room had been set aside for it, so it is pinned under that lease, from its commit on or, if it `exists`,
    from now on; then its place is told as well.
    """

    status: Literal["reserved", "exists", "busy", "full"]
    reservation: int = 0
    extent: int = 0
    slot_offset: int = 0
    payload_offset: int = 0
    generation: int = 0
    kept: bool = False


class Reserved(Message, frozen=True):
    """One Slot a chunk, in the order of the request."""

    rid: int
    boot: bytes
    slots: list[Slot]


class Written(msgspec.Struct, frozen=True, array_like=True):
    """One chunk whose bytes are complete: one xxh3_64 (u64 LE) a granule. Without any, the sender's part of a chunk
    that it shares is complete."""

    reservation: int
    checksums: bytes


class Commit(Message, frozen=True):
    """These reservations are written: make them visible."""

    rid: int
    chunks: list[Written]


class Committed(Message, frozen=True):
    """How many became visible. The others' reservations had ended (a restart, an abort), or others are still to write
    their parts. Of the chunks of `to_hash`, reservations of the sender, all parts are written: it hashes them, and
    commits them with their checksums."""

    rid: int
    boot: bytes
    committed: int
    to_hash: list[int] = []


class SetAside(Message, frozen=True):
    """Set room aside for as many whole `chunks` of a group as a tenant will store for sure, so that none of them is
    refused: all of it or nothing. `extra` is the length of what these chunks have of that. `lease_ms` as in Lookup.

    Reserve draws on it by the lease; what was reserved is used up, also if it comes to nothing. Each chunk that is then
    committed, or was there before, stays pinned under this lease; what is left over is free when it ends. Fetch draws
    on it as well, for up to `for_tiers` of the chunks at a time: what it has brought makes room for others once nobody
    reads it.
    """

    rid: int
    namespace: bytes
    tenant: str
    group: int
    chunks: int
    extra: int = 0
    lease_ms: int = 0
    for_tiers: int = 0


class Aside(Message, frozen=True):
    """Answer to SetAside. `lease` 0: there isn't so much room now, nor would there `ever` be if that is false."""

    rid: int
    boot: bytes
    lease: int
    lease_ms: int
    ever: bool


class Abort(Message, frozen=True):
    """Give reservations back unwritten: none of them is being written any more. No answer."""

    reservations: list[int]


# --- keeping -------------------------------------------------------------------------------------------


class Pin(Message, frozen=True):
    """Keep these chunks (group, key) in memory for `ttl_s`, for whoever `by` says. Answered by Kept.

    `soft`: they go only when everything that nobody keeps is gone; `hard`: they don't go, within the store's budget,
    beyond which none of them is pinned (Refused, `budget`). Renews what is pinned already. Pins don't end with the
    connection, but with the store.
    """

    rid: int
    chunks: list[tuple[int, bytes]]
    kind: Literal["soft", "hard"]
    by: str
    ttl_s: float


class Unpin(Message, frozen=True):
    """End the pins that `by` has on these chunks. Answered by Kept."""

    rid: int
    chunks: list[tuple[int, bytes]]
    by: str


class Touch(Message, frozen=True):
    """These chunks were just used. With `retain_s` they are retained for a tenant, as in Reserve.

    Answered by Kept; not at all if `rid` is 0.
    """

    rid: int
    chunks: list[tuple[int, bytes]]
    tenant: str = ""
    retain_s: float = 0.0


class Kept(Message, frozen=True):
    """How many of the chunks are in memory (after Unpin: had been pinned), and the size of their slots in bytes."""

    rid: int
    boot: bytes
    chunks: int
    size: int


# --- watching ------------------------------------------------------------------------------------------


class GetStats(Message, frozen=True):
    """Ask for figures."""

    rid: int


class TenantRow(msgspec.Struct, frozen=True, array_like=True):
    """One tenant's account. `bytes` are those of its slots; `share` is what it could hold at most now if all wanted
    more; a `dormant` one has used nothing for long. Counters: its chunks that were `evicted`, of those the ones that it
    `suffered` for others' sake, others' that it `caused`; stores that were `refused`; tokens of lookups."""

    tenant: str
    bytes: int
    quota: int | None
    guarantee: int
    weight: float
    share: int
    dormant: bool
    evicted: int
    suffered: int
    caused: int
    refused: int
    asked_tokens: int
    hit_tokens: int


class Stats(Message, frozen=True):
    """Counters and gauges by dotted name, plus descriptions of namespaces, tiers, event endpoints, tenants, and of who
    keeps how much (`pins`). A view of a tenant gets no figures but that tenant's."""

    rid: int
    boot: bytes
    pid: int
    values: dict[str, float]
    info: dict[str, str]
    namespaces: list[dict[str, str]]
    tiers: list[dict[str, str]]
    pins: list[dict[str, str]] = []
    tenants: list[TenantRow] = []


class WhatIf(Message, frozen=True):
    """Ask what each tenant's hit rate would be if the pool had `budget` bytes."""

    rid: int
    budget: int


class TenantForecast(msgspec.Struct, frozen=True, array_like=True):
    """One tenant. `held` and `wanted` are its bytes in the division of the present budget and of the other one;
    `measured` its hit rate of late (None: it asked nothing), `expected` the one to expect then, `ceiling` that of a
    cache without end; `rates` are its curve, at the sizes of the answer. `asked` are the bytes of chunks behind it."""

    tenant: str
    held: int
    wanted: int
    measured: float | None
    expected: float
    ceiling: float
    asked: int
    rates: list[float]


class Foreseen(Message, frozen=True):
    """Answer to WhatIf."""

    rid: int
    budget_now: int
    budget: int
    sizes: list[int]
    tenants: list[TenantForecast]


class List(Message, frozen=True):
    """Page through chunks in no particular order, from `cursor` (0 at first)."""

    rid: int
    cursor: int = 0
    limit: int = 500
    namespace: bytes = b""


class KeptBy(msgspec.Struct, frozen=True, array_like=True):
    """Why a chunk is kept (soft, hard, retained), by whom, and for how many seconds more."""

    kind: str
    by: str
    seconds: float


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One chunk of a listing."""

    namespace: bytes
    group: int
    key: bytes
    parent: bytes
    start: int
    tokens: int
    payload: int
    tenant: str
    state: str
    pins: int
    tiers: list[str]
    kept: list[KeptBy] = []


class Rows(Message, frozen=True):
    """`cursor` continues the listing; 0 says that this was the last page."""

    rid: int
    rows: list[Row]
    cursor: int


class Explain(Message, frozen=True):
    """Why does the prefix end where it does? Fields as in Lookup; the store works the keys out."""

    rid: int
    namespace: bytes
    root: bytes
    tokens: bytes
    extra: bytes = b""


class TierReach(msgspec.Struct, frozen=True, array_like=True):
    """How far one tier reaches in one group, and why it ends there, in words."""

    tier: str
    group: str
    tokens: int
    reason: str
    detail: str = ""


class Explained(Message, frozen=True):
    """`hit` tokens would come from memory now; `reaches` has one entry a tier and group."""

    rid: int
    hit: int
    reaches: list[TierReach]


class Check(Message, frozen=True):
    """Verify every committed chunk of the pool against its checksums. Takes as long as reading it."""

    rid: int
    repair: bool = False


class Checked(Message, frozen=True):
    """What a Check found; `damaged` describes each damaged chunk in words."""

    rid: int
    chunks: int
    bytes: int
    damaged: list[str]


class Clear(Message, frozen=True):
    """Forget chunks in memory and in every tier, pinned or not: those of a namespace (all if empty), of a tenant
    (None: of all), and with a `root` those that hold the end of `tokens` or go on from there. A `root` may be any
    chunk's key, which ends at token `start`."""

    rid: int
    namespace: bytes = b""
    tenant: str | None = None
    root: bytes = b""
    tokens: bytes = b""
    extra: bytes = b""
    start: int = 0


class Cleared(Message, frozen=True):
    """How many chunks memory lost, and each tier; -1 for a tier that doesn't say in time or can't tell which
    chunks are meant (`docs/protocol.md`)."""

    rid: int
    chunks: int
    tiers: dict[str, int] = {}


Request = Union[
    Hello, GetExtents, Register, Lookup, Warm, Survey, Fetch, Hold, Join, Release, Damaged, Reserve, Commit, Abort,
    SetAside, Pin, Unpin, Touch, GetStats, WhatIf, List, Explain, Check, Clear,
]  # fmt: skip
Reply = Union[
    Welcome, Extents, Registered, Refused, Found, Warmed, Surveyed, Fetched, Held, Joined, Reserved, Committed, Aside,
    Kept, Stats, Foreseen, Rows, Explained, Checked, Cleared,
]  # fmt: skip

REQUESTS: Codec[Request] = Codec(Request)
REPLIES: Codec[Reply] = Codec(Reply)
