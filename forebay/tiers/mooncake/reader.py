"""Loading: from the pool of hosts into an area of our own, then into the slot, and verified there.

Not straight into the slot: the library gives a transfer up after some seconds, but a host that was only stopped may
go on with it later, and the slot would be somebody else's by then. So a transfer never has a slot's address, a load can
be reported as late while its call still hangs, and nobody has to kill the process, with the memory that it lends.
What such a transfer does to the area doesn't matter: bytes are verified where they are served from.
"""

from __future__ import annotations

import ctypes
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate

from forebay.errors import CorruptChunk, ForeignChunk
from forebay.kvstore.header import (
    HEADER_BYTES_MAX,
    ChunkHeader,
    SlotState,
    decode_header,
    header_bytes,
    mark_slot,
)
from forebay.kvstore.layout import ALIGNMENT, round_up
from forebay.tiers.base import ChunkId, JobResult
from forebay.tiers.chunks import stored_header, verify_payload
from forebay.tiers.mooncake.complaints import complain
from forebay.tiers.mooncake.finder import Finder
from forebay.tiers.mooncake.holdings import Holdings
from forebay.tiers.mooncake.loads import Load
from forebay.tiers.mooncake.memory import Area, Areas
from forebay.tiers.mooncake.remote import TRANSFER_FAILED, Place, Remote, is_absent, span_of
from forebay.tiers.mooncake.removals import Removals
from forebay.tiers.mooncake.suspects import Suspects
from forebay.tiers.mooncake.watch import Watch
from forebay.tiers.timers import Timers

log = logging.getLogger("forebay.tier.mooncake")

FAILED_S, HUNG_S = 2.0, 15.0
"""So long a host is left alone: after a failure, which costs a second or two; and after a hang, a little longer than
a master takes to notice by default, after which it names other hosts, or none."""


class TooLarge(CorruptChunk):
    """The chunk is whole, but the slot doesn't take it."""


class Reader:
    """Runs batches of loads."""

    def __init__(
        self,
        remote: Remote,
        holdings: Holdings,
        removals: Removals,
        finder: Finder,
        suspects: Suspects,
        timers: Timers,
        clock: Callable[[], float],
    ) -> None:
        self._remote, self._holdings, self._removals = remote, holdings, removals
        self._finder, self._suspects, self._clock = finder, suspects, clock
        self.areas = Areas(remote.register)
        self.counts: Counter[str] = Counter()
        self.watch = Watch(timers, clock)

    def run(self, batch: Sequence[Load], number: int) -> None:
        """Load a batch; each is reported once, by us or by its deadline."""
        try:
            hosts = self._by_host(batch)
            for endpoint, loads in hosts.items():
                self._get(endpoint, loads, number)
        except Exception:
            self.counts["task_crashes"] += 1
            log.exception("loading a batch failed")
        finally:
            for load in batch:
                self.fail(load, "io")

    def fail(self, load: Load, reason: str) -> None:
        """End a load without its bytes, if it hasn't ended yet."""
        if load.give_up(reason):
            self.counts[f"loads_{reason}"] += 1

    def _by_host(self, batch: Sequence[Load]) -> dict[str, list[tuple[Load, Place]]]:
        """Who has them. Those that nobody has, or only a host that hangs, are ended."""
        wanted = [load for load in batch if load.open]
        places: dict[ChunkId, Place | None] = {
            load.job.chunk: place for load in wanted if (place := self._finder.place(load.job.chunk))
        }
        if unknown := list({load.job.chunk for load in wanted} - places.keys()):
            places |= self._remote.find(unknown, {})
        hosts: dict[str, list[tuple[Load, Place]]] = {}
        for load in wanted:
            if load.job.chunk not in places:
                self.fail(load, "io")
                continue
            place = places[load.job.chunk]
            if place is None or self._holdings.is_leaving(load.job.chunk):
                self._missing(load)
            elif self._suspects.hangs(place.endpoint):
                self.counts["loads_spared"] += 1
                self.fail(load, "io")
            elif place.length > load.job.capacity + HEADER_BYTES_MAX:
                self.fail(load, "corrupt")
            else:
                hosts.setdefault(place.endpoint, []).append((load, place))
        return hosts

    def _missing(self, load: Load) -> None:
        self.fail(load, "missing")
        self._removals.vanished(load.job.chunk, "vanished")

    def _get(self, endpoint: str, loads: Sequence[tuple[Load, Place]], number: int) -> None:
        # Each key once: of one that is named twice, the library fills one target and calls both read.
        places = {load.job.chunk: place for load, place in loads}
        sizes = [round_up(place.length, ALIGNMENT) for place in places.values()]
        area = self.areas.of(number, sum(sizes))
        offsets = dict(zip(places, accumulate(sizes, initial=0), strict=False))
        targets = [area.span(offsets[chunk], place.length) for chunk, place in places.items()]
        with self.watch.call(lambda: self._hangs(endpoint)):
            codes = dict(zip(places, self._remote.get(list(places), targets), strict=True))
        if TRANSFER_FAILED not in codes.values():
            self._suspects.trust(endpoint)  # else it was the master that took so long
        for load, place in loads:
            code = codes[load.job.chunk]
            if code == place.length:
                self._take(load, area, offsets[load.job.chunk], code)
            elif code >= 0 or is_absent(code):
                # Of another length by now: stored anew since its place was known.
                self._missing(load)
            else:
                complain("load", "a load from %s failed (code %d)", endpoint, code)
                if code == TRANSFER_FAILED:
                    self._suspects.suspect(endpoint, FAILED_S)
                self._finder.forget([load.job.chunk])
                self.fail(load, "io")

    def _hangs(self, endpoint: str) -> None:
        complain("hang", "%s hangs: it is left alone for a while", endpoint)
        self._suspects.suspect(endpoint, HUNG_S)

    def _take(self, load: Load, area: Area, at: int, length: int) -> None:
        """Copy a chunk that has come into its slot, and verify it there."""
        if not load.claim():
            return
        result = JobResult(load.job.id, False, "io")
        try:
            result = self._verified(load, area.memory[at : at + length])
            if result.ok and self._clock() > load.due:
                result = JobResult(load.job.id, False, "late")
        except CorruptChunk as error:
            result = JobResult(load.job.id, False, self._refused(load.job.chunk, error))
        finally:
            self.counts[f"loads_{result.reason}" if result.reason else "loads_ok"] += 1
            load.finish(result)

    def _verified(self, load: Load, stored: memoryview) -> JobResult:
        told = decode_header(stored)
        private = bytearray(stored[: header_bytes(told.token_count, len(told.extra))])
        mark_slot(memoryview(private), SlotState.COMMITTED, 0)  # it came with those of the slot it was stored from
        block = bytes(private)
        header = stored_header(block)
        self._check(load, header, len(stored) - len(block))
        target = load.memory[: header.payload_length]
        # Unlike an assignment this lets other threads run.
        ctypes.memmove(span_of(target).address, span_of(stored).address + len(block), len(target))
        verify_payload(header, target)
        self._holdings.touch([load.job.chunk], loaded=True)
        self.counts["loaded_bytes"] += len(stored)
        return JobResult(load.job.id, True, "", block, len(target))

    def _check(self, load: Load, header: ChunkHeader, payload_length: int) -> None:
        if ChunkId(header.group, header.key) != load.job.chunk:
            raise CorruptChunk("the pool holds another chunk under this key")
        if header.payload_length != payload_length:
            raise CorruptChunk(f"payload of {payload_length} bytes, its header says {header.payload_length}")
        if payload_length > load.job.capacity:
            raise TooLarge(f"payload of {payload_length} bytes, the slot takes {load.job.capacity}")

    def _refused(self, chunk: ChunkId, error: CorruptChunk) -> str:
        if isinstance(error, ForeignChunk):
            return "missing"  # another version's, which may want it back
        if not isinstance(error, TooLarge):
            complain("corrupt", "chunk %s is removed from the pool: %s", chunk.key.hex(), error)
            self._removals.leave([chunk], "corrupt")
        return "corrupt"
