"""Stores with p2p tiers, as their command starts them, on this host's loopback."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from tests.kvstore.support import CHUNK
from tests.kvstore.test_daemon_tiers import TierStore

TOKENS = list(range(1, 4 * CHUNK + 1))
CHUNKS = 8
"""Of TOKENS, in both groups."""


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])


class PeerStore(TierStore):
    """A store that listens for peers."""

    def __init__(self, folder: Path, name: str, memory: str = "16MiB") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder, memory)
        self.name = name
        self.port = free_port()

    @property
    def peer(self) -> str:
        """As others name it."""
        return f"{self.name}=127.0.0.1:{self.port}"

    def tier(self, peers: str = "", more: str = "") -> str:
        return (
            f'[tiers.p2p]\nkind = "p2p"\nstore = "{self.address}"\nlisten = "127.0.0.1:{self.port}"\n'
            f'peers = "{peers}"\n{more}\n'
        )

    def sees(self, *names: str) -> None:
        """Wait until these peers are up."""
        self.until(lambda v: all(v.get(f"tier.p2p.peer.{name}.up") for name in names))

    def serving(self) -> None:
        """Wait until its tier is a client of it."""
        self.until(lambda v: v.get("tier.p2p.source.connected", 0) == 1)

    def value(self, name: str) -> float:
        return self.until(lambda v: True).get(f"tier.p2p.{name}", 0)

    def until_tier(self, true: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """Figures of the tier alone, once this is true of them."""
        prefix = "tier.p2p."
        values = self.until(lambda v: true({k.removeprefix(prefix): x for k, x in v.items() if k.startswith(prefix)}))
        return {k.removeprefix(prefix): x for k, x in values.items() if k.startswith(prefix)}
