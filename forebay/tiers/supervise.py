"""Keeping one tier process running: started, listened to, killed when it hangs, started again when it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from forebay.errors import (
    AlreadyRunning,
    ConfigError,
    ForebayError,
    NoSpace,
    NotWritable,
    OtherVersion,
    ResourceError,
    TierUnavailable,
)
from forebay.tiers.channel import Channel
from forebay.tiers.child import Child
from forebay.tiers.messages import FromTier, GetTierStats, Start, Started, StartFailed, Stop

log = logging.getLogger(__name__)

HEARTBEAT_RID = 0
START_ERRORS: dict[str, type[ForebayError]] = {
    kind.__name__: kind
    for kind in (ConfigError, AlreadyRunning, NoSpace, NotWritable, OtherVersion, TierUnavailable, ResourceError)
}


@dataclass(frozen=True)
class Patience:
    """How long a living tier process may take for what, in seconds, and how fast a lost one comes back."""

    start_s: float = 60.0
    stop_s: float = 15.0
    heartbeat_s: float = 2.0
    hang_s: float = 10.0
    store_s: float = 120.0
    backoff_first_s: float = 0.1
    backoff_max_s: float = 30.0


@dataclass(frozen=True)
class Hooks:
    """What the owner wants to be told, all on the loop.

    `message`: one came. `ready`: a new process has started, tell it what it must know. `dead`: the process
    is reaped, writes no more, and everything it said has been passed on. `overdue`: why it must be hanging,
    or None.
    """

    message: Callable[[FromTier], None]
    opened: Callable[[Channel], None]
    ready: Callable[[Channel], None]
    dead: Callable[[str], None]
    overdue: Callable[[], str | None]


class Supervisor:
    """One tier process after another. `channel` is set from start to death, `up` between Started and death."""

    def __init__(
        self,
        start: Start,
        hooks: Hooks,
        patience: Patience,
        *,
        lock_fd: int | None,
        out_bytes_max: int,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        new_child: Callable[[int | None], Child] = Child,
    ) -> None:
        self._start_message = start
        self._hooks = hooks
        self._patience = patience
        self._lock_fd = lock_fd
        self._out_bytes_max = out_bytes_max
        self._clock = clock
        self._sleep = sleep
        self._new_child = new_child
        self._child: Child | None = None
        self._answer: asyncio.Future[Started | StartFailed] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._heard_at = 0.0
        self.channel: Channel | None = None
        self.up = False
        self.stopping = False
        self.counts: Counter[str] = Counter()

    @property
    def pid(self) -> int | None:
        """Process id of the latest process, None before the first."""
        return self._child.pid if self._child else None

    async def start(self) -> None:
        """Start the first process and keep one running from then on. Raises what the tier says if it can't, unless
        that is TierUnavailable: then it is tried again, later each time."""
        name = self._start_message.name
        try:
            await self._spawn()
        except TierUnavailable as error:
            self.counts["start_failures"] += 1
            log.error("tier %s can't start yet: %s", name, error)
        self._tasks = [
            asyncio.create_task(self._keep_running(), name=f"tier {name}: keep running"),
            asyncio.create_task(self._watch(), name=f"tier {name}: watch"),
        ]

    async def _spawn(self) -> None:
        """Start a process and wait until its tier is ready. When it raises, the process is dead and reaped."""
        child = self._child = self._new_child(self._lock_fd)
        answered = self._answer = asyncio.get_running_loop().create_future()
        channel = self.channel = Channel(child.connection, self._received, self._closed, self._out_bytes_max)
        self.counts["starts"] += 1
        channel.send(self._start_message, force=True)
        try:
            self._hooks.opened(channel)
        except OSError as error:
            await self._bury("it could not be given the pool")
            raise NoSpace(f"can't give a tier's process the pool: {error.strerror}; raise the file limit") from error
        await asyncio.wait((answered,), timeout=self._patience.start_s)
        if answered.done() and isinstance(answered.result(), Started):
            self._heard_at = self._clock()
            self.up = True
            self._hooks.ready(channel)
            return
        failure = answered.result() if answered.done() else None
        await self._bury("it did not start")
        raise self._start_error(failure)

    def _start_error(self, failure: Started | StartFailed | None) -> ForebayError:
        name = self._start_message.name
        if not isinstance(failure, StartFailed):
            return ResourceError(f"tier {name!r} did not start in {self._patience.start_s:.0f} s; is its device well?")
        kind = START_ERRORS.get(failure.error, ResourceError)
        return kind(failure.message)

    def _received(self, message: FromTier) -> None:
        self._heard_at = self._clock()
        if isinstance(message, Started | StartFailed):
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(message)
        else:
            self._hooks.message(message)

    def _closed(self, why: str) -> None:
        # Without its socket a process is of no use, whatever the reason; it is reported once it is dead.
        if self._answer is not None and not self._answer.done():
            name = self._start_message.name
            self._answer.set_result(StartFailed("ResourceError", f"tier {name!r}: process ended early ({why})"))
        if self._child is not None and not self.stopping:
            self._child.kill()

    async def _keep_running(self) -> None:
        backoff = self._patience.backoff_first_s
        while True:
            if self.up:
                assert self._child is not None
                since = self._clock()
                await self._child.dead.wait()
                await self._lost(f"process {self._child.pid} ended with status {self._child.returncode}")
                if self._clock() - since > 2 * self._patience.backoff_max_s:
                    backoff = self._patience.backoff_first_s
            while not self.up:
                await self._sleep(backoff)
                backoff = min(backoff * 2, self._patience.backoff_max_s)
                try:
                    await self._spawn()
                except ForebayError as error:
                    self.counts["start_failures"] += 1
                    log.error("tier %s can't start again: %s", self._start_message.name, error)

    async def _lost(self, why: str) -> None:
        self.counts["deaths"] += 1
        log.error("tier %s is lost: %s", self._start_message.name, why)
        await self._bury(why)

    async def _bury(self, why: str) -> None:
        """End the process if it lives, and tell once it is dead and its last words are passed on."""
        child, channel = self._child, self.channel
        assert child is not None and channel is not None
        child.kill()
        await child.dead.wait()
        channel.drain()
        channel.close()
        self.channel = None
        self.up = False
        self._hooks.dead(why)

    async def _watch(self) -> None:
        """Ask for a sign of life, again and again; kill what gives none or sits on a job."""
        looked_at = self._clock()
        while True:
            await self._sleep(self._patience.heartbeat_s)
            before, looked_at = looked_at, self._clock()
            if looked_at - before > 2 * self._patience.heartbeat_s:
                self._heard_at = looked_at  # it was our own loop that stood still: ask first, judge later
            if not self.up or self.channel is None:
                continue
            silent = looked_at - self._heard_at
            why = self._hooks.overdue() if silent <= self._patience.hang_s else f"no answer for {silent:.1f} s"
            if why is None:
                self.channel.send(GetTierStats(HEARTBEAT_RID))
            else:
                self._kill_hung(why, looked_at)

    def _kill_hung(self, why: str, now: float) -> None:
        assert self._child is not None
        log.error("tier %s hangs (%s): killing process %d", self._start_message.name, why, self._child.pid)
        self.counts["hangs"] += 1
        self._child.kill()
        self._heard_at = now  # an uninterruptible wait may keep it for a while; don't count it twice

    async def stop(self) -> None:
        """Let the process finish what it writes, at most `stop_s`, and end it."""
        self.stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._child is None or self.channel is None:
            return
        self.up = False
        self.channel.send(Stop(), force=True)
        try:
            await asyncio.wait_for(self._child.dead.wait(), self._patience.stop_s)
        except TimeoutError:
            log.error("tier %s did not stop in %.0f s", self._start_message.name, self._patience.stop_s)
        await self._bury("stopped")
