"""Empty a worker on purpose, with no client noticing: it takes no new requests, and those that it has go on elsewhere.

The worker stores what it has computed; its front ends then move its requests to their other workers, which go on from
there. Requests for which there is no other worker end where they are. Ends when the worker has nothing left to do.

example:
  forebay drain unix:///run/forebay/w0.sock           then it may be stopped, or:
  forebay drain unix:///run/forebay/w0.sock --stop    it ends by itself (`forebay serve` starts another one)
  forebay drain unix:///run/forebay/w0.sock --undo    it takes requests again

exit codes: 0 it has nothing left, 1 it still has requests after --timeout, 3 no worker answers
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from forebay.cli.tables import bytes_text
from forebay.config import Setting, add_settings, boolean, duration, resolve, text
from forebay.errors import ConfigError
from forebay.workers.control import Left, WorkerControl

SETTINGS = (
    Setting("worker", text, None, "unix socket of the worker", positional=True),
    Setting("undo", boolean, False, "let it take requests again", shown="no", switch=True),
    Setting("stop", boolean, False, "let it end when it has nothing left", shown="no", switch=True),
    Setting("timeout", duration, 300.0, "how long to wait until it has nothing left", shown="5m"),
)

LOOK_S = 0.1
TELL_S = 1.0
AGREE = 3
"""Looks in a row that must find nothing: a front end may just be moving a request."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_settings(parser, SETTINGS)


def run(flags: dict[str, Any]) -> int:
    """Drain, or undo it."""
    values = resolve("drain", SETTINGS, flags)
    if values["worker"] is None:
        raise ConfigError("which worker? give its socket, such as unix:///run/forebay/w0.sock")
    if values["undo"] and values["stop"]:
        raise ConfigError("give --undo or --stop, not both")
    with WorkerControl(values["worker"]) as control:
        described = control.describe()
        name = f"the worker on {control.path} (process {described.pid})"
        if values["undo"]:
            control.drain(False)
            print(f"{name} takes requests again")
            return 0
        control.drain(True)
        if described.store == "down":
            _tell(f"{name} has lost its store: what moves is computed anew")
        began = time.monotonic()
        left = wait(control.left, values["timeout"], _tell)
        if not left.nothing:
            print(f"{name} still has {words(left)} after {values['timeout']:g} s; it takes nothing new meanwhile")
            return 1
        print(f"{name} has nothing left after {time.monotonic() - began:.1f} s; all it computed is stored")
        if values["stop"]:
            control.leave()
            print(f"{name} has ended")
    return 0


def wait(look: Callable[[], Left], timeout_s: float, tell: Callable[[str], None]) -> Left:
    """Look until nothing is left, or for so long; what was seen last."""
    until, told_at, nothing = time.monotonic() + timeout_s, float("-inf"), 0
    while True:
        left = look()
        nothing = nothing + 1 if left.nothing else 0
        if nothing >= AGREE:
            return left
        now = time.monotonic()
        if now >= until and not left.nothing:
            return left
        if now - told_at >= TELL_S and not left.nothing:
            told_at = now
            tell(f"{words(left)} left")
        time.sleep(LOOK_S)


def words(left: Left) -> str:
    """`3 requests, 2 chunks to store (1.5 MiB queued)`."""
    queued = f" ({bytes_text(left.bytes)} queued)" if left.bytes else ""
    return f"{left.requests} requests, {left.chunks} chunks to store{queued}"


def _tell(line: str) -> None:
    print(f"forebay drain: {line}", file=sys.stderr, flush=True)
