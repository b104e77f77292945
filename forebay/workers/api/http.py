"""The HTTP that FastAPI leaves to us: bounded bodies, JSON, event streams, and clients that go away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forebay.workers.api.bodies import too_large
from forebay.workers.api.errors import ApiError

T = TypeVar("T")

log = logging.getLogger(__name__)

BODY_BYTES_MAX = 32 << 20


class ClientGone(Exception):
    """Nobody waits for this answer any more."""


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def error_response(error: ApiError) -> Response:
    """An error in OpenAI's shape."""
    return json_response(error.body(), error.status, error.headers)


async def body_of(request: Request) -> bytes:
    """The request's body, at most BODY_BYTES_MAX of it. Raises ApiError 413; ClientGone if it ends in the middle."""
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > BODY_BYTES_MAX:
        raise too_large(BODY_BYTES_MAX)
    data = bytearray()
    try:
        async for part in request.stream():
            data += part
            if len(data) > BODY_BYTES_MAX:
                raise too_large(BODY_BYTES_MAX)
    except ClientDisconnect as error:
        raise ClientGone from error
    return bytes(data)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client goes away meanwhile (then ClientGone)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for job in (task, gone):
            job.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. The first one is there already, so that a failure before it has a status of its own.

    Whatever ends the answer (its end, a client that goes away, a server that stops), `events` is closed.
    """

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes, None], headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", **(headers or {})})
        del self.headers["content-length"]  # nobody knows it
        self._first, self._events = first, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientGone:
            log.debug("a client went away in mid-stream")
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
