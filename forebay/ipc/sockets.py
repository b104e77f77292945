"""Unix sockets with private modes, peer credentials and descriptor passing."""

from __future__ import annotations

import array
import errno
import grp
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from forebay.errors import AlreadyRunning, ConfigError, NotWritable, StoreUnavailable

SEND_BUFFER_BYTES = 1 << 20
DESCRIPTORS_MAX = 64
"""Descriptors in one message; Linux allows 253."""

_UCRED = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Peer:
    """Credentials that the kernel vouches for, as they were when the peer connected."""

    pid: int
    uid: int
    gid: int


def peer_of(connection: socket.socket) -> Peer:
    """Who is at the other end of a unix socket."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return Peer(*_UCRED.unpack(raw))


def socket_path(address: str) -> Path:
    """The path in `unix:///run/x.sock` or a bare path. Raises ConfigError."""
    path = address.removeprefix("unix://")
    if "://" in path or not path:
        raise ConfigError(f"{address!r} is no unix socket; write unix:///path/to/store.sock")
    if len(os.fsencode(path)) > 107:
        raise ConfigError(f"socket path {path!r} is over 107 bytes, which Linux can't bind; choose a shorter one")
    return Path(path)


def listen(path: Path, *, group: str | None = None, backlog: int = 128) -> socket.socket:
    """A listening socket at `path`, mode 0600, or 0660 with `group`.

    A stale file is replaced; a living listener raises AlreadyRunning.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        _replace_stale(path)
        # The mode is right from the first instant: a umask is the only way that leaves no gap.
        old = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(old)
        if group is not None:
            os.chown(path, -1, _group_id(group))
            os.chmod(path, 0o660)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise NotWritable(f"can't listen on {path}: {error.strerror}; is its folder there and writable?") from error
    except BaseException:
        listener.close()
        raise
    return listener


def _group_id(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"--socket-group {name!r}: no such group on this machine") from None


def _replace_stale(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_socket():
        raise NotWritable(f"{path} exists and is no socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError as error:
            if error.errno not in (errno.ECONNREFUSED, errno.ENOENT):
                raise
            path.unlink(missing_ok=True)
            return
    raise AlreadyRunning(f"another process serves {path}; stop it first, or choose another socket")


def widen(connection: socket.socket) -> None:
    """Let a whole lookup of a long prompt lie in the socket at once: a sender that must wait costs two wake-ups."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


def connect(path: Path, timeout_s: float) -> socket.socket:
    """A connected socket. Raises StoreUnavailable with the remedy."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    widen(connection)
    connection.settimeout(timeout_s)
    try:
        connection.connect(str(path))
    except OSError as error:
        connection.close()
        raise StoreUnavailable(
            f"nobody answers on {path} ({error.strerror or error}); start one with `forebay store --socket {path}`"
        ) from error
    return connection


def send_with_descriptors(connection: socket.socket, data: bytes, descriptors: list[int]) -> int:
    """Send `data` with open descriptors attached to its first byte; returns the bytes that were taken."""
    assert 0 < len(descriptors) <= DESCRIPTORS_MAX and data
    rights = array.array("i", descriptors).tobytes()
    return connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def receive_with_descriptors(connection: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """Receive up to `size` bytes and any descriptors that came along; the caller owns and closes them."""
    data, ancillary, flags, _ = connection.recvmsg(
        size, socket.CMSG_SPACE(DESCRIPTORS_MAX * 4), socket.MSG_CMSG_CLOEXEC
    )
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) - len(payload) % 4])
    if flags & socket.MSG_CTRUNC:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ConfigError("descriptors were lost on the way: raise this process's open file limit (ulimit -n)")
    return data, list(descriptors)
