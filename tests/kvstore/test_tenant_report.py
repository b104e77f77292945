"""What is told about tenants: rows, labels that stay few, forecasts; as tables, JSON and metrics."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.cli.tenant_tables import budget_of, change, forecast_text
from forebay.kvstore.client import StoreClient
from forebay.kvstore.curves import Curves
from forebay.kvstore.protocol import TenantRow
from forebay.kvstore.tenancy import OTHERS, TenantRule
from forebay.kvstore.tenant_report import LABELS_MAX, curve_sizes, foresee, labelled, tenant_rows
from tests.cli.commands import told
from tests.kvstore.support import CHUNK, SmallStore
from tests.kvstore.test_curves import key
from tests.kvstore.test_tenants import SPEC, RunningStore, get, prompts, put


def row(tenant: str, size: int) -> TenantRow:
    return TenantRow(tenant, size, None, 0, 1.0, 0, False, 1, 0, 0, 2, 10, 5)


def test_labels_of_metrics_are_few_whoever_comes() -> None:
    rows = [row(f"t{n}", n) for n in range(1000)]
    found = labelled(rows, configured=["t3"])
    assert len(found) == LABELS_MAX + 1 and {"t3", "t999", OTHERS} <= set(found)
    assert sum(r.bytes for r in found.values()) == sum(range(1000)), "the rest is summed up, not lost"
    assert sum(r.refused for r in found.values()) == 2000
    assert labelled(rows[:3], []) == {f"t{n}": rows[n] for n in range(3)}


def test_rows_tell_shares_of_those_who_hold_something() -> None:
    store = SmallStore(extents=2)
    store.store_prompt([1] * CHUNK)
    told = tenant_rows(store.core)
    assert [r.tenant for r in told] == [""] and told[0].share == store.core.place.slots.total_bytes
    assert told[0].bytes == store.core.place.slots.used_bytes
    assert tenant_rows(store.core, only="nobody") == []


def test_more_memory_is_foreseen_to_go_to_those_who_need_it() -> None:
    store, curves = SmallStore(extents=4), Curves()
    total = store.core.place.slots.total_bytes
    size = total // 1000
    for _ in range(4):  # a goes round 4 times the pool; b is content with a tenth of it
        curves.looked_up("a", b"".join(key(("a", n)) for n in range(4000)), size, 4000 * CHUNK, 0)
        for _ in range(10):
            curves.looked_up("b", b"".join(key(("b", n)) for n in range(100)), size, 100 * CHUNK, 90 * CHUNK)
    now = {t.tenant: t for t in foresee(store.core, curves, total)}
    then = {t.tenant: t for t in foresee(store.core, curves, 8 * total)}
    assert now["a"].held == now["a"].wanted and now["a"].expected == pytest.approx(0.0, abs=0.02)
    assert then["a"].expected == pytest.approx(0.75, abs=0.05) and then["a"].ceiling == pytest.approx(0.75, abs=0.02)
    assert then["b"].measured == 0.9 and then["b"].expected == pytest.approx(0.9, abs=0.1)
    assert now["b"].held == pytest.approx(0.1 * total, rel=0.3), "it wants no more"
    assert now["a"].held + now["b"].held <= total
    assert foresee(store.core, curves, total, only="b")[0].tenant == "b"


def test_a_quota_bounds_what_is_foreseen() -> None:
    store, curves = SmallStore(extents=4), Curves()
    store.core.place.accounts.rules["a"] = TenantRule(quota=1 << 14)
    store.core.place.accounts.of("a").rule = TenantRule(quota=1 << 14)
    curves.looked_up("a", b"".join(key(n) for n in range(4000)), 4096, 4000, 0)
    assert foresee(store.core, curves, 1 << 30)[0].wanted == 1 << 14


@pytest.mark.parametrize(
    ("text", "budget"), [("+64GiB", 96 << 30), ("-8GiB", 24 << 30), ("=16GiB", 16 << 30), ("+1kib", (32 << 30) + 1024)]
)
def test_changes_of_the_budget(text: str, budget: int) -> None:
    assert budget_of(32 << 30, change(text)) == budget


@pytest.mark.parametrize("text", ["64GiB", "+much", "*2", ""])
def test_a_change_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="takes a "):
        change(text)


@pytest.fixture
def port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture
def store(tmp_path: Path, port: int) -> Iterator[RunningStore]:
    rules = {"alice": TenantRule(quota=2 << 20, guarantee=1 << 20, weight=2.0)}
    running = RunningStore(tmp_path, rules, "--metrics", f"127.0.0.1:{port}")
    running.start()
    yield running
    running.stop()


def test_stat_and_metrics_show_every_tenant(store: RunningStore, port: int) -> None:
    with StoreClient(str(store.socket)) as client:
        client.register(SPEC)
        for tokens in prompts(1, 30):
            get(client, "alice", tokens)
            put(client, "alice", tokens)
            get(client, "alice", tokens)
        put(client, "bob", [3] * 32)
    text = told("stat", "--socket", store.socket)
    line = next(line for line in text.splitlines() if line.startswith("alice"))
    assert "2.0 MiB" in line and "1.0 MiB" in line and "50.0 %" in line
    tenants = json.loads(told("stat", "--socket", store.socket, "--json"))["tenants"]
    alice = next(tenant for tenant in tenants if tenant["tenant"] == "alice")
    assert alice["evicted"] > 0 and alice["suffered"] == 0 and alice["hit_tokens"] == 30 * 64
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        metrics = answer.read().decode()
    assert f'forebay_store_tenant_hit_tokens{{tenant="alice"}} {30 * 64:.1f}' in metrics
    assert 'forebay_store_tenant_quota{tenant="bob"}' not in metrics, "it has none"
    assert 'forebay_store_tenant_bytes{tenant="bob"}' in metrics


def test_what_if_prints_the_future(store: RunningStore) -> None:
    assert "nobody has asked" in told("stat", "--socket", store.socket, "--what-if", "+16MiB")
    with StoreClient(str(store.socket)) as client:
        client.register(SPEC)
        for _ in range(2):
            for tokens in prompts(1, 200):
                get(client, "bob", tokens)
                put(client, "bob", tokens)
    text = told("stat", "--socket", store.socket, "--what-if", "+64MiB")
    assert "a pool of 80.0 MiB instead of 16.0 MiB" in text and "if it had" in text and "bob" in text
    found = json.loads(told("stat", "--socket", store.socket, "--what-if=-8MiB", "--json"))
    assert found["budget"] == 8 << 20 and found["sizes"] == curve_sizes(8 << 20, 16 << 20)
    (bob,) = found["tenants"]
    assert bob["tenant"] == "bob" and len(bob["rates"]) == len(found["sizes"])
    more = json.loads(told("stat", "--socket", store.socket, "--what-if", "+64MiB", "--json"))["tenants"][0]
    assert more["expected"] > bob["expected"] + 0.2, "26 MB are asked again and again: 16 MiB can't hold that, 80 can"
    assert "leaves nothing" in told("stat", "--socket", store.socket, "--what-if=-1TiB", code=2)


def test_ls_lists_one_tenant_if_asked_to(store: RunningStore) -> None:
    with StoreClient(str(store.socket)) as client:
        client.register(SPEC)
        put(client, "alice", [1] * 32)
        put(client, "bob", [1] * 64)
        foreseen = client.what_if(1 << 30)
    assert forecast_text(foreseen).endswith("nobody has asked for anything yet")
    lines = told("ls", "--socket", store.socket, "--tenant", "bob", "--json").splitlines()
    assert [json.loads(line)["tenant"] for line in lines] == ["bob", "bob"]
