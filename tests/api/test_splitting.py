"""Who prefills: decided by what the store has; whatever doesn't answer in time is done without."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest
import xxhash

from forebay.kvstore.client import StoreClient
from forebay.kvstore.identity import chunk_keys, encode_namespace, pack_tokens, root_key
from forebay.kvstore.protocol import Explained, NewChunk, TierReach, Written
from forebay.testing import web
from forebay.tiers.p2p.options import Address
from forebay.workers.api.fleet import Fleet
from forebay.workers.api.metrics import Metrics
from forebay.workers.api.splitting import VIEWS_MAX, RemotePrefill, Splitter, StoreView, reach_of
from forebay.workers.protocol import Description
from tests.api.scripted import NAMESPACE, ScriptedWorker
from tests.api.serving import Front
from tests.workers.processes import start_store

PROMPT = list(range(5, 205))
STORED, CHUNK = 64, 32


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A store that has the first 64 tokens of the prompt."""
    folder = tmp_path_factory.mktemp("store")
    process = start_store(folder)
    address = f"{folder}/store.sock"
    with StoreClient(address) as client:
        namespace = client.register(NAMESPACE, "x")
        root, packed = root_key(NAMESPACE.id, b""), pack_tokens(PROMPT[:STORED])
        joined = chunk_keys(root, packed, CHUNK)
        keys = [joined[at : at + 32] for at in range(0, len(joined), 32)]
        parents = [root, *keys]
        chunks = [
            NewChunk(0, key, parents[n], n * CHUNK, packed[4 * n * CHUNK : 4 * (n + 1) * CHUNK])
            for n, key in enumerate(keys)
        ]
        geometry = NAMESPACE.groups[0]
        size = 2 * len(geometry.layers) * geometry.kv_heads * geometry.head_dim * 4 * CHUNK
        written = []
        for slot in client.reserve(namespace, "", chunks).slots:
            client.room(slot, size)[:] = bytes(size)
            written.append(Written(slot.reservation, zeros(size)))
        client.commit(written)
    yield address
    process.end()


def zeros(size: int) -> bytes:
    """Checksums of granules of zeros."""
    granules = CHUNK // 16
    return xxhash.xxh3_64_intdigest(bytes(size // granules)).to_bytes(8, "little") * granules


class Both(Fleet):
    """Both sides are there."""

    prefills = True


class OneSide(Fleet):
    """Nobody prefills for others."""

    prefills = False


def fleet_of(kind: type[Fleet]) -> Fleet:
    """A fleet that knows its model."""
    fleet = kind([Path("a.sock")], 4)
    fleet.description = Description(
        boot="b", pid=1, model="m", vocab_size=300, max_context=2000, eos_ids=[], store="connected",
        namespace=encode_namespace(NAMESPACE),
    )  # fmt: skip
    return fleet


def ask(splitter: Splitter, prompt: list[int], tenant: str = "") -> bool:
    async def asked() -> bool:
        try:
            return await splitter.local(prompt, b"", tenant, None, None)
        finally:
            await splitter.store.close()

    return asyncio.run(asked())


@pytest.mark.parametrize(("at", "split"), [(len(PROMPT) - STORED, True), (len(PROMPT) - STORED + 1, False)])
def test_a_prompt_is_split_where_enough_of_it_is_not_stored(store: str, at: int, split: bool) -> None:
    splitter = Splitter(fleet_of(Both), StoreView(store), at)
    assert ask(splitter, PROMPT) is split
    assert (splitter.counters.local, splitter.counters.cached) == (int(split), int(not split))


def test_a_short_prompt_costs_no_question_and_one_side_alone_splits_nothing(tmp_path: Path, store: str) -> None:
    nobody = StoreView(f"{tmp_path}/nobody.sock")
    assert not ask(Splitter(fleet_of(Both), nobody, len(PROMPT) + 1), PROMPT)
    alone = Splitter(fleet_of(OneSide), nobody, 10)
    assert not ask(alone, PROMPT) and alone.counters.alone == 1


def test_without_a_store_nothing_is_split(tmp_path: Path) -> None:
    splitter = Splitter(fleet_of(Both), StoreView(f"{tmp_path}/nobody.sock"), 10)
    assert not ask(splitter, PROMPT) and splitter.counters.cached == 1


def test_connections_to_the_store_are_kept_for_so_many_tenants(store: str) -> None:
    view = StoreView(store)

    async def many() -> None:
        for number in range(2 * VIEWS_MAX):
            assert await view.reach(encode_namespace(NAMESPACE), PROMPT, b"", f"tenant-{number}") is not None
            assert view.connections <= VIEWS_MAX
        assert view.connections == VIEWS_MAX
        await view.close()
        assert view.connections == 0

    asyncio.run(many())


def test_a_prefix_that_one_tier_has_of_all_groups_counts_as_reached() -> None:
    reaches = [TierReach("fs", "full", 96, ""), TierReach("fs", "window", 64, ""), TierReach("s3", "full", 32, "")]
    assert reach_of(Explained(rid=1, hit=48, reaches=reaches)) == 64
    assert reach_of(Explained(rid=1, hit=80, reaches=reaches)) == 80
    assert reach_of(Explained(rid=1, hit=0, reaches=[])) == 0


# --- another host ----------------------------------------------------------------------------------------


class Host:
    """Another host's front end, as far as ours asks it."""

    def __init__(self) -> None:
        self.healthy, self.hangs, self.status = True, False, 200
        self.bodies: list[dict[str, object]] = []

    async def __aenter__(self) -> Host:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.remote = RemotePrefill(Address("127.0.0.1", port))
        self._watching = asyncio.create_task(self.remote.watch())
        await self.until(lambda: self.remote.up)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._watching.cancel()
        self._server.close()

    async def until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not true():
            assert time.monotonic() < end
            await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lengths = (line for line in head.splitlines() if line.lower().startswith("content-length"))
        length = int(next(lengths).split(":")[1])
        body = await reader.readexactly(length)
        status, told = 200, b'{"model": "m", "store": "connected"}'
        if head.startswith("GET"):
            status = 200 if self.healthy else 503
        else:
            self.bodies.append(json.loads(body))
            status = self.status
            if self.hangs:
                await asyncio.sleep(60)
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(told)}\r\n\r\n".encode() + told)
        writer.close()


def test_another_host_is_told_the_prompt_and_that_its_kv_will_be_fetched() -> None:
    async def play() -> None:
        async with Host() as host:
            assert await host.remote.prefill([1, 2, 3], "salt", "Bearer x")
            (body,) = host.bodies
            assert (body["prompt"], body["max_tokens"], body["cache_salt"]) == ([1, 2, 3], 1, "salt")
            assert body["kv_transfer_params"]["do_remote_decode"] is True  # type: ignore[index]
            host.status = 429
            assert not await host.remote.prefill([1, 2, 3], None, None)

    asyncio.run(play())


class Empty(StoreView):
    """A store that has nothing."""

    async def reach(self, namespace: bytes, prompt: Sequence[int], salt: bytes, tenant: str) -> int:
        return 0


def test_a_host_that_answers_nobody_gathers_no_more_than_may_be_under_way_here() -> None:
    async def play() -> None:
        async with Host() as host:
            host.hangs = True
            fleet = fleet_of(OneSide)
            splitter = Splitter(fleet, Empty("nowhere"), 10, [host.remote])
            asking = [
                asyncio.ensure_future(splitter.local(PROMPT, b"", "", None, None)) for _ in range(fleet.max_calls)
            ]
            await host.until(lambda: host.remote.running == fleet.max_calls)
            shown = await Metrics().render(fleet, splitter)
            assert f"forebay_split_running {float(fleet.max_calls)}".encode() in shown
            assert not await splitter.local(PROMPT, b"", "", None, None) and splitter.counters.alone == 1
            host.healthy = False
            assert await asyncio.gather(*asking) == [False] * fleet.max_calls and host.remote.running == 0

    asyncio.run(play())


class Slow:
    """A splitter whose prefill host takes for ever."""

    def __init__(self) -> None:
        self.asked = self.left = 0

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def local(self, *prompt: object) -> bool:
        self.asked += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.left += 1
        raise AssertionError


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_leaves_is_not_prefilled_for(tmp_path: Path, path: str) -> None:
    slow = Slow()
    body = {"prompt": "|x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    with Front(tmp_path, worker=ScriptedWorker(tmp_path / "worker.sock"), splitter=slow) as front:
        with pytest.raises(httpx.ReadTimeout):
            web.post(front.url + path, json=body | {"max_tokens": 5}, timeout=0.5)
        front.wait_until(lambda: slow.left == 1)
        assert slow.asked == 1 and not front.fleet.calls


def test_what_a_host_was_asked_is_given_up_as_soon_as_it_is_gone() -> None:
    async def play() -> None:
        async with Host() as host:
            host.hangs = True
            asking = asyncio.ensure_future(host.remote.prefill([1, 2, 3], None, None))
            await host.until(lambda: bool(host.bodies))
            assert not asking.done() and host.remote.running == 1
            host.healthy = False
            assert not await asking and not host.remote.up and host.remote.running == 0
            host.healthy = True
            await host.until(lambda: host.remote.up)

    asyncio.run(play())
