"""The metrics' door: whoever stands in it doesn't block it."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

import pytest

from forebay.kvstore.metrics import SCRAPES_MAX, MetricsServer

BODY = b"x" * (32 << 20)
REQUEST = b"GET /metrics HTTP/1.1\r\n\r\n"


class Large(MetricsServer):
    """It has much to tell."""

    async def _figures(self) -> bytes:
        return BODY


async def answered(port: int) -> int:
    """Length of an answer; 0 if it is hung up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(REQUEST)
        return len(await reader.read())
    except ConnectionError:
        return 0
    finally:
        writer.close()


@pytest.mark.parametrize("said", [b"", REQUEST])
def test_who_says_nothing_or_reads_nothing_is_hung_up_on_and_there_are_not_many(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.kvstore.metrics.REQUEST_S_MAX", 0.5)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])

    async def crowd() -> None:
        server = Large(f"127.0.0.1:{port}", cast(Any, None))
        await server.start()
        assert await answered(port) > len(BODY)
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(SCRAPES_MAX)]
        for connection in silent:
            connection.sendall(said)
        while server._scrapes < SCRAPES_MAX:
            await asyncio.sleep(0)
        assert await answered(port) == 0, "no more at a time"
        while not await answered(port):
            await asyncio.sleep(0.05)
        for connection in silent:
            connection.close()
        await server.stop()

    asyncio.run(crowd())
