"""Clears that reach peers: passed on by the host where they are made, carried out by those that know its key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from forebay.kvstore.client import StoreClient
from forebay.kvstore.identity import pack_tokens, root_key
from forebay.testing.conformance import Pool, make_chunk
from forebay.tiers.base import ClearScope
from forebay.tiers.p2p import clears
from forebay.tiers.p2p.wire import Clear, Refused
from tests.kvstore.support import CHUNK as CHUNK_TOKENS
from tests.kvstore.support import namespace
from tests.tiers.p2p.conftest import MakeStore
from tests.tiers.p2p.dialers import Dialer
from tests.tiers.p2p.rig import Asker, Host, own_folder
from tests.tiers.p2p.stores import CHUNKS, TOKENS

CHUNK = make_chunk(granule=4096)
EVERYTHING = ClearScope()


@pytest.fixture
def keys(tmp_path: Path) -> str:
    return str(own_folder(tmp_path, "peer"))


@pytest.fixture
def host(keys: str) -> Iterator[Host]:
    made = Host("peer", keys=keys, clear_peers=True)
    made.source.put(CHUNK)
    yield made
    made.close()


def asker(open_all: ExitStack, pool: Pool, address: str, keys: str, **options: object) -> Asker:
    given: dict[str, object] = {"keys": keys, "clear_peers": True, "ask_s": 1.0, "miss_s": 0.0, **options}
    return open_all.enter_context(closing(Asker(pool, address, **given)))


def test_a_clear_reaches_a_peer_and_until_then_it_is_asked_for_nothing(
    host: Host, open_all: ExitStack, pool: Pool, keys: str
) -> None:
    made = asker(open_all, pool, host.address, keys)
    made.sees("peer")
    assert made.driver.serves(CHUNK)
    host.source.gate.clear()
    asked = host.source.asked
    assert made.tier.clear_scope(EVERYTHING) is None
    for _ in range(3):
        assert made.driver.lookup(CHUNK.query())[0].outcome == "away"
        assert made.driver.load(CHUNK).result.reason == "missing"
    assert made.value("clears_waiting") == 1 and host.source.asked == asked
    host.source.gate.set()
    made.until(lambda: made.value("clears_told") == 1, "the peer to have cleared")
    assert (host.source.cleared, host.source.chunks) == ([EVERYTHING], {})
    assert made.value("chunks_cleared_there") == 1 and made.value("clears_waiting") == 0
    host.source.put(CHUNK)
    assert made.driver.serves(CHUNK), "and then it is asked again"


def test_what_is_to_be_forgotten_is_told_as_it_is(host: Host, open_all: ExitStack, pool: Pool, keys: str) -> None:
    scopes = [
        ClearScope(CHUNK.header.namespace), ClearScope(b"", "somebody"),
        ClearScope(CHUNK.header.namespace, None, 2, b"p" * 32, 64, b"\1\0\0\0" * 16, b"x"),
    ]  # fmt: skip
    made = asker(open_all, pool, host.address, keys)
    made.sees("peer")
    for scope in scopes:
        made.tier.clear_scope(scope)
    made.until(lambda: made.value("clears_told") == len(scopes), "the peer to have cleared")
    assert host.source.cleared == scopes


def test_a_peer_that_is_away_is_told_when_it_is_back(open_all: ExitStack, pool: Pool, keys: str) -> None:
    host = Host("peer", keys=keys, clear_peers=True)
    made = asker(open_all, pool, host.address, keys)
    made.sees("peer")
    host.tier.close()
    made.until(lambda: not made.tier._engine.up, "it to be missed")
    made.tier.clear_scope(EVERYTHING)
    made.until(lambda: made.value("clears_waiting") == 1, "that")
    back = open_all.enter_context(closing(Host("peer", keys=keys, clear_peers=True, listen=f"127.0.0.1:{host.port}")))
    back.source.put(CHUNK)
    made.until(lambda: made.value("clears_told") == 1, "it to be told")
    assert not back.source.chunks


def test_clears_that_wait_for_a_peer_have_a_cap_beyond_which_it_clears_everything(
    open_all: ExitStack, pool: Pool, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clears, "WAITING_MAX", 3)
    made = asker(open_all, pool, "peer=127.0.0.1:9", keys)
    for number in range(5):
        made.tier.clear_scope(ClearScope(bytes([number]) * 32))
    made.until(lambda: made.value("clears_passed_on") == 5, "that")
    assert made.value("clears_widened") == 1
    assert made.tier._engine._clears._peers["peer"].waiting == [EVERYTHING, ClearScope(b"\4" * 32)]


def test_who_does_not_want_clears_neither_passes_them_on_nor_takes_them(
    open_all: ExitStack, pool: Pool, keys: str
) -> None:
    host = open_all.enter_context(closing(Host("peer", keys=keys)))
    host.source.put(CHUNK)
    quiet = asker(open_all, pool, host.address, keys, clear_peers=False)
    quiet.sees("peer")
    quiet.tier.clear_scope(EVERYTHING)
    assert quiet.driver.serves(CHUNK) and quiet.value("clears_passed_on") == 0
    made = asker(open_all, pool, host.address, keys)
    made.sees("peer")
    made.tier.clear_scope(EVERYTHING)
    made.until(lambda: made.value("clears_refused") == 1, "it to be refused")
    assert host.source.chunks and made.value("clears_waiting") == 0
    assert host.tier.statistics().values["serve.clears_refused"] == 1


def test_without_keys_nobody_can_clear(open_all: ExitStack) -> None:
    host = open_all.enter_context(closing(Host("peer")))
    host.source.put(CHUNK)
    guest = open_all.enter_context(closing(Dialer(host.port)))
    guest.say(Clear(1, EVERYTHING))
    assert "clear_peers" in guest.hear(Refused).why
    assert host.source.chunks


def test_stores_clear_each_other_once(make_store: MakeStore, tmp_path: Path) -> None:
    """Everything, and what follows a prefix; each is the other's peer, and what was passed on isn't passed on again."""
    a, b = make_store("a"), make_store("b")
    keys = own_folder(tmp_path, "a")
    (keys / "b.pub").write_bytes((keys / "public.key").read_bytes())
    more = f'keys = "{keys}"\nclear_peers = true\nask_s = "1s"\nmiss_s = "10ms"'
    a.begin(a.tier(b.peer, more))
    b.begin(b.tier(a.peer, more))
    for store, peer in ((a, "b"), (b, "a")):
        store.serving()
        store.sees(peer)
    a.fill(TOKENS)
    b.fill(TOKENS)
    half = TOKENS[: len(TOKENS) // 2 + CHUNK_TOKENS]
    with StoreClient(a.address) as client:
        cleared = client.clear(namespace().id, root=root_key(namespace().id), tokens=pack_tokens(half))
    assert cleared.chunks == CHUNKS // 2 and cleared.tiers == {"p2p": -1}
    b.until(lambda v: v["host.entries"] == CHUNKS - CHUNKS // 2)
    a.until(lambda v: v.get("tier.p2p.clears_told") == 1)
    assert a.value("chunks_cleared_there") == CHUNKS // 2
    with StoreClient(b.address) as client:
        client.clear()
    a.until(lambda v: v["host.entries"] == 0)
    for store in (a, b):
        store.until(lambda v: v.get("tier.p2p.clears_told") == v.get("tier.p2p.clears_obeyed") == 1)
        assert store.value("clears_passed_on") == 1
        assert store.lookup(TOKENS).hit == 0
