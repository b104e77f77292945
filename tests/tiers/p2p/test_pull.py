"""What one store has, another serves: pulled over the network, every byte compared."""

from __future__ import annotations

import pytest

from tests.kvstore.support import CHUNK
from tests.tiers.p2p.conftest import MakeStore
from tests.tiers.p2p.stores import CHUNKS, TOKENS


@pytest.mark.parametrize("bulk", ["auto", "frames"])
def test_what_one_store_has_another_pulls(make_store: MakeStore, bulk: str) -> None:
    a, b = make_store("a"), make_store("b")
    a.start(a.tier(more=f'bulk = "{bulk}"'))
    b.start(b.tier(a.peer, more=f'bulk = "{bulk}"'))
    a.fill(TOKENS)
    a.serving()
    b.sees("a")
    found = b.lookup(TOKENS)
    assert (found.hit, found.from_tier) == (len(TOKENS), {"p2p": len(TOKENS)})
    way = "stream" if bulk == "auto" else "frames"
    values = b.until_tier(lambda v: v["loads_running"] == 0)
    assert values["loads_ok"] == values[f"loads_by_{way}"] > 0
    assert b.lookup(TOKENS).from_tier == {}, "it is b's now"
    assert CHUNKS and CHUNK
