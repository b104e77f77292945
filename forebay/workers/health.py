"""Asking a front end how it is, over plain HTTP on an address of this machine."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import msgspec

ANSWER_S = 2.0
ANSWER_BYTES_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Health:
    """What `/health` said. `store` is `connected`, `down` or `none`."""

    status: int
    model: str = ""
    store: str = ""

    @property
    def serving(self) -> bool:
        """Is there a worker, and does it have its store?"""
        return self.status == 200 and self.store == "connected"


class _Body(msgspec.Struct):
    model: str | None = None
    store: str | None = None


async def health_of(host: str, port: int) -> Health | None:
    """The front end's health; None while nobody answers sensibly."""
    try:
        return await asyncio.wait_for(_ask(host, port), ANSWER_S)
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
        return None


async def _ask(host: str, port: int) -> Health:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET /health HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read(ANSWER_BYTES_MAX)
        while data := await reader.read(ANSWER_BYTES_MAX):
            answer += data
            if len(answer) > ANSWER_BYTES_MAX:
                raise ValueError("not a front end of ours")
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    try:
        known = msgspec.json.decode(body, type=_Body)
    except msgspec.DecodeError:
        known = _Body()
    return Health(status, known.model or "", known.store or "")
