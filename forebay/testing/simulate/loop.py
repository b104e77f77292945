"""An asyncio event loop on virtual time: no selector, no thread, no sleep; the order of everything from one seed.

    something is ready   one of the ready callbacks runs; which one, the seed decides (or first come, first served)
    nothing is ready     the clock jumps to the next timer
    nothing is scheduled the run is over, and whoever still waits will wait for ever

Every callback belongs to the simulated process in whose context it was made. Those of a killed process never run,
so no `finally` of it does anything after SIGKILL; those of a stopped one wait until it goes on.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
import warnings
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("simulated process", default=None)


class Killed(BaseException):
    """Unwinds what a process was just doing when it was killed in the middle of it."""


@dataclass(eq=False)
class Process:
    """A simulated process. `at_exit` is what the kernel does for it when it ends, however it ends. `node` is the
    number of the host if this is its daemon."""

    name: str
    loop: SimLoop
    node: int = -1
    parent: Process | None = None
    alive: bool = True
    stopped: bool = False
    at_exit: list[Callable[[], None]] = field(default_factory=list)
    parked: list[asyncio.Handle] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)

    def call(self, callback: Callable[..., T], *args: Any) -> T:
        """Run `callback` as this process, now."""
        return self.context.copy().run(callback, *args)

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> asyncio.Handle:
        """Run `callback` as this process, soon."""
        return self.loop.call_soon(callback, *args, context=self.context.copy())

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task of this process. What it raises ends the run."""
        task: asyncio.Task[T] = self.loop.create_task(work, context=self.context.copy())
        task.add_done_callback(self._ended, context=contextvars.Context())
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, Killed):
            self.loop.fail(error)

    def kill(self) -> None:
        """SIGKILL: nothing of it runs any more."""
        if not self.alive:
            return
        self.alive = False
        self.parked.clear()
        for clean in self.at_exit:
            clean()

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = self.alive

    def go_on(self) -> None:
        """SIGCONT: what came meanwhile runs now, in its order."""
        self.stopped = False
        parked, self.parked = self.parked, []
        for handle in parked:
            self.loop.put_back(handle)


def _process_of(handle: asyncio.Handle) -> Process | None:
    context: contextvars.Context = handle._context  # type: ignore[attr-defined]  # asyncio gives no other way
    return context.get(PROCESS, None)


class SimLoop(asyncio.AbstractEventLoop):
    """See the module's text. `after_step` is called after every callback with the process that ran.

    `fail` notes what must not happen; the run then ends by raising it.
    """

    def __init__(self, order: random.Random, *, shuffle: bool) -> None:
        self._order = order
        self._shuffle = shuffle
        self._now = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._serial = 0
        self._closed = False
        self._tasks: list[tuple[asyncio.Task[Any], Process | None]] = []
        self._readers: dict[int, Any] = {}
        self.steps = 0
        self.failure: BaseException | None = None
        self.after_step: Callable[[Process | None], None] = lambda process: None
        self.on_error: Callable[[dict[str, Any]], None] = lambda context: None

    # --- running ---------------------------------------------------------------------------------------

    def run_until(self, until: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Run until the virtual time, or until `done` says so after a step; True if it did.

        Raises what `fail` was given.
        """
        events._set_running_loop(self)
        try:
            while not done():
                if not self._step(until):
                    return False
            return True
        finally:
            events._set_running_loop(None)

    def _step(self, until: float) -> bool:
        if not self._ready and not self._advance(until):
            return False
        handle = self._choose()
        process = _process_of(handle)
        if process is not None and not process.alive:
            return True
        if process is not None and process.stopped:
            process.parked.append(handle)
            return True
        if handle.cancelled():
            return True
        self.steps += 1
        handle._run()  # type: ignore[attr-defined]
        if self.failure is None:
            self.after_step(process)
        if self.failure is not None:
            raise self.failure
        return True

    def _choose(self) -> asyncio.Handle:
        if self._shuffle and len(self._ready) > 1:
            self._ready.rotate(-self._order.randrange(len(self._ready)))
        return self._ready.popleft()

    def _advance(self, until: float) -> bool:
        """Jump to the next timer, if it is due by `until`."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if not self._timers or self._timers[0][0] > until:
            self._now = max(self._now, until)
            return False
        self._now = max(self._now, self._timers[0][0])
        while self._timers and self._timers[0][0] <= self._now:
            handle = heapq.heappop(self._timers)[2]
            if not handle.cancelled():
                self._ready.append(handle)
        return True

    def fail(self, why: BaseException) -> None:
        """The run has failed; the first reason counts."""
        if self.failure is None:
            self.failure = why

    @property
    def idle(self) -> bool:
        """Is nothing ready now?"""
        return not self._ready

    # --- scheduling ------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now

    # Of asyncio's generic signatures the plain form is enough here.

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if not self._closed:
            self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def put_back(self, handle: asyncio.Handle) -> None:
        """Run a callback that was put aside."""
        self._ready.append(handle)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if not self._closed:
            self._serial += 1
            heapq.heappush(self._timers, (when, self._serial, handle))
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + max(delay, 0.0), callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """asyncio tells of every cancelled timer; ours are dropped when they fall due."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        # Kept until the end: a killed process's tasks must not be collected, which would run their `finally`s.
        self._tasks.append((task, PROCESS.get() if context is None else context.get(PROCESS, None)))
        return task

    def tasks_of(self, process: Process) -> list[asyncio.Task[Any]]:
        """The unfinished tasks of a process."""
        return [task for task, owner in self._tasks if owner is process and not task.done()]

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """What a thread would do happens in one step, at some later moment."""
        future: asyncio.Future[T] = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_later(self._order.choice((0.0, 0.0002, 0.003, 0.05, 0.2)), work)
        return future

    # --- descriptors -----------------------------------------------------------------------------------

    def register_end(self, end: Any) -> None:
        """Make a simulated socket known by its descriptor."""
        self._readers[end.fileno()] = end

    def forget_end(self, descriptor: int) -> None:
        """A simulated socket is closed."""
        self._readers.pop(descriptor, None)

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        self._readers[fd].watch_readable(lambda: callback(*args))

    def remove_reader(self, fd: Any) -> bool:
        return fd in self._readers and bool(self._readers[fd].watch_readable(None))

    def add_writer(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        self._readers[fd].watch_writable(lambda: callback(*args))

    def remove_writer(self, fd: Any) -> bool:
        return fd in self._readers and bool(self._readers[fd].watch_writable(None))

    # --- what asyncio asks of a loop -------------------------------------------------------------------

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._closed

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.on_error(context)

    def close(self) -> None:
        """End whatever is left without letting it do anything."""
        self._closed = True
        self.on_error = lambda context: None
        self._ready.clear()
        self._timers.clear()
        tasks, self._tasks = self._tasks, []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nobody awaited what a killed process was about to await
            for task, _ in tasks:
                _unwind(task)


def _unwind(task: asyncio.Task[Any]) -> None:
    """What a task of a dead process holds is let go of here, in a fixed order, and not when the collector comes by."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    if not task.done():
        with suppress(BaseException):
            task.get_coro().close()  # type: ignore[union-attr]
