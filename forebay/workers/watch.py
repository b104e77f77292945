"""Is the worker alive? A supervisor's own connection to it, on which it listens for heartbeats.

A front end carries its streams to another worker when this one falls silent; only the supervisor can end a
worker that hangs, and so make room for another one.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path

from forebay.errors import ProtocolError
from forebay.ipc.framing import FrameBuffer
from forebay.workers.protocol import FROM_WORKER, TO_WORKER, Alive, Describe, Description, FromWorker

SILENCE_S = 10.0
"""Heartbeats come four times a second from beside the engine: this long without one is a hang, not a long step."""
STEP_S_MAX = 300.0
"""No step of a sane batch takes this long: the engine's thread hangs."""
STALL_S = 30.0
"""So long without progress (`pulse.py`), and it is given up. Front ends have gone elsewhere long before."""
READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Hang:
    """A worker that hangs: its process, and what is wrong with it."""

    pid: int
    why: str


async def watch_worker(path: Path, *, silence_s: float = SILENCE_S, stall_s: float = STALL_S) -> Hang | None:
    """Listen to one worker until it hangs (Hang) or its connection ends (None). Raises nothing that it heard."""
    try:
        reader, writer = await asyncio.open_unix_connection(str(path))
    except OSError:
        return None
    try:
        writer.write(TO_WORKER.encode(Describe()))
        return await _listen(reader, silence_s, stall_s)
    except (OSError, ProtocolError):
        return None
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _listen(reader: asyncio.StreamReader, silence_s: float, stall_s: float) -> Hang | None:
    buffer: FrameBuffer[FromWorker] = FrameBuffer(FROM_WORKER)
    pid: int | None = None
    while True:
        try:
            # Until it has said who it is, it may be loading its model for minutes.
            data = await asyncio.wait_for(reader.read(READ_BYTES), None if pid is None else silence_s)
        except TimeoutError:
            assert pid is not None
            return Hang(pid, f"no heartbeat for {silence_s:.0f} s")
        if not data:
            return None
        for message in buffer.feed(data):
            if isinstance(message, Description):
                pid = message.pid
            elif isinstance(message, Alive) and message.step_s > STEP_S_MAX and pid is not None:
                return Hang(pid, f"one step has been running for {message.step_s:.0f} s")
            elif isinstance(message, Alive) and message.stalled_s > stall_s and pid is not None:
                return Hang(pid, f"its engine has stood still for {message.stalled_s:.0f} s")
