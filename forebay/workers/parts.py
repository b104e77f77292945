"""One supervised process: started by the public command line, stopped by SIGTERM, killed if it hangs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.errors import ResourceError
from forebay.parent import PARENT_VARIABLE

log = logging.getLogger(__name__)

KILL_S = 5.0
"""How long the kernel may take to end a killed process (it may be writing to a slow disk)."""


class PartsFailed(ResourceError):
    """A part can't be kept running. `exit_code` is what it exited with."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class Part:
    """A process of `forebay ARGUMENTS`, in a session of its own, so that only its supervisor signals it.

    `stop_s` is how long it may take to stop; `descriptors` are handed to it open.
    """

    name: str
    arguments: Sequence[str]
    stop_s: float
    descriptors: Sequence[int] = ()
    starts: int = 0
    process: Process | None = field(default=None, repr=False)

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        return self.process.pid if self.running and self.process is not None else None

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self) -> None:
        """Start it. Call it on the main thread: the process ends with the thread that started it.

        Raises PartsFailed if the machine has no room for one more process.
        """
        assert not self.running, f"{self.name} is running already"
        environment = os.environ | {PARENT_VARIABLE: str(os.getpid())}
        try:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "forebay", *self.arguments,
                stdin=asyncio.subprocess.DEVNULL, env=environment, pass_fds=self.descriptors, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise PartsFailed(f"can't start the {self.name}: {error.strerror}; raise the process limit", 4) from error
        self.starts += 1

    async def ended(self) -> int:
        """Wait for its end; its exit code, negative for a signal."""
        assert self.process is not None
        return await self.process.wait()

    async def stop(self) -> bool:
        """SIGTERM, then SIGKILL if that takes too long. False if it had to be killed."""
        if not self.running or self.process is None:
            return True
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.process.wait(), self.stop_s)
        except TimeoutError:
            log.warning("the %s did not stop within %.0f s; killing it", self.name, self.stop_s)
            await self.kill()
            return False
        return True

    async def kill(self) -> None:
        """SIGKILL, to it and to whatever it started."""
        if not self.running or self.process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), KILL_S)

    def hurry(self) -> None:
        """SIGKILL now; somebody is waiting for its end already."""
        if self.running:
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
