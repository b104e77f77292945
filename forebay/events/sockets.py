"""Bound ZMQ sockets: which endpoints are allowed, and CURVE keys for those that leave the machine.

Consumers connect, so ours bind. A tcp endpoint off loopback is refused unless the publisher has a CURVE key
and a list of the client keys that it lets in; `ipc://` sockets get mode 0600.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from forebay.events.errors import EndpointRefused, EndpointUnavailable

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_BATCH = 64
_LINGER_MS = 200


@dataclass(frozen=True, slots=True)
class CurveServer:
    """Keys of a publisher: its secret key and the public keys of who may connect (Z85, 40 characters)."""

    secret_key: bytes
    allowed: frozenset[bytes]

    def __post_init__(self) -> None:
        if not self.allowed:
            raise EndpointRefused("CURVE without an allowed client key lets nobody in: add at least one")
        for key in (self.secret_key, *self.allowed):
            _check_key(key)

    @property
    def public_key(self) -> bytes:
        """What clients need to know of the server."""
        return zmq.curve_public(self.secret_key)


@dataclass(frozen=True, slots=True)
class CurveClient:
    """Keys of a consumer: its secret key and the server's public key (Z85, 40 characters)."""

    secret_key: bytes
    server_key: bytes

    def __post_init__(self) -> None:
        _check_key(self.secret_key)
        _check_key(self.server_key)

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Make `socket` speak CURVE with these keys. Before it connects."""
        socket.curve_serverkey = self.server_key
        socket.curve_secretkey = self.secret_key
        socket.curve_publickey = zmq.curve_public(self.secret_key)


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound socket and the endpoint that it really has (the port filled in)."""

    socket: zmq.Socket[bytes]
    endpoint: str


class Sockets:
    """The sockets of one or more publishers, in one ZMQ context. Used by one thread.

    With CURVE it also holds the gate that checks every connection's key; somebody has to call `poll_gate`
    often, since until then a connection waits in its handshake.
    """

    def __init__(self, curve: CurveServer | None = None) -> None:
        self.curve = curve
        self._context = zmq.Context()
        self._open: list[zmq.Socket[bytes]] = []
        self._gate: zmq.Socket[bytes] | None = None
        self.admitted = 0
        self.denied = 0
        if curve is not None:
            # The gate exists before any socket: ZMQ without one accepts every key.
            self._gate = self._context.socket(zmq.REP)
            self._gate.linger = 0
            self._gate.bind(_ZAP_ENDPOINT)
            self._allowed = frozenset(z85.decode(key) for key in curve.allowed)

    def bind(self, kind: int, endpoint: str, options: Iterable[tuple[int, int]] = ()) -> Bound:
        """A socket of `kind` bound to `endpoint` (tcp port 0 takes a free one).

        Raises EndpointRefused for what isn't allowed and EndpointUnavailable for what can't be had.
        """
        check_endpoint(endpoint, curve=self.curve is not None)
        socket = self._context.socket(kind)
        socket.linger = _LINGER_MS
        socket.ipv6 = "[" in endpoint
        for option, value in options:
            socket.setsockopt(option, value)
        if self.curve is not None:
            socket.curve_server = True
            socket.curve_secretkey = self.curve.secret_key
            socket.zap_domain = b"forebay"
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close(0)
            raise EndpointUnavailable(
                f"can't bind {endpoint}: {error.strerror}; choose another endpoint, or port 0 for a free one"
            ) from error
        if endpoint.startswith("ipc://"):
            os.chmod(endpoint.removeprefix("ipc://"), 0o600)
        self._open.append(socket)
        return Bound(socket, socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def poll_gate(self) -> bool:
        """Answer waiting key checks, a bounded number of them. True: there may be more."""
        if self._gate is None:
            return False
        for _ in range(_ZAP_BATCH):
            try:
                request = self._gate.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._gate.send_multipart(self._verdict(request))
        return True

    @property
    def gate_fd(self) -> int | None:
        """A descriptor that turns readable (edge-triggered) when a key check waits."""
        return None if self._gate is None else int(self._gate.getsockopt(zmq.FD))

    def descriptors(self) -> list[int]:
        """Descriptors that turn readable when a request or a key check waits. Edge-triggered, as ZMQ's are: after
        each sign, and after each answer, receive until nothing is left."""
        asked = [socket for socket in self._open if socket.type == zmq.ROUTER]
        asked += [self._gate] if self._gate is not None else []
        return [int(socket.getsockopt(zmq.FD)) for socket in asked]

    def release(self, bound: Bound) -> None:
        """Close one socket."""
        if bound.socket in self._open:
            self._open.remove(bound.socket)
        bound.socket.close()
        if bound.endpoint.startswith("ipc://"):
            Path(bound.endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    def close(self) -> None:
        """Close all sockets and the context. May block for the linger time of 200 ms."""
        for socket in self._open:
            socket.close()
        self._open.clear()
        if self._gate is not None:
            self._gate.close()
            self._gate = None
        self._context.term()

    def _verdict(self, request: list[bytes]) -> list[bytes]:
        # ZAP request: version, request id, domain, address, identity, mechanism, credentials...
        number = request[1] if len(request) > 1 else b""
        admitted = len(request) == 7 and request[5] == b"CURVE" and request[6] in self._allowed
        if admitted:
            self.admitted += 1
            return [b"1.0", number, b"200", b"OK", b"", b""]
        self.denied += 1
        return [b"1.0", number, b"400", b"this key is not on the allow list", b"", b""]


def check_endpoint(endpoint: str, *, curve: bool) -> None:
    """Raise EndpointRefused unless `endpoint` may be bound."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest:
        return
    host, separator, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not separator or not (port == "*" or port.isdecimal()):
        raise EndpointRefused(f"{endpoint!r} is no endpoint to bind: use tcp://ADDRESS:PORT or ipc://PATH")
    if not curve and not _is_loopback(host):
        raise EndpointRefused(
            f"{endpoint} is open to the network and would tell anyone what is cached: bind a loopback "
            "address such as tcp://127.0.0.1:PORT, or give the publisher a CURVE key and its clients' keys"
        )


def check_remote(endpoint: object) -> None:
    """Raise EndpointRefused unless `endpoint` is one to connect to."""
    scheme, _, rest = endpoint.partition("://") if isinstance(endpoint, str) else ("", "", "")
    host, _, port = rest.rpartition(":")
    if (scheme == "ipc" and rest) or (scheme == "tcp" and host and port.isdecimal() and 0 < int(port) < 65536):
        return
    raise EndpointRefused(f"{endpoint!r} is no endpoint to connect to: use tcp://ADDRESS:PORT or ipc://PATH")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        # A name or an interface: what it stands for can change, so it is no loopback.
        return False


def _check_key(key: bytes) -> None:
    try:
        good = len(z85.decode(key)) == 32
    except (KeyError, ValueError):
        good = False
    if not good:
        raise EndpointRefused("a CURVE key must be 40 characters of Z85, as zmq.curve_keypair() gives them")
