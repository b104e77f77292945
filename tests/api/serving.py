"""A front end over scripted workers: real HTTP on a port of its own, all on one event loop in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn
import uvloop

from forebay.testing import web
from forebay.tiers.p2p.options import Address
from forebay.workers.api.app import make_app
from forebay.workers.api.fleet import Fleet
from forebay.workers.api.frontend import AppServer, bind
from forebay.workers.api.keys import Keys, open_to_all
from forebay.workers.api.metrics import Metrics
from forebay.workers.api.service import ApiService
from forebay.workers.api.tool_formats import FORMATS
from tests.api.codec import ByteCodec, LineChat
from tests.api.scripted import ScriptedWorker

T = TypeVar("T")
PATIENCE_S = 60.0


@dataclass
class Front:
    """Start with `with`. `run` runs a coroutine on the server's loop."""

    folder: Path
    keys: Keys | None = None
    chat: bool = True
    max_calls: int = 64
    give_up_s: float = 30.0
    worker: ScriptedWorker | None = None
    kv_address: Address | None = None
    tools: str = "hermes"
    shutdown_s: float | None = None
    sockets: tuple[str, ...] = ("worker.sock",)
    prefill: tuple[Path, ...] = ()
    workers: tuple[ScriptedWorker, ...] = ()
    splitter: Any = None
    fleet: Fleet = field(init=False)
    port: int = 0

    def __enter__(self) -> Front:
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()  # as the front end's
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.run(self._begin())
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    async def _begin(self) -> None:
        self.fleet = Fleet([self.folder / name for name in self.sockets], self.max_calls, self.give_up_s, self.prefill)
        service = ApiService(
            self.fleet, ByteCodec(), LineChat() if self.chat else None, Metrics(), "", self.kv_address,
            FORMATS.get(self.tools), self.splitter,
        )  # fmt: skip
        app = make_app(service, self.keys or open_to_all(self.folder / "state"))
        bound = bind("127.0.0.1", 0)
        bound.listen()
        self.port = bound.getsockname()[1]
        config = uvicorn.Config(app, log_level="warning", http="httptools", timeout_graceful_shutdown=1)
        shutdown_s = self.shutdown_s
        self._server = uvicorn.Server(config) if shutdown_s is None else AppServer(app, self.fleet, shutdown_s)
        if not self._server.config.loaded:
            self._server.config.load()
        self._serving = asyncio.create_task(self._server._serve([bound]))
        for worker in self.workers:
            await worker.start()
        if self.worker is not None:
            await self.worker.start()
        await self.until(lambda: self._server.started and (self.worker is None or self.fleet.connected))

    async def _end(self) -> None:
        self._server.should_exit = True
        await self._serving
        if self.worker is not None:
            await self.worker.die()

    async def until(self, true: Any) -> None:
        """Wait until `true()` holds."""
        end = asyncio.get_running_loop().time() + PATIENCE_S
        while not true():
            assert asyncio.get_running_loop().time() < end, "it never happened"
            await asyncio.sleep(0.01)

    def stop(self) -> None:
        """As SIGTERM does."""
        self._loop.call_soon_threadsafe(setattr, self._server, "should_exit", True)

    def wait_until(self, true: Any) -> None:
        self.run(self.until(true))

    def replace_worker(self, worker: ScriptedWorker) -> None:
        """The present worker dies as by SIGKILL; another one comes to its socket."""

        async def swap() -> None:
            if self.worker is not None:
                await self.worker.die()
            self.worker = worker
            await worker.start()

        self.run(swap())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        kind = "content" if isinstance(body, (bytes, str)) else "json"
        return web.post(self.url + path, timeout=PATIENCE_S, **{kind: body}, **more)

    def complete(self, prompt: Any, **more: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": prompt, "max_tokens": 100, **more})

    def get(self, path: str, **more: Any) -> httpx.Response:
        return web.get(self.url + path, timeout=PATIENCE_S, **more)
