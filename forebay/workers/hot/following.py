"""Hot buffers of a rank that doesn't schedule: it hears where pages are, and finds and copies the rows by itself.

It reads the same chunks of the same pool, where it has mapped that, under the lease that the rank that schedules holds.
A page that it can't find there (the pool of a store that has gone meanwhile) has no bytes, and who reads of it is void.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from forebay.kvstore.header import slot_generation
from forebay.workers.counters import Counters
from forebay.workers.hot.buffers import Buffers
from forebay.workers.hot.mirror import Places
from forebay.workers.hot.resolving import Stay, StepResolver
from forebay.workers.hot.telling import Arrived, HotDone, HotShape, HotStep

HEAD_BYTES = 64
"""Of a slot's header, in which its generation is."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """Extents of the store of this `boot` that this process has mapped."""

    boot: bytes = b""
    extents: Mapping[int, memoryview] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """See `InPlace`. `payload` goes as far as anybody needs it."""

    payload: memoryview
    witness: Callable[[], bool]


class FollowingBook:
    """See `RankBook`. `mapped` gives the extents as they are now. For the thread that computes."""

    def __init__(self, shape: HotShape, mapped: Callable[[], Mapped], device: torch.device) -> None:
        self.buffers = Buffers(shape.sharers, shape.regions, shape.rows, device)
        self.host = Places(shape.granule_bytes)
        self.counters = Counters()
        self._group, self._mapped = shape.group, mapped

    def begin(self, told: HotStep, pools: Mapping[str, Tensor]) -> StepResolver:
        """Learn what has changed; what resolves this step. Its requests are named by their place in the step."""
        self.buffers.forget(told.gone)
        self.host.remove(told.gone)
        for region, blocks in told.opened.items():
            self.buffers.open(region, blocks)
        mapped = self._mapped()
        for arrived in told.arrived:
            self._arrive(arrived, mapped)
        count = len(told.regions)
        resident, host = (
            np.frombuffer(packed, dtype="<i4").reshape(count, -1).astype(np.int64)
            for packed in (told.resident, told.host)
        )
        stays = [Stay(at, region, resident[at], host[at]) for at, region in enumerate(told.regions)]
        return StepResolver(self, stays, pools[self._group])

    def _arrive(self, arrived: Arrived, mapped: Mapped) -> None:
        place, size = arrived.place, self.host.granule_bytes
        extent = mapped.extents.get(place.extent) if mapped.boot == place.boot else None
        for page, _ in arrived.pages:
            self.host.name(page)
        if extent is None:
            return
        head = extent[place.slot_offset : place.slot_offset + HEAD_BYTES]
        upto = place.payload_offset + (max(unit for _, unit in arrived.pages) + 1) * size
        chunk = _Chunk(extent[place.payload_offset : upto], lambda: slot_generation(head) == place.generation)
        for page, unit in arrived.pages:
            self.host.put(page, chunk, unit)


def done(resolver: StepResolver) -> HotDone:
    """What the rank that schedules wants to know, after the step."""
    changed, cold = resolver.wrong()
    return HotDone(changed, cold, resolver.misses(), resolver.decisions())
