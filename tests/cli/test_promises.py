"""pin, touch and clear do what they say, and ls and stat show it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from forebay.kvstore.client import StoreClient
from tests.cli.commands import RunningStore, told
from tests.cli.test_store_tools import SPEC
from tests.kvstore.running import get, put

SYSTEM = list(range(64))
IDS = ",".join(map(str, SYSTEM))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStore]:
    store = RunningStore(tmp_path_factory.mktemp("store"))
    store.start("--pin-budget", "1%")
    yield store
    assert store.stop() == 0


@pytest.fixture(autouse=True)
def prompts(store: RunningStore) -> None:
    with StoreClient(str(store.socket)) as client:
        client.register(SPEC, "tiny")
        put(client, SPEC, SYSTEM + [7] * 32)
        put(client, SPEC, SYSTEM + [8] * 32)


def hit(store: RunningStore, tokens: list[int]) -> int:
    with StoreClient(str(store.socket)) as client:
        return get(client, SPEC, tokens).hit


def listed(store: RunningStore) -> list[dict[str, object]]:
    return [json.loads(line) for line in told("ls", "--socket", store.socket, "--json").splitlines()]


def test_a_pin_is_seen_with_its_owner_until_it_is_ended(store: RunningStore) -> None:
    text = told("pin", "--socket", store.socket, "--token-ids", IDS, "--by", "ops", "--ttl", "5m")
    assert "64 of 64 tokens" in text and "pinned softly by ops for 300 s" in text
    kept = [line["kept"] for line in listed(store) if line["kept"]]
    assert len(kept) == 2 and all(k[0]["by"] == "ops" and 0 < k[0]["seconds"] <= 301 for k in kept)  # type: ignore[index]
    assert "soft by ops" in told("ls", "--socket", store.socket) and "ops" in told("stat", "--socket", store.socket)
    assert "unpinned" in told("pin", "--socket", store.socket, "--token-ids", IDS, "--by", "ops", "--unpin")
    assert not any(line["kept"] for line in listed(store))


def test_a_hard_pin_beyond_the_budget_is_refused_and_names_the_setting(store: RunningStore) -> None:
    with StoreClient(str(store.socket)) as client:
        put(client, SPEC, many := [9] * 32 * 64)
    ids = ",".join(map(str, many))
    assert "--pin-budget" in told("pin", "--socket", store.socket, "--token-ids", ids, "--hard", code=1)
    assert not any(line["kept"] for line in listed(store)), "all or nothing"
    assert "pinned hard" in told("pin", "--socket", store.socket, "--token-ids", IDS, "--hard", "--ttl", "1s")


def test_touch_retains_for_a_tenant(store: RunningStore) -> None:
    told("touch", "--socket", store.socket, "--token-ids", IDS, "--retain", "1m", "--tenant", "acme")
    rows = json.loads(told("stat", "--socket", store.socket, "--json"))["pins"]
    assert [(row["kind"], row["by"], row["chunks"]) for row in rows if row["by"] == "acme"] == [
        ("retained", "acme", "2")
    ]


def test_clear_by_prefix_forgets_what_goes_on_from_it_in_memory_and_files(store: RunningStore) -> None:
    store.wait_for(lambda values: values["tier.fs.stores_running"] == 0)
    ids = ",".join(map(str, SYSTEM + [7] * 16))
    text = told("clear", "--socket", store.socket, "--token-ids", ids)
    assert "memory: 1 chunks" in text and "fs: 1 chunks" in text
    assert hit(store, SYSTEM + [7] * 32) == 64 and hit(store, SYSTEM + [8] * 32) == 96


def test_clear_by_tenant_and_all(store: RunningStore) -> None:
    store.wait_for(lambda values: values["tier.fs.stores_running"] == 0)
    assert "memory: 0 chunks" in told("clear", "--socket", store.socket, "--tenant", "nobody")
    assert hit(store, SYSTEM) == 64
    told("clear", "--socket", store.socket, "--all")
    assert listed(store) == [] and hit(store, SYSTEM) == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["clear"], "--all"), (["clear", "--all", "--tenant", "x"], "--all"), (["pin"], "--token-ids"),
        (["clear", "--namespace", "00"], "--namespace"), (["pin", "--token-ids", "1", "--ttl", "x"], "--ttl"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(store: RunningStore, arguments: list[str], named: str) -> None:
    assert named in told(*arguments, "--socket", store.socket, code=2)
