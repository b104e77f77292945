"""A thread with a connection to the store that comes back by itself.

The engine's threads ask and go on; what they ask for while nobody is connected is answered at once, with nothing.
Before the connection is made anew it waits for copies into the pool that are under way: its first message says that
there are none.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import uvloop

from forebay.connectors.questions import Answer, Question
from forebay.errors import ForebayError, RequestRefused, StoreError, StoreUnavailable
from forebay.kvstore.client import AsyncStoreClient
from forebay.kvstore.identity import Namespace
from forebay.kvstore.protocol import Stats

BACKOFF_S = (0.2, 2.0)
"""First and longest pause between attempts to connect."""

WATCH_S = 0.25
"""How often an idle connection is looked at."""

GRACE_S = 1.0
"""How much longer than the store's own deadline a lookup may take before its store counts as hung."""

HUNG_S = 5.0
"""A store that takes longer than this to answer counts as gone, unless somebody has said otherwise."""

LEASE_MS = 60_000
"""How long a lookup's pins hold, if nobody gives them back."""

log = logging.getLogger(__name__)


class StoreLink:
    """`name` is the thread's; `group` what processes of one engine have in common. `introduced` is told, on the thread,
    what the store says of itself, each time that it has been made to know a namespace. A store that doesn't answer for
    `hung_s` counts as gone. Call `start` once, `stop` once.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str,
        group: bytes,
        label: str = "",
        hung_s: float = HUNG_S,
        introduced: Callable[[bytes, Stats], None] | None = None,
    ) -> None:
        self.client = AsyncStoreClient(address, kind="worker", group=group, timeout_s=hung_s)
        self.hung_s = hung_s
        self.room_lock = threading.Lock()
        """Held while bytes are written into the pool."""
        self.session = 0
        """Counts connections: what was reserved on an earlier one must not be written any more."""
        self.connects = 0
        self.losses = 0
        self._label = label
        self._introduced = introduced
        self._namespace: Namespace | None = None
        self._known: bytes = b""
        self._boot = b""
        self._stopping = False
        self._loop = uvloop.new_event_loop()
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # --- from any thread ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to connect. Returns at once."""
        self._thread.start()

    def use(self, namespace: Namespace) -> None:
        """From now on requests are about this namespace."""
        self._soon(self._use, namespace)

    def boot(self) -> bytes:
        """Boot id of the store that answers and knows the namespace; empty if there is none."""
        return self._boot

    @property
    def namespace_id(self) -> bytes:
        """Of the namespace that the store knows us by."""
        return self._known

    def run(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine on the connection's loop. What it raises is logged."""
        self._soon(self._begin, make)

    def ask(self, question: Question, deadline_ms: int) -> None:
        """Look a prefix up; see `Question`."""
        if not self._soon(self._begin, lambda: self._lookup(question, deadline_ms)):
            question.give(None)

    def release(self, boot: bytes, lease: int) -> None:
        """Give a lease of that store back. One of an earlier connection has ended with it."""
        self._soon(self._release, boot, lease)

    def damaged(self, group: int, key: bytes) -> None:
        """Report a chunk whose bytes are wrong."""
        self._soon(self.client.damaged, [(group, key)])

    async def connected(self, patience_s: float) -> None:
        """On the loop: wait until there is a store, but not longer than that."""
        until = self._loop.time() + patience_s
        while not self._boot and self._loop.time() < until and not self._stopping:
            await asyncio.sleep(0.005)

    async def give_up(self, why: str) -> None:
        """On the loop: end a connection that is hung. It is made anew."""
        log.warning("%s; connecting anew", why)
        self._boot = b""
        await self.client.close()
        self._wake.set()

    def stop(self, patience_s: float = 5.0) -> None:
        """Wait for what is under way, for so long at most; end the thread. Blocks."""
        for end, wait_s in ((self._stop_soon, patience_s), (self._cancel_all, 1.0)):
            if self._thread.is_alive():
                self._soon(end)
                self._thread.join(wait_s)

    def _soon(self, call: Callable[..., None], *arguments: Any) -> bool:
        """False if the loop has been closed: it is over."""
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            return False
        return True

    # --- on the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._main = self._loop.create_task(self._serve())
        try:
            self._loop.run_until_complete(self._main)
        except asyncio.CancelledError:
            log.warning("gave up on %d transfers at the end", len(self._tasks))
        finally:
            self._boot = b""
            self._loop.run_until_complete(self.client.close())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def _use(self, namespace: Namespace) -> None:
        self._namespace = namespace
        if namespace.id != self._known:
            self._boot = b""
        self._wake.set()

    def _begin(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._loop.create_task(self._guarded(make))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await make()
        except Exception:
            log.exception("a transfer failed in a way it should not; the engine goes on")

    def _release(self, boot: bytes, lease: int) -> None:
        if self.client.connected and self.client.boot == boot:
            self.client.release([lease])

    def _stop_soon(self) -> None:
        self._stopping = True
        self._wake.set()

    def _cancel_all(self) -> None:
        self._main.cancel()

    async def _serve(self) -> None:
        pause = BACKOFF_S[0]
        while not self._stopping:
            if not await self._connect(pause):
                await self._nap(pause)
                pause = min(2 * pause, BACKOFF_S[1])
                continue
            pause = BACKOFF_S[0]
            await self._watch()
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _nap(self, seconds: float) -> None:
        self._wake.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)

    async def _connect(self, pause: float) -> bool:
        await asyncio.to_thread(self.room_lock.acquire)
        try:
            self.session += 1
            self._known = b""
            await self.client.connect()
            await self._register()
        except Exception as error:
            # Said once, then quietly tried again; what is neither is a bug, and still no reason to stop the engine.
            expected = isinstance(error, ForebayError | OSError)
            level = logging.WARNING if pause == BACKOFF_S[0] else logging.DEBUG
            log.log(level if expected else logging.ERROR, "no store: %s", error, exc_info=not expected)
            await self.client.close()
            return False
        finally:
            self.room_lock.release()
        self.connects += 1
        log.info("connected to the store")
        return True

    async def _register(self) -> None:
        """Make the present namespace known, if there is one and it isn't."""
        namespace = self._namespace
        if namespace is None or namespace.id == self._known:
            return
        try:
            async with asyncio.timeout(self.hung_s):
                self._known = await self.client.register(namespace, self._label)
                stats = await self.client.stats() if self._introduced is not None else None
        except TimeoutError as error:
            raise StoreUnavailable("the store takes no namespace; is it hung?") from error
        if namespace is self._namespace:  # else there is a newer one by now
            self._boot = self.client.boot
        if self._introduced is not None and stats is not None:
            self._introduced(self._known, stats)

    async def _watch(self) -> None:
        """Until the connection is lost, or we are told to stop."""
        try:
            while self.client.connected and not self._stopping:
                await self._register()
                await self._nap(WATCH_S)
        except StoreError as error:
            log.warning("lost the store: %s", error)
        except Exception:
            log.exception("lost the store in a way that it should not be; connecting anew")
        if not self._stopping:
            self._boot = b""
            self.losses += 1
            await self.client.close()

    async def _lookup(self, question: Question, deadline_ms: int) -> None:
        answer = None
        try:
            if self._boot:
                answer = await self._found(question, deadline_ms)
        except TimeoutError:
            # It has missed its own deadline by far: hung. Connecting anew is how it shows that it isn't.
            await self.give_up("the store doesn't answer lookups")
        except RequestRefused as error:
            log.warning("the store refused a lookup: %s", error)
        except StoreError as error:
            log.debug("a lookup failed: %s", error)
        finally:
            if not question.give(answer) and answer is not None and answer.lease:
                self._release(answer.boot, answer.lease)

    async def _found(self, question: Question, deadline_ms: int) -> Answer:
        prefix = question.prefix
        async with asyncio.timeout(deadline_ms / 1000 + GRACE_S):
            found = await self.client.lookup(
                self._known, prefix.root, prefix.tokens, prefix.keys, limit=prefix.limit, deadline_ms=deadline_ms,
                extra=prefix.extra, lease_ms=LEASE_MS, tenant=question.tenant,
            )  # fmt: skip
        return Answer(found.boot, found.lease, found.hit, tuple(found.chunks), found.from_tier)
