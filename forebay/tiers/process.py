"""A tier's own process: `python -m forebay.tiers.process --fd N`, started by the store daemon.

One thread runs the loop below; the tier's own threads wake it through an eventfd. It sleeps in `poll` and
nowhere else, so it answers the daemon whatever its device does. It dies with its parent.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys

from forebay.errors import ForebayError
from forebay.tiers.base import SecondaryTier
from forebay.tiers.link import DaemonLink
from forebay.tiers.messages import Start, Started, StartFailed
from forebay.tiers.registry import create_tier
from forebay.tiers.service import TierService

log = logging.getLogger("forebay.tier")

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent's thread that started us ends, and die now if it has already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


class Waker:
    """An eventfd that any thread may ring."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def wake(self) -> None:
        """Make the loop's `poll` return. Never blocks, may be called from any thread."""
        if self.descriptor >= 0:
            with contextlib.suppress(BlockingIOError):  # the counter is full, so the loop is awake as it is
                os.eventfd_write(self.descriptor, 1)

    def close(self) -> None:
        """Close it; a ring after that is heard by nobody."""
        descriptor, self.descriptor = self.descriptor, -1
        os.close(descriptor)

    def clear(self) -> None:
        """Forget that it rang."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)


class TierProcess:
    """Carries messages between the daemon's socket and one tier object, until Stop or end of file."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._link = DaemonLink(connection)
        self._waker = Waker()

    def run(self) -> int:
        """Serve until the daemon says Stop or is gone; returns the exit code."""
        # Both are sent to whole groups of processes. The daemon decides what to do and tells us; if it can't
        # any more, the socket ends.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return self.serve()

    def serve(self) -> int:
        """The same, on whatever thread this is: signals are left alone."""
        start = self._first_message()
        if start is None:
            return 0
        tier = self._open(start)
        if tier is None:
            return 4
        service = TierService(tier, self._link)
        try:
            self._link.send(Started(os.getpid()))
            self._loop(service)
        finally:
            service.close()
            self._link.flush(timeout_s=1.0)
        return 5 if service.failed else 0

    def close(self) -> None:
        """Give back what this object holds, for a caller that lives on."""
        self._link.close()
        self._waker.close()

    def _first_message(self) -> Start | None:
        while not self._link.closed:
            self._link.wait(None, self._waker.descriptor)
            for message in self._link.receive():
                if not isinstance(message, Start):
                    log.error("the daemon's first message is %s, not Start", type(message).__name__)
                    return None
                return message
        return None

    def _open(self, start: Start) -> SecondaryTier | None:
        try:
            tier = create_tier(start.kind, start.name, start.options)
        except ForebayError as error:
            self._fail(type(error).__name__, str(error))
            return None
        except Exception as error:
            log.exception("tier %s (%s) can't start", start.name, start.kind)
            self._fail("ResourceError", f"tier {start.name!r} can't start: {error!r}; its log says more")
            return None
        tier.set_waker(self._waker.wake)
        return tier

    def _fail(self, error: str, message: str) -> None:
        self._link.send(StartFailed(error, message))
        self._link.flush(timeout_s=1.0)

    def _loop(self, service: TierService) -> None:
        while not (self._link.closed or service.stopping):
            # Messages that came in one read with Start are waiting already.
            self._link.wait(service.next_look_s(), self._waker.descriptor)
            self._waker.clear()
            for message in self._link.receive():
                service.handle(message)
            service.progress()


def main(arguments: list[str] | None = None) -> int:
    """Entry point. `--lock-fd` is kept open for the whole life: its flock tells others that we live."""
    parser = argparse.ArgumentParser(prog="python -m forebay.tiers.process")
    parser.add_argument("--fd", type=int, required=True, help="inherited end of the daemon's socket pair")
    parser.add_argument("--lock-fd", type=int, help="inherited descriptor that holds this tier's lock")
    parser.add_argument("--parent", type=int, required=True, help="the daemon's process id")
    options = parser.parse_args(arguments)
    die_with_parent(options.parent)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    if options.lock_fd is not None:
        os.set_inheritable(options.lock_fd, False)
    os.set_inheritable(options.fd, False)
    return TierProcess(socket.socket(fileno=options.fd)).run()


if __name__ == "__main__":
    sys.exit(main())
