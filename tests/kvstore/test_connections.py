"""How many may be connected, and what who hasn't said who it is may cost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from forebay.errors import RequestRefused
from forebay.ipc.framing import frame
from forebay.kvstore.client import AsyncStoreClient
from forebay.kvstore.config import StoreConfig
from forebay.kvstore.limits import Limits
from forebay.kvstore.server import HELLO_BYTES_MAX
from forebay.kvstore.service import WAITING_MAX
from tests.faults.inprocess import InProcessDaemon, started

MOST = 3


class Few(StoreConfig):
    """A store for few clients."""

    @property
    def limits(self) -> Limits:
        return Limits(connections=MOST)


def with_store(folder: Path, use: Callable[[InProcessDaemon], Awaitable[None]]) -> None:
    async def run() -> None:
        (folder / "pool").mkdir()
        daemon = InProcessDaemon(Few(folder / "store.sock", memory=4 << 20, extent=1 << 20, pool_dir=folder / "pool"))
        ended = await started(daemon)
        try:
            await use(daemon)
        finally:
            daemon.stop()
            assert await ended == 0

    asyncio.run(run())


def client_of(daemon: InProcessDaemon) -> AsyncStoreClient:
    return AsyncStoreClient(f"unix://{daemon.config.socket}")


async def raw(daemon: InProcessDaemon) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_unix_connection(str(daemon.config.socket))


def test_as_many_as_may_be_connected_are_and_one_more_is_told_so(tmp_path: Path) -> None:
    async def use(daemon: InProcessDaemon) -> None:
        clients = [client_of(daemon) for _ in range(MOST)]
        for client in clients:
            await client.connect()
        with pytest.raises(RequestRefused, match=f"{MOST} clients are connected"):
            await client_of(daemon).connect()
        await clients.pop().close()
        again = client_of(daemon)
        while True:
            try:
                await again.connect()
                break
            except RequestRefused:  # the end of the other one isn't noticed yet
                await asyncio.sleep(0.01)
        for client in [*clients, again]:
            await client.close()

    with_store(tmp_path, use)


def test_those_who_say_nothing_are_not_listened_to_without_end(tmp_path: Path) -> None:
    async def use(daemon: InProcessDaemon) -> None:
        silent = [await raw(daemon) for _ in range(2 * (MOST + WAITING_MAX))]
        hung_up = [asyncio.create_task(reader.read()) for reader, _ in silent]
        await asyncio.wait(hung_up, return_when=asyncio.FIRST_COMPLETED)
        while sum(task.done() for task in hung_up) < MOST + WAITING_MAX - 1:
            await asyncio.sleep(0.01)
        assert len(daemon.service.connections) <= MOST + WAITING_MAX + 1
        for _, writer in silent:
            writer.close()
        await asyncio.gather(*hung_up)

    with_store(tmp_path, use)


def test_a_long_frame_before_a_hello_ends_its_connection(tmp_path: Path) -> None:
    async def use(daemon: InProcessDaemon) -> None:
        reader, writer = await raw(daemon)
        writer.write(frame(bytes(1 << 20))[: 2 * HELLO_BYTES_MAX])
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()

    with_store(tmp_path, use)
