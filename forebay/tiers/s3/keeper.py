"""The tier's one background thread: deletes what has left, writes recency, tries a shut circuit, learns and sweeps."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator

import lmdb

from forebay.tiers.fs.outbox import Outbox
from forebay.tiers.fs.state import State
from forebay.tiers.s3.complaints import complain
from forebay.tiers.s3.doomed import Doomed
from forebay.tiers.s3.failures import RequestFailed
from forebay.tiers.s3.holdings import Holdings
from forebay.tiers.s3.learner import Learner
from forebay.tiers.s3.names import Names
from forebay.tiers.s3.sightings import Sightings
from forebay.tiers.s3.sweep import Sweeper

log = logging.getLogger("forebay.tier.s3")

FLUSH_S = 2.0
LOOK_S = 0.1
"""How often it is looked whether a shut circuit is due for a trial."""
HEALTHY_S = 30.0
DOOMED_BATCH = 256
TRIM_BYTES = 256 << 20


class Keeper:
    """Runs until `close`. `kick` makes it look at once. `trial` is the name of an object that isn't there."""

    def __init__(
        self, holdings: Holdings, names: Names, sightings: Sightings, doomed: Doomed, learner: Learner,
        sweeper: Sweeper, outbox: Outbox, state: State | None, trial: str,
    ) -> None:  # fmt: skip
        self._holdings = holdings
        self._names = names
        self._sightings = sightings
        self._doomed = doomed
        self._learner = learner
        self._sweeper = sweeper
        self._outbox = outbox
        self._state = state
        self._trial = trial
        self._announcing: Iterator[None] | None = holdings.announce()
        self._kicked = threading.Event()
        self._closing = False
        self.counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._work, name="s3-keeper", daemon=True)

    @property
    def announced(self) -> bool:
        """Has everything been told of that an earlier process stored?"""
        return self._announcing is None

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def kick(self) -> None:
        """There is something to delete or to find out. Never blocks."""
        self._kicked.set()

    def _work(self) -> None:
        healthy_at = time.monotonic() + HEALTHY_S
        while not self._closing and self._outbox.failure is None:
            self._kicked.wait(self._pause_s)
            self._kicked.clear()
            self._turn()
            if self._state is not None and time.monotonic() > healthy_at:
                self._state.healthy()

    @property
    def _pause_s(self) -> float:
        if self._announcing is not None:
            return 0.0
        if self._holdings.bucket.requests.breaker.shut:
            return LOOK_S
        wait = self._learner.wait_s
        return FLUSH_S if wait is None else min(FLUSH_S, wait)

    def _turn(self) -> None:
        self._outbox.wait_for_room()
        try:
            if self._announcing is not None and next(self._announcing, self) is self:
                self._announcing = None
            self._holdings.flush_touches()
            self._with_bucket()
        except lmdb.Error as error:
            self._outbox.manifest_error(error)
        except RequestFailed as failure:
            self.counts["background_failures"] += 1
            complain("s3 background", "the background work waits: %s", failure)
        except Exception:
            self.counts["background_crashes"] += 1
            log.exception("the background work failed, and goes on")
            time.sleep(LOOK_S)

    def _with_bucket(self) -> None:
        breaker = self._holdings.bucket.requests.breaker
        if breaker.shut:
            if breaker.due:
                self._try()
            return
        if self._closing:
            return
        more = self._holdings.reap(pages=4) > 0
        more |= self._trim()
        more |= self._delete_doomed()
        more |= self._sweeper.step()
        self._learner.step()
        if more:
            self.kick()

    def _try(self) -> None:
        """The trial that closes the circuit, or doesn't."""
        try:
            self._holdings.bucket.front(self._trial, 1)
        except RequestFailed as failure:
            if not failure.kind.answered:
                self.counts["trials_failed"] += 1
                return
        log.info("%s answers again", self._holdings.bucket.requests.where)
        self._outbox.wake()

    def _trim(self) -> bool:
        """Evict some of what is over the quota: it may be smaller than last time."""
        over = self._holdings.ledger.used - self._holdings.ledger.quota
        return over > 0 and self._holdings.evict(min(over, TRIM_BYTES), reason="quota")

    def _delete_doomed(self) -> bool:
        names = self._doomed.some(DOOMED_BATCH)
        if not names:
            return False
        chunks = {name: self._names.parse_chunk(name) for name in names}
        with self._holdings.locks.hold_free([chunk for chunk in chunks.values() if chunk is not None]) as held:
            mine = {chunk for chunk in held if not self._holdings.owns(chunk)}
            for name in names:
                if (chunk := chunks[name]) in held and chunk not in mine:
                    self._doomed.gone(name)  # it has been stored anew since
            free = [name for name in names if name in self._doomed and (chunks[name] is None or chunks[name] in mine)]
            failed = set(self._holdings.bucket.delete(free)) if free else set()
            for name in free:
                if name in failed:
                    self._doomed.put_back(name)
                    continue
                if (chunk := chunks[name]) is not None:
                    self._sightings.forget(chunk)  # what was seen of it before is hidden no longer
                self._doomed.gone(name)
        self.counts["doomed_deleted"] += len(free) - len(failed)
        for name in free:
            if name not in failed:
                self._holdings.cards.end(name.removeprefix(f"{self._names.prefix}/"))
        return len(free) > len(failed)

    def close(self) -> None:
        """Stop, after the present step."""
        self._closing = True
        self._kicked.set()
        self._thread.join(5.0)
