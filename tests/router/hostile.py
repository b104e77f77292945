"""Workers that fail in every way that HTTP has, and a router's proxy before them, all on one loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from forebay.router.router import Router
from forebay.router.settings import Backend, RouterConfig

WHOLE = 6
"""Tokens of every answer: 100, 101, ..., said as t0, t1, ..."""
SAID = [f"t{number}" for number in range(WHOLE)]
PROMPT = list(range(1, 40))


def chunk(number: int) -> bytes:
    finish = "length" if number == WHOLE - 1 else None
    choice = {"index": 0, "text": f"t{number}", "token_ids": [100 + number], "finish_reason": finish}
    return b"data: " + json.dumps({"id": "x", "choices": [choice]}).encode() + b"\n\n"


ODD_EVENTS = (
    b"data: {nonsense\n\n", b"data: \xff\xfe\n\n", b"data: [1, 2]\n\n", b'data: {"choices": 5}\n\n',
    b'data: {"choices": [7]}\n\n', b'data: {"choices": [{"index": "x"}]}\n\n',
    b'data: {"choices": [{"index": 0, "delta": [1]}]}\n\n',
    b'data: {"choices": [{"index": 0, "text": "t", "token_ids": ["a"]}]}\n\n',
    b'data: ' + b"[" * 100_000 + b"\n\n", b'data: {"error": {"message": "out of luck"}}\n\n',
)  # fmt: skip
ODD_USAGE = (
    b'data: {"choices": [], "usage": {"prompt_tokens": "many", "prompt_tokens_details": {"cached_tokens": []}}}\n\n'
)


@dataclass
class Hostile:
    """A front end like ours. `script` has what becomes of each completion in turn; then all are fine.

    fine, odd usage          an answer
    400, 429, 500, 503       a refusal
    close, half head, no http, odd length       no answer
    hang                     no answer, ever
    N then close, N then hang, N then odd, N then error     a stream that breaks off after N more tokens
    """

    script: list[str] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    healthy: bool = True
    hold: asyncio.Event | None = None
    odd: int = 0
    namespace: str = "00" * 32

    @asynccontextmanager
    async def served(self, name: str) -> AsyncIterator[Backend]:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield Backend(name, "127.0.0.1", server.sockets[0].getsockname()[1])
        finally:
            self._stop.set()
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(int(line[15:]) for line in head.splitlines() if line.startswith("content-length:"))
            await self._answer(head.split()[1], await reader.readexactly(length), writer)
        writer.close()

    async def _answer(self, path: str, data: bytes, writer: asyncio.StreamWriter) -> None:
        if not self.healthy and path == "/health":
            _say(writer, 503, b"")
        elif path == "/v1/models":
            _say(writer, 200, b'{"data": [{"id": "m"}]}')
        elif path.startswith("/forebay/namespace"):
            _say(writer, 200, json.dumps({"id": self.namespace, "root": "11" * 32}).encode())
        elif path == "/v1/completions":
            self.asked.append(json.loads(data))
            await self._complete(self.asked[-1], self.script.pop(0) if self.script else "fine", writer)
        else:
            _say(writer, 200, b"")
        await writer.drain()

    async def _complete(self, body: dict[str, Any], way: str, writer: asyncio.StreamWriter) -> None:
        if way.isdigit():
            _say(writer, int(way), b'{"error": {"message": "no"}}')
        elif way == "hang":
            await self._stop.wait()
        elif way == "half head":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-le")
        elif way == "no http":
            writer.write(b"\x00\x01 what?\r\n\r\n")
        elif way == "odd length":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nshort")
        elif way != "close" and body.get("stream"):
            await self._stream(body, way, writer)
        elif way != "close":
            details = {"cached_tokens": "none" if way == "odd usage" else 3}
            usage = {"prompt_tokens": 39, "prompt_tokens_details": details}
            _say(writer, 200, json.dumps({"choices": [{"text": "".join(SAID)}], "usage": usage}).encode())

    async def _stream(self, body: dict[str, Any], way: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        before = len(body["resume_token_ids"][0]) if "resume_token_ids" in body else 0
        count, _, end = way.partition(" then ")
        left = range(before, min(before + int(count), WHOLE) if end else WHOLE)
        for number in left:
            writer.write(chunk(number))
            await writer.drain()
            if self.hold is not None:
                await self.hold.wait()
        if end == "hang":
            await self._stop.wait()
        elif end == "odd":
            self.odd += 1
            writer.write(ODD_EVENTS[self.odd % len(ODD_EVENTS)])
        elif not end:
            writer.write((ODD_USAGE if way == "odd usage" else b"") + b"data: [DONE]\n\n")


def _say(writer: asyncio.StreamWriter, status: int, data: bytes) -> None:
    writer.write(f"HTTP/1.1 {status} Word\r\ncontent-length: {len(data)}\r\nretry-after: 3\r\n\r\n".encode() + data)


@asynccontextmanager
async def routed(*workers: Hostile, **settings: Any) -> AsyncIterator[Router]:
    """A router before these, which have been looked at once."""
    async with AsyncExitStack() as stack:
        backends = [await stack.enter_async_context(one.served(f"w{at}")) for at, one in enumerate(workers)]
        router = Router(RouterConfig(tuple(backends), seed=1, **settings))
        await look(router)
        yield router


async def look(router: Router) -> None:
    """What the health poll does in one round."""
    await asyncio.gather(*(router.upstreams._look(number) for number in range(len(router.upstreams.all))))


def body(**more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": PROMPT, **more}


async def streamed(router: Router, most: int | None = None) -> list[str]:
    """What a client reads of a stream: its texts, `error`, `[DONE]`. It goes away after `most` events."""
    proxy = router.proxy
    events = proxy.stream(await proxy.call("/v1/completions", body(stream=True), {}))
    heard: list[str] = []
    try:
        async for event in events:
            heard.append(said(event))
            if most is not None and len(heard) >= most:
                break
    finally:
        await events.aclose()
    return heard


def said(event: bytes) -> str:
    data = event.removeprefix(b"data: ").strip()
    if data == b"[DONE]":
        return "[DONE]"
    told = json.loads(data)
    return "error" if "error" in told else str(told["choices"][0]["text"])


def at_rest(router: Router) -> None:
    """Nothing is counted that isn't under way."""
    load = router.routing.load
    assert load.stats().in_flight == 0 and not load._tickets
    for gauge in (load.requests, load.decoding, load.tokens, load._queued_s):
        assert not gauge.any(), gauge
    assert not any(load._queues) and not load.wait_s(1e9).any()
    assert not any(router.proxy._answers)
    assert not any(upstream.breaker._trying for upstream in router.upstreams.all)
