"""All parts of one router, put together; and the process that runs it."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from typing import Any

from forebay.errors import ConfigError
from forebay.router.listening import QUIET_S, Listener
from forebay.router.metrics import RouterMetrics
from forebay.router.prompts import Prompts
from forebay.router.proxy import Proxy
from forebay.router.settings import Backend, RouterConfig, StoreStream, check, curve_of, servers_of
from forebay.router.upstream import Upstream, Upstreams
from forebay.scheduler.feed import Feed
from forebay.scheduler.fleet import Fleet, Worker
from forebay.scheduler.index import PrefixIndex
from forebay.scheduler.places import Holders
from forebay.scheduler.policies import POLICIES
from forebay.scheduler.routing import Routing
from forebay.workers.api.frontend import is_loopback

LOOK_S = 0.1


class Router:
    """Lives on one event loop, from `watch` to `close`. Raises ConfigError for settings that can't be used."""

    def __init__(self, config: RouterConfig) -> None:
        check(config)
        if not is_loopback(config.host):
            raise ConfigError(
                f"--host {config.host} would open every worker to the network without keys: bind a loopback address, "
                "and put whatever ends TLS and checks keys before it"
            )
        self.config = config
        seed = secrets.randbits(64) if config.seed is None else config.seed
        rng = random.Random(seed)  # noqa: S311 - it breaks ties and seeds sampling; nothing secret comes of it
        self._index, self._holders = PrefixIndex(), Holders()
        workers = [Worker(b.name, b.store, b.block_tokens, b.rates) for b in config.backends]
        fleet = Fleet(workers, self._holders)
        policy = POLICIES[config.policy](rng)
        most = config.per_worker * len(workers)
        self.routing = Routing.of(fleet, self._index, policy, predict_s=config.predict_s, max_in_flight=most)
        self.metrics = RouterMetrics(config.stores)
        self.upstreams = Upstreams(config, time.monotonic, self._is_down)
        self.prompts = Prompts(config, self.upstreams)
        self.proxy = Proxy(config, self.routing, self.upstreams, self.prompts, self.metrics, rng)
        self.listeners: dict[str, Listener] = {}
        self._stores = {store.name: store for store in config.stores}
        self._curves = {name: curve_of(config, server) for name, server in servers_of(config).items()}

    def _is_down(self, number: int) -> None:
        self.proxy.is_down(number)

    async def watch(self) -> None:
        """Poll workers and listen to streams, until cancelled."""
        polling = asyncio.create_task(self.upstreams.watch())
        try:
            while True:
                for upstream in self.upstreams.all:
                    self._listen_to(upstream)
                await asyncio.sleep(LOOK_S)
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)

    def close(self) -> None:
        """Stop listening. Waits for threads; not on the loop."""
        for listener in self.listeners.values():
            listener.close()

    async def place(self, number: int, backend: Backend, store: StoreStream | None) -> None:
        """A worker is somewhere else from now on, with its store (None: that one stays). What was known of their
        streams is forgotten; answers that come from the old place go on elsewhere."""
        upstream = self.upstreams.all[number]
        upstream.move(backend)
        self._is_down(number)
        if store is not None:
            self._stores[store.name] = store
        for owner in (backend.name, *([store.name] if store is not None else [])):
            listener = self.listeners.get(owner)
            if listener is None:
                continue
            await asyncio.to_thread(listener.close)
            await asyncio.sleep(0)  # what it had handed over is applied, and then forgotten
            listener.feed.down()
            if self.listeners.get(owner) is listener:
                # Not before: another worker of the store would begin anew, and `down` would take that from it.
                del self.listeners[owner]

    def render_metrics(self) -> bytes:
        """The text of `/metrics`."""
        return self.metrics.render(self.routing, self.upstreams.all, list(self.listeners.values()), self.prompts)

    def described(self) -> dict[str, Any]:
        """Workers and streams as they are now."""
        workers = [
            {
                "name": up.backend.name, "url": f"http://{up.backend.host}:{up.backend.port}", "up": up.up,
                "draining": up.draining, "models": sorted(up.models), "store": up.backend.store,
                "in_flight": int(self.routing.load.requests[number]),
            }
            for number, up in enumerate(self.upstreams.all)
        ]  # fmt: skip
        streams = [
            {"owner": name, "trust": one.feed.trust.value, "stored": one.feed.counters.stored}
            for name, one in self.listeners.items()
        ]
        return {"policy": self.routing.policy.name, "workers": workers, "streams": streams}

    def _listen_to(self, upstream: Upstream) -> None:
        """Once it is known which model a worker has, its events and its store's mean something."""
        backend = upstream.backend
        model = next((name for name, parent in upstream.models.items() if parent is None), None)
        if model is None:
            return
        if backend.events is not None:
            self._listen(backend, backend.name, model, backend.events, backend.replay, None)
        store = None if backend.store is None else self._stores[backend.store]
        if store is not None:
            self._listen(backend, store.name, model, store.events, store.replay, QUIET_S)

    def _listen(
        self, backend: Backend, owner: str, model: str, events: str, replay: str | None, quiet_s: float | None
    ) -> None:
        if owner in self.listeners:
            return
        feed = Feed(owner, model, self._index, self._holders, backend.block_tokens)
        loop, curve = asyncio.get_running_loop(), self._curves[owner]
        listener = Listener(feed, events, replay, loop, quiet_s, curve=curve)
        self.listeners[owner] = listener
        listener.start()


def run_router(config: RouterConfig) -> int:
    """Serve until SIGTERM or SIGINT. Raises ForebayError if it can't start."""
    import signal

    import uvicorn

    from forebay.router.app import make_app
    from forebay.workers.api.frontend import BACKLOG, bind

    router = Router(config)
    with bind(config.host, config.port) as bound:
        bound.listen(BACKLOG)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: None)
        server = uvicorn.Server(
            uvicorn.Config(
                make_app(router), loop="uvloop", http="httptools", log_level="warning", access_log=False,
                server_header=False, timeout_graceful_shutdown=5,
            )
        )  # fmt: skip
        server.run(sockets=[bound])
    return 0
