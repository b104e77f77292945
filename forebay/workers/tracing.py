"""What a worker did when, as a Chrome trace: open the file in chrome://tracing or ui.perfetto.dev.

Three kinds of rows. `engine` has steps and their parts: schedule, forward, sample, push. `store` has what the transfer
thread moved. Each `request` row shows one request at a time: waiting, loading, prefill, decode. The newest events are
kept, up to a cap; the file is written when the worker stops.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

EVENTS_MAX = 200_000
"""Some 25 MB of JSON; at 40 steps a second the last quarter of an hour of one request."""

ENGINE, STORE, REQUESTS = 1, 2, 100
"""Rows (Chrome calls them threads); requests have those from 100 on."""


@dataclass(slots=True)
class _Phase:
    row: int
    name: str
    began: float
    args: dict[str, Any]


class Trace:
    """Collects events. `span` and `phase` belong to the engine's thread; `moved` may be called from any. `clock` gives
    seconds."""

    def __init__(self, events_max: int = EVENTS_MAX, clock: Callable[[], float] = time.perf_counter) -> None:
        self.recorded = 0
        self._events: deque[dict[str, Any]] = deque(maxlen=events_max)
        self._lock = threading.Lock()
        self._clock = clock
        self._zero = clock()
        self._phases: dict[Hashable, _Phase] = {}
        self._rows: set[int] = set()
        self._rows_used = 0

    def now(self) -> float:
        """For `moved`."""
        return self._clock()

    @contextmanager
    def span(self, name: str, **args: Any) -> Iterator[dict[str, Any]]:
        """A part of the engine's work. What is put into the given table is shown with it."""
        began = self._clock()
        try:
            yield args
        finally:
            self._add(ENGINE, name, began, args)

    def moved(self, name: str, began: float, **args: Any) -> None:
        """The transfer thread did something from `began` until now."""
        self._add(STORE, name, began, args)

    def phase(self, request: Hashable, name: str, **args: Any) -> None:
        """`request` is in this phase from now on, if it wasn't already."""
        before = self._phases.get(request)
        if before is not None and before.name == name:
            before.args.update(args)
            return
        row = before.row if before is not None else self._free_row()
        if before is not None:
            self._add(row, before.name, before.began, before.args)
        self._phases[request] = _Phase(row, name, self._clock(), {"request": str(request), **args})

    def end(self, request: Hashable, why: str) -> None:
        """`request` is over; its row can be another's."""
        phase = self._phases.pop(request, None)
        if phase is not None:
            self._rows.discard(phase.row)
            self._add(phase.row, phase.name, phase.began, phase.args | {"ended": why})

    @property
    def dropped(self) -> int:
        """Events that were pushed out by newer ones."""
        return self.recorded - len(self._events)

    def write(self, path: Path) -> None:
        """Write the file, anew; phases that still last end here. Raises OSError."""
        for request in list(self._phases):
            self.end(request, "the worker stopped")
        names = {ENGINE: "engine", STORE: "store"}
        names |= {REQUESTS + row: f"request {row + 1}" for row in range(self._rows_used)}
        with self._lock:
            events = [_named(row, name) for row, name in names.items()] + list(self._events)
        body = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"dropped": self.dropped}}
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_bytes(msgspec.json.encode(body))
        partial.replace(path)

    def _add(self, row: int, name: str, began: float, args: dict[str, Any]) -> None:
        event = {
            "ph": "X", "pid": 1, "tid": row, "name": name, "ts": self._micros(began),
            "dur": max(0.0, self._micros(self._clock()) - self._micros(began)), "args": args,
        }  # fmt: skip
        with self._lock:
            self._events.append(event)
            self.recorded += 1

    def _micros(self, seconds: float) -> float:
        return round((seconds - self._zero) * 1e6, 1)

    def _free_row(self) -> int:
        row = REQUESTS
        while row in self._rows:
            row += 1
        self._rows.add(row)
        self._rows_used = max(self._rows_used, row - REQUESTS + 1)
        return row


class NoTrace(Trace):
    """Takes everything and keeps nothing."""

    @contextmanager
    def span(self, name: str, **args: Any) -> Iterator[dict[str, Any]]:
        """See `Trace`."""
        yield args

    def phase(self, request: Hashable, name: str, **args: Any) -> None:
        """See `Trace`."""

    def end(self, request: Hashable, why: str) -> None:
        """See `Trace`."""

    def _add(self, row: int, name: str, began: float, args: dict[str, Any]) -> None:
        return


NO_TRACE = NoTrace(0)


def _named(row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": row, "name": "thread_name", "args": {"name": name}}
