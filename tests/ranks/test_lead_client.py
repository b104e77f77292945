"""Rank 0's client: what it has mapped the other ranks can find."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from forebay.kvstore.client import AsyncStoreClient
from forebay.workers.ranks.client import LeadClient
from forebay.workers.ranks.messages import Done, See


@dataclass
class Orders:
    """A crew that carries out whatever it is told."""

    given: list[object] = field(default_factory=list)

    def order(self, order: object) -> list[Done]:
        self.given.append(order)
        return []


@pytest.mark.parametrize("cancelled", [False, True])
def test_other_ranks_look_for_extents_even_if_whoever_needed_them_has_gone(
    monkeypatch: pytest.MonkeyPatch, *, cancelled: bool
) -> None:
    async def scenario() -> None:
        orders, mapped = Orders(), asyncio.Event()

        async def mapping(client: AsyncStoreClient) -> None:
            await mapped.wait()

        monkeypatch.setattr(AsyncStoreClient, "map_extents", mapping)
        client = LeadClient("unix:///nowhere", orders)  # type: ignore[arg-type]
        client._attached = True
        task = asyncio.create_task(client.map_extents())
        await asyncio.sleep(0)
        assert orders.given == []
        (task.cancel if cancelled else mapped.set)()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled() == cancelled and orders.given == [See()]

    asyncio.run(scenario())
