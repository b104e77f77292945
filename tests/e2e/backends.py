"""What stands behind each kind of tier in the end-to-end test: its server, and the store's configuration."""

from __future__ import annotations

import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.errors import StoreError
from forebay.kvstore.client import StoreClient
from forebay.testing import mooncake
from forebay.testing.buckets import SeaweedFS
from forebay.testing.cluster import wait_for
from forebay.testing.ports import free_port


class Backend(ABC):
    """Started once; the store is started over it again and again. `name` is the tier's in the configuration."""

    name: str
    partial = True
    """Does it find a prefix that ends inside of a chunk?"""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.open()

    def open(self) -> None:
        """Start what is needed."""

    @abstractmethod
    def tiers(self, store: str) -> str:
        """Tables of the configuration of the store at this address."""

    def ready(self, values: dict[str, float]) -> bool:
        """Has a store with these figures found what is behind its tier?"""
        return True

    def close(self) -> None:
        """End what was started."""


class Files(Backend):
    name = "fs"

    def tiers(self, store: str) -> str:
        return f'[tiers.fs]\nkind = "fs"\ndirectory = "{self.folder}/files"\nquota_bytes = "1GiB"\n'


class Bucket(Backend):
    name = "s3"

    def open(self) -> None:
        absent = SeaweedFS.absent()
        if absent:
            pytest.skip(absent)
        self.server = SeaweedFS(self.folder)
        self.server.start()
        try:
            self.server.make_bucket("kv-cache")
        except BaseException:
            self.server.kill()
            raise
        self._patch = pytest.MonkeyPatch()
        for name, value in self.server.environment.items():
            self._patch.setenv(name, value)

    def tiers(self, store: str) -> str:
        return (
            f'[tiers.s3]\nkind = "s3"\nbucket = "kv-cache"\nendpoint_url = "{self.server.endpoint}"\n'
            'addressing = "path"\n'
            f'state_dir = "{self.folder}/state"\n'
        )

    def close(self) -> None:
        self._patch.undo()
        self.server.kill()


class Peer(Backend):
    """Another store: chunks are pushed to it, and pulled from it by a store whose memory is empty."""

    name = "p2p"

    def open(self) -> None:
        self.port, self.our_port = free_port(), free_port()
        self.address = f"unix://{self.folder}/peer.sock"
        (self.folder / "peer.toml").write_text(
            f'[tiers.p2p]\nkind = "p2p"\nstore = "{self.address}"\nlisten = "127.0.0.1:{self.port}"\n'
        )
        self.start()

    def start(self) -> None:
        """Start its store, or another one after that was killed."""
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "forebay", "store", "--config", f"{self.folder}/peer.toml",
                 "--socket", f"{self.folder}/peer.sock", "--memory", "128MiB"],
                stdout=log, stderr=log,
            )  # fmt: skip
        wait_for("the peer's store", lambda: self.values().get("tier.p2p.source.connected") == 1)

    def values(self) -> dict[str, float]:
        """The peer's figures; none while it doesn't answer."""
        assert self.process.poll() is None, (self.folder / "log").read_text()[-3000:]
        try:
            with StoreClient(self.address, maps=False) as client:
                return client.stats().values
        except StoreError:
            return {}

    def tiers(self, store: str) -> str:
        return (
            f'[tiers.p2p]\nkind = "p2p"\nstore = "{store}"\nlisten = "127.0.0.1:{self.our_port}"\n'
            f'peers = "peer=127.0.0.1:{self.port}"\npush_to = "peer"\nask_s = "5s"\n'
        )

    def ready(self, values: dict[str, float]) -> bool:
        return values.get("tier.p2p.peers_up") == 1

    def close(self) -> None:
        self.process.terminate()
        assert self.process.wait(30) == 0


class Pooled(Backend):
    """A pool of which another host lends the memory."""

    name = "mooncake"
    partial = False

    def open(self) -> None:
        if why := mooncake.why_not():
            pytest.skip(why)
        # A host that isn't heard of for so long is dead to the master, and what it lends is forgotten: a busy machine
        # may keep a sound one quiet for seconds.
        self.master = mooncake.Master(self.folder, client_ttl_s=60).start()
        self.member = mooncake.Member(self.master, 128 << 20)

    def tiers(self, store: str) -> str:
        return (
            f'[tiers.mooncake]\nkind = "mooncake"\nmaster = "{self.master.address}"\nsegment_bytes = 0\n'
            "trusted_network = true\n"
        )

    def close(self) -> None:
        self.member.kill()
        self.master.kill()


BACKENDS: tuple[Callable[[Path], Backend], ...] = (Files, Bucket, Peer, Pooled)
