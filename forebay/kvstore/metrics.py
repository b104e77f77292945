"""Prometheus metrics of the store: every figure of `forebay stat` as `forebay_store_*`, those of tenants by label."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay.errors import AlreadyRunning, ConfigError
from forebay.kvstore.protocol import TenantRow
from forebay.kvstore.tenant_report import labelled, tenant_rows

if TYPE_CHECKING:
    from forebay.kvstore.service import StoreService

REQUEST_BYTES_MAX = 8192
REQUEST_S_MAX = 5.0
SCRAPES_MAX = 32
"""At a time. Anybody on this machine may ask, and mustn't take the descriptors that clients need."""
BY_TENANT = {
    "bytes": "bytes of slots that it holds",
    "quota": "bytes that it may hold at most",
    "guarantee": "bytes that others can't take from it",
    "weight": "its weight in what isn't guaranteed",
    "share": "bytes that it could hold now if all wanted more",
    "evicted": "its chunks that were evicted",
    "suffered": "its chunks that were evicted for others",
    "caused": "chunks of others that were evicted for it",
    "refused": "chunks of it that found no room",
    "asked_tokens": "tokens of its lookups",
    "hit_tokens": "tokens that its lookups hit",
}


class _Figures(Collector):
    """One scrape's figures. `tenants` are by label, and not many (see `labelled`)."""

    def __init__(self, values: Mapping[str, float], tenants: Mapping[str, TenantRow]) -> None:
        self._values, self._tenants = values, tenants

    def collect(self) -> Iterable[Metric]:
        """prometheus_client: the present figures."""
        for name, value in sorted(self._values.items()):
            clean = re.sub(r"[^a-zA-Z0-9_]", "_", name)
            yield GaugeMetricFamily(f"forebay_store_{clean}", f"store figure {name}", value=value)
        for name, told in BY_TENANT.items():
            family = GaugeMetricFamily(f"forebay_store_tenant_{name}", told, labels=["tenant"])
            figure = attrgetter(name)
            for label, row in self._tenants.items():
                if figure(row) is not None:
                    family.add_metric([label], figure(row))
            yield family


class MetricsServer:
    """Answers `GET /metrics` on a loopback address, on the daemon's own loop."""

    def __init__(self, address: str | None, service: StoreService) -> None:
        self._address, self._service = address, service
        self._server: asyncio.AbstractServer | None = None
        self._scrapes = 0

    async def start(self) -> None:
        """Listen, if an address was given. Raises ConfigError off loopback, AlreadyRunning if it is taken."""
        if self._address is None:
            return
        host, _, port = self._address.rpartition(":")
        if host not in ("127.0.0.1", "localhost", "[::1]") or not port.isdigit():
            raise ConfigError(f"--metrics {self._address!r}: takes a loopback HOST:PORT, such as 127.0.0.1:9400")
        try:
            self._server = await asyncio.start_server(
                self._serve, host.strip("[]"), int(port), limit=REQUEST_BYTES_MAX
            )
        except OSError as error:
            raise AlreadyRunning(f"--metrics {self._address}: {error.strerror}; choose another port") from error

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._scrapes >= SCRAPES_MAX:
            writer.transport.abort()
            return
        self._scrapes += 1
        try:
            await self._answer(reader, writer)
            writer.close()
            await asyncio.wait_for(writer.wait_closed(), REQUEST_S_MAX)
        except (TimeoutError, ConnectionError):  # it doesn't read
            writer.transport.abort()
        finally:
            self._scrapes -= 1

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), REQUEST_S_MAX)
        except (asyncio.LimitOverrunError, asyncio.IncompleteReadError, TimeoutError, ConnectionError):
            return
        found = head.startswith((b"GET /metrics ", b"GET / "))
        body = await self._figures() if found else b"only /metrics is here\n"
        status = b"200 OK" if found else b"404 Not Found"
        kind = b"text/plain; version=0.0.4; charset=utf-8"
        writer.write(
            b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
            % (status, kind, len(body), body)
        )

    async def _figures(self) -> bytes:
        values, _ = await self._service.figures()
        registry = CollectorRegistry()
        core = self._service.core
        registry.register(_Figures(values, labelled(tenant_rows(core), list(core.place.accounts.rules))))
        return generate_latest(registry)
