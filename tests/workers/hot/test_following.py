"""A rank that follows: from what it is told it comes to the decisions of the one that schedules, and to the same bytes,
where it has mapped the pool somewhere else; a page that it can't find there makes void what reads it, on all ranks.

The real books, a pool in a file that is mapped twice, and a rank that may be behind: with a store that has gone.
"""

from __future__ import annotations

import mmap
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from forebay.ipc.framing import HEAD_BYTES as FRAME_HEAD
from forebay.kernels.batch import pack_batch
from forebay.kernels.chosen import Selection
from forebay.kvstore.header import SlotState, mark_slot, slot_generation
from forebay.scheduler.request import Request
from forebay.workers.block_pool import GroupPool
from forebay.workers.hot.book import HotBook
from forebay.workers.hot.following import HEAD_BYTES, FollowingBook, Mapped, done
from forebay.workers.hot.mirror import HostChunk
from forebay.workers.hot.resolving import Stay, StepResolver
from forebay.workers.hot.settings import settings_for
from forebay.workers.hot.telling import Changes, ChunkPlace, HotDone, HotShape
from forebay.workers.ranks.messages import FROM_FOLLOWER, TO_FOLLOWER, Step
from tests.workers.hot.test_books import CHUNK, GRANULE, info

SEEDS = int(os.environ.get("FOREBAY_HOT_SEEDS", "150")) // 10
PARTS = 5
TOP_K, ROWS, LAYERS, POOL_BYTES = 16, 48, 2, 4 << 20


@dataclass
class Two:
    """Two ranks. Of every request all pages are in host memory alone, or nowhere; some share chunks."""

    folder: Path
    rng: random.Random
    boot: int = 1
    used: int = 0
    stale: bool = False
    counted: int = 0
    void: int = 0
    cold: int = 0
    chunks: list[HostChunk] = field(default_factory=list)
    written: dict[ChunkPlace, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = settings_for(info(), ROWS, regions=3, chunk_tokens=CHUNK, deadline_s=5)
        pool = GroupPool(30, sharers_pay=False, on_evicted=lambda key: None)
        self.book = HotBook(settings, pool, GRANULE, 40, lambda leases: None)
        self.book.changes = Changes()
        with (self.folder / "pool").open("w+b") as file:
            file.truncate(POOL_BYTES)
            self.here, self.there = (memoryview(mmap.mmap(file.fileno(), POOL_BYTES)) for _ in range(2))
        self.gone = memoryview(bytearray(POOL_BYTES))  # other bytes, and the same generations
        shape = HotShape("latent", settings.regions, ROWS, dict(settings.sharers), GRANULE)
        self.follower = FollowingBook(shape, self._mapped, torch.device("cpu"))
        self.pools = [torch.zeros(30, LAYERS, 1, 1, 16, 8) for _ in range(2)]
        self.free = list(range(30))

    def _mapped(self) -> Mapped:
        return Mapped(b"%d" % (self.boot - self.stale), {7: self.gone if self.stale else self.there})

    def _chunk(self) -> HostChunk:
        slot, begin = self.used, self.used + HEAD_BYTES
        self.used = begin + CHUNK // 16 * GRANULE
        for memory in (self.here, self.gone):
            mark_slot(memory[slot:begin], SlotState.COMMITTED, 3)
        self.here[begin : self.used] = self.rng.randbytes(self.used - begin)
        head, place = self.here[slot:begin], ChunkPlace(b"%d" % self.boot, 7, slot, begin, 3)
        payload = self.here[begin : self.used]
        written = torch.frombuffer(bytearray(payload), dtype=torch.int32).view(-1, LAYERS, 16, 8)
        self.written[place] = written.transpose(1, 2).reshape(CHUNK, LAYERS, 8)
        return HostChunk(0, 0, CHUNK, payload, 0, 0, lambda: slot_generation(head) == 3, place)

    # --- events ----------------------------------------------------------------------------------------

    def come(self) -> None:
        """A request with as many chunks as fit; each may be another one's as well."""
        count = self.rng.randrange(1, 5)
        if not self.book.can_open() or not self.book.host_room(2 * count):
            return
        self.counted += 1
        request = Request(self.counted, [0] * (CHUNK * count + 1), CHUNK * count + 1)
        self.book.admit(request)
        self.book.open_region(request.key, [self.free.pop(self.rng.randrange(len(self.free))) for _ in range(3)])
        self.book.follow(request.key, [-1] * (2 * count))
        for number in range(count):
            if self.rng.random() < 0.1:
                continue  # it is nowhere
            known = [chunk for chunk in self.chunks if chunk.start == number * CHUNK]
            chunk = self.rng.choice(known) if known and self.rng.random() < 0.5 else self._chunk()
            chunk = HostChunk(
                0, number * CHUNK, CHUNK, chunk.payload, 0, 0, chunk.witness, chunk.place
            )  # fmt: skip
            self.chunks.append(chunk)
            self.book.hosted(request.key, self.book.of(request.key).admission, chunk, [-1] * (2 * count))

    def leave(self) -> None:
        keys = [key for key, _ in self.book.everybody()]
        if keys:
            self._end(self.rng.choice(keys))

    def _end(self, key: object) -> None:
        self.free += self.book.close(key).blocks
        held = [chunk for _, request in self.book.everybody() for chunk in request.chunks]
        self.chunks = [chunk for chunk in self.chunks if any(chunk is other for other in held)]

    def store_dies(self) -> None:
        """All that is read there is nowhere: these start over, and find another store."""
        for key in self.book.lose_host():
            self._end(key)
        self.boot += 1

    def falls_behind(self) -> None:
        """The other rank hasn't connected to the new store yet, or has by now."""
        self.stale = not self.stale

    def give_away(self) -> None:
        """One slot is another chunk's now."""
        if self.chunks and (place := self.rng.choice(self.chunks).place) is not None:
            self.chunks = [chunk for chunk in self.chunks if chunk.place != place]  # nobody finds it any more
            mark_slot(self.here[place.slot_offset : place.payload_offset], SlotState.COMMITTED, 4)
            self.here[place.payload_offset] ^= 255

    # --- a step ----------------------------------------------------------------------------------------

    def read(self) -> None:
        """Some of them read: one row of positions, or two."""
        keys = [key for key, _ in self.book.everybody() if self.rng.random() < 0.8]
        if not keys:
            return
        pages = {key: self.book.follow(key, [-1] * len(self.book.of(key).pages)) for key in keys}
        stays = [Stay(key, self.book.of(key).region, pages[key].resident, pages[key].host) for key in keys]
        mine = StepResolver(self.book, stays, self.pools[0], self.book.changes)
        told = TO_FOLLOWER.open(*_split(TO_FOLLOWER.encode(Step(b"", b"", [], {}, mine.told))))
        assert isinstance(told, Step) and told.hot is not None
        theirs = self.follower.begin(told.hot, {"latent": self.pools[1]})
        selection = self._select([16 * len(pages[key]) for key in keys])
        mine_at, theirs_at = (_resolve(resolver, selection) for resolver in (mine, theirs))
        assert torch.equal(mine_at, theirs_at)
        heard = FROM_FOLLOWER.open(*_split(FROM_FOLLOWER.encode(done(theirs))))
        assert isinstance(heard, HotDone)
        mine.hear([heard])
        void = set(mine.end().lost)
        cold = {keys[at] for at in heard.cold}
        assert {keys[at] for at in heard.void} | cold == void, "nothing happened that the other hasn't seen"
        self.cold += len(cold)
        self._check(keys, selection, mine_at, void)
        self.void += len(void)
        for key in void:
            if key not in cold or self.rng.random() < 0.5:  # what the others have copied is right, and stays
                self._end(key)

    def _select(self, lengths: list[int]) -> Selection:
        rows = [at for at in range(len(lengths)) for _ in range(self.rng.choice([1, 1, 2]))]
        positions = torch.full((len(rows), TOP_K), -1)
        for row, at in enumerate(rows):
            found = self.rng.sample(range(lengths[at]), self.rng.randrange(TOP_K + 1))
            positions[row, : len(found)] = torch.tensor(found)
        return Selection(torch.arange(len(rows)), torch.tensor(rows), positions)

    def _check(self, keys: list[object], selection: Selection, slots: torch.Tensor, void: set[object]) -> None:
        """What isn't void is what was stored, on both ranks and in both layers; and they have the same slots."""
        rows = [pool.view(torch.int32).permute(0, 2, 3, 4, 1, 5).reshape(-1, LAYERS, 8) for pool in self.pools]
        for at, positions, found in zip(selection.sequences, selection.positions, slots, strict=True):
            there = positions >= 0
            if keys[at] in void or not bool(there.any()):
                continue
            request = self.book.of(keys[at])
            written = torch.full((16 * len(request.pages), LAYERS, 8), -1, dtype=torch.int32)
            for chunk in request.chunks:
                assert chunk.place is not None
                written[chunk.start : chunk.start + CHUNK] = self.written[chunk.place]
            for mine in rows:
                assert torch.equal(mine[found[there]], written[positions[there]]), keys[at]
        mine, theirs = (book.buffers.of(0) for book in (self.book, self.follower))
        assert torch.equal(mine.held, theirs.held) and torch.equal(mine.order, theirs.order)
        assert self.book.counters["hot.ranks_parted"] == 0
        assert self.book.counters["hot.misses_elsewhere"] == self.book.counters["hot.misses"]


def _resolve(resolver: StepResolver, selection: Selection) -> torch.Tensor:
    batch = pack_batch([([0], 0)], {})  # which it doesn't look at
    slots = resolver.resolve(0, batch, selection)
    for layer in range(LAYERS):
        resolver.prepare(layer, batch, selection, slots)
    return slots


def _split(frame: bytes) -> tuple[bytes, bytes]:
    return frame[:FRAME_HEAD], frame[FRAME_HEAD:]


@pytest.mark.parametrize("part", range(PARTS))
def test_another_rank_comes_to_the_same_decisions_and_bytes(part: int, tmp_path: Path) -> None:
    void = cold = 0
    for seed in range(part, SEEDS, PARTS):
        two = Two(tmp_path, random.Random(seed))
        deeds = [two.come, two.leave, two.store_dies, two.falls_behind, two.give_away, two.read]
        for _ in range(150):
            two.rng.choices(deeds, weights=[3, 1, 0.15, 0.15, 0.15, 8])[0]()
        assert two.book.counters["hot.misses"] > 0, seed
        void, cold = void + two.void, cold + two.cold
    assert void > cold > 0


def test_what_was_told_once_is_not_told_again_and_the_last_of_a_number_counts() -> None:
    changes, places = Changes(), [ChunkPlace(b"b", 1, 0, 64, generation) for generation in (1, 2)]
    changes.arrive(3, 0, places[0])
    changes.arrive(4, 1, places[0])
    changes.end([3])
    changes.arrive(3, 1, places[1])
    changes.open(0, [1, 2, 3])
    changes.open(0, [4, 5, 6])
    opened, gone, arrived = changes.take()
    assert opened == {0: [4, 5, 6]} and gone == [3]
    assert {one.place: one.pages for one in arrived} == {places[0]: [(4, 1)], places[1]: [(3, 1)]}
    assert changes.take() == ({}, [], [])
