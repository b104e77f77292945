"""Asking a front end how it is, over plain HTTP on an address of this machine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
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


@dataclass(frozen=True, slots=True)
class Told:
    """A whole HTTP answer."""

    status: int
    body: bytes


async def health_of(host: str, port: int) -> Health | None:
    """The front end's health; None while nobody answers sensibly."""
    try:
        told = await asyncio.wait_for(ask(host, port, "GET", "/health"), ANSWER_S)
    except (OSError, TimeoutError, ValueError):
        return None
    try:
        known = msgspec.json.decode(told.body, type=_Body)
    except msgspec.DecodeError:
        known = _Body()
    return Health(told.status, known.model or "", known.store or "")


async def ask(
    host: str, port: int, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> Told:
    """Ask a front end of ours something to which the answer is short. Raises OSError, or ValueError if that wasn't one.

    Waits for as long as it takes.
    """
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}:{port}", "Connection: close", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        answer = bytearray()
        while data := await reader.read(ANSWER_BYTES_MAX):
            answer += data
            if len(answer) > ANSWER_BYTES_MAX:
                raise ValueError("not a front end of ours")
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    head, _, rest = bytes(answer).partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 3:
        raise ValueError("the connection ended before there was an answer")
    return Told(int(words[1]), rest)
