"""The mooncake tier's world: a master behind bad weather, another host that lends the memory, both of which stand still
and die, and chunks that somebody overwrites."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path

from forebay.testing import mooncake
from forebay.testing.chaosproxy import CALM, ChaosProxy, Weather
from forebay.tiers.messages import OptionValue
from forebay.tiers.mooncake.options import mooncake_options
from forebay.tiers.mooncake.remote import Remote
from tests.conformance.worlds import QUOTA, World

BAD = {
    "delay": Weather(delay_s=0.03, jitter_s=0.05),
    "slices": Weather(slice_bytes=20),
    "silence": Weather(silent=True),
    "refusal": Weather(refuse=True),
    "resets": Weather(reset_after=2000),
    "lost answers": Weather(silent=True, direction="to_client"),
}
SPOILT = ("flip", "cut", "other")
HARD = ("master stopped", "member stopped", "member killed", "master killed")
FORGOTTEN_S = 5.0
"""By then the master knows that a host is dead; until then it gives chunks to it, which is a store that failed."""


class PoolWorld(World):
    kind = sick_kind = "mooncake"
    persistent = False
    tells_length = False  # the pool is asked, and tells of whatever another host has put there
    slack = 64

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        self.master = mooncake.Master(folder).start()
        self.member = mooncake.Member(self.master, 64 << 20)
        self.proxy = ChaosProxy((self.master.address.host, self.master.address.port), seed=seed)
        given = {"master": str(self.master.address), "segment_bytes": 0, "trusted_network": True}
        self.other = Remote("other", mooncake_options("other", given))

    @classmethod
    def absent(cls) -> str:
        return mooncake.why_not()

    def options(self) -> dict[str, OptionValue]:
        return {
            "master": f"127.0.0.1:{self.proxy.port}", "segment_bytes": 0, "quota_bytes": QUOTA, "rpc_timeout_s": 1.0,
            "transfer_timeout_s": 1.0, "trusted_network": True,
        }  # fmt: skip

    def ready(self, values: Mapping[str, float]) -> bool:
        return values.get("pool_up", 1) == 1

    def trouble(self, rng: random.Random) -> None:
        name = rng.choice((*BAD, *BAD, *SPOILT, *SPOILT, *HARD))
        self.struck[name] += 1
        if name in BAD:
            self.proxy.weather = BAD[name]
            time.sleep(0.05 + rng.random() * 0.2)
            self.proxy.weather = CALM
            if rng.random() < 0.3:
                self.proxy.reset_all()
        elif name.endswith("stopped"):
            who = self.master if name.startswith("master") else self.member
            who.pause()
            time.sleep(rng.random() * 0.3)
            who.resume()
        elif name in SPOILT:
            self._spoil(name, rng)
        elif name == "member killed":
            self.member.kill()
            self.member = mooncake.Member(self.master, 64 << 20)
        else:
            self.master.kill()
            self.master.start()

    def _spoil(self, what: str, rng: random.Random) -> None:
        """Another host puts something else in a chunk's place."""
        chunk, another = rng.choice(self.chunks), rng.choice(self.chunks)
        data = bytearray(chunk.block + chunk.payload)
        if what == "flip":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif what == "cut":
            del data[rng.randrange(1, len(data)) :]
        else:
            data = bytearray(another.block + another.payload)
        self.other._store.upsert(self.other.key(chunk.id), bytes(data))

    def calm(self) -> None:
        """A new member joins, and the master has noticed by then who is dead."""
        self.proxy.weather = CALM
        if self.struck["member killed"] or self.struck["master killed"]:
            self.member.kill()
            time.sleep(FORGOTTEN_S)
            self.member = mooncake.Member(self.master, 64 << 20)

    def close(self) -> None:
        self.proxy.close()
        self.other.close()
        self.member.kill()
        self.master.kill()
