"""The file tier's one background thread: unlinks what has left, writes recency, reconciles."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import lmdb

from forebay.tiers.fs.outbox import Outbox
from forebay.tiers.fs.shelf import Shelf
from forebay.tiers.fs.state import State

log = logging.getLogger("forebay.tier.fs")

FLUSH_S = 2.0
HEALTHY_S = 30.0
REAP_FILES = 256
STEP_PAUSE_S = 0.02
"""Between two steps of a slow walk: 200,000 files take a minute, and the disk hardly notices."""
TRIM_BYTES = 256 << 20


class Keeper:
    """Runs until `close`. `kick` makes it look at once. `look` is called every few seconds: are there other stores?"""

    def __init__(
        self, shelf: Shelf, outbox: Outbox, state: State, walk: Iterator[int], look: Callable[[], None], *, fast: bool
    ) -> None:
        self._shelf = shelf
        self._outbox = outbox
        self._state = state
        self._walk: Iterator[int] | None = walk
        self._look = look
        self._fast = fast
        self._kicked = threading.Event()
        self._closing = False
        self._rounds = 0
        self.walked = 0
        self._thread = threading.Thread(target=self._work, name="fs-keeper", daemon=True)

    @property
    def reconciled(self) -> bool:
        """Has every folder been compared with the manifest?"""
        return self._walk is None

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def kick(self) -> None:
        """There is something to unlink or to write. Never blocks."""
        self._kicked.set()

    def _work(self) -> None:
        healthy_at = time.monotonic() + HEALTHY_S
        while self.working:
            self._kicked.wait(self.pause_s)
            self.turn()
            if time.monotonic() > healthy_at:
                self._state.healthy()

    @property
    def working(self) -> bool:
        """Is there to be another turn?"""
        return not self._closing and self._outbox.failure is None

    @property
    def pause_s(self) -> float:
        """How long to wait for a kick before the next turn."""
        return FLUSH_S if self._walk is None else 0.0 if self._fast else STEP_PAUSE_S

    def turn(self) -> None:
        """What there is to do now. Errors are told, and the next turn tries again."""
        self._kicked.clear()
        self._outbox.wait_for_room()
        try:
            self._round()
        except lmdb.Error as error:
            self._outbox.manifest_error(error)
        except OSError as error:
            log.error("the file tier's background work failed, and goes on: %s", error)

    def _round(self) -> None:
        if self._walk is not None and not self._closing:
            self.step()
        if self._shelf.reap(files=REAP_FILES) or self.trim():
            self.kick()  # there may be more
        self._rounds += 1
        if self._walk is None or self._rounds % 64 == 0:
            self._shelf.flush_touches()
            self._look()
        if self._rounds % 16 == 0:
            self._shelf.quarantine.recount()

    def step(self) -> None:
        """One step of the walk."""
        seen = next(self._walk, None) if self._walk is not None else 0
        self.walked += seen or 0
        if seen is None:
            self._walk = None
            self._shelf.ledger.open = True
        self.trim()

    def trim(self) -> bool:
        """Evict some of what is over the quota: a smaller quota than last time, or files that were found.

        False if nothing is over it, or nothing of that can leave.
        """
        over = self._shelf.ledger.used - self._shelf.ledger.limit
        return over > 0 and self._shelf.evict(min(over, TRIM_BYTES), reason="quota")

    def close(self) -> None:
        """Stop, after the present step."""
        self._closing = True
        self._kicked.set()
        self._thread.join(5.0)
