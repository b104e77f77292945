"""The worker's books and scheduler alone: who is admitted, squeezed, made to wait. Nothing is computed or copied."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from forebay.kvstore.identity import MATCH_UNIT, Namespace, root_key
from forebay.models.base import KVGroup, ModelInfo, Sparsity
from forebay.scheduler.batch import BatchScheduler
from forebay.scheduler.plan import Limits
from forebay.scheduler.request import Request
from forebay.workers.assembly import namespace_of
from forebay.workers.config import WorkerConfig
from forebay.workers.holdings import Holdings
from forebay.workers.hot.making import make_holdings
from forebay.workers.hot.mirror import HostChunk
from forebay.workers.hot.settings import default_rows
from forebay.workers.moves import Pull, Pulled, Push, Pushed, RoomGiven
from forebay.workers.prefix import GroupShape
from forebay.workers.sealing import DeviceMemory

CHUNK, STEP = 256, 4096
STEPS, DECODED = 3, 40
"""Steps after each newcomer, and at the end."""
ROOM = 1
"""The lease of whatever room is asked for: the store has enough of it."""
POOL_SHARE = 8
"""Rows get an eighth of the device where requests are hot: what is left holds index keys."""


def tiny_glm() -> ModelInfo:
    """Two layers, the second of which shares what the first chooses; an index of two heads of 32, its keys in FP8."""
    groups = (KVGroup("latent", "latent", (0, 1), 1, 64), KVGroup("index", "indexer", (0,), 1, 32, scaled=True))
    return ModelInfo("glm_moe_dsa", 512, 64, 2, 1 << 21, groups, sparse=Sparsity("latent", 512, (0, 0)))


class _Nobody:
    """Is told of units, and forgets them."""

    def stored(self, group: int, parent: bytes | None, keys: Sequence[bytes], tokens: Sequence[int]) -> None:
        """See `PoolListener`."""

    def removed(self, group: int, key: bytes) -> None:
        """See `PoolListener`."""


class Books:
    """A worker of `device` bytes, for requests of `context` tokens."""

    def __init__(self, info: ModelInfo, device: int, context: int, *, hot: bool) -> None:
        dtype = torch.float32
        self._context, self._hot = context, hot
        namespace: Namespace = namespace_of(info, "float32", b"w" * 32, CHUNK)
        sizes = [group.granule_bytes(dtype) for group in info.kv_groups]
        self._granule = sizes[0]
        config = WorkerConfig(
            Path("none"), "none", store="none", device_memory=device, chunk_tokens=CHUNK, hot_buffers=hot,
            max_num_seqs=256, max_num_batched_tokens=STEP, hot_buffer_host_tokens=1 << 28,
            hot_buffer_pool_tokens=device // POOL_SHARE // sizes[0] * MATCH_UNIT if hot else None,
        )  # fmt: skip
        shapes = [GroupShape(geometry, CHUNK, STEP) for geometry in namespace.groups]
        self._holdings: Holdings = make_holdings(config, info, shapes, sizes, _Nobody(), lambda _: None)
        self._pushes: list[Push] = []
        self._memory = DeviceMemory(self._holdings, CHUNK, self._take)
        self._scheduler = BatchScheduler(Limits(STEP, 256, 1024), self._memory, lambda: 0.0)
        self._holdings.ask_store = True
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (as long as what is mapped of it)
        self._room, self._used = memoryview(b""), 0
        self.host_bytes = 0

    @staticmethod
    def rows(info: ModelInfo) -> int:
        """Of a region."""
        assert info.sparse is not None
        return default_rows(info.sparse.top_k)

    def fill(self, most: int) -> int:
        """Submit up to `most` requests and let them decode; how many ran at a time before one waited or gave way."""
        for number in range(most):
            # Each differs from the first token on, so nobody's prefix is another's.
            request = Request(number, [number % 250, number // 250, *([7] * (self._context - 2))], self._context)
            self._scheduler.submit(request)
            self._holdings.expect(request, root_key(b"n" * 32, b""), "")
            if not self._admitted(number + 1, STEPS):
                return number
        return most if self._admitted(most, DECODED) else most - 1

    def _admitted(self, wanted: int, steps: int) -> bool:
        """A few steps: are so many running, and has nobody given way?"""
        for _ in range(steps):
            plan = self._scheduler.plan()
            for request in plan.loads:
                self._holdings.settle(request, self._pulled(self._holdings.pull(request)))
                self._scheduler.load_ended(request.key)
            for ask in self._holdings.room_asks():
                self._holdings.room_given(RoomGiven(ask, ROOM))
            for work in plan.works:
                work.request.computed = work.end
                if work.samples:
                    work.request.tokens.append(9)
                    self._holdings.holding(work.request).chain.extend([9])
                self._memory.advance(work.request)
            self._answer()
            if self._scheduler.preemptions:
                return False
        return self._scheduler.running == wanted

    def _pulled(self, pull: Pull) -> Pulled:
        """All of it is in host memory."""
        placed = tuple(
            {} if group in pull.hosted else dict(enumerate(room.spare)) for group, room in enumerate(pull.rooms)
        )
        hosted = tuple(self._chunks(pull.limit)) if pull.hosted else ()
        aside = ROOM if pull.hosted else 0
        return Pulled(pull.request, pull.limit, placed, {"host": pull.limit}, pull.limit, hosted, aside)

    def _chunks(self, tokens: int) -> Iterator[HostChunk]:
        for start in range(0, tokens, CHUNK):
            yield self._chunk(start, min(CHUNK, tokens - start))

    def _chunk(self, start: int, tokens: int) -> HostChunk:
        size = tokens // MATCH_UNIT * self._granule
        if self._used + size > len(self._room):
            self._file.truncate(self._file.seek(0, 2) + (1 << 30))
            self._room = memoryview(mmap.mmap(self._file.fileno(), 1 << 30, offset=self._file.seek(0, 2) - (1 << 30)))
            self._used = 0
        payload = self._room[self._used : self._used + size]
        self._used += size
        self.host_bytes += size
        return HostChunk(0, start, tokens, payload, lease=0, shares=1 << 30, witness=lambda: True)

    def _take(self, push: Push) -> bool:
        self._pushes.append(push)
        return True

    def _answer(self) -> None:
        pushes, self._pushes = self._pushes, []
        for push in pushes:
            tokens = len(push.chunk.tokens) // 4
            chunk = self._chunk(push.chunk.start, tokens) if push.admission else None
            self._memory.pushed(Pushed(push, hosted=chunk))
