"""The thread behind a p2p tier: one event loop that serves peers, keeps links to them, and runs loads and pushes.

The tier's process answers the daemon on its main thread, whatever happens here. Calls come in through
`call_soon_threadsafe`; results go out through `finish` and `fail`, from this thread.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket as sockets_of_the_system
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from forebay.errors import ConfigError, TierUnavailable
from forebay.tiers.base import ClearScope, JobResult, LookupResult, Query, StoreJob
from forebay.tiers.chunks import Slot
from forebay.tiers.p2p import sockets
from forebay.tiers.p2p.answers import Answers
from forebay.tiers.p2p.clears import PeerClears
from forebay.tiers.p2p.errors import PeerError, PeerLost
from forebay.tiers.p2p.fetch import Fetcher, Wanted, Ways
from forebay.tiers.p2p.keys import KeyPair, own_pair, peer_key
from forebay.tiers.p2p.loads import Loads
from forebay.tiers.p2p.nixl import NixlAgent
from forebay.tiers.p2p.options import PeerAddress, Settings
from forebay.tiers.p2p.peer import Peer, Self
from forebay.tiers.p2p.push import Pushes
from forebay.tiers.p2p.reach import Reaching
from forebay.tiers.p2p.remote import NoRemote
from forebay.tiers.p2p.server import CLEAR_S, Server
from forebay.tiers.p2p.source import Source, StoreSource
from forebay.tiers.p2p.stream_server import Listen, StreamServer
from forebay.tiers.p2p.streams import Place, Streams
from forebay.tiers.p2p.tls import Identity, new_identity
from forebay.tiers.p2p.wire import WINDOW, Nixl, Welcome, batches, sound

log = logging.getLogger("forebay.tier.p2p")

START_S = 10.0
CLOSE_S = 3.0
PIECES_AHEAD = 32
"""Pieces that all loads together ask one peer for ahead: a quarter of what its socket queues for us."""
SWITCH_S = 0.0005
"""A thread that comes back from a copy waits at most this long for the interpreter; by default it would be 5 ms."""
POLL_BUSY_S = 0.0005
POLL_IDLE_S = 0.02
"""How often NIXL is helped on while somebody may be reading from us, and while nobody is, or nobody needs help."""


class Engine:
    """See the module's text. `extents` and `namespaces` are the tier's, which grow while this runs; `make_source` is
    for tests. Constructing it starts the thread and waits until it listens; raises ConfigError, TierUnavailable."""

    def __init__(
        self,
        settings: Settings,
        extents: Mapping[int, memoryview],
        namespaces: Mapping[bytes, bytes],
        answers: Answers,
        *,
        finish: Callable[[JobResult], None],
        fail: Callable[[Exception], None],
        wake: Callable[[], None],
        make_source: Callable[[], Source] | None = None,
    ) -> None:
        self._settings, self._answers, self._wake = settings, answers, wake
        self._extents, self._namespaces = extents, namespaces
        self._finish, self._fail, self._make_source = finish, fail, make_source
        sys.setswitchinterval(SWITCH_S)
        self._pair = self._keys()
        self._identity = self._open_identity()
        self.nixl = self._open_nixl()
        self.up: frozenset[str] = frozenset()
        # Is any of the peers not up?
        self.absent = False
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._clears = PeerClears(
            [peer.name for peer in settings.peers], self._clear_there, self._spawn, time.monotonic
        )
        self._reaching = Reaching(settings.options.stall_s)
        self._remotes: dict[str, tuple[str, int]] = {}
        self._threads = ThreadPoolExecutor(settings.options.loads_at_once + 1, "p2p-load")
        self._started = threading.Event()
        self._failure: Exception | None = None
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="p2p", daemon=True)
        self._thread.start()
        if not self._started.wait(START_S):
            raise TierUnavailable(f"p2p: its event loop didn't start in {START_S:.0f} s")
        if self._failure is not None:
            raise self._failure

    def _keys(self) -> KeyPair | None:
        keys = self._settings.keys
        if keys is None:
            return None
        for peer in self._settings.peers:
            peer_key(keys, peer.name)
        return own_pair(keys)

    def _open_identity(self) -> Identity | None:
        if not self._settings.serves_tls:
            return None
        try:
            return new_identity()
        except ConfigError as error:
            if self._settings.options.bulk == "tls":
                raise
            log.warning("p2p: %s; bytes go in frames, which is slower", error)
            return None

    def _open_nixl(self) -> NixlAgent | None:
        if self._settings.options.bulk != "nixl":
            return None
        addresses = [peer.address for peer in self._settings.peers]
        addresses += [self._settings.listen] if self._settings.listen else []
        return NixlAgent(secrets.token_hex(16), loopback=all(address.loopback for address in addresses))

    # --- from the tier's thread ------------------------------------------------------------------------

    def ask(self, queries: Sequence[Query]) -> None:
        """Ask every peer that is up; `answers` is told, and the tier woken."""
        self._call(self._ask_all, list(queries))

    def load(self, wanted: Wanted) -> None:
        """Run a load."""
        if not self._loads.begin(wanted):
            self._call(self._spawn, self._loads_run, wanted)

    def _load_again(self, wanted: Wanted) -> None:
        self._call(self._spawn, self._loads_run, wanted)

    def push(self, job: StoreJob, slot: Slot) -> None:
        """Run a push."""
        self._call(self._spawn, self._pushes_run, job, slot)

    def clear(self, scope: ClearScope) -> bool:
        """Pass a clear on to all peers, if that is wanted; False if it isn't. What is asked after this call is asked
        of no peer before it has cleared."""
        if not self._settings.options.clear_peers or self._clears.obeying(scope):
            return False
        self._call(lambda: self._clears.pass_on(scope, self.up))
        return True

    def now(self) -> float:
        """The clock of deadlines."""
        return self._loop.time()

    def _call(self, function: Callable[..., object], *arguments: Any) -> None:
        with suppress(RuntimeError):  # it is closed: whoever waits is told by close
            self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> bool:
        """End everything; False if the thread still hangs somewhere."""
        self._call(self._stop.set)
        self._thread.join(CLOSE_S)
        # Nobody may be told that a load is over while one of these still writes into its slot.
        ending = threading.Thread(target=self._threads.shutdown, kwargs={"cancel_futures": True}, daemon=True)
        ending.start()
        ending.join(CLOSE_S)
        if self.nixl is not None:
            self.nixl.close()
        return not self._thread.is_alive() and not ending.is_alive()

    # --- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except Exception as error:
            if self._started.is_set():
                log.exception("p2p: the event loop has failed")
                self._fail(error)
            self._failure = error
        finally:
            self._started.set()
            with suppress(Exception):
                self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _main(self) -> None:
        options = self._settings.options
        context = sockets.Context()
        name, boot = sockets_of_the_system.gethostname(), secrets.token_bytes(16)
        self._source = self._make_source() if self._make_source else self._own_store()
        self._peers = {
            peer.name: self._peer(context, peer, Self(name, boot, self.nixl is not None))
            for peer in self._settings.peers
        }
        self.absent = bool(self._peers)
        window = max(1, min(WINDOW, PIECES_AHEAD // options.loads_at_once))
        fetcher = Fetcher(self._threads, options.stall_s, self._namespaces, self.nixl, window)
        self._loads = Loads(
            self._peers, self._answers, fetcher, self._ways, self._finish, self._fail, options.ask_s,
            options.loads_at_once, self._load_again,
        )  # fmt: skip
        self._pushes = Pushes(
            self._peers, self._settings.push_to, self._namespaces, self._finish, options.stall_s, self._ways
        )  # fmt: skip
        self._loads_run, self._pushes_run = self._loads.run, self._pushes.run
        self._server: Server | None = None
        self._stream_server: StreamServer | None = None
        opened: list[sockets.Socket] = []
        try:
            self._listen(context, name, boot, opened)
            for peer in self._peers.values():
                self._spawn(peer.run)
            self._started.set()
            await self._stop.wait()
        finally:
            if self._stream_server is not None:
                self._stream_server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if isinstance(self._source, StoreSource):
                await self._source.close()
            self._pushes.close()
            self._reaching.close()
            context.destroy(linger=0)

    def _own_store(self) -> StoreSource:
        options = self._settings.options
        source = StoreSource(options.store, self._extents, self._namespaces, options.lend_s, options.lend_bytes)
        if self._settings.listen is not None:
            self._spawn(source.keep_connected)
        return source

    def _listen(self, context: sockets.Context, name: str, boot: bytes, opened: list[sockets.Socket]) -> None:
        listen = self._settings.listen
        if listen is None:
            return
        if self._pair is not None and self._settings.keys is not None:
            zap = sockets.zap_socket(context)
            self._spawn(sockets.answer_handshakes, zap, self._settings.keys)
        router = sockets.listening(context, listen, self._pair)
        opened.append(router)
        self._server = Server(router, name, boot, self._source, self.nixl or NoRemote())
        if self._settings.options.clear_peers and self._pair is not None:
            self._server.clear = partial(self._clears.obey, clear=self._source.clear)
        if self._settings.serves_plain or self._identity is not None:
            guests, options = self._server.guests, self._settings.options
            self._stream_server = StreamServer(
                Listen(listen.host, options.stream_port, self._identity), self._loop, self._source,
                self.nixl or NoRemote(), lambda ticket: guests.of_ticket(ticket) is not None, options.stall_s,
            )  # fmt: skip
            self._server.stream_port = self._stream_server.port
            self._server.fingerprint = self._stream_server.fingerprint
        self._spawn(self._server.run)
        if self.nixl is not None:
            self._spawn(self._poll_nixl, self._server, self.nixl)

    async def _poll_nixl(self, server: Server, nixl: NixlAgent) -> None:
        """Who reads from us over TCP needs our help; over CMA, as on one host, or RDMA nobody does."""
        listen = self._settings.listen
        alone = listen is not None and listen.loopback
        while True:
            await self._loop.run_in_executor(nixl.thread, nixl.progress)
            reading = server.guests.figures()["guest_opens"] > 0
            await asyncio.sleep(POLL_BUSY_S if reading and not alone else POLL_IDLE_S)

    def _spawn(self, function: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        task = self._loop.create_task(function(*arguments))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("p2p: a task has failed: %r", error)
            self._fail(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    # --- peers -----------------------------------------------------------------------------------------

    def _peer(self, context: sockets.Context, peer: PeerAddress, me: Self) -> Peer:
        return Peer(
            peer.name, me, lambda: sockets.dialled(context, peer, self._pair, self._settings.keys), self._changed,
            self._greeted, self._nixl_changed,
        )  # fmt: skip

    def _changed(self) -> None:
        self.up = frozenset(name for name, peer in self._peers.items() if peer.up)
        self.absent = len(self.up) < len(self._peers)
        self._reaching.only(self.up)
        for name in self.up:
            self._clears.came_up(name)

    def _greeted(self, peer: Peer, welcome: Welcome) -> None:
        address = next(p.address for p in self._settings.peers if p.name == peer.name)
        settings, way = self._settings, Place(address.host, welcome.stream_port, welcome.ticket, welcome.fingerprint)
        if welcome.stream_port and (settings.takes_tls if welcome.fingerprint else settings.takes_plain(address)):
            streams = Streams(way)
            self._reaching.known(peer.name, streams)
            if welcome.fingerprint:
                self._spawn(self._reaching.reach, peer.name, streams)
        if self.nixl is not None and welcome.nixl:
            self._spawn(self._meet, self.nixl, peer.name, Nixl(welcome.nixl, welcome.nixl_epoch))

    def _nixl_changed(self, peer: Peer, now: Nixl) -> None:
        if self.nixl is not None and now.metadata:
            self._spawn(self._meet, self.nixl, peer.name, now)

    async def _meet(self, nixl: NixlAgent, name: str, now: Nixl) -> None:
        known = self._remotes.pop(name, None)
        try:
            if known is not None:
                await self._loop.run_in_executor(nixl.thread, nixl.part, known[0])
            agent = await self._loop.run_in_executor(nixl.thread, nixl.meet, now.metadata)
        except PeerError as error:
            log.warning("p2p: peer %s: %s; its chunks come another way", name, error)
            return
        self._remotes[name] = (agent, now.epoch)

    def _ways(self, peer: Peer) -> Ways | None:
        link = peer.bulk
        if link is None or not link.open or self._clears.due(peer.name):
            return None
        agent, epoch = self._remotes.get(peer.name, (None, -1))
        return Ways(link, self._reaching.streams.get(peer.name), agent, epoch)

    def _ask_all(self, asked: list[Query]) -> None:
        queries = [query for query in asked if sound(query)]
        for peer in self._peers.values():
            if not peer.up or self._clears.due(peer.name) or self._clears.quiet:
                self._answers.silent(peer.name, asked)
                continue
            self._answers.silent(peer.name, (query for query in asked if not sound(query)))
            self._spawn(self._ask, peer, queries)
        self._wake()

    async def _ask(self, peer: Peer, queries: list[Query]) -> None:
        """Ask one peer; being late with any part of it is being late once."""
        answered = await asyncio.gather(*(self._ask_batch(peer, batch) for batch in batches(queries)))
        if all(answered):
            peer.answered()
        else:
            peer.late()

    async def _ask_batch(self, peer: Peer, batch: list[Query]) -> bool:
        link = peer.link
        try:
            results: list[LookupResult] = await link.ask(batch, self._settings.options.ask_s) if link else []
        except PeerError:
            results = []
        if results:
            self._answers.heard(peer.name, batch, results)
        else:
            self._answers.silent(peer.name, batch)
        self._wake()
        return bool(results)

    async def _clear_there(self, name: str, scope: ClearScope) -> int:
        peer = self._peers[name]
        if peer.link is None:
            raise PeerLost("it isn't there")
        try:
            return await peer.link.clear(scope, CLEAR_S)
        except PeerLost as error:
            peer.leave(f"a clear: {error}")  # it is told again when it is back
            raise

    # --- figures ---------------------------------------------------------------------------------------

    def figures(self) -> dict[str, float]:
        """Gauges and counters. From any thread; a figure may be a moment old."""
        values: dict[str, float] = {
            "peers": float(len(self._peers)), "peers_up": float(len(self.up)),
            "loads_running": float(self._loads.running), "pushes_running": float(self._pushes.running),
            "tasks": float(len(self._tasks)),
        }  # fmt: skip
        for counts in (self._loads.counts, self._pushes.counts):
            values.update({name: float(count) for name, count in counts.copy().items()})
        for name, peer in self._peers.items():
            values.update({f"peer.{name}.{key}": value for key, value in peer.figures().items()})
        if self._server is not None:
            values.update(self._server.figures())
            values.update(self._source.figures())
        if self.nixl is not None:
            values["nixl_peers"], values["nixl_epoch"] = float(len(self._remotes)), float(self.nixl.epoch)
            values["nixl_peer_epoch_max"] = float(max((epoch for _, epoch in self._remotes.values()), default=0))
            values |= {f"nixl.{name}": float(count) for name, count in self.nixl.counts.copy().items()}
        if self._stream_server is not None:
            values["streams"] = float(self._stream_server.connections)
            values["stream_strangers"] = float(self._stream_server.strangers)
            counts = self._stream_server.counts.copy()
            values["serve.stream_bytes"] = float(counts.pop("sent_bytes", 0))
            for name, count in counts.items():
                values[f"serve.{name}"] = values.get(f"serve.{name}", 0.0) + count
        values |= self._reaching.figures() | self._clears.figures()
        return values

    def states(self) -> dict[str, str]:
        """Of each peer, for people."""
        return {f"peer.{name}": peer.state for name, peer in self._peers.items()}
