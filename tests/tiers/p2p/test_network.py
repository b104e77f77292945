"""Stores on hosts of their own, with keys: through CURVE, over slow links and through partitions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from forebay.tiers.p2p.keys import own_pair
from tests.kvstore.support import CHUNK
from tests.tiers.p2p.network import Network, why_not
from tests.tiers.p2p.stores import PeerStore

PORT = 7450


@dataclass(frozen=True)
class Site:
    network: Network
    a: PeerStore
    b: PeerStore
    c: PeerStore


def config(store: PeerStore, network: Network, keys: Path, peers: dict[str, int], more: str = "") -> str:
    index = {"a": 0, "b": 1, "c": 2}
    known = ", ".join(f"{name}={network.address(index[name])}:{PORT}" for name in peers)
    return (
        f'[tiers.p2p]\nkind = "p2p"\nstore = "{store.address}"\n'
        f'listen = "{network.address(index[store.name])}:{PORT}"\n'
        f'keys = "{keys / store.name}"\npeers = "{known}"\n{more}\n'
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Three hosts; `c` has `a` and `b` for peers."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    keys = tmp_path_factory.mktemp("keys")
    for name in "abc":
        own_pair(keys / name)
    for name in "abc":
        for other in set("abc") - {name}:
            (keys / name / f"{other}.pub").write_bytes((keys / other / "public.key").read_bytes())
    network = Network(3)
    stores = {name: PeerStore(tmp_path_factory.mktemp(name), name) for name in "abc"}
    try:
        for index, (name, store) in enumerate(stores.items()):
            peers = {"a": 0, "b": 1} if name == "c" else {}
            more = 'ask_s = "500ms"\nstall_s = "500ms"\nmiss_s = "10ms"' if name == "c" else ""
            store.begin(config(store, network, keys, peers, more), network.inside(index))
        for store in stores.values():
            store.serving()
        stores["c"].sees("a", "b")
        yield Site(network, **stores)
    finally:
        for store in stores.values():
            store.end()
        network.close()


def tokens(serial: int, chunks: int = 4) -> list[int]:
    return list(range(serial * 10_000 + 1, serial * 10_000 + chunks * CHUNK + 1))


def test_chunks_cross_the_network_encrypted(site: Site) -> None:
    site.c.until(lambda v: v["tier.p2p.streams_usable"] == 2)
    before = site.c.value("loads_ok")
    site.a.fill(tokens(1))
    found = site.c.lookup(tokens(1))
    assert (found.hit, found.from_tier) == (4 * CHUNK, {"p2p": 4 * CHUNK})
    assert site.c.value("loads_by_tls") == site.c.value("loads_ok") - before > 0


def test_a_host_that_is_cut_off_is_a_miss_in_time_and_the_other_still_serves(site: Site) -> None:
    site.a.fill(tokens(2))
    site.b.fill(tokens(3))
    with site.network.cut_off(0):
        began = time.monotonic()
        assert site.c.lookup(tokens(2), deadline_ms=1500).hit == 0
        assert time.monotonic() - began < 15
        site.c.until(lambda v: site.c.lookup(tokens(3)).hit == 4 * CHUNK)
    site.c.sees("a")
    site.c.until(lambda v: site.c.lookup(tokens(2)).hit == 4 * CHUNK)


def test_a_link_that_goes_down_in_the_middle_of_loads_costs_the_rest_alone(site: Site) -> None:
    long = tokens(4, chunks=48)
    site.a.fill(long)
    with site.network.slow(0, "4mbit"):
        before = site.c.value("loads_ok")
        with site.c.looking_up(long, deadline_ms=4000) as answer:
            site.c.until(lambda v: v.get("tier.p2p.loads_ok", 0) > before + 2)
            with site.network.cut_off(0):
                assert answer().hit < len(long)
                site.c.until_tier(lambda v: v["loads_running"] == 0)
    site.c.sees("a")
    site.c.until(lambda v: site.c.lookup(long).hit == len(long))


def test_a_slow_link_brings_what_fits_into_the_deadline(site: Site) -> None:
    long = tokens(5, chunks=64)
    site.b.fill(long)
    with site.network.slow(1, "1mbit"):
        began = time.monotonic()
        assert site.c.lookup(long, deadline_ms=700).hit < len(long)
        assert time.monotonic() - began < 15
    site.c.until(lambda v: site.c.lookup(long).hit == len(long))
