"""The half that lives beside a rank's model: copies."""

from __future__ import annotations

import logging
from collections import Counter

from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import KVCacheConfig

from forebay.connectors.copying import GroupCopier, LayerStack
from forebay.connectors.guard import guarded_errors
from forebay.connectors.link import StoreLink
from forebay.connectors.moving import Done, Mover
from forebay.connectors.orders import Orders
from forebay.connectors.settings import Settings
from forebay.connectors.vllm.metrics import COUNTS, GAUGES, Differences, ForebayStats
from forebay.connectors.vllm.model import grouping_of
from forebay.connectors.vllm.packing import packing_of
from forebay.kvstore.geometry import GroupGeometry
from forebay.kvstore.layout.ownership import HeadPart, split_heads

log = logging.getLogger(__name__)


class WorkerSide:
    """Its methods are vLLM's, as `ForebayConnector` passes them on."""

    def __init__(self, config: VllmConfig, caches: KVCacheConfig, settings: Settings, group: bytes) -> None:
        self._settings = settings
        self._config = config
        self._caches = caches
        self._ranks = config.parallel_config.tensor_parallel_size
        self._grouping = grouping_of(config, caches)
        self._link = StoreLink(
            settings.store, name="forebay-transfers", group=group, label=settings.label, hung_s=settings.hung_ms / 1000
        )
        self._mover: Mover | None = None
        self._orders = Orders()
        self._differences = Differences()

    def register(self, caches: dict[str, Tensor]) -> None:
        """vLLM has made its caches."""
        rank = get_tensor_model_parallel_rank() if self._ranks > 1 else 0
        grouping = self._grouping
        heads = [_heads(geometry, rank, self._ranks) for geometry in grouping.geometries]
        copiers = [
            GroupCopier(geometry, part, self._stacks(group, caches))
            for group, (geometry, part) in enumerate(zip(grouping.geometries, heads, strict=True))
        ]
        self._mover = Mover(
            self._link,
            grouping.geometries,
            copiers,
            writers=[self._ranks // _replicas(geometry, self._ranks) for geometry in grouping.geometries],
            writes=[part.replica == 0 for part in heads],
            queue_bytes=self._settings.queue_bytes,
            store_wait_s=self._settings.store_wait_ms / 1000,
        )
        self._link.start()
        log.info("%d cache groups of %d layers in all", len(copiers), len(caches))

    def _stacks(self, group: int, caches: dict[str, Tensor]) -> list[LayerStack]:
        """The caches of one of our groups."""
        geometry = self._grouping.geometries[group]
        return [
            LayerStack(part, caches, self._caches.num_blocks, geometry, packing_of(self._config, part, geometry))
            for part in self._grouping.parts
            if part.group == group
        ]

    def begin(self, orders: Orders) -> None:
        """Before the forward."""
        self._orders = orders
        if self._mover is None:
            return
        try:
            self._mover.begin(orders)
        except Exception:
            self._mover.refuse(orders)  # a request whose load nobody answers would wait for ever
            raise

    def end(self) -> None:
        """After the forward."""
        if self._mover is not None:
            self._mover.end(idle=self._orders.idle)

    def done(self) -> Done:
        """What has ended since the last call."""
        return self._mover.take_done() if self._mover is not None else Done(set(), set(), set())

    def shutdown(self) -> None:
        """vLLM ends."""
        if self._mover is not None:
            self._mover.close()

    def statistics(self) -> ForebayStats | None:
        """Since the last time."""
        if self._mover is None:
            return None
        now = Counter({f"rank.{name}": value for name, value in self._mover.counters.items()})
        now.update({f"rank.errors.{name}": count for name, count in guarded_errors.items()})
        gauges = {f"rank.{name}": value for name, value in self._mover.gauges().items()}
        return ForebayStats({COUNTS: self._differences.since(now), GAUGES: self._differences.changed(gauges)})


def _replicas(geometry: GroupGeometry, ranks: int) -> int:
    """How many ranks hold the same bytes."""
    return ranks if geometry.kind == "latent" else max(ranks // geometry.kv_heads, 1)


def _heads(geometry: GroupGeometry, rank: int, ranks: int) -> HeadPart:
    return HeadPart(0, 1, rank) if geometry.kind == "latent" else split_heads(geometry.kv_heads, rank, ranks)
