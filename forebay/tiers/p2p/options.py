"""Settings of a p2p tier."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from forebay.errors import ConfigError
from forebay.ipc.sockets import socket_path
from forebay.tiers.registry import convert_options

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
Bulk = Literal["auto", "nixl", "stream", "tls", "frames"]


class P2pOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One host's part in a group of stores.

    `store` is this host's own store, for which peers are served on `listen` (empty: nobody is served), by streams on
    `stream_port` (0: one that the kernel chooses). `peers` are `NAME=HOST:PORT`, comma separated, each the `listen` of
    another host; `keys` a directory with this host's key pair and the public key NAME.pub of each peer. Without it
    everything is plain, which is taken on loopback only. `push_to` names peers: a chunk that is copied to this tier
    goes to one of them. Seconds: a peer has `ask_s` to say what it has and `stall_s` to make progress; a hit is
    remembered for `hit_s`, a miss for `miss_s`, and what a peer was told that there is stays pinned for `lend_s`, of
    at most `lend_bytes` in all. With `clear_peers` a clear that is made here is passed on to all peers, and one that a
    peer passes on is carried out; with keys alone.
    """

    store: str
    listen: str = ""
    peers: str = ""
    keys: str = ""
    push_to: str = ""
    bulk: Bulk = "auto"
    stream_port: int = 0
    clear_peers: bool = False
    ask_s: float = 0.25
    stall_s: float = 1.0
    hit_s: float = 1.0
    miss_s: float = 0.1
    lend_s: float = 2.0
    lend_bytes: int = 256 << 20
    loads_at_once: int = 4
    load_queue_bytes: int = 256 << 20
    push_queue_bytes: int = 256 << 20


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address. `host` is a name or a number, without the brackets of IPv6."""

    host: str
    port: int

    @property
    def endpoint(self) -> str:
        """As ZMQ takes it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    def __str__(self) -> str:
        return self.endpoint.removeprefix("tcp://")

    @property
    def unspecified(self) -> bool:
        """Does it mean every address of this host?"""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return self.host == "*"

    @property
    def loopback(self) -> bool:
        """Does it never leave this host?"""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A peer by its name and where it listens."""

    name: str
    address: Address


@dataclass(frozen=True, slots=True)
class Settings:
    """Options that have been read and checked."""

    options: P2pOptions
    listen: Address | None
    peers: tuple[PeerAddress, ...]
    push_to: tuple[str, ...]

    @property
    def keys(self) -> Path | None:
        """The directory of keys; None for plain."""
        return Path(self.options.keys) if self.options.keys else None

    @property
    def serves_plain(self) -> bool:
        """Are streams taken without TLS?"""
        return self.listen is not None and self.takes_plain(self.listen)

    @property
    def serves_tls(self) -> bool:
        """Are streams taken through TLS?"""
        return self.listen is not None and self.takes_tls and not self.serves_plain

    def takes_plain(self, address: Address) -> bool:
        """May streams to or at this address go without TLS?"""
        return address.loopback and self.options.bulk in ("auto", "nixl", "stream")

    @property
    def takes_tls(self) -> bool:
        """May streams go through TLS? Without keys there is nothing to tell by who is at the other end."""
        return self.keys is not None and self.options.bulk in ("auto", "nixl", "tls")


def p2p_settings(name: str, options: Mapping[str, object]) -> Settings:
    """Typed and checked options. Raises ConfigError that names the option."""
    found = convert_options(name, options, P2pOptions)
    where = f"tier {name!r}"
    _check_store(where, found.store)
    listen = _address(where, "listen", found.listen) if found.listen else None
    peers = tuple(_peer(where, text) for text in _words(found.peers))
    names = [peer.name for peer in peers]
    if len(set(names)) != len(names):
        raise ConfigError(f"{where}: peers: a name stands there twice")
    push_to = tuple(_words(found.push_to))
    unknown = [one for one in push_to if one not in names]
    if unknown:
        raise ConfigError(f"{where}: push_to {unknown[0]!r} is none of the peers")
    if listen is None and not peers:
        raise ConfigError(f"{where}: takes listen (HOST:PORT, to serve others), peers (NAME=HOST:PORT, ...), or both")
    _check_numbers(where, found)
    settings = Settings(found, listen, peers, push_to)
    _check_plain(where, settings)
    return settings


def _check_store(where: str, store: str) -> None:
    try:
        socket_path(store)
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{where}: store {store!r}: takes this host's own store, as unix:///PATH: {error}") from error


def _check_numbers(where: str, found: P2pOptions) -> None:
    for option in ("ask_s", "stall_s", "lend_s"):
        if not 0 < getattr(found, option) <= 60:
            raise ConfigError(f"{where}: {option} must be more than 0 and at most 60 seconds")
    for option in ("hit_s", "miss_s"):
        if not 0 <= getattr(found, option) <= 60:
            raise ConfigError(f"{where}: {option} must be from 0 to 60 seconds")
    for option in ("lend_bytes", "load_queue_bytes", "push_queue_bytes"):
        if getattr(found, option) < 0:
            raise ConfigError(f"{where}: {option} can't be negative")
    if not 0 <= found.stream_port < 1 << 16:
        raise ConfigError(f"{where}: stream_port must be from 0 (any) to 65535")
    if not 1 <= found.loads_at_once <= 64:
        raise ConfigError(f"{where}: loads_at_once must be from 1 to 64")


def _check_plain(where: str, settings: Settings) -> None:
    """Without keys nobody is authenticated and nothing is encrypted: that must not leave the host."""
    far = [("listen", settings.listen)] if settings.listen else []
    far += [(f"peer {peer.name}", peer.address) for peer in settings.peers]
    far = [(what, address) for what, address in far if not address.loopback]
    if settings.options.bulk == "stream" and far:
        raise ConfigError(f"{where}: bulk stream is plain TCP, for loopback only, and {far[0][0]} isn't: leave it out")
    if settings.options.clear_peers and settings.keys is None:
        raise ConfigError(f"{where}: clear_peers takes keys: else anybody on this host could clear")
    if settings.options.bulk == "tls" and settings.keys is None:
        raise ConfigError(f"{where}: bulk tls takes keys, by which it tells who is at the other end")
    if settings.keys is not None:
        if not settings.keys.is_absolute():
            raise ConfigError(f"{where}: keys {str(settings.keys)!r} must be an absolute path")
        return
    for what, address in far:
        raise ConfigError(
            f"{where}: {what} {address.host}:{address.port} isn't on loopback, so connections need keys: make a "
            "pair on each host with `python -m forebay.tiers.p2p.keys DIR` and set keys = DIR"
        )


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _peer(where: str, text: str) -> PeerAddress:
    name, equals, address = text.partition("=")
    if not equals or not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: peers {text!r}: takes NAME=HOST:PORT, names of letters, digits, dots and dashes")
    return PeerAddress(name, _address(where, "peers", address))


def _address(where: str, option: str, text: str) -> Address:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{where}: {option} {text!r}: takes HOST:PORT")
    return Address(host, int(port))
