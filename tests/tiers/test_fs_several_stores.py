"""Whole stores, each in its own processes, on one directory: one is killed in the middle, the others go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.tiers.fs.fsck import check_directory
from tests.kvstore.support import CHUNK
from tests.kvstore.test_daemon_tiers import TierStore
from tests.tiers.fs_several import used

QUOTA = 12 << 20
PROMPTS = [[1000 * number + i for i in range(1, 4 * CHUNK + 1)] for number in range(40)]


def tier(folder: Path, name: str, more: str = "") -> str:
    return (
        f'[tiers.files]\nkind = "fs"\ndirectory = "{folder / "shared"}"\nstate_dir = "{folder / name}"\n'
        f'quota_bytes = {QUOTA}\ntakeover_s = "300ms"\ndead_after_s = "3s"\n{more}\n'
    )


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[list[TierStore]]:
    made = []
    for name in ("a", "b", "c"):
        (tmp_path / f"run-{name}").mkdir()
        made.append(TierStore(tmp_path / f"run-{name}"))
    yield made
    for store in made:
        if store.process is not None and store.process.poll() is None:
            assert store.stop() == 0


def tier_process(store: TierStore) -> int:
    """The store's one child."""
    assert store.process is not None
    pid = store.process.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


@pytest.mark.parametrize("liveness", ["flock", "heartbeat"])
def test_a_store_that_is_killed_in_the_middle_costs_the_others_nothing(
    stores: list[TierStore], tmp_path: Path, liveness: str
) -> None:
    first, second, third = stores
    more = f'liveness = "{liveness}"'
    first.start(tier(tmp_path, "a", more))
    first.fill(PROMPTS[0])
    first.until(lambda v: v["tier.files.chunks"] >= 8)
    second.start(tier(tmp_path, "b", more))
    second.until(lambda v: v["tier.files.stores"] == 2)
    assert second.lookup(PROMPTS[0]).from_tier == {"files": len(PROMPTS[0])}, "every byte is compared"
    third.start(tier(tmp_path, "c", more))
    first.until(lambda v: v["tier.files.stores"] == 3)
    most = 0
    for number, prompt in enumerate(PROMPTS[1:19]):
        stores[number % 3].fill(prompt)
        most = max(most, used(tmp_path / "shared"))
    assert first.process is not None
    first.process.send_signal(signal.SIGKILL)
    first.process.wait(20)
    for number, prompt in enumerate(PROMPTS[19:]):
        stores[1 + number % 2].fill(prompt)
        most = max(most, used(tmp_path / "shared"))
    second.until(lambda v: v["tier.files.stores"] == 2)
    until = time.monotonic() + 60
    while not any(store.until(lambda v: True).get("tier.files.estates") for store in (second, third)):
        assert time.monotonic() < until, "nobody took over what the dead one left"
        most = max(most, used(tmp_path / "shared"))
    hits = 0
    for prompt in PROMPTS:
        hits += second.lookup(prompt).hit > 0
        third.lookup(prompt)
    assert hits > 10
    assert max(most, used(tmp_path / "shared")) <= QUOTA
    first.start(tier(tmp_path, "a", more))
    first.until(lambda v: v["tier.files.stores"] == 3)
    first.lookup(PROMPTS[-1])
    for store in stores:
        assert store.stop() == 0
    report = check_directory(tmp_path / "shared", repair=False)
    assert report.clean and report.leftovers == []


def test_a_tier_process_that_is_killed_finds_its_seat_again(stores: list[TierStore], tmp_path: Path) -> None:
    first, second, _ = stores
    first.start(tier(tmp_path, "a").replace("300ms", "60s"))
    second.start(tier(tmp_path, "b").replace("300ms", "60s"))
    second.until(lambda v: v["tier.files.stores"] == 2 and v["tier.files.bytes_quota"] > 4 << 20)
    second.fill(PROMPTS[0])
    second.until(lambda v: v["tier.files.chunks"] >= 8)
    pid = tier_process(second)
    os.kill(pid, signal.SIGKILL)
    values = second.until(lambda v: v.get("tier.files.seat") == 1 and v["tier.files.host.starts"] == 2)
    assert values["tier.files.chunks"] >= 8
    assert first.lookup(PROMPTS[0]).from_tier == {"files": len(PROMPTS[0])}
