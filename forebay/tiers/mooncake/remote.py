"""The pool as this tier sees it: keys, addresses, lengths, and codes for what went wrong.

Calls block, for `rpc_timeout_s` where only the master is asked; a transfer from or to a host that hangs takes some ten
times `transfer_timeout_s`. All may be called from any thread.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from forebay.errors import TierUnavailable
from forebay.tiers.base import ChunkId
from forebay.tiers.mooncake.library import load_library
from forebay.tiers.mooncake.options import Address, MooncakeOptions

CONNECT_S, _RECONNECT_S = 2.0, 0.5
LOCAL_BUFFER_BYTES = 16 << 20
"""Memory that the library keeps for calls that we don't make."""

NO_ROOM = -200
"""No host of the pool has room. The pool evicts in the background, so a little later there may be."""
NOT_FOUND = -704
LEASE_EXPIRED = -707
"""The chunk may have been evicted while it was read: what came may be something else."""
TRANSFER_FAILED = -800
"""A host of the pool didn't do its part."""
_RPC = range(-999, -899)
_RPC_FAILED = -900


def is_absent(code: int) -> bool:
    """Is there nothing under this key any more?"""
    return code in (NOT_FOUND, LEASE_EXPIRED)


def is_rpc_failure(code: int) -> bool:
    """Did the master not answer?"""
    return code in _RPC


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of this process's memory."""

    address: int
    length: int


@dataclass(frozen=True, slots=True)
class Place:
    """A stored value's length, and which host has its bytes."""

    length: int
    endpoint: str


def span_of(memory: memoryview) -> Span:
    """Where this memory lies. It must stay mapped as long as the span is used."""
    return Span(ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory))


def route_to(address: Address, timeout_s: float = CONNECT_S) -> str:
    """This host's address that faces `address`. Raises TierUnavailable if nobody listens there."""
    try:
        with socket.create_connection((address.host, address.port), timeout_s) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise TierUnavailable(f"no mooncake_master answers on {address}: {error}") from error


class Remote:
    """A client of one pool, which lends it memory too."""

    unreachable = False
    """Was there no master when it was last asked? One that listens but doesn't answer isn't meant."""

    def __init__(self, name: str, options: MooncakeOptions) -> None:
        """Connect. Raises ConfigError without the library, TierUnavailable without a master."""
        facing = route_to(options.address)  # the library itself would try for a minute and a half
        hostname = options.hostname or facing
        library = load_library(name, options)
        self._prefix = options.prefix
        self._master = options.address
        self._master_failed = False
        self._config = library.ReplicateConfig()
        self._config.replica_num = options.replicas
        self._store = library.MooncakeDistributedStore()
        code = self._store.setup(
            hostname, "P2PHANDSHAKE", options.segment_bytes, LOCAL_BUFFER_BYTES, options.protocol, options.device,
            options.master,
        )  # fmt: skip
        if code != 0:
            raise TierUnavailable(
                f"tier {name!r}: Mooncake can't join the pool of {options.master} as {hostname} over "
                f"{options.protocol} with a segment of {options.segment_bytes} bytes (code {code})"
            )

    def _asked(self, count: int, ask: Callable[[], Iterable[int]]) -> list[int]:
        """Codes of a call that takes the master. After one that failed, it is first seen whether anybody listens:
        without, the library would try for seconds each time."""
        if self._master_failed:
            try:
                route_to(self._master, _RECONNECT_S)
            except TierUnavailable:
                self.unreachable = True
                return [_RPC_FAILED] * count
        codes = [int(code) for code in ask()]
        self._master_failed = any(is_rpc_failure(code) for code in codes)
        self.unreachable = _RPC_FAILED in codes
        return codes

    def key(self, chunk: ChunkId) -> str:
        """A chunk's name in the pool."""
        return f"{self._prefix}/{chunk.group:x}/{chunk.key.hex()}"

    def register(self, memory: memoryview) -> bool:
        """Let transfers use this memory, which must stay mapped until `close`. False if that failed."""
        span = span_of(memory)
        return int(self._store.register_buffer(span.address, span.length)) == 0

    def put(self, chunks: Sequence[ChunkId], values: Sequence[Span]) -> list[int]:
        """Store values. A code each, 0 if it is stored or was there already: what has a key keeps it."""
        keys = [self.key(chunk) for chunk in chunks]
        addresses, sizes = [value.address for value in values], [value.length for value in values]
        return self._asked(len(keys), lambda: self._store.batch_put_from(keys, addresses, sizes, self._config))

    def get(self, chunks: Sequence[ChunkId], targets: Sequence[Span]) -> list[int]:
        """Read values into memory. The length of each, or a code.

        A call that fails may leave transfers behind that write into the targets later.
        """
        keys = [self.key(chunk) for chunk in chunks]
        addresses, sizes = [target.address for target in targets], [target.length for target in targets]
        return self._asked(len(keys), lambda: self._store.batch_get_into(keys, addresses, sizes))

    def exist(self, chunks: Sequence[ChunkId]) -> list[int]:
        """1 or 0 each, or a code. A host that died counts as there until the master has noticed."""
        keys = [self.key(chunk) for chunk in chunks]
        return self._asked(len(keys), lambda: self._store.batch_is_exist(keys))

    def find(self, chunks: Sequence[ChunkId], known: Mapping[ChunkId, Place]) -> dict[ChunkId, Place | None]:
        """Length and host of each, None if no host has it in memory. Those for which the master didn't answer aren't
        in the result. Where it has been known, it isn't asked for again, only whether it is there."""
        codes = dict(zip(chunks, self.exist(chunks), strict=True))
        absent: dict[ChunkId, Place | None] = {chunk: None for chunk, code in codes.items() if code == 0}
        there = [chunk for chunk, code in codes.items() if code == 1]
        # Telling where takes ten times as long as telling whether; and for what is absent, a line in the log.
        new = [chunk for chunk in there if chunk not in known]
        return absent | {chunk: known[chunk] for chunk in there if chunk in known} | (self._places(new) if new else {})

    def _places(self, chunks: Sequence[ChunkId]) -> dict[ChunkId, Place | None]:
        by_key = {self.key(chunk): chunk for chunk in chunks}
        found: dict[ChunkId, Place | None] = {}
        for key, replicas in self._store.batch_get_replica_desc(list(by_key)).items():
            buffers = [r.get_memory_descriptor().buffer_descriptor for r in replicas if r.is_memory_replica()]
            places = [Place(int(buffer.size), str(buffer.transport_endpoint)) for buffer in buffers]
            found[by_key[key]] = places[0] if places else None
        return found

    def remove(self, chunks: Sequence[ChunkId]) -> list[int]:
        """Remove at once, also what somebody is reading: their checksums, or their lease, tell them. Codes."""
        keys = [self.key(chunk) for chunk in chunks]
        return self._asked(len(keys), lambda: self._store.batch_remove(keys, True))

    def remove_all(self) -> int:
        """Remove everything with our prefix, whoever stored it. How many, or a code."""
        pattern = f"^{self._prefix.replace('.', '[.]')}/"
        return self._asked(1, lambda: [self._store.remove_by_regex(pattern, True)])[0]

    def close(self) -> None:
        """Take the segment back, with what it holds. Blocks for a second, longer without a master."""
        self._store.close()
