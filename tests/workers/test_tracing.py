"""The trace is a file that Chrome opens: valid, bounded, and true about what was done when."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import ConfigError
from forebay.workers.config import WorkerConfig
from forebay.workers.tracing import NO_TRACE, Trace
from tests.workers.processes import start_store, start_worker


def ticking() -> Iterator[float]:
    now = 100.0
    while True:
        yield now
        now += 0.001


def clocked(events_max: int = 1000) -> Trace:
    ticks = ticking()
    return Trace(events_max, lambda: next(ticks))


def read(path: Path) -> tuple[list[dict[str, Any]], dict[int, str], dict[str, Any]]:
    """Events, names of rows, and the rest; checks what Chrome's format asks for."""
    body = json.loads(path.read_text())
    events = [event for event in body["traceEvents"] if event["ph"] == "X"]
    names = {event["tid"]: event["args"]["name"] for event in body["traceEvents"] if event["ph"] == "M"}
    for event in events:
        assert event["dur"] >= 0 and event["pid"] == 1 and event["tid"] in names and event["name"], event
    for row in names:
        check_nesting([event for event in events if event["tid"] == row])
    return events, names, body["otherData"]


def check_nesting(events: list[dict[str, Any]]) -> None:
    """Of two events in one row one lies within the other, or they don't touch: else Chrome draws nonsense."""
    open_until: list[float] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        end = event["ts"] + event["dur"]
        while open_until and open_until[-1] <= event["ts"] + 0.2:  # times are rounded to a tenth of a microsecond
            open_until.pop()
        assert not open_until or end <= open_until[-1] + 0.2, event
        open_until.append(end)


def test_spans_nest_and_a_request_has_one_phase_at_a_time(tmp_path: Path) -> None:
    trace = clocked()
    trace.phase("a", "waiting", prompt=5)
    trace.phase("b", "waiting")
    with trace.span("step", requests=2), trace.span("forward"):
        trace.phase("a", "decode")
        trace.phase("a", "decode", more=1)
    trace.end("a", "stop")
    trace.phase("c", "waiting")
    trace.moved("push", trace.now(), chunks=2)
    trace.write(tmp_path / "t.json")
    events, names, _ = read(tmp_path / "t.json")
    assert names == {1: "engine", 2: "store", 100: "request 1", 101: "request 2"}
    mine = [e for e in events if e["args"].get("request") == "a"]
    assert [e["name"] for e in mine] == ["waiting", "decode"]
    assert mine[0]["ts"] + mine[0]["dur"] <= mine[1]["ts"] and mine[1]["args"]["ended"] == "stop"
    assert mine[1]["args"]["more"] == 1
    last = [e for e in events if e["args"].get("request") == "c"]
    assert last[0]["tid"] == 100, "the row that a has left"
    assert last[0]["args"]["ended"] == "the worker stopped"


def test_the_newest_events_are_kept_and_the_others_counted(tmp_path: Path) -> None:
    trace = clocked(events_max=10)
    for number in range(25):
        with trace.span("step", number=number):
            pass
    assert trace.recorded == 25 and trace.dropped == 15
    trace.write(tmp_path / "t.json")
    events, _, other = read(tmp_path / "t.json")
    assert [e["args"]["number"] for e in events] == list(range(15, 25)) and other["dropped"] == 15


def test_without_a_trace_nothing_is_kept() -> None:
    with NO_TRACE.span("step"):
        NO_TRACE.phase("a", "waiting")
    NO_TRACE.end("a", "stop")
    assert NO_TRACE.recorded == NO_TRACE.dropped == 0 and not NO_TRACE._phases


def test_a_trace_that_could_not_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    WorkerConfig(Path("m"), "unix://w.sock", trace=tmp_path / "out.json").check()
    with pytest.raises(ConfigError, match="no directory"):
        WorkerConfig(Path("m"), "unix://w.sock", trace=tmp_path / "nowhere" / "out.json").check()


def test_a_worker_writes_what_it_did_when_it_stops(tmp_path: Path) -> None:
    store = start_store(tmp_path)
    prompt = [n % 250 for n in range(100)]
    out = tmp_path / "out.json"
    process, front = start_worker(tmp_path, "w0")
    front.settle()
    front.ask("first", prompt, 8)
    front.settle()
    process.end()
    process, front = start_worker(tmp_path, "w1", f"trace={out}")
    front.settle()
    front.ask("again", prompt, 8)
    front.ask("other", prompt[::-1], 8)
    front.settle()
    assert process.end(signal.SIGTERM) == 0, process.log.read_text()
    store.end()
    events, _, _ = read(out)
    assert {"schedule", "step", "forward", "sample", "push"} <= {e["name"] for e in events if e["tid"] == 1}
    assert {"pull", "push"} <= {e["name"] for e in events if e["tid"] == 2}
    again = [e for e in events if e["args"].get("request") == "again#1" and e["tid"] >= 100]
    assert [e["name"] for e in again] == ["waiting", "loading", "prefill", "decode"]
    (prefill,) = [e for e in again if e["name"] == "prefill"]
    assert prefill["args"]["cached"] == 96
    steps = [e for e in events if e["name"] == "step"]
    assert sum(e["args"]["prefilled"] for e in steps) == 4 + 100
    assert sum(e["args"]["decoded"] for e in steps) == 7 + 7
    for before, after in pairwise(steps):
        assert before["ts"] + before["dur"] <= after["ts"] + 0.2
