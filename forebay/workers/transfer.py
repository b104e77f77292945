"""The worker's side of the store: one thread with an event loop that owns the connection.

The engine asks and offers; answers come back through `deliver`, which must be quick and safe to call from
this thread. The store may be absent, die, hang or come back: the engine is told, and never waits.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import uvloop
from torch import Tensor

from forebay.errors import ForebayError, StoreUnavailable
from forebay.kvstore.client import AsyncStoreClient
from forebay.kvstore.identity import Namespace
from forebay.workers.config import Prefixes
from forebay.workers.counters import Counters
from forebay.workers.doors import Doors, own_doors
from forebay.workers.hot.keeping import LEASE_MS
from forebay.workers.hot.promising import set_aside
from forebay.workers.messages import Told
from forebay.workers.moves import AskRoom, AskRows, Pull, Pulled, Push, Pushed, RoomGiven, RowsCame, StoreChanged
from forebay.workers.prefix import GroupShape
from forebay.workers.pulling import Puller, PullRules
from forebay.workers.pushing import PushQueue
from forebay.workers.rates import Rates
from forebay.workers.tracing import NO_TRACE, Trace

BACKOFF_S = (0.2, 2.0)
"""First and longest pause between attempts to connect."""

WATCH_S = 0.25
"""How often an idle connection is looked at."""

LOSS_S = 1.0
"""So soon it is noticed, and told, that a connection has been lost."""

RENEW_S = LEASE_MS / 4000
JOIN_LEASES_MAX = 64
"""So many leases are renewed with one message."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """`lookup_deadline_ms` is how long the store's tiers may take to promote; `queue_bytes_max` caps what
    waits to be pushed; `prefixes` is what is done with what tiers have."""

    address: str
    namespace: Namespace
    label: str = ""
    lookup_deadline_ms: int = 2000
    queue_bytes_max: int = 256 << 20
    prefixes: Prefixes = "cut"


class Transfer:
    """Pulls and pushes of one worker. All public methods may be called from the engine's thread."""

    def __init__(
        self,
        config: TransferConfig,
        shapes: Sequence[GroupShape],
        pools: Mapping[str, Tensor],
        deliver: Callable[[Told], None],
        client: AsyncStoreClient | None = None,
        trace: Trace = NO_TRACE,
        doors: Doors | None = None,
    ) -> None:
        self.counters = Counters()
        self.rates = Rates(time.monotonic)
        self.queue = PushQueue(config.queue_bytes_max, self.counters)
        self._config = config
        self._deliver = deliver
        doors = doors or own_doors(client or AsyncStoreClient(config.address, kind="worker"), shapes, pools)
        self._client, copiers, self._shard = doors.client, doors.copiers, doors.shard
        for made, shape in zip(copiers, shapes, strict=True):
            assert made.granule_bytes == shape.geometry.granule_bytes, shape.geometry
        self._renewed: set[int] = set()
        rules = PullRules(config.lookup_deadline_ms, config.prefixes)
        self._puller = Puller(
            self._client, shapes, copiers, rules, self.counters, self.rates, self._tell, self._renewed
        )  # fmt: skip
        self._pusher = doors.pusher(self._client, self.queue, copiers, self.counters, self._tell, trace)
        self._trace = trace
        self._namespace_id = b""
        self._connected = False
        self._stopping = False
        self._loop = uvloop.new_event_loop()
        self._wake = asyncio.Event()
        self._pulls: set[asyncio.Task[None]] = set()
        self._rows: dict[tuple[Hashable, int], set[asyncio.Task[None]]] = {}
        self._era = 0  # connections that have ended
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)

    # --- from the engine's thread ------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether the store answers and knows the namespace."""
        return self._connected

    @property
    def pushes_running(self) -> int:
        """Chunks that have been taken from the queue and are not yet committed."""
        return self._pusher.running

    def gauges(self) -> dict[str, float]:
        """Present figures, beside the counters. Callable from any thread."""
        cutter = self._puller.cutter
        return self.rates.gauges() | {
            "push.queue.bytes": self.queue.bytes,
            "push.queue.chunks": len(self.queue),
            "cut.open": cutter.open,
            "cut.late_answers": len(cutter.abandoned),
            "hosted.leases": len(self._renewed),
            "hosted.row_asks": sum(len(tasks) for tasks in list(self._rows.values())),
        }

    def start(self) -> None:
        """Begin to connect. Returns at once."""
        self._thread.start()

    def pull(self, pull: Pull) -> None:
        """Answered by `Pulled`, whatever happens."""
        self._loop.call_soon_threadsafe(self._begin, pull)

    def push(self, push: Push) -> bool:
        """Answered by `Pushed`, unless this returns False: the queue is full, nothing was taken."""
        taken = self.queue.offer(push)
        if taken:
            self._loop.call_soon_threadsafe(self._wake.set)
        return taken

    def ask_room(self, ask: AskRoom) -> None:
        """Answered by `RoomGiven`, whatever happens."""
        self._loop.call_soon_threadsafe(self._begin, ask)

    def ask_rows(self, ask: AskRows) -> None:
        """Answered by `RowsCame`, whatever happens, the last of which is `done`."""
        self._loop.call_soon_threadsafe(self._begin, ask)

    def drop_rows(self, request: Hashable, admission: int) -> None:
        """Nobody wants the rows any more that were asked for by this stay of a request."""
        self._loop.call_soon_threadsafe(self._drop_rows, (request, admission))

    def release(self, leases: Sequence[int]) -> None:
        """Give leases back of chunks that were read in place."""
        self._loop.call_soon_threadsafe(self._let_go, tuple(leases))

    def shed(self) -> None:
        """Drop the pushes that wait, because their blocks are needed. Each is answered."""
        for push in self.queue.empty_out():
            self.counters.add("push.shed")
            self._deliver(Pushed(push))

    def stop(self, drain_s: float) -> None:
        """Store what is queued, for at most `drain_s`; end the thread. Blocks."""
        for end, patience_s in ((self._stop_soon, drain_s), (self._cancel_all, 1.0)):
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(end)
                self._thread.join(patience_s)

    # --- on the transfer thread --------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._main = self._loop.create_task(self._serve())
        try:
            self._loop.run_until_complete(self._main)
        except asyncio.CancelledError:
            log.warning("gave up on %d pushes at the end", len(self.queue))
        finally:
            self._loop.run_until_complete(self._client.close())
            self._loop.run_until_complete(self._end_tasks())
            self._loop.close()

    async def _end_tasks(self) -> None:
        """Pulls, and answers that nobody waits for any more, end with the thread."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self) -> None:
        pause = BACKOFF_S[0]
        while not self._stopping:
            try:
                await self._client.connect()
                self._namespace_id = await self._client.register(
                    self._config.namespace, self._config.label, shard=self._shard
                )
            except Exception as error:
                # Said once, then quietly tried again; what is neither is a bug, and still no reason to stop serving.
                expected = isinstance(error, ForebayError | OSError)
                level = logging.INFO if pause == BACKOFF_S[0] else logging.DEBUG
                log.log(level if expected else logging.ERROR, "no store: %s", error, exc_info=not expected)
                await self._client.close()
                await self._pause(pause)
                pause = min(2 * pause, BACKOFF_S[1])
                continue
            pause = BACKOFF_S[0]
            self._change(True)
            renewing = self._loop.create_task(self._renew())
            try:
                await self._push_on()
            except (ForebayError, OSError) as error:
                log.warning("lost the store: %s", error)
            except Exception:
                log.exception("a push failed in a way it should not; connecting anew")
            finally:
                # Copies run on this thread, so none is under way: the next connection may say so.
                self._era += 1
                renewing.cancel()
                for stay in list(self._rows):
                    self._drop_rows(stay)
                self._renewed.clear()
                await self._client.close()
                self._change(False)
                self._lose_queue()

    async def _push_on(self) -> None:
        while self._client.connected:
            self._wake.clear()
            if await self._pusher.push_some(self._namespace_id):
                continue
            if self._stopping:
                return
            try:
                await asyncio.wait_for(self._wake.wait(), WATCH_S)
            except TimeoutError:
                continue

    def _let_go(self, leases: tuple[int, ...]) -> None:
        for lease in leases:
            self._renewed.discard(lease)
        self._client.release(list(leases))

    async def _renew(self) -> None:
        """Leases of chunks that are read in place last as long as they are used, and this connection."""
        while True:
            await asyncio.sleep(RENEW_S)
            leases = list(self._renewed)
            for at in range(0, len(leases), JOIN_LEASES_MAX):
                some = leases[at : at + JOIN_LEASES_MAX]
                try:
                    joined = await self._client.join(some, lease_ms=LEASE_MS)
                except ForebayError as error:
                    log.warning("leases weren't renewed: %s", error)
                    break
                self.counters.add("hosted.leases_ended", len(some) - len(joined.leases))

    def _tell(self, told: Told) -> None:
        """`deliver`; what stays in host memory is renewed from now on."""
        one = (told.hosted,) if isinstance(told, Pushed) else ()
        chunks = told.hosted if isinstance(told, Pulled | RowsCame) else one
        leases = {chunk.lease for chunk in chunks if chunk is not None}
        if isinstance(told, Pulled | RoomGiven):
            leases.add(told.aside)
        self._renewed |= leases - {0}
        self._deliver(told)

    async def _pause(self, seconds: float) -> None:
        self._lose_queue()
        self._wake.clear()
        try:
            await asyncio.wait_for(self._wake.wait(), seconds)
        except TimeoutError:
            return

    def _change(self, connected: bool) -> None:
        self._connected = connected
        self.counters.add("store.connects" if connected else "store.losses")
        if connected and self.counters["store.connects"] > 1:
            self.counters.add("store.reconnects")
        self._deliver(StoreChanged(connected))

    def _lose_queue(self) -> None:
        for push in self.queue.empty_out():
            self.counters.add("push.lost")
            self._deliver(Pushed(push, lost=True))

    def _begin(self, asked: Pull | AskRoom | AskRows) -> None:
        match asked:
            case Pull():
                task = self._loop.create_task(self._pull(asked))
            case AskRoom():
                task = self._loop.create_task(self._give_room(asked))
            case AskRows():
                task = self._loop.create_task(self._bring_rows(asked))
                self._rows.setdefault((asked.request, asked.admission), set()).add(task)
                task.add_done_callback(lambda task: self._rows_ended((asked.request, asked.admission), task))
        self._pulls.add(task)
        task.add_done_callback(self._pulls.discard)

    def _rows_ended(self, stay: tuple[Hashable, int], task: asyncio.Task[None]) -> None:
        self._rows[stay].discard(task)
        if not self._rows[stay]:
            del self._rows[stay]

    def _drop_rows(self, stay: tuple[Hashable, int]) -> None:
        for task in self._rows.get(stay, ()):
            task.cancel()

    async def _give_room(self, ask: AskRoom) -> None:
        lease = 0
        try:
            if self._connected:
                aside = await set_aside(self._client, self._namespace_id, ask.tenant, ask.group, ask.chunks)
                lease = aside.lease
        except ForebayError as error:
            log.debug("no room was set aside: %s", error)
        finally:
            self._tell(RoomGiven(ask, lease))

    async def _bring_rows(self, ask: AskRows) -> None:
        began = self._trace.now()
        try:
            if self._connected:
                await self._puller.rows.bring(self._namespace_id, ask)
        except (ForebayError, TimeoutError) as error:
            log.debug("rows weren't brought: %s", error)
            if isinstance(error, StoreUnavailable):
                # They aren't late. The engine is about to hear that the store has gone, which ends this.
                await asyncio.sleep(LOSS_S)
        except Exception:
            log.exception("rows weren't brought, in a way it should not be; their request is computed anew")
        finally:
            self._trace.moved("rows", began, request=str(ask.request), chunks=len(ask.positions))
            self._tell(RowsCame(ask, done=True))

    async def _pull(self, pull: Pull) -> None:
        nothing = Pulled(pull.request, 0, tuple({} for _ in pull.rooms), refused="now" if pull.hosted else "")
        pulled, began, era = nothing, self._trace.now(), self._era
        try:
            if self._connected:
                pulled = await self._puller.pull(self._namespace_id, pull)
        except ForebayError as error:  # a rank is gone, and the worker will be
            log.warning("a pull failed: %s", error)
        except Exception:
            log.exception("a pull failed in a way it should not; its request computes")
        finally:
            leases = ({chunk.lease for chunk in pulled.hosted} | {pulled.aside}) - {0}
            if leases and era != self._era:
                # The engine has heard that the store went: some of it has ended since, or all of it.
                self._let_go(tuple(leases))
                pulled = nothing
            self._trace.moved("pull", began, request=str(pull.request), hit=pulled.hit)
            self._tell(pulled)

    def _stop_soon(self) -> None:
        self._stopping = True
        self._wake.set()

    def _cancel_all(self) -> None:
        self._main.cancel()
