"""What the engine's thread and the transfer thread say to each other: plain facts, no shared state."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from forebay.kvstore.protocol import NewChunk

if TYPE_CHECKING:
    from forebay.workers.cut import Cut
    from forebay.workers.hot.mirror import HostChunk

HOST, DEVICE = "host", "device"
"""Where KV may come from, beside tiers, which go by their names."""


@dataclass(frozen=True, slots=True)
class GroupRoom:
    """One group's side of a pull: `have` are ascending runs of units that the device has already, `spare`
    blocks to copy into.

    `spare` is taken in order by the units that are missing, in theirs.
    """

    have: tuple[range, ...]
    spare: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pull:
    """Find the longest prefix in the store and copy what the device lacks of it.

    `tokens` (u32 LE) and `keys` (joined) cover the first `limit` tokens. Of no use unless more than
    `device_hit` tokens come out of it. `tenant` is who asks, `retain_s` how long it wants what is found kept. What
    `hosted` groups have isn't copied: it stays pinned, to be read in place; and of `chunks`, as many as such a request
    can come to have, the store sets room aside for those that it hasn't. What tiers have of them before `cold` tokens
    stays there until it is asked for.
    """

    request: Hashable
    root: bytes
    tokens: bytes
    keys: bytes
    limit: int
    device_hit: int
    rooms: tuple[GroupRoom, ...]
    tenant: str = ""
    retain_s: float = 0.0
    hosted: frozenset[int] = frozenset()
    chunks: int = 0
    cold: int = 0


@dataclass(frozen=True, slots=True)
class Pulled:
    """A pull ended. `hit` tokens are on the device (0: nothing was gained), `placed[g]` says which spare
    block got which unit, and `sources` where the hit's tokens came from. `stored` is how far the store
    itself reaches, None if it did not say. `hosted` are chunks that stay in host memory, `aside` is the lease under
    which room for others was set aside. `refused`: there isn't so much room ("now"), or never will be ("ever"), and so
    nothing was brought. `cold` are chunk positions of the hit whose rows tiers have, of which `most` may be in host
    memory at a time (None: all)."""

    request: Hashable
    hit: int
    placed: tuple[dict[int, int], ...]
    sources: dict[str, int] = field(default_factory=dict)
    stored: int | None = None
    hosted: tuple[HostChunk, ...] = ()
    aside: int = 0
    refused: Literal["", "now", "ever"] = ""
    cold: range = range(0)
    most: int | None = None


@dataclass(frozen=True, slots=True)
class AskRoom:
    """Have room set aside for `chunks` of a group, for a request that is under way; `admission` as in Push. Answered by
    RoomGiven."""

    request: Hashable
    admission: int
    group: int
    chunks: int
    tenant: str


@dataclass(frozen=True, slots=True)
class RoomGiven:
    """Room for it is set aside under the lease `aside`; 0: there is none now."""

    ask: AskRoom
    aside: int


@dataclass(frozen=True, slots=True)
class AskRows:
    """Bring chunks of a prefix into host memory, whose rows tiers have: `positions`, in the order in which they are of
    use. `pull` asked for the prefix, of which `hit` tokens are served; `admission` as in Push, `aside` is where there
    is room. With `apart` each is pinned under a lease of its own. `number` tells asks of one stay apart. Answered by
    RowsCame."""

    request: Hashable
    admission: int
    pull: Pull
    hit: int
    positions: tuple[int, ...]
    aside: int
    deadline_s: float
    apart: bool = False
    number: int = 0


@dataclass(frozen=True, slots=True)
class RowsCame:
    """Some of them are in host memory. Of the `lost` positions nobody has the chunk. `done`: nothing more comes."""

    ask: AskRows
    hosted: tuple[HostChunk, ...] = ()
    done: bool = False
    lost: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Opened:
    """A prefix is loaded from its back; the engine may compute from its front, as far as the table `cut` lets it. The
    first one for a request brings what host memory had at once (`part`), and asks for blocks; the others say that to
    wait any longer isn't worth it. A `Pulled` that gains nothing ends the loading."""

    request: Hashable
    cut: Cut
    part: Pulled | None = None


@dataclass(frozen=True, slots=True)
class Push:
    """One chunk to store. `blocks` hold its units in order and stay pinned until it is answered. With an `admission`
    the chunk is wanted in host memory from then on: see `Holdings.admission`. `aside` is where its request has room."""

    request: Hashable
    tenant: str
    chunk: NewChunk
    blocks: tuple[int, ...]
    bytes: int
    retain_s: float = 0.0
    admission: int = 0
    aside: int = 0

    @property
    def end(self) -> int:
        """Absolute position after the chunk's last token."""
        return self.chunk.start + len(self.chunk.tokens) // 4


@dataclass(frozen=True, slots=True)
class Pushed:
    """Its blocks are no longer read. `lost` says that the store went away before it had the chunk; `hosted` is that
    chunk in host memory, if it was wanted there and is. If not, `refused` says that the store has seen to that: it may
    also never have been asked."""

    push: Push
    lost: bool = False
    hosted: HostChunk | None = None
    refused: bool = False


@dataclass(frozen=True, slots=True)
class StoreChanged:
    """The store came (`connected`) or went."""

    connected: bool
