"""The HTTP surface: routes, who may use them, and what errors look like. What they do is in `service.py`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from forebay import __version__
from forebay.kvstore.identity import MATCH_UNIT, decode_namespace, root_key
from forebay.workers.api.answers import Answer
from forebay.workers.api.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse
from forebay.workers.api.errors import ApiError, bad
from forebay.workers.api.http import ClientGone, EventStream, body_of, error_response, json_response, unless_gone
from forebay.workers.api.keys import Keys, Tenant
from forebay.workers.api.link import WorkerLink
from forebay.workers.api.service import ApiService

log = logging.getLogger(__name__)

REFRESH_S = 0.5
GREETING_S = 1.0
CLIENT_GONE = 499
"""Nobody sees this status; it keeps abandoned requests apart in the metrics."""

REQUEST_ID = "X-Request-Id"
NAME = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")

Handler = Callable[[Request, Tenant], Awaitable[Response]]


def name_of(given: str | None) -> str:
    """A client's own name for its request, if it is one that logs can show; else none."""
    return given if given is not None and NAME.fullmatch(given) else ""


def make_app(service: ApiService, keys: Keys) -> FastAPI:
    """The application. Its lifespan keeps the connections to the workers."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(service.fleet.run()), asyncio.create_task(_refresh(service))]
        if service.splitter is not None:
            tasks.append(asyncio.create_task(service.splitter.run()))
        # Who came while a front end was replaced waits in the backlog: greet the worker before them.
        await service.fleet.met_any(GREETING_S)
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    app = FastAPI(
        title="Forebay", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )
    routes = _Routes(service)
    for path, handler in {
        "/v1/completions": routes.completions,
        "/v1/chat/completions": routes.chat,
        "/tokenize": routes.tokenize,
        "/detokenize": routes.detokenize,
    }.items():
        app.add_api_route(path, _guarded(service, keys, path, handler), methods=["POST"], response_model=None)
    for path, handler in {
        "/v1/models": routes.models,
        "/metrics": routes.metrics,
        "/forebay/namespace": routes.namespace,
        "/model_info": routes.model_info,
        "/get_model_info": routes.model_info,
        "/server_info": routes.server_info,
        "/get_server_info": routes.server_info,
        "/load": routes.load,
    }.items():
        app.add_api_route(path, _guarded(service, keys, path, handler), methods=["GET"], response_model=None)
    for path in ("/health", "/health_generate"):
        app.add_api_route(path, routes.health, methods=["GET"], response_model=None)
    add_errors(app)
    return app


async def _refresh(service: ApiService) -> None:
    # The worker's store comes and goes; `/health` should know within a moment.
    while True:
        await asyncio.sleep(REFRESH_S)
        try:
            service.fleet.refresh()
        except Exception:  # a bug of ours; what is known of the workers must not stay as it is for ever
            log.exception("the workers couldn't be asked how they are")


def _guarded(service: ApiService, keys: Keys, path: str, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """The handler, for those who have a key; its errors in OpenAI's shape; counted."""

    async def answer(request: Request) -> Response:
        try:
            response = await handler(request, keys.who(request.headers.get("authorization")))
        except ApiError as error:
            response = error_response(error)
        except ClientGone:
            response = Response(status_code=CLIENT_GONE)
        service.metrics.requests.labels(path, response.status_code).inc()
        return response

    return answer


def add_errors(app: FastAPI) -> None:
    """Let every error of an application, and every bug, be answered in OpenAI's shape."""
    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return error_response(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))

    @app.exception_handler(Exception)
    async def our_bug(request: Request, error: Exception) -> Response:
        log.error("%s failed", request.url.path, exc_info=error)
        problem = ApiError(500, "this is a bug of the server; its log has the details", kind="server_error")
        return error_response(problem)


def _how(link: WorkerLink) -> dict[str, object]:
    known = link.description if link.connected else None
    return {
        "state": link.state, "role": link.role.value, "worker": None if known is None else known.pid,
        "store": "unknown" if known is None else known.store, "calls": len(link.calls),
    }  # fmt: skip


class _Routes:
    """One method a route."""

    def __init__(self, service: ApiService) -> None:
        self._service = service

    async def completions(self, request: Request, tenant: Tenant) -> Response:
        body = parse(await body_of(request), CompletionBody)
        answer = await unless_gone(request.receive, self._service.completion(body, tenant, *self._told(request)))
        return await self._respond(request, answer, body.stream)

    async def chat(self, request: Request, tenant: Tenant) -> Response:
        body = parse(await body_of(request), ChatBody)
        answer = await unless_gone(request.receive, self._service.chat_completion(body, tenant, *self._told(request)))
        return await self._respond(request, answer, body.stream)

    @staticmethod
    def _told(request: Request) -> tuple[str, str | None]:
        return name_of(request.headers.get(REQUEST_ID)), request.headers.get("authorization")

    async def _respond(self, request: Request, answer: Answer, stream: bool | None) -> Response:
        named = {REQUEST_ID: answer.name}
        if not stream:
            return json_response(await unless_gone(request.receive, answer.whole()), headers=named)
        events = answer.stream()
        try:
            first = await unless_gone(request.receive, anext(events))
        except BaseException:
            await events.aclose()
            raise
        return EventStream(first, events, named)

    async def tokenize(self, request: Request, tenant: Tenant) -> Response:
        tokens = await self._service.tokenize(parse(await body_of(request), TokenizeBody))
        limit = self._service.worker.max_context
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": limit})

    async def detokenize(self, request: Request, tenant: Tenant) -> Response:
        body = parse(await body_of(request), DetokenizeBody)
        self._service.check_model(body.model)
        vocab = self._service.worker.vocab_size
        if body.tokens and max(body.tokens) >= vocab:
            raise bad(f"tokens has the id {max(body.tokens)}; the model's ids end at {vocab - 1}", "tokens")
        return json_response({"prompt": self._service.codec.decode(body.tokens)})

    async def models(self, request: Request, tenant: Tenant) -> Response:
        entry = {
            "id": self._service.model, "object": "model", "created": 0, "owned_by": "forebay",
            "max_model_len": self._service.worker.max_context,
        }  # fmt: skip
        return json_response({"object": "list", "data": [entry]})

    async def health(self) -> Response:
        """Open to everybody: whoever balances load or restarts us has no key."""
        fleet = self._service.fleet
        there = [link for link in fleet.links if link.connected and link.description is not None]
        able = next((link for link in there if link.able), there[0] if there else None)
        known = None if able is None else able.description
        body: dict[str, object] = {
            "status": "no worker" if able is None else able.state,
            "model": self._service.model,
            "worker": None if known is None else known.pid,
            "store": fleet.store,
        }
        if len(fleet.links) > 1:
            body["workers"] = {link.name: _how(link) for link in fleet.links}
        return json_response(body, 200 if able is not None and able.able else 503)

    async def metrics(self, request: Request, tenant: Tenant) -> Response:
        text = await self._service.metrics.render(self._service.fleet, self._service.splitter)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def model_info(self, request: Request, tenant: Tenant) -> Response:
        """What routers ask a worker for its model."""
        worker = self._service.worker
        return json_response(
            {
                "model_path": self._service.model, "served_model_name": self._service.model, "is_generation": True,
                "max_model_len": worker.max_context, "vocab_size": worker.vocab_size,
            }
        )  # fmt: skip

    async def server_info(self, request: Request, tenant: Tenant) -> Response:
        """What routers ask a worker for its shape: one rank, as far as they need to know."""
        worker = self._service.worker
        return json_response(
            {
                "model_path": self._service.model, "served_model_name": self._service.model, "dp_size": 1,
                "version": __version__, "max_model_len": worker.max_context, "kv_block_size": MATCH_UNIT,
                "max_running_requests": self._service.fleet.max_calls,
            }
        )  # fmt: skip

    async def load(self, request: Request, tenant: Tenant) -> Response:
        """How many generations are under way."""
        return json_response({"server_load": len(self._service.fleet.calls)})

    async def namespace(self, request: Request, tenant: Tenant) -> Response:
        """Where the caller's chains begin: what `forebay explain` asks a store with."""
        found = decode_namespace(self._service.worker.namespace)
        root = root_key(found.id, tenant.salt(request.query_params.get("cache_salt")))
        groups = [{"name": group.name, "kind": group.kind, "window": group.window} for group in found.groups]
        return json_response(
            {"id": found.id.hex(), "root": root.hex(), "chunk_tokens": found.chunk_tokens, "groups": groups}
        )
