"""The router's HTTP surface."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from forebay import __version__
from forebay.router.client import BackendFailed, ask
from forebay.router.explaining import explained
from forebay.router.prompts import passed_on
from forebay.router.proxy import Refused
from forebay.router.router import Router
from forebay.router.settings import moved, stores_of
from forebay.workers.api.app import add_errors
from forebay.workers.api.errors import ApiError, bad, unavailable
from forebay.workers.api.http import ClientGone, EventStream, body_of, error_response, json_response, unless_gone

log = logging.getLogger(__name__)

CLIENT_GONE = 499


def make_app(router: Router) -> FastAPI:
    """The application. Its lifespan watches workers and listens to events."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(router.watch())
        yield
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await asyncio.to_thread(router.close)

    app = FastAPI(
        title="Forebay router", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )
    routes = _Routes(router)
    for path, method, handler in (
        ("/v1/completions", "POST", routes.generate), ("/v1/chat/completions", "POST", routes.generate),
        ("/tokenize", "POST", routes.passed), ("/detokenize", "POST", routes.passed),
        ("/v1/models", "GET", routes.models), ("/health", "GET", routes.health), ("/metrics", "GET", routes.metrics),
        ("/router/explain", "POST", routes.explain), ("/router/drain", "POST", routes.drain),
        ("/router/workers", "GET", routes.workers), ("/router/place", "POST", routes.place),
    ):  # fmt: skip
        app.add_api_route(path, routes.guarded(path, handler), methods=[method], response_model=None)
    add_errors(app)
    return app


class _Routes:
    """One method a route."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def guarded(self, path: str, handler: Any) -> Any:
        """The handler, its errors in OpenAI's shape, counted."""

        async def answer(request: Request) -> Response:
            try:
                response: Response = await handler(request)
            except ApiError as error:
                response = error_response(error)
            except Refused as error:
                headers = {"Retry-After": error.retry_after} if error.retry_after else None
                response = Response(error.data, error.status, headers, "application/json")
            except ClientGone:
                response = Response(status_code=CLIENT_GONE)
            self._router.metrics.requests.labels(path, response.status_code).inc()
            return response

        return answer

    async def generate(self, request: Request) -> Response:
        body = await _object(request)
        proxy = self._router.proxy
        call = await unless_gone(request.receive, proxy.call(request.url.path, body, request.headers))
        if not body.get("stream"):
            data = await unless_gone(request.receive, proxy.whole(call))
            return Response(data, media_type="application/json")
        events = proxy.stream(call)
        try:
            first = await unless_gone(request.receive, anext(events))
        except StopAsyncIteration as error:
            raise unavailable("the worker said nothing; try again") from error
        except BaseException:
            await events.aclose()
            raise
        return EventStream(first, events)

    async def passed(self, request: Request) -> Response:
        """On to any worker."""
        data = await body_of(request)
        upstream = next((up for up in self._router.upstreams.all if up.up), None)
        if upstream is None:
            raise unavailable("no worker is ready; try again in a moment")
        backend, headers = upstream.backend, passed_on(request.headers) | {"content-type": "application/json"}
        try:
            async with await ask(
                backend.host, backend.port, "POST", request.url.path, body=data, headers=headers
            ) as answer:
                return Response(await answer.whole(), answer.status, media_type="application/json")
        except BackendFailed as error:
            raise unavailable(f"worker {backend.name} doesn't answer; try again") from error

    async def models(self, request: Request) -> Response:
        listed = [
            {"id": name, "object": "model", "created": 0, "owned_by": "forebay", "max_model_len": context}
            for name, context in sorted(self._router.upstreams.models().items())
        ]
        return json_response({"object": "list", "data": listed})

    async def health(self, request: Request) -> Response:
        up = sum(upstream.up for upstream in self._router.upstreams.all)
        body = {"status": "ok" if up else "no worker", "workers": len(self._router.upstreams.all), "up": up}
        return json_response(body, 200 if up else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._router.render_metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def workers(self, request: Request) -> Response:
        return json_response(self._router.described())

    async def explain(self, request: Request) -> Response:
        """Where a completion (or a chat, if it has messages) would go: every candidate's cost, term by term."""
        body = await _object(request)
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        started = time.perf_counter()
        decision = await self._router.proxy.explain(path, body, request.headers)
        return json_response(explained(decision, self._router, time.perf_counter() - started))

    async def drain(self, request: Request) -> Response:
        """Send a worker nothing new, or (with `"drain": false`) something again. What it does goes on."""
        body = await _object(request)
        found = next((up for up in self._router.upstreams.all if up.backend.name == body.get("worker")), None)
        if found is None:
            raise bad(f"there is no worker {body.get('worker')!r}", "worker")
        found.draining = bool(body.get("drain", True))
        number = self._router.upstreams.all.index(found)
        left = int(self._router.routing.load.requests[number])
        return json_response({"worker": found.backend.name, "draining": found.draining, "in_flight": left})


    async def place(self, request: Request) -> Response:
        """A worker has another address from now on (and its store other streams), under its old name."""
        body = await _object(request)
        names = [up.backend.name for up in self._router.upstreams.all]
        if body.get("worker") not in names:
            raise bad(f"there is no worker {body.get('worker')!r}", "worker")
        number = names.index(body["worker"])
        old = self._router.upstreams.all[number].backend
        try:
            backend = moved(old, body)
            stores = () if old.store is None or body.get("store") is None else stores_of({old.store: body["store"]})
        except ValueError as error:
            raise bad(str(error)) from error
        await self._router.place(number, backend, stores[0] if stores else None)
        return json_response({"worker": backend.name, "url": f"http://{backend.host}:{backend.port}"})


async def _object(request: Request) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(await body_of(request))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad(f"the body can't be read: {error}") from error
    if not isinstance(found, dict):
        raise bad("the body takes an object")
    return found
