"""Two tenants behind one worker and one store: what one has computed saves the other nothing, and costs it nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from forebay.kvstore.client import StoreClient
from forebay.kvstore.identity import tenant_salt
from tests.workers.fake_model import VOCAB
from tests.workers.processes import FrontEnd, start_store, start_worker, store_values

ALICE = {"tenant": "alice", "salt": tenant_salt(b"a" * 32, "")}
BOB = {"tenant": "bob", "salt": tenant_salt(b"b" * 32, "")}
LENGTH = 150
COUNTED = (
    "store.lookups",
    "store.hit_tokens",
    "store.reserved",
    "store.committed",
    "tier.fs.asked",
    "tier.fs.promoted",
)


def text(seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCAB - 1) for _ in range(LENGTH)]


@dataclass
class House:
    """A store and two workers."""

    folder: Path
    first: FrontEnd
    second: FrontEnd


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    processes = [start_store(tmp_path)]
    workers = []
    for name in ("first", "second"):
        process, front = start_worker(tmp_path, name)
        processes.append(process)
        front.settle()
        workers.append(front)
    yield House(tmp_path, *workers)
    for process in reversed(processes):
        process.end()


def settled(folder: Path, worker: FrontEnd) -> dict[str, float]:
    """The store's and the worker's figures, once nothing is under way."""
    worker.settle()
    end = time.monotonic() + 30
    while store_values(folder).get("tier.fs.stores_running", 1) and time.monotonic() < end:
        time.sleep(0.02)
    values = store_values(folder)
    mine = worker.stats().values
    return {name: values.get(name, 0.0) for name in COUNTED} | {
        f"worker {name}": mine.get(name, 0.0)
        for name in ("lookups", "loaded.host.bytes", "loaded.fs.bytes", "cached.host", "cached.fs", "tokens.prefilled")
    }


def test_a_foreign_prompt_is_computed_like_one_that_nobody_ever_sent(house: House) -> None:
    folder, first, second = house.folder, house.first, house.second
    known, unknown = text(1), text(2)
    first.ask("alice", known, 5, **ALICE)
    settled(folder, first)
    work = []
    for name, prompt in (("foreign", known), ("unknown", unknown)):
        before = settled(folder, second)
        heard = second.ask(name, prompt, 5, **BOB)
        assert heard.started is not None and heard.started.cached == {}, "no token of it is cached"
        after = settled(folder, second)
        work.append({figure: after[figure] - before[figure] for figure in after})
    assert work[0] == work[1], "lookups, questions to tiers, bytes loaded, tokens computed, chunks stored"
    assert work[0]["store.lookups"] >= 1 and work[0]["tier.fs.asked"] >= 1 and work[0]["worker cached.host"] == 0
    heard = second.ask("own", known, 5, **ALICE)
    assert heard.started is not None and heard.started.cached == {"host": 144}, (
        "the owner's hit was there all the while"
    )
    with StoreClient(f"{folder}/store.sock") as client:
        rows = {row.tenant: row for row in client.stats().tenants}
    assert rows["alice"].hit_tokens == 144 and rows["bob"].hit_tokens == 0
    assert rows["bob"].asked_tokens == 2 * 144, "workers say for whom they ask"
    assert rows["alice"].bytes > 0 and rows["bob"].bytes > 0
