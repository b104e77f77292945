"""Event streams without ZMQ: the real publisher, codec and subscriber over sockets that lose and delay batches."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import zmq

from forebay.events.publisher import restart_safe_seq
from forebay.events.schema import AllBlocksCleared, BlockRemoved
from forebay.events.sockets import Bound
from forebay.events.subscriber import EventSubscriber, Received
from forebay.testing.simulate.loop import Process

if TYPE_CHECKING:
    from forebay.testing.simulate.node import Node
    from forebay.testing.simulate.world import World

ROUTER_DESCRIPTORS = 1 << 24
RETRY_S = 0.2
"""A subscriber asks again so soon here: most worlds don't last for long."""
Frames = list[bytes]
View = dict[str | None, set[Any]]


@dataclass(eq=False)
class _Pub:
    """A publisher's socket. `nodrop` as ZMQ's option of this name."""

    hub: Hub
    endpoint: str
    nodrop: bool = True

    def setsockopt(self, option: int, value: int) -> None:
        """Only the option that the publisher changes while it runs."""
        self.nodrop = bool(value)

    def send_multipart(self, frames: Frames, flags: int = 0) -> None:
        """To every subscriber, or not."""
        for sub in self.hub.subscribers.get(self.endpoint, []):
            if sub.congested and self.hub.world.strikes("events_lost", 0.5, self.hub.world.event_rng):
                if self.nodrop:
                    raise zmq.Again
                continue
            self.hub.deliver(sub, frames)


@dataclass(eq=False)
class _Router:
    """A replay socket: requests in, answers out to the dealer that asked. Its process is woken by what comes."""

    process: Process
    number: int
    requests: deque[Frames] = field(default_factory=deque)
    dealers: dict[bytes, _Dealer] = field(default_factory=dict)
    watcher: Callable[[], None] | None = None

    def fileno(self) -> int:
        """The number by which the loop knows it."""
        return self.number

    def watch_readable(self, callback: Callable[[], None] | None) -> bool:
        """Call `callback` when a request comes; None ends that."""
        had, self.watcher = self.watcher is not None, callback
        return had

    def asked(self, frames: Frames) -> None:
        """A request has come."""
        self.requests.append(frames)
        if self.watcher is not None:
            self.process.call_soon(self.watcher)

    def recv_multipart(self, flags: int = 0) -> Frames:
        """The next request; raises zmq.Again."""
        if not self.requests:
            raise zmq.Again
        return self.requests.popleft()

    def send_multipart(self, frames: Frames, flags: int = 0) -> None:
        """One answer; raises ZMQError if the dealer has gone."""
        dealer = self.dealers.get(frames[0])
        if dealer is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        dealer.answers.append(frames[1:])


class SimSockets:
    """What a publisher asks of `forebay.events.sockets.Sockets`."""

    def __init__(self, hub: Hub, process: Process) -> None:
        self._hub, self._process = hub, process
        self.admitted = self.denied = 0
        self.gate_fd: int | None = None
        self.curve = None
        self._routers: list[_Router] = []

    def bind(self, kind: int, endpoint: str, options: object = ()) -> Bound:
        """A socket at this endpoint, in place of a dead process's."""
        made: Any
        if kind == zmq.ROUTER:
            self._hub.numbers += 1
            made = _Router(self._process, ROUTER_DESCRIPTORS + self._hub.numbers)
            self._process.loop.register_end(made)
            self._hub.routers[endpoint] = (self._process, made)
            self._routers.append(made)
        else:
            made = _Pub(self._hub, endpoint)
        self._hub.reconnected(endpoint)
        return Bound(made, endpoint)

    def descriptors(self) -> list[int]:
        """Those of the replay sockets."""
        return [router.number for router in self._routers]

    def poll_gate(self) -> bool:
        """No keys here."""
        return False

    def release(self, bound: Bound) -> None:
        """Nothing to close."""

    def close(self) -> None:
        """Nothing to close."""


class _Sub:
    """A subscriber's socket."""

    def __init__(self, hub: Hub, owner: Subscriber) -> None:
        self.hub, self.owner = hub, owner
        self.batches: deque[Frames] = deque()
        self.disconnects = 0
        self.flying: deque[Frames] = deque()
        self.arrives = 0.0
        self.closed = False

    @property
    def congested(self) -> bool:
        """Is there a queue?"""
        return len(self.flying) + len(self.batches) > 2

    def subscribe(self, topic: bytes) -> None:
        """All topics come."""

    def get_monitor_socket(self, events: int) -> _Sub:
        """It is its own monitor."""
        return _Monitor(self)  # type: ignore[return-value]

    def disable_monitor(self) -> None:
        """Nothing to end."""

    def poll(self, timeout: int) -> int:
        """Is a batch there?"""
        return len(self.batches)

    def recv_multipart(self) -> Frames:
        """The next batch."""
        return self.batches.popleft()

    def close(self, linger: int = 0) -> None:
        """Closed."""
        self.closed = True


@dataclass
class _Monitor:
    sub: _Sub

    def poll(self, timeout: int) -> int:
        """Has a connection been lost?"""
        return self.sub.disconnects

    def recv_multipart(self) -> Frames:
        """One loss."""
        self.sub.disconnects -= 1
        return []

    def close(self, linger: int = 0) -> None:
        """Closed."""


class _Dealer:
    """A replay request's socket: the publisher's process answers while the subscriber waits."""

    def __init__(self, hub: Hub, endpoint: str) -> None:
        self._hub, self._endpoint = hub, endpoint
        hub.dealers += 1
        self._name = b"dealer%d" % hub.dealers
        self.answers: deque[Frames] = deque()

    def send_multipart(self, frames: Frames) -> None:
        """A request."""
        found = self._hub.routers.get(self._endpoint)
        if found is not None and found[0].alive:
            found[1].dealers[self._name] = self
            found[1].asked([self._name, *frames])

    def poll(self, timeout: int) -> int:
        """Let the publisher work, unless it can't."""
        world = self._hub.world
        process = self._hub.publisher_of(self._endpoint)
        if self.answers:
            return 1
        if process is None or process.stopped or world.strikes("replay_fails", 0.2, world.event_rng):
            return 0
        for _ in range(50):
            more = self._hub.poll(process)
            if self.answers:
                return 1
            if not more:
                return 0
        return 0

    def recv_multipart(self) -> Frames:
        """One answer."""
        return self.answers.popleft()

    def close(self, linger: int = 0) -> None:
        """The publisher finds nobody any more."""
        found = self._hub.routers.get(self._endpoint)
        if found is not None:
            found[1].dealers.pop(self._name, None)


class _SimSubscriber(EventSubscriber):
    """The real subscriber over simulated sockets."""

    def __init__(self, hub: Hub, owner: Subscriber, endpoint: str, replay: str | None) -> None:
        self._hub, self._owner = hub, owner
        super().__init__(
            endpoint, replay=replay, from_start=True, retry_seconds=RETRY_S, clock=hub.world.loop.time
        )

    def _connect(self, kind: int, endpoint: str) -> Any:
        if kind == zmq.DEALER:
            return _Dealer(self._hub, endpoint)
        self._owner.socket = _Sub(self._hub, self._owner)
        self._hub.subscribers.setdefault(endpoint, []).append(self._owner.socket)
        return self._owner.socket


class Subscriber:
    """A router's index of one node's stream: what it believes to be held, by medium.

    `gap` is set once it knows that it has missed something that no replay brought; a restart begins anew.
    """

    def __init__(self, hub: Hub, node: Node, stream: int, start_at: float) -> None:
        self.hub, self.node, self.stream = hub, node, stream
        self.view: View = {}
        self.gap = False
        self.socket: _Sub
        self._woken = False
        self.process = Process(f"subscriber of {node.name}/{stream}", hub.world.loop)
        endpoint = f"tcp://127.0.0.1:{node.port + 2 * stream}"
        replay = f"tcp://127.0.0.1:{node.port + 1 + 2 * stream}" if hub.world.plan.replay else None
        self.endpoint = endpoint
        self.subscriber = _SimSubscriber(hub, self, endpoint, replay)
        self.process.spawn(self._look_now_and_then())

    async def _look_now_and_then(self) -> None:
        while not self.hub.world.over:
            self.look()
            await asyncio.sleep(0.25)

    def wake(self) -> None:
        """A batch has come."""
        if not self._woken:
            self._woken = True
            self.process.call_soon(self.look)

    def look(self) -> None:
        """Take what is there."""
        self._woken = False
        while (received := self.subscriber.receive(0)) is not None:
            self._apply(received)

    def _apply(self, received: Received) -> None:
        world = self.hub.world
        world.count("events.batches")
        if received.restart is not None:
            world.count("events.restarts_seen")
            self.view.clear()
            self.gap = False
        if received.missed:
            world.count("events.gaps_known")
            self.gap = True
        if received.replayed and received.compacted:
            world.count("events.compacted")
        for event in received.batch.events:
            if isinstance(event, AllBlocksCleared):
                self.view.clear()
            elif isinstance(event, BlockRemoved):
                self.view.setdefault(event.medium, set()).difference_update(event.block_hashes)
            else:
                self.view.setdefault(event.medium, set()).update(event.block_hashes)

    @property
    def caught_up(self) -> bool:
        """Has it everything that was sent to it?"""
        return not self.socket.batches and not self.socket.flying


class Hub:
    """All event sockets of a world, by endpoint."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.routers: dict[str, tuple[Process, _Router]] = {}
        self.subscribers: dict[str, list[_Sub]] = {}
        self.all: list[Subscriber] = []
        self.dealers = self.numbers = 0

    def sockets(self, process: Process) -> SimSockets:
        """Sockets of a daemon's streams."""
        return SimSockets(self, process)

    def subscribe(self, node: Node, stream: int) -> None:
        """A new subscriber of a node's stream."""
        self.all.append(Subscriber(self, node, stream, restart_safe_seq(0)))

    def publisher_of(self, replay_endpoint: str) -> Process | None:
        """The living process behind a replay endpoint."""
        found = self.routers.get(replay_endpoint)
        return found[0] if found is not None and found[0].alive else None

    def poll(self, process: Process) -> bool:
        """Let a daemon serve replays."""
        for node in self.world.nodes:
            daemon = node.running
            if daemon is not None and daemon.process is process and daemon.service is not None:
                streams = daemon.service.announcer.streams
                return bool(streams is not None and process.call(streams.poll))
        return False

    def deliver(self, sub: _Sub, frames: Frames) -> None:
        """Send a batch on its way, or lose it."""
        world = self.world
        if world.strikes("events_lost", 0.1, world.event_rng):
            return
        sub.arrives = max(sub.arrives, world.loop.time() + world.event_rng.choice((0.0001, 0.002, 0.03)))
        sub.flying.append(frames)
        world.loop.call_at(sub.arrives, self._arrived, sub, context=world.kernel)

    def _arrived(self, sub: _Sub) -> None:
        sub.batches.append(sub.flying.popleft())
        sub.owner.wake()

    def reconnected(self, endpoint: str) -> None:
        """A new publisher is bound there: whoever was connected has noticed."""
        for sub in self.subscribers.get(endpoint, []):
            sub.disconnects += 1
