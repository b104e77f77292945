"""Key pairs of CURVE: one of this host, and the public keys of those that it talks to.

    DIR/secret.key      this host's pair, mode 0600
    DIR/public.key      its public half: copy it to the others, there as NAME.pub
    DIR/NAME.pub        a peer's public half; whoever isn't there isn't let in

`python -m forebay.tiers.p2p.keys DIR` makes the pair if there is none and prints the public half; so does a tier
that is started with such a directory.
"""

from __future__ import annotations

import argparse
import os
import re
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

import zmq

from forebay.errors import ConfigError, ForebayError

_Z85 = re.compile(rb"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Both halves, each as 40 characters of Z85."""

    public: bytes
    secret: bytes


def own_pair(directory: Path) -> KeyPair:
    """This host's pair, made now if there is none. Raises ConfigError for a file that others may read, or is no key."""
    path = directory / "secret.key"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _make(directory)
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            lines = file.read(256).split()
    except OSError as error:
        raise ConfigError(f"keys {directory}: {error.strerror}: {error.filename}") from error
    if mode & 0o077:
        raise ConfigError(f"keys: {path} has mode {mode:04o}, others can read it: chmod 600 {path}")
    if len(lines) != 2 or not all(_Z85.fullmatch(line) for line in lines):
        raise ConfigError(f"keys: {path} isn't a public and a secret key of 40 characters: remove it for a new pair")
    return KeyPair(*lines)


def _make(directory: Path) -> None:
    public, secret = zmq.curve_keypair()
    new = directory / f".secret.{os.getpid()}"
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(public + b"\n" + secret + b"\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(new, directory / "secret.key")  # whoever comes second takes the first one's
    except FileExistsError:
        return
    finally:
        new.unlink()
    (directory / "public.key").write_bytes(public + b"\n")


def peer_key(directory: Path, name: str) -> bytes:
    """The public key of a peer. Raises ConfigError with what to do."""
    path = directory / f"{name}.pub"
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"keys: {path}: {error.strerror}; copy public.key of host {name} there") from error
    if not _Z85.fullmatch(key):
        raise ConfigError(f"keys: {path} isn't a public key of 40 characters; copy public.key of host {name} there")
    return key


def allowed(directory: Path) -> dict[bytes, str]:
    """Public keys of all that may come in, with their names. What can't be read lets nobody in."""
    found = {}
    for path in sorted(directory.glob("*.pub")):
        try:
            key = path.read_bytes().strip()
        except OSError:
            continue
        if _Z85.fullmatch(key):
            found[key] = path.stem
    return found


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m forebay.tiers.p2p.keys", description="Make this host's key pair.")
    parser.add_argument("directory", type=Path)
    options = parser.parse_args(arguments)
    try:
        pair = own_pair(options.directory.absolute())
    except ForebayError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(pair.public.decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
