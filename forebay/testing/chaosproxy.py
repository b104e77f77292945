"""A TCP proxy that behaves as networks do on bad days, for tests of whatever speaks over one.

    with ChaosProxy(("127.0.0.1", server_port), seed=7) as proxy:
        client = connect("127.0.0.1", proxy.port)
        proxy.weather = Weather(delay_s=0.05, slice_bytes=100)
        proxy.weather = Weather(silent=True)      # a partition: nothing passes, nothing fails
        proxy.weather = Weather()                 # and what was held back arrives late, as TCP has it
        proxy.reset_all()

One thread of its own, whatever the number of connections. What a connection holds back is bounded, so a sender
that is faster than the weather is made to wait, as by a real network.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Literal

BLOCK_BYTES = 64 << 10
BLOCKS_HELD = 64
CONNECTIONS_MAX = 512
LOOK_S = 0.005
"""How often a stream that is held back looks at the weather."""
CONNECT_S = 5.0

Direction = Literal["both", "to_client", "to_server"]


@dataclass(frozen=True)
class Weather:
    """What happens to bytes from now on; by default they pass.

    `delay_s` is latency, `jitter_s` more of it, drawn for each block; the order stays. `bytes_per_s` is each stream's
    bandwidth, 0 for any. `slice_bytes` cuts what is passed on into pieces. One bit of about `flip_every` bytes is
    flipped. A connection is reset after `reset_after` bytes of one stream, or ended in good order after `end_after`.
    `silent`: nothing passes. `refuse`: new connections are reset. `direction` is what all but the last are for.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = 0.0
    slice_bytes: int = 0
    flip_every: int = 0
    reset_after: int = 0
    end_after: int = 0
    silent: bool = False
    refuse: bool = False
    direction: Direction = "both"


CALM = Weather()


class ChaosProxy:
    """Passes connections on to `target`. `weather` may be set from any thread at any time.

    `counts` has what was done: connections, refused, resets, ended, flips, bytes. The same seed flips the same
    bits of the same bytes as long as they come in the same blocks.
    """

    def __init__(self, target: tuple[str, int], *, host: str = "127.0.0.1", port: int = 0, seed: int = 0) -> None:
        self.weather = CALM
        self.counts: Counter[str] = Counter()
        self._target = target
        self._random = random.Random(seed)
        self._open: set[_Pair] = set()
        self._listener = socket.create_server((host, port), backlog=128)
        self.host = host
        self.port = int(self._listener.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"chaos proxy {self.port}", daemon=True)
        self._thread.start()

    def __enter__(self) -> ChaosProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def open(self) -> int:
        """Connections that are passed on at present."""
        return len(self._open)

    def reset_all(self) -> None:
        """Reset every connection, in both directions. Returns once that is done."""
        self._call(self._reset_all)

    def close(self) -> None:
        """End everything. Blocks until the thread is gone; twice is fine."""
        if self._thread.is_alive():
            self._call(self._reset_all)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _call(self, function: object) -> None:
        async def call() -> None:
            assert callable(function)
            function()

        asyncio.run_coroutine_threadsafe(call(), self._loop).result(CONNECT_S)

    def _reset_all(self) -> None:
        for pair in list(self._open):
            pair.reset("resets")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._accepted, sock=self._listener))
        self._loop.run_forever()
        server.close()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.counts["connections"] += 1
        if self.weather.refuse or len(self._open) >= CONNECTIONS_MAX:
            self.counts["refused"] += 1
            _reset(writer)
            return
        try:
            there = await asyncio.wait_for(asyncio.open_connection(*self._target), CONNECT_S)
        except (OSError, TimeoutError):
            self.counts["target_away"] += 1
            _reset(writer)
            return
        pair = _Pair(self, (reader, writer), there)
        self._open.add(pair)
        try:
            await pair.run()
        finally:
            self._open.discard(pair)

    def flipped(self, data: bytes, every: int) -> bytes:
        """`data` with about one bit of `every` bytes flipped."""
        changed = bytearray(data)
        at = int(self._random.expovariate(1 / every))
        while at < len(changed):
            changed[at] ^= 1 << self._random.randrange(8)
            self.counts["flips"] += 1
            at += 1 + int(self._random.expovariate(1 / every))
        return bytes(changed)

    def jitter(self, most: float) -> float:
        """A drawn part of `most`."""
        return self._random.random() * most if most else 0.0


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Pair:
    """One connection and its continuation."""

    def __init__(self, proxy: ChaosProxy, here: Ends, there: Ends) -> None:
        self.proxy = proxy
        self._writers = (here[1], there[1])
        self._streams = (
            _Stream(self, "to_server", here[0], there[1]),
            _Stream(self, "to_client", there[0], here[1]),
        )

    async def run(self) -> None:
        try:
            await asyncio.gather(*(stream.run() for stream in self._streams))
        except OSError:
            self.reset("broken")
        finally:
            for writer in self._writers:
                writer.close()

    def reset(self, why: str) -> None:
        if not self._writers[0].transport.is_closing():
            self.proxy.counts[why] += 1
        for writer in self._writers:
            _reset(writer)


class _Stream:
    """One direction of a connection: read, held for its delay, changed, passed on."""

    def __init__(
        self, pair: _Pair, name: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._proxy = pair.proxy
        self._pair = pair
        self._name = name
        self._reader = reader
        self._writer = writer
        self._held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(BLOCKS_HELD)
        self._passed = 0

    @property
    def _weather(self) -> Weather:
        weather = self._proxy.weather
        return weather if weather.direction in ("both", self._name) else CALM

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read())
            group.create_task(self._write())

    async def _read(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            try:
                data = await self._reader.read(BLOCK_BYTES)
            except OSError:
                self._pair.reset("broken")
                data = b""
            weather = self._weather
            await self._held.put((clock() + weather.delay_s + self._proxy.jitter(weather.jitter_s), data))
            if not data:
                return

    async def _write(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due, data = await self._held.get()
            if (left := due - clock()) > 0:
                await asyncio.sleep(left)
            while self._weather.silent and not self._writer.transport.is_closing():
                await asyncio.sleep(LOOK_S)
            try:
                if not data:
                    self._end()
                    return
                await self._pass_on(data)
            except OSError:
                self._pair.reset("broken")
            if self._writer.transport.is_closing():
                await self._drain_reader(data)
                return

    async def _drain_reader(self, data: bytes) -> None:
        """The other end is gone: take what still comes, so that the reader ends."""
        while data:
            _, data = await self._held.get()

    def _end(self) -> None:
        if not self._writer.transport.is_closing():
            with contextlib.suppress(OSError):
                self._writer.write_eof()

    async def _pass_on(self, data: bytes) -> None:
        weather = self._weather
        if weather.flip_every:
            data = self._proxy.flipped(data, weather.flip_every)
        limit = min((n for n in (weather.reset_after, weather.end_after) if n), default=0)
        if limit and self._passed + len(data) >= limit:
            await self._cut(data[: max(0, limit - self._passed)], weather)
            return
        step = weather.slice_bytes or len(data)
        for at in range(0, len(data), step):
            await self._send(data[at : at + step])
            if weather.bytes_per_s:
                await asyncio.sleep(step / weather.bytes_per_s)

    async def _send(self, data: bytes) -> None:
        self._passed += len(data)
        self._proxy.counts["bytes"] += len(data)
        self._writer.write(data)
        await self._writer.drain()

    async def _cut(self, front: bytes, weather: Weather) -> None:
        await self._send(front)
        if weather.end_after and self._passed >= weather.end_after:
            self._proxy.counts["ended"] += 1
            self._writer.close()
        else:
            self._pair.reset("resets")


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset instead of an end: what is on its way is lost."""
    found = writer.get_extra_info("socket")
    if found is not None and not writer.transport.is_closing():
        with contextlib.suppress(OSError):  # it is closed already
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
