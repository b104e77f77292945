"""Reading traces: JSON lines, plain or compressed with zstd, in one of two forms.

    {"timestamp": ms, "input_length": tokens, "hash_ids": [per 512 tokens]}           a request a line
    {"block_size": 64, "requests": [{"t": s, "in": tokens, "hash_ids": [...]}]}       a session a line

In a session, `type: subagent` nests the requests of one that it started, at times that count from its own `t`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.hit_rate.workload import BLOCK_TOKENS, Ask, Session, Workload, round_robin, timed, workload

WINDOW_BYTES_MAX = 1 << 27


class TraceError(Exception):
    """This trace can't be read; the message says why, and what helps."""


def lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """The objects of a trace, one a line. Raises TraceError."""
    try:
        with open(path, "rb") as file:
            plain: Any = _decompressed(file) if path.suffix == ".zst" else file
            for number, line in enumerate(io.TextIOWrapper(plain, encoding="utf-8"), 1):
                if line.strip():
                    yield _parsed(line, path, number)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error


def _decompressed(file: Any) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise TraceError(
            "to read .zst, install the package zstandard (pip install zstandard), or decompress it first "
            "(zstd -d --long=27 FILE)"
        ) from error
    return zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX).stream_reader(file)


def _parsed(line: str, path: Path, number: int) -> Mapping[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{path}, line {number}: not JSON: {error}") from error
    if not isinstance(found, dict) or not ({"requests", "timestamp"} & found.keys()):
        raise TraceError(f"{path}, line {number}: neither a request (timestamp) nor a session (requests)")
    return found


def load(path: Path, first: int, count: int | None, in_turn: bool) -> Workload:
    """A trace's workload. Of sessions, `count` from `first` (from 0); None: 128 at their own times, 64 in turn.

    Requests that have times of their own are replayed at those, all of them. Raises TraceError.
    """
    rows = lines(path)
    head = next(rows, None)
    if head is None:
        raise TraceError(f"{path}: empty")
    if "timestamp" in head:
        asks = sorted((_request(row) for row in (head, *rows)), key=lambda ask: ask.now)
        return workload(path.name, ((ask.now, ask.tokens, ask.blocks) for ask in asks))
    count = count or (64 if in_turn else 128)
    sessions = [_session(row) for row in islice(_from(head, rows), first, first + count)]
    if not sessions:
        raise TraceError(f"{path}: has no session {first}")
    name = f"{path.name}, sessions {first + 1} to {first + len(sessions)}, "
    return round_robin(name + "round robin", sessions) if in_turn else timed(name + "own times", sessions)


def _from(head: Mapping[str, Any], rows: Iterator[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    yield head
    yield from rows


def _request(row: Mapping[str, Any]) -> Ask:
    return Ask(row["timestamp"] / 1000, row["input_length"], row["hash_ids"])


def _session(row: Mapping[str, Any]) -> Session:
    """All its requests in order of time, in blocks of 512 tokens: each is named by the last small block in it, which
    determines its prefix; what doesn't fill one is left out."""
    small = BLOCK_TOKENS // row["block_size"]
    found = sorted(_flat(row["requests"], 0.0), key=lambda item: item[0])
    return [Ask(now, request["in"], request["hash_ids"][small - 1 :: small]) for now, request in found]


def _flat(requests: Any, offset: float) -> Iterator[tuple[float, Mapping[str, Any]]]:
    for request in requests:
        if request["type"] == "subagent":
            yield from _flat(request["requests"], offset + request["t"])
        else:
            yield offset + request["t"], request
