"""What the engine's thread is told, by front ends through the server, by the transfer thread and by the compiler."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.workers.generation import RequestKey
from forebay.workers.guiding import Compiled
from forebay.workers.moves import Opened, Pulled, Pushed, RoomGiven, RowsCame, StoreChanged
from forebay.workers.protocol import Generate


@dataclass(frozen=True, slots=True)
class Submit:
    """A front end asks for a generation."""

    key: RequestKey
    ask: Generate


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """A front end has lost interest in one request, or wants to `move` it to another worker."""

    key: RequestKey
    move: bool = False


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A front end is gone: so are its requests."""

    connection: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop, after the tails of all running requests have been handed to the store."""


Told = Opened | Pulled | Pushed | RoomGiven | RowsCame | StoreChanged
"""By the transfer thread."""

Message = Submit | CancelRequest | Disconnected | Stop | Compiled | Told
