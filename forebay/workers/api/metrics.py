"""Prometheus metrics of a front end, and its worker's figures as `forebay_worker_*`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay.workers.api.link import WorkerLink

TTFT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)


class Metrics:
    """Counters that endpoints bump. One a front end."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter(
            "forebay_requests", "answered requests", ["endpoint", "status"], registry=registry
        )
        self.ttft = Histogram(
            "forebay_time_to_first_token_seconds", "from a request's arrival to its first token",
            buckets=TTFT_BUCKETS, registry=registry,
        )  # fmt: skip
        self.prompt_tokens = Counter("forebay_prompt_tokens", "tokens of prompts", registry=registry)
        self.output_tokens = Counter("forebay_output_tokens", "generated tokens", registry=registry)
        self.cached_tokens = Counter(
            "forebay_cached_tokens", "prompt tokens that weren't computed", ["source"], registry=registry
        )
        self.transfers = Counter(
            "forebay_transfer_requests", "requests that named another party for their KV", ["party"], registry=registry
        )

    async def render(self, link: WorkerLink) -> bytes:
        """The text of `/metrics`; waits a moment for the worker's figures."""
        stats = await link.stats()
        live = CollectorRegistry()
        live.register(_Live(link, stats.values if stats else {}, stats.store if stats else "unknown"))
        return generate_latest(self.registry) + generate_latest(live)


class _Live(Collector):
    """Figures of this moment."""

    def __init__(self, link: WorkerLink, values: dict[str, float], store: str) -> None:
        self._link, self._values, self._store = link, values, store

    def collect(self) -> Iterable[Metric]:
        """prometheus_client: the present figures."""
        link = self._link
        yield GaugeMetricFamily("forebay_worker_up", "a worker is connected", value=float(link.connected))
        yield GaugeMetricFamily("forebay_worker_store_up", "it has its store", value=float(self._store == "connected"))
        yield GaugeMetricFamily("forebay_calls", "generations under way", value=len(link.calls))
        yield GaugeMetricFamily("forebay_calls_max", "generations that may be under way", value=link.max_calls)
        for name in link.counters.__dataclass_fields__:
            value = float(getattr(link.counters, name))
            yield GaugeMetricFamily(f"forebay_link_{name}", f"worker connection: {name}", value=value)
        for name, value in sorted(self._values.items()):
            clean = re.sub(r"[^a-zA-Z0-9_]", "_", name)
            yield GaugeMetricFamily(f"forebay_worker_{clean}", f"worker figure {name}", value=value)
