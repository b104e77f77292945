"""Figures on vLLM's own ways: what has happened since the last time, by name, and what is now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter as PrometheusCounter
from prometheus_client import Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.cache_hit_source import CacheHitSource

SOURCES = {
    "host": CacheHitSource.HOST,
    "fs": CacheHitSource.DISK,
    "p2p": CacheHitSource.P2P,
}

COUNTS, GAUGES = "counts", "gauges"


def sources_of(tiers: Mapping[str, int]) -> dict[CacheHitSource, int]:
    """Tokens by vLLM's name for where they came from."""
    found: dict[CacheHitSource, int] = {}
    for tier, tokens in tiers.items():
        source = SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
        found[source] = found.get(source, 0) + tokens
    return found


@dataclass
class ForebayStats(KVConnectorStats):
    """`counts` add up over time and over ranks; of `gauges` the last is told."""

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data.setdefault(COUNTS, {})
        self.data.setdefault(GAUGES, {})

    def reset(self) -> None:
        """Forget all."""
        self.data = {COUNTS: {}, GAUGES: {}}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Those of another rank, or of a later time, are added."""
        counts = Counter(self.data[COUNTS])
        counts.update(other.data.get(COUNTS, {}))
        self.data = {COUNTS: dict(counts), GAUGES: {**self.data[GAUGES], **other.data.get(GAUGES, {})}}
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log."""
        told = {**self.data[GAUGES], **{name: value for name, value in self.data[COUNTS].items() if value}}
        return {f"forebay {name}": told[name] for name in sorted(told)}

    def is_empty(self) -> bool:
        """Is there nothing to tell?"""
        return not self.data[GAUGES] and not any(self.data[COUNTS].values())


class Differences:
    """What counters have gained, and which gauges have changed, since they were last looked at."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()
        self._gauges: dict[str, int] = {}

    def since(self, now: Mapping[str, float]) -> dict[str, float]:
        """Gains by name; those without are left out."""
        gained = {name: value - self._seen[name] for name, value in now.items() if value != self._seen[name]}
        self._seen = Counter(now)  # type: ignore[arg-type]
        return gained

    def changed(self, now: Mapping[str, int]) -> dict[str, int]:
        """Gauges that aren't what they were."""
        before, self._gauges = self._gauges, dict(now)
        return {name: value for name, value in now.items() if before.get(name) != value}


class ForebayMetrics(KVConnectorPromMetrics):
    """`vllm:forebay_total{name=...}` counts, `vllm:forebay_now{name=...}` is as it was last told."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], engine_labels: dict[int, list[object]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, engine_labels)
        self._counter: PrometheusCounter = self._counter_cls(
            name="vllm:forebay", documentation="What Forebay's connector has done.", labelnames=[*labelnames, "name"]
        )
        self._gauge: Gauge = self._gauge_cls(
            name="vllm:forebay_now", documentation="What Forebay's connector has now.", labelnames=[*labelnames, "name"]
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take one interval's figures."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.get(COUNTS, {}).items():
            self._counter.labels(*labels, name).inc(value)
        for name, value in transfer_stats_data.get(GAUGES, {}).items():
            self._gauge.labels(*labels, name).set(value)
