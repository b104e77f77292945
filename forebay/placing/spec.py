"""What a host is told, and what it tells. Both go through Ray, so they are plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

import zmq

from forebay.tiers.p2p.keys import KeyPair

SERVER, ROUTER = "hosts", "router"
"""Names of the two key pairs: all hosts publish with one, the router reads with the other."""


@dataclass(frozen=True)
class HostSpec:
    """How every host serves: flags of `forebay serve` (those of its address aside), variables of the environment, the
    text of an API keys file (None: nobody is asked), the secret of tenants' salts, and keys of event streams."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    api_keys: str | None = field(repr=False)
    secret: bytes = field(repr=False)
    pair: KeyPair = field(repr=False)
    router_key: bytes


@dataclass(frozen=True)
class Place:
    """Where a host serves. `started` changes whenever it does; `ready`: its front end has a worker; `trouble` is what
    its processes said last before they ended."""

    url: str
    events: str
    replay: str
    pid: int
    started: int
    running: bool = True
    ready: bool = False
    trouble: str = ""


def new_pair() -> KeyPair:
    """A key pair for one run."""
    return KeyPair(*zmq.curve_keypair())
