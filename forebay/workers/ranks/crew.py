"""The other ranks as rank 0 sees them: started, told what to do, watched.

Whatever ends one of them ends the worker: nothing can be computed without its part, and nothing is lost that the store
doesn't have. They end with rank 0 as well, by the kernel's doing, even if that is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forebay.errors import ResourceError
from forebay.parent import PARENT_VARIABLE
from forebay.workers.hot.telling import HotDone
from forebay.workers.parts import how_it_ended
from forebay.workers.ranks.channel import Channel
from forebay.workers.ranks.errors import RankLost, RankNotStarted
from forebay.workers.ranks.messages import (
    ANSWERS,
    FROM_FOLLOWER,
    ORDERS,
    TO_FOLLOWER,
    Done,
    FromFollower,
    Order,
    Start,
    ToFollower,
)
from forebay.workers.ranks.progress import Progress

END_S = 2.0
"""How long all of them may take to end once they are told."""


@dataclass
class _Other:
    """One more rank: its process, and both channels to it."""

    rank: int
    process: subprocess.Popen[bytes]
    steps: Channel[ToFollower, FromFollower]
    moves: Channel[Order, Done]
    pidfd: int = -1

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.process.pid})"


@dataclass
class Crew:
    """Ranks 1 and up of one worker. `progress` is rank 0's own. Steps are told by the engine's thread, orders are given
    by the transfer thread, all else happens on the main thread.

    A rank that hasn't carried out an order within `patience_s` is lost, and so is its worker: it may still be copying,
    into blocks that would be somebody else's by now.
    """

    size: int
    patience_s: float
    progress: Progress = field(default_factory=Progress)
    orders: int = 0
    _others: list[_Other] = field(default_factory=list)
    _lost: str = ""
    _loop: asyncio.AbstractEventLoop | None = None
    _on_lost: Callable[[RankLost], None] | None = None

    # --- from start to stop, on the main thread ------------------------------------------------------------

    def start(self, starts: Sequence[Start]) -> None:
        """Start a process for each of these. On the main thread: they end with the thread that started them."""
        for start in starts:
            other = _start(start.rank)
            self._others.append(other)
            other.steps.send(start, self.patience_s)

    def tell(self, message: ToFollower) -> None:
        """Say something to all. Raises RankLost."""
        for other in self._others:
            other.steps.send(message, self.patience_s)

    def until_loaded(self) -> None:
        """Wait until each has done what it was told. Raises RankNotStarted if one has ended instead."""
        for other in self._others:
            try:
                other.steps.receive()
            except RankLost as error:
                code = self._code(other)
                raise RankNotStarted(
                    f"{other.name} could not start: {how_it_ended(code)}; what it said is above", max(code, 1)
                ) from error

    def _code(self, other: _Other) -> int:
        try:
            return other.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return 1

    def watch(self, lost: Callable[[RankLost], None]) -> None:
        """From now on call `lost` on the running loop when one ends."""
        self._on_lost = lost
        self._loop = loop = asyncio.get_running_loop()
        for other in self._others:
            other.pidfd = os.pidfd_open(other.process.pid)
            loop.add_reader(other.pidfd, self._ended, loop, other)

    def _ended(self, loop: asyncio.AbstractEventLoop, other: _Other) -> None:
        loop.remove_reader(other.pidfd)
        how = how_it_ended(other.process.wait())
        self._lose(f"{other.name} has ended ({how}), so this worker ends: its successor goes on from the store")

    def close(self) -> None:
        """End all, and wait for it."""
        self._on_lost = None
        for other in self._others:
            other.steps.close()
            other.moves.close()
        until = time.monotonic() + (0.0 if self._lost else END_S)
        for other in self._others:
            with contextlib.suppress(subprocess.TimeoutExpired):
                other.process.wait(max(0.0, until - time.monotonic()))
            other.process.kill()
            other.process.wait()
            if other.pidfd >= 0:
                os.close(other.pidfd)
        self._others = []

    @property
    def lost(self) -> str:
        """Which rank has been lost, and how; empty if none has."""
        return self._lost

    @property
    def pids(self) -> list[int]:
        """Process ids of ranks 1 and up."""
        return [other.process.pid for other in self._others]

    def _lose(self, why: str) -> RankLost:
        self._lost = self._lost or why
        error = RankLost(self._lost)
        if self._on_lost is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._on_lost, error)
        return error

    # --- the engine's thread -------------------------------------------------------------------------------

    def step(self, message: ToFollower) -> None:
        """Have all compute what this thread computes next. Raises RankLost."""
        if self._lost:
            raise RankLost(self._lost)
        try:
            self.tell(message)
        except RankLost as error:
            raise self._lose(str(error)) from error

    def hot_done(self) -> list[HotDone]:
        """Of a step that was answered, every rank's answer. Blocks until all are through with it. Raises RankLost."""
        answers = []
        try:
            for other in self._others:
                answer = other.steps.receive(self.patience_s)
                assert isinstance(answer, HotDone), answer
                answers.append(answer)
        except RankLost as error:
            raise self._lose(str(error)) from error
        return answers

    # --- the transfer thread -------------------------------------------------------------------------------

    def order(
        self, order: Order, *, to: Sequence[int] | None = None, meanwhile: Callable[[], None] | None = None
    ) -> list[Done]:
        """Have ranks (None: all others) carry out an order while this thread does its own part; their answers.

        When it returns or raises, none of them touches a block or the pool any more; or else a rank is lost, and with
        it the worker: RankLost.
        """
        if self._lost:
            raise RankLost(self._lost)
        self.orders += 1
        ordered = [other for other in self._others if to is None or other.rank in to]
        try:
            for other in ordered:
                other.moves.send(order, self.patience_s)
            try:
                if meanwhile is not None:
                    meanwhile()
            finally:
                answers = [other.moves.receive(self.patience_s) for other in ordered]
        except RankLost as error:
            raise self._lose(str(error)) from error
        return answers


def _start(rank: int) -> _Other:
    environment = os.environ | {PARENT_VARIABLE: str(os.getpid())}
    (steps, their_steps), (moves, their_moves) = socket.socketpair(), socket.socketpair()
    with their_steps, their_moves:
        descriptors = (their_steps.fileno(), their_moves.fileno())
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "forebay.workers.ranks", *map(str, descriptors)],
                stdin=subprocess.DEVNULL, env=environment, pass_fds=descriptors,
            )  # fmt: skip
        except OSError as error:
            raise ResourceError(f"can't start rank {rank}: {error.strerror}; raise the process limit") from error
    who = f"rank {rank} (process {process.pid})"
    return _Other(
        rank, process, Channel(steps, TO_FOLLOWER, FROM_FOLLOWER, who), Channel(moves, ORDERS, ANSWERS, who)
    )
