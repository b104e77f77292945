"""`forebay serve`: store, workers and front end as supervised processes on one machine.

    taken:   the port, a private runtime directory (its lock)
    started: store -> workers and front end                     stopped: front end -> workers -> store

A part that ends is started again, with a growing pause; one that ends at once, again and again, ends all, but for a
worker beside others that do work: that one is tried again once a minute. The front end's listening socket is ours, so
clients that come while it restarts wait instead of being refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import socket
import stat
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forebay.errors import AlreadyRunning, ConfigError, ForebayError, NotWritable
from forebay.kvstore.extents import pool_path
from forebay.workers.health import Health, health_of
from forebay.workers.parts import Part, PartsFailed, how_it_ended
from forebay.workers.watch import watch_worker

log = logging.getLogger(__name__)

STORE_STOP_S, WORKER_STOP_S, FRONTEND_STOP_S = 12.0, 8.0, 5.0
STORE_READY_S = 60.0
PAUSES_S = (0.1, 0.5, 1.0, 2.0, 5.0)
"""How long to wait before a part is started again, by how often in a row it has ended early."""
EARLY_S = 10.0
"""A part that ended this soon after its start has ended early."""
HURRY_S = 1.0
"""A second Ctrl-C this long after the first one means it: nothing is waited for any more."""
REST_S = 60.0
"""How long a worker that doesn't stay up is left alone while others serve."""
POLL_S = 0.1
FINAL_CODES = (2, 4, 5)
"""A part that says one of these at its very first start (wrong setting, no room, broken model) won't say
otherwise the next time."""


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What `forebay serve` runs. `runtime` becomes a private directory for sockets, removed at the end. `shutdown_s` is
    how long the front end lets open answers go on when it stops. Every one of `workers` gets the same arguments."""

    model: Path
    runtime: Path
    host: str = "127.0.0.1"
    port: int = 8000
    pool_dir: Path = Path("/dev/shm")  # noqa: S108 - the tmpfs that every Linux has
    store_arguments: Sequence[str] = ()
    worker_arguments: Sequence[str] = ()
    frontend_arguments: Sequence[str] = ()
    shutdown_s: float = 0.0
    workers: int = 1


def take_port(host: str, port: int) -> socket.socket:
    """A socket bound to the port, not listening yet: nobody else can take it, and clients are refused.

    Raises AlreadyRunning if it is taken, ConfigError if this machine has no such address.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host!r}: not an address of this machine ({error.strerror})") from error
    bound = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it: no token waits for an ACK
    try:
        bound.bind(address)
    except PermissionError as error:
        bound.close()
        raise NotWritable(f"port {port} needs more rights; choose one from 1024 on with --port") from error
    except OSError as error:
        bound.close()
        raise AlreadyRunning(
            f"port {port} on {host} can't be had ({error.strerror}); stop what uses it, or choose another with --port"
        ) from error
    return bound


@contextlib.contextmanager
def runtime_directory(path: Path) -> Iterator[Path]:
    """A private directory that is ours alone until the end, and then removed. Raises AlreadyRunning, NotWritable."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise NotWritable(f"{path} isn't a private directory of this user; remove it, or set XDG_RUNTIME_DIR")
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise NotWritable(f"can't use {path} for sockets: {error.strerror}; set XDG_RUNTIME_DIR") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise AlreadyRunning(f"another `forebay serve` uses {path}; stop it, or choose another --port") from error
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)


@dataclass
class Supervisor:
    """All parts from start to stop. `tell` gets lines for people, `ready` the first healthy answer."""

    config: ServeConfig
    listener: socket.socket
    tell: Callable[[str], None]
    ready: Callable[[Health], None]
    parts: list[Part] = field(default_factory=list)
    restarts: int = 0
    _early: dict[str, int] = field(default_factory=dict)
    """How often in a row each part has ended right after its start."""
    _jobs: set[asyncio.Task[None]] = field(default_factory=set)
    _failure: BaseException | None = None
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _stop_asked: float | None = None
    _stopping: bool = False

    def __post_init__(self) -> None:
        self.store, self.workers, self.frontend = self._parts()
        self.parts = [self.store, *self.workers, self.frontend]

    @property
    def store_socket(self) -> Path:
        return self.config.runtime / "store.sock"

    @property
    def worker_sockets(self) -> list[Path]:
        numbers = range(1, self.config.workers + 1)
        names = ["worker"] if self.config.workers == 1 else [f"worker-{number}" for number in numbers]
        return [self.config.runtime / f"{name}.sock" for name in names]

    def _parts(self) -> tuple[Part, list[Part], Part]:
        config, fd = self.config, self.listener.fileno()
        store, workers = f"unix://{self.store_socket}", [f"unix://{socket}" for socket in self.worker_sockets]
        return (
            Part(
                "store",
                ["store", "--socket", str(self.store_socket), "--pool-dir", str(config.pool_dir),
                 *config.store_arguments],
                STORE_STOP_S,
            ),
            [
                Part(
                    socket.stem,
                    ["worker", str(config.model), "--listen", worker, "--store", store, *config.worker_arguments],
                    WORKER_STOP_S,
                )
                for socket, worker in zip(self.worker_sockets, workers, strict=True)
            ],
            Part(
                "front end",
                ["frontend", "--worker", ",".join(workers), "--model", str(config.model), "--host", config.host,
                 "--port", str(config.port), "--listen-fd", str(fd), *config.frontend_arguments],
                FRONTEND_STOP_S + config.shutdown_s, descriptors=[fd],
            ),
        )  # fmt: skip

    async def run(self) -> None:
        """Serve until told to stop. Raises PartsFailed if a part can't be kept running."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop, number)
        self._spawn(self._start())
        try:
            await self._stop.wait()
        finally:
            self._stopping = True
            jobs = list(self._jobs)
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            await self._stop_all()
        if self._failure is not None:
            raise self._failure

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run a job beside the others; if it fails, everything stops."""

        def done(job: asyncio.Task[None]) -> None:
            self._jobs.discard(job)
            if not job.cancelled() and job.exception() is not None:
                self._failure = self._failure or job.exception()
                self._stop.set()

        job = asyncio.get_running_loop().create_task(work)
        self._jobs.add(job)
        job.add_done_callback(done)

    async def _start(self) -> None:
        await self.store.start()
        self._spawn(self._keep(self.store))
        await self._until_store_answers()
        self.tell("the store is ready")
        for part in (*self.workers, self.frontend):
            await part.start()
            self._spawn(self._keep(part))
        for worker, path in zip(self.workers, self.worker_sockets, strict=True):
            self._spawn(self._watch(worker, path))
        while True:
            health = await health_of(self.config.host, self.config.port)
            if health is not None and health.serving:
                break
            await asyncio.sleep(POLL_S)
        self.ready(health)

    async def _until_store_answers(self) -> None:
        for _ in range(int(STORE_READY_S / POLL_S)):
            try:
                _, writer = await asyncio.open_unix_connection(str(self.store_socket))
                writer.close()
                return
            except OSError:
                await asyncio.sleep(POLL_S)
        raise PartsFailed(f"the store did not answer within {STORE_READY_S:.0f} s", 1)

    # --- keeping them running ----------------------------------------------------------------------------

    async def _keep(self, part: Part) -> None:
        """Start a part again whenever it ends. Raises PartsFailed once that is hopeless."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            code = await self._end_of(part)
            if self._stopping or self._stop.is_set():
                return
            early = self._early[part.name] = self._early.get(part.name, 0) + 1 if loop.time() - began < EARLY_S else 0
            hopeless = self._hopeless(part, code, early)
            if hopeless and (part.starts == 1 or not self._spared(part)):
                raise PartsFailed(hopeless, code if code > 0 else 1)
            if hopeless:
                pause = REST_S
                log.error("%s; the other workers go on, it is tried again in %.0f s", hopeless, pause)
            else:
                pause = PAUSES_S[min(early, len(PAUSES_S) - 1)]
                log.warning("the %s has ended (%s); starting it again in %.1f s", part.name, how_it_ended(code), pause)
            await asyncio.sleep(pause)
            await part.start()
            self.restarts += 1

    async def _end_of(self, part: Part) -> int:
        """Wait for it; what stays up for a while hasn't ended early any more. Its exit code."""
        end = asyncio.ensure_future(part.ended())
        try:
            await asyncio.wait((end,), timeout=EARLY_S)
            if not end.done():
                self._early[part.name] = 0
            return await end
        finally:
            end.cancel()

    def _hopeless(self, part: Part, code: int, early: int) -> str:
        """Why starting it again makes no sense, or nothing."""
        if part.starts == 1 and early and code in FINAL_CODES:
            return f"the {part.name} could not start; its message is above"
        if early >= len(PAUSES_S):
            return f"the {part.name} has ended {early} times in a row right after its start ({how_it_ended(code)})"
        return ""

    def _spared(self, part: Part) -> bool:
        """Whether it is one worker of several and another one stays up, or may yet."""
        others = [worker for worker in self.workers if worker is not part]
        return part in self.workers and any(self._early.get(other.name, 0) < len(PAUSES_S) for other in others)

    async def _watch(self, worker: Part, path: Path) -> None:
        """End a worker that hangs; `_keep` then starts another."""
        while True:
            hang = await watch_worker(path)
            if hang is not None and hang.pid == worker.pid:
                log.error("the %s hangs (%s); killing it", worker.name, hang.why)
                await worker.kill()
            await asyncio.sleep(POLL_S)

    # --- the end -----------------------------------------------------------------------------------------

    def _asked_to_stop(self, number: int) -> None:
        now = asyncio.get_running_loop().time()
        if self._stop_asked is None:
            self._stop_asked = now
            self._stop.set()
        elif number == signal.SIGINT and now - self._stop_asked > HURRY_S:
            # `make` passes a signal on that we got already; only a late Ctrl-C is a person's second one. The
            # store is still given its time: what it must take along is in shared memory.
            self.tell("stopping at once")
            for part in (self.frontend, *self.workers):
                part.hurry()

    async def _stop_all(self) -> None:
        if any(part.running for part in self.parts):
            self.tell("stopping")
        await self.frontend.stop()
        await asyncio.gather(*(worker.stop() for worker in self.workers))
        await self.store.stop()
        # A store that was killed or failed leaves its pool for the next one; after us there is no next one.
        shutil.rmtree(pool_path(self.config.pool_dir, self.store_socket), ignore_errors=True)


def serve(
    config: ServeConfig, listener: socket.socket, tell: Callable[[str], None], ready: Callable[[Health], None]
) -> int:
    """Run everything until SIGTERM or SIGINT; returns the exit code. Raises ForebayError if it can't start."""
    with runtime_directory(config.runtime):
        try:
            asyncio.run(Supervisor(config, listener, tell, ready).run())
        except PartsFailed as error:
            failed: ForebayError = error
        else:
            return 0
    raise failed
