"""Prefixes that the simulated worker loads from the back while it computes from the front.

The table is the real one, and so is what the memory makes of it. When pieces land, which never do, and what either end
thinks of the other's speed is chance: an end that judges as badly as can be must still lose nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from forebay.kvstore.identity import MATCH_UNIT, Chain, unpack_tokens
from forebay.kvstore.protocol import Place
from forebay.scheduler.request import RequestState
from forebay.workers.cut import Cut
from forebay.workers.moves import Pull, Pulled
from forebay.workers.pieces import plan_pieces

if TYPE_CHECKING:
    from tests.scheduler.simulation import Worker


def whims(chance: random.Random) -> Any:
    """Rates that are something else whenever they are asked for."""
    return SimpleNamespace(
        prefill=SimpleNamespace(
            samples=1, step_s=0.0, seconds=lambda begin, end: chance.random() * max(0, end - begin)
        ),
        loads=SimpleNamespace(bandwidth=lambda tier: chance.choice([None, chance.uniform(0.1, 100.0)])),
    )


@dataclass
class OpenCut:
    """One that is under way. `taken` is a piece that is being copied."""

    pull: Pull
    cut: Cut
    keys: list[bytes]
    taken: tuple[int, list[list[int]]] | None = None


@dataclass
class Cuts:
    """All of one worker's. `met` is how many were computed in part and loaded in part, `woken` how often one went on
    that had waited, `broken` how many ended with something that never came."""

    worker: Worker
    share: float
    holes: float
    pace: float = 0.5
    open: list[OpenCut] = field(default_factory=list)
    met: int = 0
    woken: int = 0
    broken: int = 0

    def begin(self, pull: Pull) -> bool:
        """Instead of a load: a cut, if chance wants one."""
        worker, chance = self.worker, self.worker.chance
        if pull.limit <= pull.device_hit or chance.random() >= self.share:
            return False
        reach = chance.randrange(pull.device_hit + MATCH_UNIT, pull.limit + 1, MATCH_UNIT)
        part = worker.place(pull, chance.randrange(0, reach, MATCH_UNIT))
        start = max(part.hit, pull.device_hit)
        positions = range(reach // worker.chunk_tokens + 1)
        places = [Place(group, at, "tier", 100) for group in range(len(worker.shapes)) for at in positions]
        pieces = plan_pieces(worker.shapes, pull.rooms, start, reach, places)
        cut = Cut(pull.request, pieces, len(worker.shapes), whims(chance), lambda: float(worker.turn))
        keys = Chain(pull.root, unpack_tokens(pull.tokens), chunk_tokens=worker.chunk_tokens).keys
        self.open.append(OpenCut(pull, cut, list(keys)))
        worker.awake = True
        request = worker.scheduler.find(pull.request)
        assert request is not None
        if request.state is RequestState.FINISHED:
            cut.close()
            return True
        worker.holdings.open(request, cut, part)
        if cut.wakes():
            worker.scheduler.load_opened(pull.request)
        return True

    def turn(self) -> None:
        """Everybody's back gets on, or doesn't."""
        for one in list(self.open):
            if self._goes_on(one):
                if one.cut.wakes():
                    self.woken += 1
                    self.worker.awake = True
                    self.worker.scheduler.load_opened(one.pull.request)
                continue
            self.open.remove(one)
            one.cut.finish()
            self._end(one)

    def _goes_on(self, one: OpenCut) -> bool:
        chance, cut = self.worker.chance, one.cut
        if one.taken is not None:
            index, blocks = one.taken
            one.taken = None
            if chance.random() < self.holes:
                cut.failed(blocks)
                return False
            self._write(one, index, blocks)
            return not cut.over
        if cut.over or cut.next == 0 or chance.random() < self.holes:
            return False
        if chance.random() < self.pace:
            blocks_or_none = cut.take(cut.next - 1)
            if blocks_or_none is None:
                return False
            one.taken = cut.next - 1, blocks_or_none
        return True

    def _write(self, one: OpenCut, index: int, blocks: list[list[int]]) -> None:
        piece = one.cut.pieces[index]
        for group, runs in enumerate(piece.missing):
            for unit, block in zip([unit for run in runs for unit in run], blocks[group], strict=True):
                self.worker.contents[group][block] = one.keys[unit]
        one.cut.landed(index, blocks, dict.fromkeys(range(piece.start // 16, piece.end // 16), "tier"))

    def _end(self, one: OpenCut) -> None:
        worker, key = self.worker, one.pull.request
        worker.awake = True
        request = worker.scheduler.find(key)
        assert request is not None
        waited = request.state is RequestState.LOADING
        self.broken += not one.cut.over
        self.met += bool(one.cut.close().names) and request.computed > one.cut.start if one.cut.over else 0
        if request.state is not RequestState.FINISHED:
            worker.holdings.settle(request, Pulled(key, 0, tuple({} for _ in worker.shapes)))
        if worker.scheduler.load_ended(key) is None:
            worker.holdings.forget(key)
        elif waited:
            worker.due[key] = request
