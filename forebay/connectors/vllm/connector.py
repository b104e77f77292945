"""`ForebayConnector`: vLLM's calls, each passed on to the half that it is for, and none of them ever raising.

What is wrong with the configuration is raised when the engine starts; nothing after that.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from forebay.connectors.guard import guarded, nothing
from forebay.connectors.orders import Orders
from forebay.connectors.settings import Settings
from forebay.connectors.vllm.metrics import ForebayMetrics, ForebayStats, sources_of
from forebay.connectors.vllm.scheduler import SchedulerSide
from forebay.connectors.vllm.worker import WorkerSide

log = logging.getLogger("forebay")

_GROUP_DOMAIN = b"forebay/vllm-group/1\0"


class ForebayMetadata(KVConnectorMetadata):
    """One step's orders."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders


class ForebayConnector(KVConnectorBase_V1, SupportsHMA):
    """See the package. The settings are those of `forebay.connectors.settings.Settings`."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_vllm_does()
        settings = Settings.read(self._kv_transfer_config.kv_connector_extra_config)
        group = _group(vllm_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(vllm_config, kv_cache_config, settings, group)
        else:
            self._worker = WorkerSide(vllm_config, kv_cache_config, settings, group)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what isn't stored is computed the next time."""
        return False

    # --- beside the scheduler ------------------------------------------------------------------------------

    @guarded(nothing)
    def on_new_request(self, request: Any) -> None:
        """A request has come."""
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded, if that is known already."""
        assert self._scheduler is not None
        return self._scheduler.matched(request, num_computed_tokens)

    @guarded(nothing)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks have been given."""
        assert self._scheduler is not None
        tables = tuple(tuple(table) for table in blocks.get_block_ids()) if num_external_tokens else ()
        self._scheduler.allocated(request, tables, num_external_tokens)

    @guarded(dict)
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Where the tokens of a load come from."""
        return sources_of(self._scheduler.sources(request)) if self._scheduler is not None else {}

    @guarded(lambda: ForebayMetadata(Orders()))
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """One step's orders."""
        assert self._scheduler is not None
        return ForebayMetadata(self._scheduler.orders(scheduler_output))

    @guarded(nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        """What the ranks have done."""
        if self._scheduler is not None:
            self._scheduler.output(connector_output)

    @guarded(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended."""
        assert self._scheduler is not None
        return self._scheduler.finished(request, tuple(tuple(table) for table in block_ids)), None

    @guarded(list)
    def take_events(self) -> Iterable[Any]:
        """The store's events about this model."""
        return self._scheduler.events() if self._scheduler is not None else []

    @guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        """Weights may have changed."""
        return self._scheduler.reset() if self._scheduler is not None else None

    # --- beside the model ----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """The caches have been made. Raises ConfigError if they aren't what the configuration says."""
        assert self._worker is not None
        self._worker.register(kv_caches)

    @guarded(nothing)
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        assert self._worker is not None and isinstance(connector_metadata, ForebayMetadata)
        self._worker.begin(connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads have begun with the step."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a request isn't computed before all of its layers are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Chunks are copied when a step has filled them, all layers at once."""

    @guarded(nothing)
    def wait_for_save(self) -> None:
        """The forward has run."""
        if self._worker is not None:
            self._worker.end()

    @guarded(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What has ended."""
        assert self._worker is not None
        done = self._worker.done()
        return KVConnectorTransferResults(done.sent, done.received, done.failed)

    # --- both ----------------------------------------------------------------------------------------------

    @guarded(nothing)
    def shutdown(self) -> None:
        """The engine ends."""
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.shutdown()

    @guarded(nothing)
    def get_kv_connector_stats(self) -> ForebayStats | None:
        """Figures since the last time."""
        side = self._scheduler or self._worker
        return side.statistics() if side is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ForebayStats:
        """Figures that came from another process."""
        return ForebayStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> ForebayMetrics:
        """For `/metrics`."""
        return ForebayMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _group(config: VllmConfig) -> bytes:
    """What the processes of one engine have in common, and nobody else."""
    assert config.kv_transfer_config is not None
    parts = (config.kv_transfer_config.engine_id, config.instance_id, config.parallel_config.data_parallel_rank)
    return hashlib.sha256(_GROUP_DOMAIN + repr(parts).encode()).digest()[:16]


def _log_as_vllm_does() -> None:
    """What is logged here goes where vLLM's own lines go, unless somebody has said otherwise."""
    theirs = logging.getLogger("vllm")
    if not log.handlers:
        for handler in theirs.handlers:
            log.addHandler(handler)
        log.propagate = theirs.propagate
    if log.level == logging.NOTSET:
        log.setLevel(theirs.getEffectiveLevel())
