"""As much of an HTTP/1.1 client as a proxy needs: one request a connection, bodies as they come.

Answers are parsed by httptools. Every wait has a limit; leaving `Answer` early closes the connection, which ends the
request at the other side.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

import httptools

_READ_BYTES = 1 << 16
HEADER_BYTES_MAX = 1 << 16
WHOLE_BYTES_MAX = 64 << 20


class BackendFailed(Exception):
    """No answer, or one that broke off. `begun` tells whether some of it had come."""


@dataclass(eq=False)
class Answer:
    """One answer. Use it as an asynchronous context; `status` and `headers` are there from the start."""

    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _silence_s: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    _parts: list[bytes] = field(default_factory=list)
    _headed: bool = False
    _complete: bool = False
    _size: int = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End it, whether it is complete or not. Idempotent."""
        self._writer.transport.abort()

    async def body(self) -> AsyncGenerator[bytes, None]:
        """Parts of the body as they come. Raises BackendFailed if it breaks off."""
        while True:
            parts, self._parts = self._parts, []
            for part in parts:
                yield part
            if self._complete and not self._parts:
                return
            await self._more()

    async def whole(self) -> bytes:
        """The whole body. Raises BackendFailed."""
        data = bytearray()
        async for part in self.body():
            data += part
            if len(data) > WHOLE_BYTES_MAX:
                raise BackendFailed("the answer is too long")
        return bytes(data)

    async def _more(self) -> None:
        try:
            data = await asyncio.wait_for(self._reader.read(_READ_BYTES), self._silence_s)
            if data:
                self._parser.feed_data(data)
            elif self._headed and "content-length" not in self.headers and not self._chunked:
                self._complete = True  # it ends with the connection
            else:
                raise BackendFailed("the connection ended before the answer did")
        except (OSError, TimeoutError, httptools.HttpParserError) as error:
            raise BackendFailed(f"{type(error).__name__} {error}") from error

    @property
    def _chunked(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "").lower()

    async def _head(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        while not self._headed:
            await self._more()

    # --- httptools ---------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header line."""
        self._size += len(name) + len(value)
        if self._size > HEADER_BYTES_MAX:
            raise ValueError("headers are too long")
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """All of them."""
        self.status = self._parser.get_status_code()
        self._headed = True

    def on_body(self, part: bytes) -> None:
        """Some of the body."""
        self._parts.append(part)

    def on_message_complete(self) -> None:
        """The end."""
        self._complete = True


async def ask(
    host: str, port: int, method: str, path: str, *, body: bytes = b"", headers: Mapping[str, str] | None = None,
    connect_s: float = 2.0, silence_s: float = 600.0, opened: Callable[[Answer], None] = lambda answer: None,
) -> Answer:  # fmt: skip
    """Send a request; returns once the answer's head is there. `opened` is given the answer as soon as it can be
    closed, before that. Raises BackendFailed."""
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), connect_s)
    except (OSError, TimeoutError, UnicodeError) as error:  # a name can be none that DNS takes
        raise BackendFailed(f"{host}:{port} can't be reached: {error or 'timeout'}") from error
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}:{port}", "connection: close", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    answer = Answer(reader, writer, silence_s)
    opened(answer)
    try:
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        await writer.drain()
        await answer._head()
    except OSError as error:
        answer.close()
        raise BackendFailed(f"{host}:{port} broke off: {error}") from error
    except BaseException:
        answer.close()
        raise
    return answer
