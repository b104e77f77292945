"""A store with several tiers, its own and other people's, as its command takes them from a file."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forebay.errors import StoreError
from forebay.kvstore.client import StoreClient
from forebay.kvstore.extents import pool_path
from forebay.kvstore.identity import KEY_BYTES
from forebay.kvstore.protocol import Found
from tests.kvstore.running import Store, get, prompt_of, put
from tests.kvstore.support import CHUNK, namespace

ODD = "tests.tiers.odd_tiers:"
TOKENS = list(range(1, 4 * CHUNK + 1))
CHUNKS = 8


class TierStore(Store):
    """A store with the tiers of a TOML file."""

    def __init__(self, folder: Path, memory: str = "16MiB") -> None:
        super().__init__(folder)
        self.config = folder / "forebay.toml"
        self.memory = memory

    def start(self, tiers: str = "") -> None:
        self.config.write_text(tiers)
        arguments = ["--socket", str(self.socket), "--memory", self.memory, "--extent", "2MiB"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "forebay", "store", "--config", str(self.config), *arguments]
        )
        self.until(lambda values: True)

    def until(self, true: Callable[[dict[str, float]], bool], seconds: float = 60.0) -> dict[str, float]:
        """The first figures of which this is true."""
        until = time.monotonic() + seconds
        values: dict[str, float] = {}
        while time.monotonic() < until:
            assert self.process is not None and self.process.poll() is None, "the store has ended"
            try:
                with StoreClient(self.address, maps=False) as client:
                    values = client.stats().values
                    if true(values):
                        return values
            except StoreError:
                pass
            time.sleep(0.02)
        raise AssertionError(f"it did not come true: {values}")

    def fill(self, tokens: list[int]) -> None:
        with StoreClient(self.address) as client:
            client.register(namespace())
            put(client, namespace(), tokens)

    def lookup(self, tokens: list[int], deadline_ms: int = 5000) -> Found:
        """What it serves; every byte is compared."""
        spec, prompt = namespace(), prompt_of(namespace(), tokens)
        with StoreClient(self.address) as client:
            client.register(spec)
            found = client.lookup(
                spec.id, prompt.root, prompt.tokens, prompt.keys, limit=len(tokens), deadline_ms=deadline_ms
            )
            client.release([found.lease])
            assert get(client, spec, tokens).hit == found.hit
            return found

    def forget(self) -> None:
        """Start anew with nothing in memory."""
        assert self.stop() == 0


def fs(folder: Path, name: str, more: str = "") -> str:
    return f'[tiers.{name}]\nkind = "fs"\ndirectory = "{folder / name}"\nquota_bytes = "64MiB"\n{more}\n'


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TierStore]:
    running = TierStore(tmp_path)
    yield running
    if running.process is not None and running.process.poll() is None:
        assert running.stop() == 0
    assert not running.pool.exists()


def test_every_tier_gets_a_chunk_and_the_first_that_has_it_is_read(store: TierStore, tmp_path: Path) -> None:
    near, far = fs(tmp_path, "near"), fs(tmp_path, "far")
    store.start(near + far)
    store.fill(TOKENS)
    store.until(lambda v: v["tier.near.chunks"] == v["tier.far.chunks"] == CHUNKS)
    store.forget()
    store.start(near + far)
    assert store.lookup(TOKENS).from_tier == {"near": len(TOKENS)}


def test_one_prompt_comes_from_several_tiers_and_spreads_on(store: TierStore, tmp_path: Path) -> None:
    near, far = fs(tmp_path, "near"), fs(tmp_path, "far")
    store.start(near)
    store.fill(TOKENS[: 2 * CHUNK])
    store.until(lambda v: v["tier.near.chunks"] == 4)
    store.forget()
    store.start(far)
    store.fill(TOKENS)
    store.until(lambda v: v["tier.far.chunks"] == CHUNKS)
    store.forget()
    for path in (tmp_path / "far" / "chunks").rglob("*"):  # the front is in the near tier alone
        if path.is_file() and any(key in path.name for key in front_keys()):
            path.unlink()
    store.start(near + far)
    assert store.lookup(TOKENS).from_tier == {"near": 2 * CHUNK, "far": 2 * CHUNK}
    store.until(lambda v: v["tier.near.chunks"] == CHUNKS)


def front_keys() -> list[str]:
    """Hexadecimal keys of the chunks of the first two positions."""
    prompt = prompt_of(namespace(), TOKENS)
    return [prompt.key_at(end).hex() for end in (CHUNK, 2 * CHUNK)]


def test_lookups_that_want_the_same_chunks_at_once_share_their_loads(store: TierStore, tmp_path: Path) -> None:
    slow = 'fault_kind = "fs"\nfault_rates = "delay=1.0"'
    kind = '"forebay.testing.faults.tier:FaultyTier"'
    tiers = fs(tmp_path, "disk", slow).replace('"fs"', kind, 1)
    store.start(tiers)
    store.fill(TOKENS)
    store.until(lambda v: v["tier.disk.chunks"] == CHUNKS)
    store.forget()
    store.start(tiers)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(store.lookup, [TOKENS] * 4))
    assert {one.hit for one in found} == {len(TOKENS)}
    loads = store.until(lambda v: True)["tier.disk.loads_ok"]
    assert 0 < loads <= CHUNKS, "a window of tokens needs no chunks from before it, and none is loaded twice"


def test_a_tier_that_cannot_keep_its_word_costs_no_hit_that_another_can_serve(store: TierStore, tmp_path: Path) -> None:
    broken = f'[tiers.broken]\nkind = "{ODD}Broken"\n'
    store.start(broken + fs(tmp_path, "disk"))
    store.fill(TOKENS)
    store.until(lambda v: v["tier.broken.chunks"] == v["tier.disk.chunks"] == CHUNKS)
    evict_all(store)
    found = store.lookup(TOKENS)
    assert (found.hit, found.from_tier) == (len(TOKENS), {"disk": len(TOKENS)})
    values = store.until(lambda v: True)
    assert values["tier.broken.load_failed"] >= 4 and values["tier.disk.promoted"] >= 4


def evict_all(store: TierStore, wait_for: str = "") -> None:
    """Push everything out of memory by other prompts, without looking it up, which would keep it; no faster than the
    tier that is waited for takes it."""
    keys = prompt_of(namespace(), TOKENS).keys
    wanted = {keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)}
    for serial in range(200):
        store.fill([10_000 + serial] * (CHUNK * 64))
        store.until(lambda v: not v.get(f"tier.{wait_for}.stores_running"))
        with StoreClient(store.address) as client:
            page = client.list_chunks()
            rows = page.rows
            while page.cursor:
                page = client.list_chunks(cursor=page.cursor)
                rows += page.rows
        if not any(row.key in wanted for row in rows):
            return
    raise AssertionError("they were not evicted")


def test_a_second_hit_brings_a_chunk_to_the_tier_that_waits_for_it(store: TierStore, tmp_path: Path) -> None:
    store.start(fs(tmp_path, "disk", 'copy = "second-hit"'))
    store.fill(TOKENS)
    store.fill([7] * CHUNK)
    store.lookup(TOKENS)  # asked twice, since the bytes are compared by another lookup
    values = store.until(lambda v: v["tier.disk.stores_running"] == 0 and v["tier.disk.chunks"] > 0)
    with StoreClient(store.address) as client:
        rows = client.list_chunks().rows
    copied = {(row.start, row.group) for row in rows if "disk" in row.tiers}
    assert (0, 0) in copied and values["tier.disk.chunks"] < CHUNKS + 2, "what nobody asked for isn't there"


def test_what_is_evicted_goes_to_the_tier_before_and_comes_back_from_it(store: TierStore, tmp_path: Path) -> None:
    store.start(fs(tmp_path, "disk", 'copy = "evict"'))
    store.fill(TOKENS)
    assert store.until(lambda v: True)["tier.disk.chunks"] == 0
    evict_all(store, wait_for="disk")
    assert store.lookup(TOKENS).from_tier.get("disk", 0) > 0


def test_other_peoples_tiers_are_named_by_module_and_class(store: TierStore) -> None:
    store.start(f'[tiers.theirs]\nkind = "{ODD}Plain"\n')
    store.fill(TOKENS)
    store.until(lambda v: v["tier.theirs.chunks"] == CHUNKS)
    evict_all(store)
    assert store.lookup(TOKENS).from_tier == {"theirs": len(TOKENS)}


def test_a_tier_that_raises_is_switched_off_and_tried_again_while_the_others_go_on(
    store: TierStore, tmp_path: Path
) -> None:
    store.start(f'[tiers.raising]\nkind = "{ODD}Raising"\n' + fs(tmp_path, "disk"))
    for serial in range(20):
        store.fill([serial] * CHUNK)
    values = store.until(lambda v: v.get("tier.raising.host.deaths", 0) >= 1 and v["tier.disk.chunks"] == 40)
    store.until(lambda v: v.get("tier.raising.host.starts", 0) > values["tier.raising.host.deaths"])
    assert values["tier.raising.store_io"] > 0


def test_a_store_starts_without_a_tier_whose_server_is_away_and_takes_it_when_it_comes(
    store: TierStore, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    store.start(f'[tiers.absent]\nkind = "{ODD}Absent"\nthere = "{there}"\n')
    store.fill(TOKENS)
    assert store.lookup(TOKENS).hit == len(TOKENS)
    there.touch()
    store.until(lambda v: v.get("tier.absent.chunks", -1) == 0)
    store.fill([5] * CHUNK)
    store.until(lambda v: v["tier.absent.chunks"] == 2)


def test_a_tier_that_cannot_be_what_is_asked_for_keeps_the_store_from_starting(tmp_path: Path) -> None:
    config = tmp_path / "forebay.toml"
    config.write_text('[tiers.far]\nkind = "nowhere.module:Tier"\n')
    command = [sys.executable, "-m", "forebay", "store", "--config", str(config), "--socket", str(tmp_path / "s")]
    ended = subprocess.run(
        [*command, "--memory", "16MiB"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2 and "'far'" in ended.stderr and "nowhere.module" in ended.stderr


def test_a_store_that_a_tier_keeps_from_starting_leaves_no_pool(tmp_path: Path) -> None:
    config, socket = tmp_path / "forebay.toml", tmp_path / "s.sock"
    config.write_text(f'[tiers.taken]\nkind = "{ODD}Taken"\n')
    command = [sys.executable, "-m", "forebay", "store", "--config", str(config), "--socket", str(socket)]
    ended = subprocess.run([*command, "--memory", "16MiB"], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 4 and "has my directory" in ended.stderr
    assert not pool_path(Path("/dev/shm"), socket).exists() and not socket.exists()


# --- warming -----------------------------------------------------------------------------------------------


def test_keys_alone_warm_a_chain(store: TierStore, tmp_path: Path) -> None:
    disk = fs(tmp_path, "disk")
    store.start(disk)
    store.fill(TOKENS)
    store.until(lambda v: v["tier.disk.chunks"] == CHUNKS)
    store.forget()
    store.start(disk)
    prompt = prompt_of(namespace(), TOKENS)
    with StoreClient(store.address) as client:
        client.register(namespace())
        warmed = client.warm(namespace().id, prompt.root, prompt.keys, deadline_ms=5000)
        assert (warmed.hit, warmed.from_tier, warmed.pending) == (len(TOKENS), {"disk": len(TOKENS)}, False)
        again = client.warm(namespace().id, prompt.root, prompt.keys, deadline_ms=5000)
        assert (again.hit, again.from_tier) == (len(TOKENS), {})
        assert client.stats().values["store.leases"] == 0, "nothing stays pinned"
        assert get(client, namespace(), TOKENS).hit == len(TOKENS)


def test_the_command_warms_by_keys_and_says_what_came_from_where(store: TierStore, tmp_path: Path) -> None:
    disk = fs(tmp_path, "disk")
    store.start(disk)
    store.fill(TOKENS)
    store.until(lambda v: v["tier.disk.chunks"] == CHUNKS)
    store.forget()
    store.start(disk)
    with StoreClient(store.address) as client:
        client.register(namespace())
    prompt = prompt_of(namespace(), TOKENS)
    keys = ",".join(prompt.keys[at : at + KEY_BYTES].hex() for at in range(0, len(prompt.keys), KEY_BYTES))
    command = [sys.executable, "-m", "forebay", "warm", "--socket", str(store.socket)]
    told = subprocess.run([*command, "--keys", keys], capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 0, told.stderr
    assert told.stdout == "128 of 128 tokens are in memory, 128 of them from disk\n"
    more = subprocess.run([*command, "--token-ids", "1,2,3"], capture_output=True, text=True, timeout=60, check=False)
    assert (more.returncode, more.stdout) == (0, "0 of 0 tokens are in memory\n")
    wrong = subprocess.run([*command, "--keys", "abc"], capture_output=True, text=True, timeout=60, check=False)
    assert wrong.returncode == 2 and "--keys" in wrong.stderr
