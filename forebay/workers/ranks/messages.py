"""What ranks tell each other: msgpack, each message of a known type, never anything that runs."""

from __future__ import annotations

import msgspec

from forebay.ipc.framing import Codec
from forebay.kvstore.protocol import NewChunk
from forebay.models.loading import IndexKeys
from forebay.models.parallel import Parallel
from forebay.workers.hot.telling import HotDone, HotShape, HotStep

FRAME_BYTES_MAX = 512 << 20
"""A step's tables are its largest part: for each group, and twice for one with hot buffers, 256 requests of a million
tokens have 64 MiB of them."""


class Start(msgspec.Struct, tag=True, frozen=True):
    """The first message: who you are, and what to load. `threads` are compute threads; `patience_s` is how long ranks
    wait for one another."""

    rank: int
    parallel: Parallel
    directory: str
    dtype: str
    kv_dtype: str | None
    device: str
    threads: int
    rendezvous: str
    patience_s: float
    index_keys: IndexKeys = "model"


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """The weights are in memory."""


class Meet(msgspec.Struct, tag=True, frozen=True):
    """All have loaded: meet at the rendezvous, now."""


class Pools(msgspec.Struct, tag=True, frozen=True):
    """Make the KV pools, of so many blocks by group, and hot buffers if there are to be any. `namespace` is encoded;
    `label` is the model's name."""

    namespace: bytes
    label: str
    blocks: dict[str, int]
    hot: HotShape | None = None


class Table(msgspec.Struct, frozen=True, array_like=True):
    """Where one group keeps a batch's KV: `blocks` i32 LE, a row for each sequence, `slots` i64 LE."""

    blocks: bytes
    slots: bytes


class Step(msgspec.Struct, tag=True, frozen=True):
    """Compute this batch. `tokens` i64 LE and `rows`, those whose logits are wanted, i64 LE; of each sequence how many
    tokens are new, and how many there were. One with `hot` is answered (`HotDone`)."""

    tokens: bytes
    rows: bytes
    spans: list[tuple[int, int]]
    groups: dict[str, Table]
    hot: HotStep | None = None


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of the pool: a payload, or whole granules of one. `generation` is its slot's."""

    extent: int
    offset: int
    length: int
    generation: int = 0


class Attach(msgspec.Struct, tag=True, frozen=True):
    """Connect to the store of this boot, as one of this group."""

    address: str
    group: bytes
    boot: bytes


class Detach(msgspec.Struct, tag=True, frozen=True):
    """End the connection, if there is one."""


class See(msgspec.Struct, tag=True, frozen=True):
    """Map what the store's pool has been extended by: from now on steps may name what lies there."""


class Load(msgspec.Struct, tag=True, frozen=True):
    """Copy your slice of these granules into these blocks, once you are through with `after` steps."""

    after: int
    group: int
    place: Place
    blocks: list[int]


class Share(msgspec.Struct, tag=True, frozen=True):
    """Ask the store for your part of these chunks, which `writers` ranks write together, each at the place that rank 0
    was given."""

    namespace: bytes
    tenant: str
    retain_s: float
    writers: int
    chunks: list[NewChunk]
    places: list[Place]


class Fill(msgspec.Struct, tag=True, frozen=True):
    """Copy your slice of these blocks into the chunk of that index in the last `Share`, after so many steps."""

    after: int
    index: int
    blocks: list[int]


class Finish(msgspec.Struct, tag=True, frozen=True):
    """Tell the store that your parts of these are written; give up those of the others in the last `Share`."""

    indices: list[int]


class Done(msgspec.Struct, tag=True, frozen=True):
    """The last order was carried out, but for what `failed` says. `given` are indices of a `Share` that were given."""

    failed: str = ""
    given: list[int] = []


ToFollower = Start | Meet | Pools | Step
FromFollower = Loaded | HotDone
Order = Attach | Detach | See | Load | Share | Fill | Finish

TO_FOLLOWER: Codec[ToFollower] = Codec(ToFollower, FRAME_BYTES_MAX)
FROM_FOLLOWER: Codec[FromFollower] = Codec(FromFollower)
ORDERS: Codec[Order] = Codec(Order, FRAME_BYTES_MAX)
ANSWERS: Codec[Done] = Codec(Done)
