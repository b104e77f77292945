"""How bytes get between the device's block pools and the store's: what differs where ranks share the pools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from forebay.kvstore.client import AsyncStoreClient
from forebay.kvstore.layout import Shard
from forebay.workers.copying import Copier, copier
from forebay.workers.prefix import GroupShape
from forebay.workers.pushing import Pusher

WHOLE = Shard()
"""This worker has all of the model, in blocks of one granule each. A store that can't serve that says so at once."""


@dataclass(frozen=True, slots=True)
class Doors:
    """The connection, a copier for each group, what empties the queue of pushes (called as `Pusher` is), and what this
    process tells the store of itself."""

    client: AsyncStoreClient
    copiers: Sequence[Copier]
    pusher: Callable[..., Pusher]
    shard: Shard


def own_doors(client: AsyncStoreClient, shapes: Sequence[GroupShape], pools: Mapping[str, Tensor]) -> Doors:
    """Of a process that has the pools to itself."""
    return Doors(client, [copier(pools[shape.geometry.name]) for shape in shapes], Pusher, WHOLE)
