"""Before a directory is used: one small file is written, named, read back and removed."""

from __future__ import annotations

import os
import secrets

from forebay.errors import ConfigError
from forebay.kvstore.layout import ALIGNMENT
from forebay.tiers.fs.device import AlignedBuffer, Expected, reason_of
from forebay.tiers.fs.shelf import Shelf

_PAYLOAD = 16 * ALIGNMENT
_FREE_AT_START = 64 << 20


def probe(shelf: Shelf, odirect: str, *, small: bool) -> None:
    """Learn what the file system can do. Raises OSError if it can't be written to, ConfigError if `odirect` is
    "on" and it has none. `small`: others use the directory too, and nothing of the quota is ours
    yet. A disk that is full of our own chunks gives some of them up first."""
    size = ALIGNMENT if small else _PAYLOAD
    try:
        _write_and_read(shelf, size)
    except OSError as error:
        if reason_of(error) != "full" or not shelf.evict(_FREE_AT_START):
            raise
        _write_and_read(shelf, size)
    if odirect == "on" and not shelf.device.direct:
        raise ConfigError(f"{shelf.device.paths.root}: this file system has no O_DIRECT; set odirect to auto or off")


def _write_and_read(shelf: Shelf, size: int) -> None:
    device = shelf.device
    path = str(device.paths.tmp / f"probe-{secrets.token_hex(8)}")
    buffer, memory = AlignedBuffer(), AlignedBuffer(2 * size)
    block = secrets.token_bytes(ALIGNMENT)
    payload = memory.view(2 * size)
    temp = device.write(path, block, payload[:size], buffer, aligned=True)
    try:
        device.publish(temp, path)
        length = ALIGNMENT + size
        direct = device.wants_direct(length, aligned=True)
        descriptor = device.open(path, direct=direct)
        try:
            loaded = device.read(descriptor, Expected(ALIGNMENT, length), payload[size:], buffer, direct=direct)
        finally:
            os.close(descriptor)
        if loaded.block != block:
            raise OSError(5, "what was written is not what is read")
    finally:
        device.discard(temp)
        device.remove(path)
