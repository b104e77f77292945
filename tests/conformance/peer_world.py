"""The p2p tier's world: one peer that serves a dict, bad weather on the way to it, a peer that stands still, chunks of
which it has lost a bit. Stores are pushed to it and loads pulled from it."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path

from forebay.testing.chaosproxy import CALM, ChaosProxy, Weather
from forebay.tiers.messages import OptionValue
from forebay.tiers.p2p.stream_server import IDLE_S
from tests.conformance.worlds import World
from tests.tiers.p2p.rig import NOWHERE, Host, own_folder

BAD = {
    "delay": Weather(delay_s=0.03, jitter_s=0.05),
    "slices": Weather(slice_bytes=700),
    "flips": Weather(flip_every=60_000),
    "silence": Weather(silent=True),
    "refusal": Weather(refuse=True),
    "resets": Weather(reset_after=20_000),
    "early ends": Weather(end_after=20_000),
    "lost answers": Weather(silent=True, direction="to_client"),
}


class PeerWorld(World):
    kind = sick_kind = "p2p"
    partial = True
    short = 250

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        self.more = self.bulk(folder)
        self.host = Host("peer", **self.more)
        server = self.host.tier._engine._server
        assert server is not None
        self.proxies = [
            ChaosProxy(("127.0.0.1", port), seed=seed + number)
            for number, port in enumerate((self.host.port, server.stream_port))
        ]
        server.stream_port = self.proxies[1].port

    def bulk(self, folder: Path) -> dict[str, OptionValue]:
        """Options of both sides: how bytes come."""
        return {}

    def options(self) -> dict[str, OptionValue]:
        return {
            "store": NOWHERE, "peers": f"peer=127.0.0.1:{self.proxies[0].port}", "push_to": "peer", "hit_s": 0.05,
            "miss_s": 0.05, "ask_s": 10.0, "stall_s": 10.0, **self.more,
        }  # fmt: skip

    def sick_options(self) -> dict[str, OptionValue]:
        """As short of patience as a load's deadline asks for; when all is calm a slow machine is no fault."""
        return self.options() | {"ask_s": 0.1, "stall_s": 0.5}

    def ready(self, values: Mapping[str, float]) -> bool:
        return values.get("peers_up") == 1

    def trouble(self, rng: random.Random) -> None:
        name = rng.choice((*BAD, "stopped", "flip", "gone"))
        self.struck[name] += 1
        if name in BAD:
            struck = [proxy for proxy in self.proxies if rng.random() < 0.7]
            for proxy in struck:
                proxy.weather = BAD[name]
            time.sleep(0.05 + rng.random() * 0.2)
            self.calm()
            for proxy in struck:
                if rng.random() < 0.3:
                    proxy.reset_all()
        elif name == "stopped":
            self.host.source.gate.clear()
            time.sleep(rng.random() * 0.3)
            self.host.source.gate.set()
        else:
            self._spoil(name, rng)

    def _spoil(self, what: str, rng: random.Random) -> None:
        chunks = self.host.source.chunks
        names = list(chunks)
        if names and what == "gone":
            chunks.pop(rng.choice(names), None)
        elif names and (kept := chunks.get(rng.choice(names))) is not None:
            kept.payload[rng.randrange(len(kept.payload))] ^= 1 << rng.randrange(8)

    def calm(self) -> None:
        for proxy in self.proxies:
            proxy.weather = CALM

    def left_behind(self) -> list[str]:
        until = time.monotonic() + 60
        while (self.host.source.lent or self.host.source.rooms) and time.monotonic() < until:
            time.sleep(0.02)
        source = self.host.source
        left = [f"{source.lent} lent, {len(source.rooms)} reserved at the peer"] if source.lent or source.rooms else []
        # Streams whose other end was swallowed by the weather are hung up after a while of silence.
        until = time.monotonic() + IDLE_S + 15
        while self.streams and time.monotonic() < until:
            time.sleep(0.05)
        return left + ([f"{self.streams} streams at the peer"] if self.streams else [])

    @property
    def streams(self) -> int:
        """Connections that the peer still has."""
        server = self.host.tier._engine._stream_server
        return server.connections + server.strangers if server is not None else 0

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.close()
        self.host.close()


class TlsPeerWorld(PeerWorld):
    """Streams through TLS."""

    slack = 8  # the first frame that is sent without a copy has pyzmq start a thread with a context of its own

    def bulk(self, folder: Path) -> dict[str, OptionValue]:
        return {"bulk": "tls", "keys": str(own_folder(folder, "peer"))}

    def ready(self, values: Mapping[str, float]) -> bool:
        return super().ready(values) and values.get("streams_usable") == 1
