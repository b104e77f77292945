"""ZMQ sockets of a p2p tier: bounded, and with CURVE where there are keys."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import zmq
import zmq.asyncio
import zmq.utils.z85

from forebay.errors import TierUnavailable
from forebay.tiers.p2p.keys import KeyPair, allowed, peer_key
from forebay.tiers.p2p.options import Address, PeerAddress
from forebay.tiers.p2p.wire import MESSAGE_BYTES_MAX

log = logging.getLogger("forebay.tier.p2p")

ZAP_DOMAIN = b"forebay"
MESSAGES_QUEUED_MAX = 128
"""Towards one peer. Whoever doesn't take what it asked for costs this much memory and then gets nothing."""
HANDSHAKE_MS = 5000
LINGER_MS = 100
Context = zmq.asyncio.Context
Socket = zmq.asyncio.Socket


def _bounded(context: Context, kind: int) -> Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
    socket.setsockopt(zmq.SNDHWM, MESSAGES_QUEUED_MAX)
    socket.setsockopt(zmq.RCVHWM, MESSAGES_QUEUED_MAX)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.IPV6, 1)
    return socket


def listening(context: Context, address: Address, pair: KeyPair | None) -> Socket:
    """A ROUTER at this address. Raises TierUnavailable if it can't be had (yet)."""
    socket = _bounded(context, zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if pair is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    try:
        socket.bind(address.endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise TierUnavailable(f"p2p can't listen on {address.endpoint}: {error}") from error
    return socket


def dialled(context: Context, peer: PeerAddress, pair: KeyPair | None, keys: Path | None) -> Socket:
    """A DEALER towards a peer. Raises ConfigError if its key can't be read."""
    socket = _bounded(context, zmq.DEALER)
    socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing queues for a peer that isn't there
    if pair is not None and keys is not None:
        try:
            socket.setsockopt(zmq.CURVE_SERVERKEY, peer_key(keys, peer.name))
        except BaseException:
            socket.close()
            raise
        socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
    socket.connect(peer.address.endpoint)
    return socket


async def answer_handshakes(socket: Socket, keys: Path) -> None:
    """ZAP: let those in whose public key lies in `keys` as NAME.pub. The directory is read at every handshake."""
    while True:
        frames = await socket.recv_multipart()
        if len(frames) < 8:
            continue  # not of libzmq: [identity, "", version, id, domain, address, routing id, mechanism, credentials]
        identity, empty, version, request, domain, _, _, mechanism, *credentials = frames
        name = _who(domain, mechanism, credentials, keys)
        status = [b"200", b"OK", name.encode()] if name else [b"400", b"unknown key", b""]
        if not name:
            log.warning("p2p: a peer with an unknown key was turned away")
        await socket.send_multipart([identity, empty, version, request, *status, b""])


def _who(domain: bytes, mechanism: bytes, credentials: list[bytes], keys: Path) -> str | None:
    if domain != ZAP_DOMAIN or mechanism != b"CURVE" or len(credentials) != 1 or len(credentials[0]) != 32:
        return None
    return allowed(keys).get(zmq.utils.z85.encode(credentials[0]))


def zap_socket(context: Context) -> Socket:
    """Where libzmq asks who may come in; one a context."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind("inproc://zeromq.zap.01")
    return socket


def send_now(socket: Socket, frames: Sequence[Any], *, copy: bool) -> BaseException | None:
    """Hand a message to ZMQ without waiting; the error if it doesn't take it."""
    sent = cast("asyncio.Future[object]", socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=copy))
    return sent.exception() if sent.done() else None


async def gone(task: asyncio.Task[None] | None) -> None:
    """Cancel a task and wait for its end."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
