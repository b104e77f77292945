"""Prometheus metrics of a front end, and its worker's figures as `forebay_worker_*`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay.workers.api.fleet import Fleet
from forebay.workers.api.link import LinkCounters
from forebay.workers.api.splitting import Splitter
from forebay.workers.protocol import WorkerStats

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

    async def render(self, fleet: Fleet, splitter: Splitter | None = None) -> bytes:
        """The text of `/metrics`; waits a moment for the workers' figures."""
        live = CollectorRegistry()
        live.register(_Live(fleet, await fleet.stats(), splitter))
        return generate_latest(self.registry) + generate_latest(live)


class _Live(Collector):
    """Figures of this moment. Those of a lone worker bear no label."""

    def __init__(self, fleet: Fleet, stats: dict[str, WorkerStats], splitter: Splitter | None) -> None:
        self._fleet, self._stats, self._splitter = fleet, stats, splitter

    def collect(self) -> Iterable[Metric]:
        """prometheus_client: the present figures."""
        fleet, store = self._fleet, any(stats.store == "connected" for stats in self._stats.values())
        able = float(any(link.able for link in fleet.links))
        yield GaugeMetricFamily("forebay_worker_up", "a worker takes calls", value=able)
        yield GaugeMetricFamily("forebay_worker_store_up", "a worker has its store", value=float(store))
        yield GaugeMetricFamily("forebay_calls", "generations under way", value=len(fleet.calls))
        yield GaugeMetricFamily("forebay_calls_max", "generations that may be under way", value=fleet.max_calls)
        for name in fleet.counters.__dataclass_fields__:
            value = float(getattr(fleet.counters, name))
            yield GaugeMetricFamily(f"forebay_link_{name}", f"calls and their workers: {name}", value=value)
        for name in LinkCounters.__dataclass_fields__:
            found = {link.name: float(getattr(link.counters, name)) for link in fleet.links}
            yield self._by_worker(f"forebay_link_{name}", f"connections to workers: {name}", found)
        if self._splitter is not None:
            for name in self._splitter.counters.__dataclass_fields__:
                value = float(getattr(self._splitter.counters, name))
                yield GaugeMetricFamily(f"forebay_split_{name}", f"prefill and decode apart: {name}", value=value)
            running = float(sum(remote.running for remote in self._splitter.remotes))
            yield GaugeMetricFamily("forebay_split_running", "prompts that other hosts compute", value=running)
            value = float(self._splitter.store.connections)
            yield GaugeMetricFamily("forebay_split_store_connections", "tenants' views of the store", value=value)
        states = {link.name: float(link.able) for link in fleet.links}
        if len(states) > 1:
            yield self._by_worker("forebay_worker_able", "this worker takes calls", states)
        for name in sorted({name for stats in self._stats.values() for name in stats.values}):
            clean = re.sub(r"[^a-zA-Z0-9_]", "_", name)
            found = {worker: stats.values[name] for worker, stats in self._stats.items() if name in stats.values}
            yield self._by_worker(f"forebay_worker_{clean}", f"worker figure {name}", found)

    def _by_worker(self, name: str, text: str, found: dict[str, float]) -> Metric:
        if len(self._fleet.links) == 1:
            return GaugeMetricFamily(name, text, value=sum(found.values()))
        family = GaugeMetricFamily(name, text, labels=["worker"])
        for worker, value in found.items():
            family.add_metric([worker], value)
        return family
