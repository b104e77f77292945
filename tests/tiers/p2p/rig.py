"""A p2p tier as an object under a driver, and peers for it in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from forebay.testing.conformance import Driver, InProcess, Pool
from forebay.testing.ports import free_port
from forebay.tiers.p2p.keys import own_pair
from forebay.tiers.p2p.source import Source
from forebay.tiers.p2p.tier import P2pTier
from tests.tiers.p2p.sources import DictSource

NAMESPACES = (b"n" * 32, b"o" * 32)
"""Of the chunks that the suite makes."""
NOWHERE = "unix:///nowhere.sock"


def own_folder(tmp_path: Path, name: str) -> Path:
    """Keys of a host that knows itself as `name`: enough for two tiers that share it."""
    folder = tmp_path / "keys"
    pair = own_pair(folder)
    (folder / f"{name}.pub").write_bytes(pair.public)
    return folder


class Host:
    """A peer that serves a dict."""

    def __init__(self, name: str, source: Source | None = None, **options: object) -> None:
        self.name, self.port = name, free_port()
        self.source = DictSource()
        listen = f"127.0.0.1:{self.port}"
        self.tier = P2pTier(
            name, {"store": NOWHERE, "listen": listen, **options}, make_source=lambda: source or self.source
        )

    @property
    def address(self) -> str:
        return f"{self.name}=127.0.0.1:{self.port}"

    def close(self) -> None:
        self.tier.close()


class Asker:
    """The tier under test: it has peers, and serves nobody."""

    def __init__(self, pool: Pool, peers: str, **options: object) -> None:
        self.tier = P2pTier("p2p", {"store": NOWHERE, "peers": peers, **options})
        self.driver = Driver(pool, InProcess(self.tier, pool))
        for namespace in NAMESPACES:
            self.tier.note_namespace(namespace, b"")

    def sees(self, *names: str) -> None:
        self.driver.until(lambda: self.tier._engine.up >= set(names), f"{names} to be up")

    def until(self, true: Callable[[], bool], what: str = "it") -> None:
        self.driver.until(true, what)

    def value(self, name: str) -> float:
        return self.driver.value(name)

    def close(self) -> None:
        self.driver.close()
