"""Prometheus metrics of a router, and what it believes of streams and workers now."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay.router.listening import Listener
from forebay.router.prompts import Prompts
from forebay.router.settings import StoreStream
from forebay.router.upstream import Upstream
from forebay.scheduler.feed import Trust
from forebay.scheduler.routing import SESSIONS_MAX, Decision, Routing
from forebay.workers.api.metrics import TTFT_BUCKETS


class RouterMetrics:
    """Counters that the proxy bumps. One a router."""

    def __init__(self, stores: Sequence[StoreStream] = ()) -> None:
        self.registry = registry = CollectorRegistry()
        self._addresses = {store.name: store.kv_address for store in stores}
        self.requests = Counter("forebay_router_requests", "answered", ["endpoint", "status"], registry=registry)
        self.decisions = Counter("forebay_router_decisions", "by reason", ["worker", "reason"], registry=registry)
        self.rejected = Counter("forebay_router_rejected", "told to come back", ["why"], registry=registry)
        self.failures = Counter("forebay_router_failures", "attempts", ["worker", "when"], registry=registry)
        self.split = Counter(
            "forebay_router_split", "long prompts, by whether another worker computed them", ["outcome"],
            registry=registry,
        )  # fmt: skip
        self.resumed = Counter("forebay_router_resumed", "streams that went on elsewhere", registry=registry)
        self.ttft = Histogram(
            "forebay_router_time_to_first_token_seconds", "from arrival", buckets=TTFT_BUCKETS, registry=registry
        )

    def decided(self, decision: Decision, worker: str) -> None:
        """Somebody was chosen."""
        self.decisions.labels(worker, decision.reason).inc()

    def source_address(self, store: str | None) -> str | None:
        """Where a store's KV is to be had, if it was told."""
        return None if store is None else self._addresses.get(store)

    def render(
        self, routing: Routing, upstreams: Sequence[Upstream], listeners: Sequence[Listener], prompts: Prompts
    ) -> bytes:
        """The text of `/metrics`."""
        live = CollectorRegistry()
        live.register(_Live(routing, upstreams, listeners, prompts))
        return generate_latest(self.registry) + generate_latest(live)


class _Live(Collector):
    """Figures of this moment."""

    def __init__(
        self, routing: Routing, upstreams: Sequence[Upstream], listeners: Sequence[Listener], prompts: Prompts
    ) -> None:
        self._routing, self._upstreams, self._listeners = routing, upstreams, listeners
        self._prompts = prompts

    def collect(self) -> Iterable[Metric]:
        """prometheus_client: the present figures."""
        yield from self._totals()
        yield from self._texts()
        yield from self._workers()
        yield from self._streams()

    def _totals(self) -> Iterable[Metric]:
        index, belief, load = self._routing.index.stats(), self._routing.belief, self._routing.load.stats()
        for name in index.__slots__:
            yield GaugeMetricFamily(f"forebay_router_index_{name}", "the index", value=float(getattr(index, name)))
        for name in belief.__slots__:
            help_text = "sums over answers whose hit is known"
            yield CounterMetricFamily(f"forebay_router_belief_{name}", help_text, value=float(getattr(belief, name)))
        yield GaugeMetricFamily("forebay_router_in_flight", "requests", value=float(load.in_flight))
        yield GaugeMetricFamily("forebay_router_in_flight_max", "requests", value=float(load.max_in_flight))
        yield GaugeMetricFamily("forebay_router_sessions", "remembered", value=float(self._routing.sessions))
        yield GaugeMetricFamily("forebay_router_sessions_max", "remembered", value=float(SESSIONS_MAX))
        soon = float(self._routing.predicted.blocks)
        yield GaugeMetricFamily("forebay_router_predicted_blocks", "that workers will have soon", value=soon)

    def _texts(self) -> Iterable[Metric]:
        for name, value in self._prompts.statistics().items():
            kind = GaugeMetricFamily if name.startswith("remembered") else CounterMetricFamily
            yield kind(f"forebay_router_{name}", "prompts read", value=float(value))

    def _workers(self) -> Iterable[Metric]:
        gauges = {
            name: GaugeMetricFamily(f"forebay_router_worker_{name}", told, labels=["worker"])
            for name, told in {
                "up": "is it", "draining": "is it", "breaker": "0 closed, 1 half open, 2 open", "load": "in flight",
                "prefilling": "prompts that it computes for others",
                "prefill_seconds_per_token": "as measured",
            }.items()
        }  # fmt: skip
        for number, upstream in enumerate(self._upstreams):
            name = [upstream.backend.name]
            gauges["up"].add_metric(name, float(upstream.up))
            gauges["draining"].add_metric(name, float(upstream.draining))
            gauges["breaker"].add_metric(name, float(upstream.breaker.state(time.monotonic()).value))
            gauges["load"].add_metric(name, float(self._routing.load.requests[number]))
            gauges["prefilling"].add_metric(name, float(upstream.prefilling))
            gauges["prefill_seconds_per_token"].add_metric(name, float(self._routing.fleet.prefill_s[number]))
        yield from gauges.values()

    def _streams(self) -> Iterable[Metric]:
        trust = GaugeMetricFamily("forebay_router_stream_trust", "1 for the present state", labels=["owner", "state"])
        counts = GaugeMetricFamily("forebay_router_stream", "what came of its events", labels=["owner", "what"])
        for listener in self._listeners:
            feed = listener.feed
            for state in Trust:
                trust.add_metric([feed.owner, state.value], float(feed.trust is state))
            for name in feed.counters.__slots__:
                counts.add_metric([feed.owner, name], float(getattr(feed.counters, name)))
            counts.add_metric([feed.owner, "gaps"], float(listener.gaps))
            counts.add_metric([feed.owner, "replays"], float(listener.replays))
            counts.add_metric([feed.owner, "failures"], float(listener.failures))
            counts.add_metric([feed.owner, "orphans"], float(feed.orphans.blocks))
            counts.add_metric([feed.owner, "orphans_given_up"], float(feed.orphans.given_up))
        yield trust
        yield counts
