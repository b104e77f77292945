"""Keys from files: one file, or a directory of them in which the last name writes and all of them read.

A key's id is a hash of the key, so a file may have any name, be renamed and copied. Which key writes is decided by
names, not by times: a copy, a restored backup or a mounted secret gives all files one time.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forebay.errors import ConfigError
from forebay.tiers.codec.envelope import KEY_ID_BYTES

KEY_BYTES = 32
KEYS_MAX = 64
_FILE_BYTES_MAX = 2 * KEY_BYTES + 2


@dataclass(frozen=True, slots=True)
class Key:
    """A secret of 32 bytes. Its text never shows it."""

    secret: bytes

    def __post_init__(self) -> None:
        assert len(self.secret) == KEY_BYTES, "a key has 32 bytes"

    @property
    def id(self) -> bytes:
        """Tells keys apart, tells nothing of the key."""
        return hashlib.sha256(b"forebay/codec-key-id/1\0" + self.secret).digest()[:KEY_ID_BYTES]

    def __repr__(self) -> str:
        return f"Key({self.id.hex()})"


class KeyRing:
    """The keys of one tier. `writing` is the one that new chunks are sealed with."""

    def __init__(self, keys: Sequence[Key]) -> None:
        """`keys` in the order of their files; the last one writes."""
        assert keys
        self.writing = keys[-1]
        self._by_id: Mapping[bytes, Key] = {key.id: key for key in keys}

    def get(self, key_id: bytes) -> Key | None:
        """The key of this id, None if it isn't here."""
        return self._by_id.get(key_id)

    def __len__(self) -> int:
        return len(self._by_id)


def load_keys(name: str, path: Path) -> KeyRing:
    """The keys in the file or directory at `path`. Raises ConfigError that names the tier, the file and the remedy.

    Names that begin with a dot are left out; others in a directory must be keys.
    """
    try:
        files = _files(path)
        if not files:
            raise ConfigError(f"tier {name!r}: encrypt_key_file {path} is a directory without a key; {_HOW} DIR/1.key")
        if len(files) > KEYS_MAX:
            raise ConfigError(f"tier {name!r}: encrypt_key_file {path} holds {len(files)} files, {KEYS_MAX} at most")
        return KeyRing([_load(name, file) for file in files])
    except OSError as error:
        raise ConfigError(
            f"tier {name!r}: encrypt_key_file {error.filename or path} can't be read: {error.strerror}"
        ) from error


_HOW = "make one with: (umask 077; head -c 32 /dev/urandom >FILE), FILE being"


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))


def _load(name: str, file: Path) -> Key:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"tier {name!r}: key file {file} is no regular file")
        if status.st_mode & 0o077:
            raise ConfigError(
                f"tier {name!r}: key file {file} can be read by others (mode {status.st_mode & 0o777:o}); chmod 600 it"
            )
        if status.st_uid not in (0, os.geteuid()):
            raise ConfigError(f"tier {name!r}: key file {file} belongs to another user ({status.st_uid}); chown it")
        data = os.read(descriptor, _FILE_BYTES_MAX + 1)
    finally:
        os.close(descriptor)
    secret = _secret(data)
    if secret is None:
        raise ConfigError(f"tier {name!r}: key file {file} must hold 32 bytes, or 64 hexadecimal digits")
    return Key(secret)


def _secret(data: bytes) -> bytes | None:
    if len(data) == KEY_BYTES:
        return data
    text = data.strip()
    if len(text) != 2 * KEY_BYTES or len(data) > _FILE_BYTES_MAX:
        return None
    try:
        return bytes.fromhex(text.decode("ascii"))
    except ValueError:
        return None
