"""The HTTP surface: routes, bodies, errors. What the endpoints do is in `service.py`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from forebay import __version__
from forebay.kvstore.identity import decode_namespace
from forebay.workers.api.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse, too_large
from forebay.workers.api.errors import ApiError, bad
from forebay.workers.api.keys import Keys
from forebay.workers.api.service import ApiService, Generation

log = logging.getLogger(__name__)

BODY_BYTES_MAX = 32 << 20
REFRESH_S = 0.5


def make_app(service: ApiService, keys: Keys) -> FastAPI:
    """The application. Its lifespan keeps the connection to the worker."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(service.link.run()), asyncio.create_task(_refresh(service))]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    app = FastAPI(title="Forebay", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    _add_errors(app, service)
    _add_generation(app, service, keys)
    _add_tokens(app, service, keys)
    _add_watching(app, service, keys)
    return app


async def _refresh(service: ApiService) -> None:
    # The worker's store comes and goes; `/health` should know within a moment.
    while True:
        await asyncio.sleep(REFRESH_S)
        service.link.refresh()


def _add_errors(app: FastAPI, service: ApiService) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        service.metrics.requests.labels(_endpoint(request), error.status).inc()
        return _json(error.body(), error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return _json(ApiError(error.status_code, message).body(), error.status_code)

    @app.exception_handler(Exception)
    async def our_bug(request: Request, error: Exception) -> Response:
        log.error("%s failed", request.url.path, exc_info=error)
        problem = ApiError(500, "this is a bug of the server; its log has the details", kind="server_error")
        return _json(problem.body(), 500)


def _endpoint(request: Request) -> str:
    # Unknown paths would make as many labels as there are wrong requests.
    route = request.scope.get("route")
    return getattr(route, "path", "other")


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


async def _body(request: Request) -> bytes:
    """The request's body, at most BODY_BYTES_MAX of it."""
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > BODY_BYTES_MAX:
        raise too_large(BODY_BYTES_MAX)
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > BODY_BYTES_MAX:
            raise too_large(BODY_BYTES_MAX)
    return bytes(data)


def _add_generation(app: FastAPI, service: ApiService, keys: Keys) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        tenant = keys.who(request.headers.get("authorization"))
        body = parse(await _body(request), CompletionBody)
        return await _answer(request, await service.completion(body, tenant), body.stream)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        tenant = keys.who(request.headers.get("authorization"))
        body = parse(await _body(request), ChatBody)
        return await _answer(request, await service.chat_completion(body, tenant), body.stream)

    async def _answer(request: Request, generation: Generation, stream: bool) -> Response:
        if stream:
            service.metrics.requests.labels(_endpoint(request), 200).inc()
            return StreamingResponse(generation.stream(), media_type="text/event-stream")
        body = await _unless_gone(request, generation.whole)
        service.metrics.requests.labels(_endpoint(request), 200).inc()
        return _json(body)


async def _unless_gone(request: Request, work: Callable[[], Awaitable[Any]]) -> Any:
    """The result of `work`, which is cancelled if the client goes away meanwhile."""
    task = asyncio.ensure_future(work())
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise ApiError(499, "the client has gone", kind="cancelled")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _add_tokens(app: FastAPI, service: ApiService, keys: Keys) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        keys.who(request.headers.get("authorization"))
        body = parse(await _body(request), TokenizeBody)
        tokens = await service.encode(body.prompt, body.add_special_tokens)
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": service.worker.max_context})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        keys.who(request.headers.get("authorization"))
        body = parse(await _body(request), DetokenizeBody)
        if any(not 0 <= token < service.worker.vocab_size for token in body.tokens):
            raise bad(f"tokens takes ids of 0 to {service.worker.vocab_size - 1}", "tokens")
        return _json({"prompt": service.tokenizer.decode(body.tokens)})


def _add_watching(app: FastAPI, service: ApiService, keys: Keys) -> None:
    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        keys.who(request.headers.get("authorization"))
        entry = {
            "id": service.model, "object": "model", "created": 0, "owned_by": "forebay",
            "max_model_len": service.worker.max_context,
        }  # fmt: skip
        return _json({"object": "list", "data": [entry]})

    @app.get("/health")
    async def health() -> Response:
        link, described = service.link, service.link.description
        body = {
            "status": "ok" if link.connected else "no worker", "model": service.model,
            "worker": described.pid if described and link.connected else None,
            "store": described.store if described and link.connected else "unknown",
        }  # fmt: skip
        return _json(body, 200 if link.connected else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        text = await service.metrics.render(service.link)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/forebay/namespace")
    async def namespace(request: Request) -> Response:
        keys.who(request.headers.get("authorization"))
        found = decode_namespace(service.worker.namespace)
        groups = [{"name": group.name, "kind": group.kind, "window": group.window} for group in found.groups]
        return _json({"id": found.id.hex(), "chunk_tokens": found.chunk_tokens, "groups": groups})
