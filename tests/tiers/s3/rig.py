"""A tier over a bucket, what drives it, and the bucket seen from outside."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from forebay.testing.buckets import Server
from forebay.tiers.s3.client import make_client
from forebay.tiers.s3.tier import S3Tier
from tests.tiers.support import Driver, InProcess, Made, Pool

BUCKET = "forebay-tests"


def options_of(server: Server, more: Mapping[str, object]) -> dict[str, Any]:
    """Options of a tier on this server; times are short, so that tests needn't wait for them."""
    return {
        "bucket": getattr(server, "volume", BUCKET), "endpoint_url": server.endpoint, "addressing": "path",
        "pack_wait_s": 0.02, "refresh_s": 0.2, "missing_s": 0.5, "connect_timeout_s": 1.0, "timeout_s": 2.0,
        "open_s": 0.2, **more,
    }  # fmt: skip


@functools.cache
def _session(access: str, secret: str) -> Any:
    """Reading the service's model takes longer than most tests: once is enough."""
    import boto3

    return boto3.session.Session(access, secret, region_name="us-east-1")


def quick_tier(server: Server, options: Mapping[str, object]) -> S3Tier:
    """A tier whose session is shared with others on this server."""
    client = functools.partial(make_client, session=_session(server.access, server.secret))
    return S3Tier("bucket", options, client=client)


class S3Rig(Driver):
    """A tier in this process. `objects` and what follows go around it, straight to the bucket."""

    def __init__(self, pool: Pool, server: Server, more: Mapping[str, object]) -> None:
        self.server = server
        self.options = options_of(server, more)
        self.bucket = str(self.options["bucket"])
        self.prefix = str(self.options["prefix"])
        self.tier = quick_tier(server, self.options)
        self.client = server.client()
        self.closed = False
        self.others: list[S3Rig] = []
        super().__init__(pool, InProcess(self.tier, pool))

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            super().close()
        for other in self.others:
            other.close()

    def again(self, **more: object) -> S3Rig:
        """A tier of its own on the same prefix: another daemon, or this one after a restart."""
        self.others.append(S3Rig(self.pool, self.server, {**self.options, **more}))
        return self.others[-1]

    def objects(self, folder: str = "") -> list[str]:
        """Names of what is in the bucket below the prefix."""
        names: list[str] = []
        for page in self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=f"{self.prefix}/{folder}"
        ):
            names += [found["Key"] for found in page.get("Contents", ())]
        return names

    def name(self, chunk: Made) -> str:
        return f"{self.prefix}/chunks/{chunk.id.key.hex()}-{chunk.id.group:02x}"

    def get(self, name: str) -> bytes:
        body: bytes = self.client.get_object(Bucket=self.bucket, Key=name)["Body"].read()
        return body

    def put(self, name: str, body: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=name, Body=body)

    def delete(self, name: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=name)

    def bytes_in_bucket(self) -> int:
        total = 0
        for page in self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=f"{self.prefix}/"
        ):
            total += sum(found["Size"] for found in page.get("Contents", ()))
        return total
