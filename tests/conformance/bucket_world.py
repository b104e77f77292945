"""The S3 tier's world: SeaweedFS, bad weather on the way to it, a server that stands still, and objects that change."""

from __future__ import annotations

import os
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from forebay.testing.buckets import SeaweedFS
from forebay.testing.chaosproxy import CALM, ChaosProxy, Weather
from forebay.tiers.messages import OptionValue
from tests.conformance.worlds import QUOTA, Sealed, World

BUCKET, PREFIX = "campaign", "kv"
BAD = {
    "delay": Weather(delay_s=0.03, jitter_s=0.05),
    "slices": Weather(slice_bytes=700),
    "flips": Weather(flip_every=60_000),
    "silence": Weather(silent=True),
    "refusal": Weather(refuse=True),
    "resets": Weather(reset_after=20_000, direction="to_client"),
    "early ends": Weather(end_after=3000, direction="to_client"),
    "lost answers": Weather(silent=True, direction="to_client"),
}


class S3World(World):
    kind = sick_kind = "s3"
    slack = 16
    short = 250

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        self.server = SeaweedFS(folder / "server")
        self.server.start()
        self.server.make_bucket(BUCKET)
        self.client: Any = self.server.client()
        self.proxy = ChaosProxy(("127.0.0.1", self.server.port), seed=seed)
        self._before = {name: os.environ.get(name) for name in self.server.environment}
        os.environ.update(self.server.environment)

    @classmethod
    def absent(cls) -> str:
        return SeaweedFS.absent() or ""

    def options(self) -> dict[str, OptionValue]:
        return {
            "bucket": BUCKET, "prefix": PREFIX, "endpoint_url": f"http://127.0.0.1:{self.proxy.port}",
            "addressing": "path", "quota_bytes": QUOTA, "state_dir": str(self.folder / "state"), "pack_wait_s": 0.02,
            "refresh_s": 0.5, "missing_s": 0.2, "connect_timeout_s": 0.3, "timeout_s": 0.3, "open_s": 0.1,
        }  # fmt: skip

    def trouble(self, rng: random.Random) -> None:
        name = rng.choice((*BAD, "stopped", "flip", "cut", "gone", "other"))
        self.struck[name] += 1
        if name in BAD:
            self.proxy.weather = BAD[name]
            time.sleep(0.05 + rng.random() * 0.2)
            self.proxy.weather = CALM
            if rng.random() < 0.3:
                self.proxy.reset_all()
        elif name == "stopped":
            self.server.stop_it()
            time.sleep(rng.random() * 0.5)
            self.server.continue_it()
        else:
            with suppress(ClientError):  # the object has left meanwhile
                self._spoil(name, rng)

    def _spoil(self, what: str, rng: random.Random) -> None:
        """An object changes, behind the tier's back."""
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=f"{PREFIX}/").get("Contents", ())
        if not found:
            return
        one, two = (rng.choice(found)["Key"] for _ in range(2))
        if what == "gone":
            self.client.delete_object(Bucket=BUCKET, Key=one)
            return
        body = bytearray(self.client.get_object(Bucket=BUCKET, Key=one)["Body"].read())
        if what == "flip" and body:
            body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
        elif what == "cut":
            del body[rng.randrange(len(body) + 1) :]
        self.client.put_object(Bucket=BUCKET, Key=two if what == "other" else one, Body=bytes(body))

    def calm(self) -> None:
        self.proxy.weather = CALM

    def close(self) -> None:
        self.proxy.close()
        self.server.kill()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class SealedS3World(Sealed, S3World):
    """Both codecs, in segments too."""
