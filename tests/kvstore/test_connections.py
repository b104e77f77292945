"""How many may be connected, and what who hasn't said who it is may cost."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from forebay.errors import RequestRefused
from forebay.ipc.framing import frame
from forebay.kvstore.client import AsyncStoreClient
from forebay.kvstore.config import StoreConfig
from forebay.kvstore.identity import GroupGeometry, Namespace
from forebay.kvstore.limits import Limits
from forebay.kvstore.protocol import CLIENT_ID_BYTES, REQUESTS, Hello
from forebay.kvstore.server import HELLO_BYTES_MAX
from forebay.kvstore.service import WAITING_MAX
from tests.faults.inprocess import InProcessDaemon, started

MOST = 3
INTAKE = 1 << 20


class Few(StoreConfig):
    """A store for few clients."""

    @property
    def limits(self) -> Limits:
        return Limits(connections=MOST, namespaces_per_client=2, intake_bytes=INTAKE)


class Impatient(StoreConfig):
    """A store for clients that finish what they begin."""

    @property
    def limits(self) -> Limits:
        return Limits(hello_s=0.3, frame_s=0.3)


def with_store(
    folder: Path, use: Callable[[InProcessDaemon], Awaitable[None]], kind: type[StoreConfig] = Few
) -> None:
    async def run() -> None:
        (folder / "pool").mkdir()
        daemon = InProcessDaemon(kind(folder / "store.sock", memory=4 << 20, extent=1 << 20, pool_dir=folder / "pool"))
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


def test_who_does_not_say_who_it_is_is_hung_up_on(tmp_path: Path) -> None:
    async def use(daemon: InProcessDaemon) -> None:
        reader, writer = await raw(daemon)
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
        half, writer = await raw(daemon)
        writer.write(frame(bytes(200))[:100])
        assert await asyncio.wait_for(half.read(), 10) == b""
        writer.close()

    with_store(tmp_path, use, Impatient)


async def greeted(daemon: InProcessDaemon) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await raw(daemon)
    writer.write(REQUESTS.encode(Hello(rid=1, client=os.urandom(CLIENT_ID_BYTES), kind="test")))
    assert await reader.read(1)
    return reader, writer


async def cut_off(reader: asyncio.StreamReader) -> None:
    """Read what is left of the welcome, until the store hangs up."""
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass


def test_a_message_whose_rest_does_not_come_ends_its_connection_and_those_who_wait_in_peace_stay(
    tmp_path: Path,
) -> None:
    async def use(daemon: InProcessDaemon) -> None:
        quiet = client_of(daemon)
        await quiet.connect()
        reader, writer = await greeted(daemon)
        writer.write(frame(bytes(1000))[:500])
        await cut_off(reader)
        writer.close()
        assert daemon.service.intake.bytes == 0
        await asyncio.sleep(2 * daemon.config.limits.frame_s)
        assert (await quiet.stats()).values["store.connections"] == 1
        await quiet.close()

    with_store(tmp_path, use, Impatient)


def test_half_messages_of_all_together_are_bounded(tmp_path: Path) -> None:
    """Each could be longer by itself; the second goes over what all may have in hand, and hears the end."""

    async def use(daemon: InProcessDaemon) -> None:
        intake, half = daemon.service.intake, INTAKE * 2 // 3
        first, second = await greeted(daemon), await greeted(daemon)
        first[1].write(frame(bytes(INTAKE))[:half])
        while intake.bytes < half:
            await asyncio.sleep(0.01)
        second[1].write(frame(bytes(INTAKE))[:half])
        await cut_off(second[0])
        assert intake.refused == 1 and intake.bytes <= INTAKE
        for _, writer in (first, second):
            writer.close()
        while intake.bytes:
            await asyncio.sleep(0.01)
        other = client_of(daemon)
        await other.connect()
        assert (await other.stats()).values["store.intake_refused"] == 1
        await other.close()

    with_store(tmp_path, use)


def test_no_client_takes_all_namespaces(tmp_path: Path) -> None:
    async def use(daemon: InProcessDaemon) -> None:
        def numbered(number: int) -> Namespace:
            return Namespace(bytes([number]) * 32, (GroupGeometry("full", "full", (0,), 1, 8, "float32"),), 32)

        greedy, other = client_of(daemon), client_of(daemon)
        for client in (greedy, other):
            await client.connect()
        for number in (1, 2, 1, 2):
            await greedy.register(numbered(number))
        with pytest.raises(RequestRefused, match="at most 2 namespaces"):
            await greedy.register(numbered(3))
        await other.register(numbered(3))
        for client in (greedy, other):
            await client.close()

    with_store(tmp_path, use)
