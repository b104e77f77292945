"""Starting, watching and ending one tier process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys

from forebay.errors import NoSpace

_MODULE = "forebay.tiers.process"


class Child:
    """A tier process. `connection` is the daemon's end of its socket pair, `dead` is set once it is reaped.

    Only a reaped process is known to write no more, neither itself nor through I/O that the kernel still
    does for it.
    """

    def __init__(self, lock_fd: int | None) -> None:
        """Start it. Call it on the loop's thread: the process dies with the thread that started it.

        Raises NoSpace if the machine has no room for one more process, or this one for more descriptors.
        """
        try:
            self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise NoSpace(f"can't start a tier's process: {error.strerror}; raise the limit of open files") from error
        command = [sys.executable, "-P", "-m", _MODULE, "--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
        inherited = [theirs.fileno()]
        if lock_fd is not None:
            command += ["--lock-fd", str(lock_fd)]
            inherited.append(lock_fd)
        # It imports from where we import, an out-of-tree tier's module too, and not from the working directory.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=inherited, env=environment
            )
        except OSError as error:
            self.connection.close()
            raise NoSpace(f"can't start a tier's process: {error.strerror}; raise the process limit") from error
        finally:
            theirs.close()
        self.pid = self._process.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError as error:  # nobody would notice its end
            self._process.kill()
            self._process.wait()
            self.connection.close()
            raise NoSpace(f"can't watch a tier's process: {error.strerror}; raise the limit of open files") from error
        self.dead = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._reap)

    def _reap(self) -> None:
        if self._process.poll() is None:
            return
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.dead.set()

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it lives."""
        return self._process.returncode

    def kill(self) -> None:
        """SIGKILL: the fence. The process is gone once `dead` is set."""
        if not self.dead.is_set():
            self._process.send_signal(signal.SIGKILL)
