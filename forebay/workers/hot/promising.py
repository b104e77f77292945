"""Room in the store for all that a request will put there, before it depends on it."""

from __future__ import annotations

import asyncio

from forebay.errors import RequestRefused
from forebay.kvstore.client import AsyncStoreClient
from forebay.kvstore.protocol import Aside
from forebay.workers.hot.keeping import LEASE_MS

PATIENCE_S = 0.25
"""So long a request that has just been admitted waits for room before it gives its blocks back, and waits on."""

LOOK_S = 0.05
"""How often the store is asked meanwhile."""

NOTHING = Aside(rid=0, boot=b"", lease=0, lease_ms=0, ever=True)


async def set_aside(
    client: AsyncStoreClient, namespace_id: bytes, tenant: str, group: int, chunks: int, patience_s: float = 0.0,
    for_tiers: int = 0,
) -> Aside:  # fmt: skip
    """Room for `chunks` whole chunks under a lease, `for_tiers` of them at a time for what those bring; asks until
    there is some, for `patience_s`. What comes to nothing (lease 0) says whether it could ever be had. Raises
    StoreUnavailable."""
    loop = asyncio.get_running_loop()
    end = loop.time() + patience_s
    while True:
        try:
            aside = await client.set_aside(
                namespace_id, tenant, group, chunks, lease_ms=LEASE_MS, for_tiers=for_tiers
            )
        except RequestRefused as error:
            if error.code != "limits":  # busy, or it has forgotten the namespace: that passes
                return NOTHING
            return Aside(rid=0, boot=b"", lease=0, lease_ms=0, ever=False)
        if aside.lease or not aside.ever or loop.time() >= end:
            return aside
        await asyncio.sleep(LOOK_S)
