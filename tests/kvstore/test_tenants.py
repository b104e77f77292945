"""Tenants of a running store: what each may hold, and that none finds, lists or times another's chunks."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import pytest

from forebay.cli.tenants import inline
from forebay.errors import RequestRefused, StoreUnavailable
from forebay.kvstore.client import StoreClient
from forebay.kvstore.demand import Demand
from forebay.kvstore.extents import pool_path
from forebay.kvstore.header import granule_checksums
from forebay.kvstore.identity import GroupGeometry, Namespace, chunk_keys, pack_tokens, root_key, tenant_salt
from forebay.kvstore.lookup import Prompt, match, pin
from forebay.kvstore.protocol import Found, TenantRow, Written
from forebay.kvstore.tenancy import TenantRule
from tests.kvstore.support import CHUNK, SmallStore, namespace

SPEC = Namespace(b"weights", (GroupGeometry("full", "full", (0, 1), 2, 64, "float32"),), chunk_tokens=32)
SECRETS = {"alice": b"a" * 32, "bob": b"b" * 32}
WAIT_S = 60.0


class RunningStore:
    """`forebay store` with rules and a file tier."""

    def __init__(self, folder: Path, rules: dict[str, TenantRule], *more: str) -> None:
        self.socket = folder / "store.sock"
        self.command = [
            sys.executable, "-m", "forebay", "store", "--socket", str(self.socket), "--memory", "16MiB",
            "--extent", "2MiB", "--fs", str(folder / "files"), "--tenants", inline(rules), *more,
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pool(self) -> Path:
        return pool_path(Path("/dev/shm"), self.socket)

    def start(self) -> None:
        self.process = subprocess.Popen(self.command)
        self.until(lambda values: values["host.extents"] == 8)

    def until(self, true: object) -> None:
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            assert self.process is not None and self.process.poll() is None
            try:
                with StoreClient(str(self.socket), maps=False) as client:
                    if true(client.stats().values):  # type: ignore[operator]
                        return
            except StoreUnavailable:
                pass
            time.sleep(0.02)
        raise AssertionError("the store never came so far")

    def stop(self, number: int = signal.SIGTERM) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(WAIT_S)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunningStore]:
    running = RunningStore(tmp_path, {"alice": TenantRule(guarantee=4 << 20), "bob": TenantRule(quota=8 << 20)})
    running.start()
    yield running
    if running.process is not None and running.process.poll() is None:
        running.stop()
        assert not running.pool.exists()


def prompt_of(tenant: str, tokens: list[int]) -> Prompt:
    salt = tenant_salt(SECRETS[tenant], "") if tenant else b""
    root, packed = root_key(SPEC.id, salt), pack_tokens(tokens)
    return Prompt(SPEC.id, SPEC, root, packed, chunk_keys(root, packed, SPEC.chunk_tokens), len(tokens))


def put(client: StoreClient, tenant: str, tokens: list[int]) -> int:
    prompt = prompt_of(tenant, tokens)
    chunks = [prompt.chunk(0, position) for position in range(prompt.positions)]
    written = []
    for chunk, slot in zip(chunks, client.reserve(SPEC.id, tenant, chunks).slots, strict=True):
        if slot.status == "reserved":
            room = client.room(slot, SPEC.groups[0].granule_bytes * (len(chunk.tokens) // 64))
            room[:] = bytes([chunk.key[0]]) * len(room)
            written.append(Written(slot.reservation, granule_checksums(room, SPEC.groups[0].granule_bytes)))
    return client.commit(written).committed


def get(client: StoreClient, tenant: str, tokens: list[int], deadline_ms: int = 0) -> Found:
    asked = prompt_of(tenant, tokens)
    found = client.lookup(
        SPEC.id, asked.root, asked.tokens, asked.keys, limit=len(tokens), deadline_ms=deadline_ms, tenant=tenant
    )
    if found.lease:
        client.release([found.lease])
    return found


def prompts(seed: int, count: int) -> Iterator[list[int]]:
    for number in range(count):
        yield [seed * 100_000 + number] * 64


def rows(client: StoreClient) -> dict[str, TenantRow]:
    return {row.tenant: row for row in client.stats().tenants}


# --- what each may hold ---------------------------------------------------------------------------------


def test_quotas_and_guarantees_hold_in_a_running_store_and_after_a_crash(store: RunningStore) -> None:
    with StoreClient(str(store.socket)) as client:
        client.register(SPEC)
        for tokens in prompts(1, 40):
            put(client, "alice", tokens)
        for tokens in prompts(2, 120):
            put(client, "bob", tokens)
        for tokens in prompts(3, 200):
            put(client, "", tokens)
        told = rows(client)
        assert told["bob"].bytes <= 8 << 20 and told["bob"].evicted > told["bob"].suffered, "bob evicts bob"
        assert told["alice"].bytes >= (4 << 20) - (1 << 17) and told["alice"].suffered > 0
        assert told[""].caused > 0 and told["alice"].guarantee == 4 << 20
        assert get(client, "alice", next(iter(prompts(1, 1)))).hit in (0, 64)
    store.stop(signal.SIGKILL)
    store.start()
    with StoreClient(str(store.socket)) as client:
        again = rows(client)
        assert {name: row.bytes for name, row in again.items()} == {name: row.bytes for name, row in told.items()}
        client.register(SPEC)
        for tokens in prompts(4, 200):
            put(client, "", tokens)
        assert rows(client)["alice"].bytes >= (4 << 20) - (1 << 17), "the guarantee outlives the daemon"


def test_what_a_tier_brings_is_at_the_expense_of_who_asks(store: RunningStore) -> None:
    tokens = next(prompts(7, 1))
    with StoreClient(str(store.socket)) as client:
        client.register(SPEC)
        assert put(client, "bob", tokens) == 2
        store.until(lambda values: values["tier.fs.chunks"] >= 2)
        for more in prompts(8, 400):
            put(client, "alice", more)
        if get(client, "bob", tokens).hit == 64:
            pytest.fail("400 prompts of 130 KiB don't fit into 16 MiB")
        assert get(client, "bob", tokens, deadline_ms=5000).hit == 64
        assert rows(client)["bob"].bytes > 0


# --- what each may see ----------------------------------------------------------------------------------


def counted(client: StoreClient) -> dict[str, float]:
    """All counters that tell of work. How much memory and how many samples there are says nothing about it."""
    still = ("process.", "curves.", "store.connections", "tier.fs.process.", "tier.fs.host.")
    return {name: value for name, value in client.stats().values.items() if not name.startswith(still)}


def test_a_foreign_prompt_costs_the_store_exactly_what_an_unknown_one_does(store: RunningStore) -> None:
    known, never = [5] * 96, [6] * 96
    with StoreClient(str(store.socket)) as client:
        client.register(SPEC)
        put(client, "alice", known)
        store.until(lambda values: values["tier.fs.chunks"] >= 3 and not values["tier.fs.stores_running"])
        assert get(client, "alice", known).hit == 96
        work = []
        for tokens in (known, never, known, never):
            before = counted(client)
            found = get(client, "bob", tokens, deadline_ms=1000)
            assert (found.hit, found.chunks, found.from_tier, found.lease) == (0, [], {}, 0)
            after = counted(client)
            work.append({name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name)})
        assert work[0] == work[1] == work[2] == work[3], "lookups, tiers asked, bytes loaded, hits: all the same"
        assert work[0]["store.lookups"] == 1 and work[0]["tier.fs.asked"] == 3


def test_a_foreign_prompt_runs_through_the_same_code_as_an_unknown_one() -> None:
    """Every function call of a lookup, one by one: what takes the same steps takes the same time."""
    store = SmallStore(extents=4)
    known, never = [1] * (3 * CHUNK), [2] * (3 * CHUNK)
    alice, bob = tenant_salt(SECRETS["alice"], ""), tenant_salt(SECRETS["bob"], "")
    store.store_prompt(known, alice)
    assert pin(store.core, store.client, match(store.core, store.prompt(known, alice))).hit == 3 * CHUNK
    store.store_prompt([3] * CHUNK, bob)

    def steps(tokens: list[int]) -> list[str]:
        asked, seen = store.prompt(tokens, bob), []

        def note(frame: FrameType, event: str, argument: object) -> None:
            name = frame.f_code.co_name if event in ("call", "return") else getattr(argument, "__qualname__", "?")
            seen.append(f"{event} {name}")

        sys.setprofile(note)
        try:
            pinned = pin(store.core, store.client, match(store.core, asked))
        finally:
            sys.setprofile(None)
        assert pinned.hit == 0
        return seen

    steps(never)  # whatever happens only the first time
    assert steps(known) == steps(never) and len(steps(known)) > 20


def test_salts_keep_requests_of_one_tenant_apart_too() -> None:
    store = SmallStore(extents=4)
    tokens = list(range(2 * CHUNK))
    store.store_prompt(tokens, tenant_salt(SECRETS["alice"], "one"))
    for salt, hit in (("one", 2 * CHUNK), ("other", 0), ("", 0)):
        asked = store.prompt(tokens, tenant_salt(SECRETS["alice"], salt))
        assert pin(store.core, store.client, match(store.core, asked)).hit == hit


def test_a_view_of_a_tenant_lists_and_explains_nothing_of_others(store: RunningStore) -> None:
    tokens = [9] * 64
    with StoreClient(str(store.socket)) as client:
        client.register(SPEC)
        put(client, "alice", tokens)
        put(client, "bob", [8] * 32)
        asked = prompt_of("bob", tokens)
        everything = client.explain(SPEC.id, asked.root, asked.tokens)
        assert everything.reaches[0].reason == "salt", "whoever may use the store may see all of it"
        assert {row.tenant for row in client.list_chunks().rows} == {"alice", "bob"}
    with StoreClient(str(store.socket), tenant="bob") as view:
        assert {row.tenant for row in view.list_chunks().rows} == {"bob"}
        told = view.explain(SPEC.id, asked.root, asked.tokens)
        never = view.explain(SPEC.id, asked.root, pack_tokens([7] * 64))
        assert told.reaches == never.reaches and told.reaches[0].reason == "never seen"
        stats = view.stats()
        assert [row.tenant for row in stats.tenants] == ["bob"] and not stats.values and not stats.tiers
        assert "chunks" not in stats.namespaces[0]
        assert [t.tenant for t in view.what_if(1 << 30).tenants] in ([], ["bob"])


def test_a_view_can_do_nothing_but_look(store: RunningStore) -> None:
    with StoreClient(str(store.socket), tenant="bob") as view:
        for forbidden in (
            lambda: view.register(SPEC),
            view.clear,
            view.check,
            lambda: get(view, "bob", [1] * 32),
            lambda: view.reserve(SPEC.id, "bob", []),
        ):
            with pytest.raises(RequestRefused, match="a view of one tenant takes no"):
                forbidden()


# --- namespaces -----------------------------------------------------------------------------------------


def test_a_thousand_namespaces_pass_through_a_running_store(store: RunningStore) -> None:
    specs = [Namespace(n.to_bytes(4, "big"), SPEC.groups, chunk_tokens=32) for n in range(1000)]
    with StoreClient(str(store.socket)) as client:
        client.register(SPEC)
        put(client, "alice", [4] * 32)
    for start in range(0, 1000, 50):
        with StoreClient(str(store.socket)) as client:
            for spec in specs[start : start + 50]:
                client.register(spec)
    with StoreClient(str(store.socket)) as client:
        stats = client.stats()
        known = {row["id"] for row in stats.namespaces}
        assert len(known) == 256 == len(list((store.pool / "namespaces").iterdir()))
        assert SPEC.id.hex() in known, "it holds a chunk"
        assert {spec.id.hex() for spec in specs[-255:]} <= known, "the oldest idle ones were forgotten"
        assert stats.values["store.namespaces_forgotten"] == 1001 - 256
        assert stats.values["tier.fs.namespaces"] <= 1024


def test_namespaces_in_use_are_not_forgotten(store: RunningStore) -> None:
    specs = [Namespace(n.to_bytes(4, "big"), SPEC.groups, chunk_tokens=32) for n in range(257)]
    with ExitStack() as clients:
        for number, spec in enumerate(specs[:256]):
            if number % 64 == 0:  # as many as one may use
                client = clients.enter_context(StoreClient(str(store.socket)))
            client.register(spec)
        client = clients.enter_context(StoreClient(str(store.socket)))
        with pytest.raises(RequestRefused, match="256 namespaces are registered already, and all have chunks or users"):
            client.register(specs[256])
    with StoreClient(str(store.socket)) as client:
        client.register(specs[256])


def test_a_namespace_is_idle_once_its_chunks_and_users_are_gone() -> None:
    store = SmallStore(extents=2)
    use, ns = store.core.use, store.namespace_id
    entry = store.store(store.chunks([1] * CHUNK)[0])
    assert entry is not None and use.of(ns).chunks == 1 and use.of(ns).payload == entry.payload_length
    assert use.forget_oldest_idle() is None
    store.core.retire(entry, "cleared")
    store.core.register(store.namespace, client=store.client)
    assert use.forget_oldest_idle() is None, "a client is using it"
    store.core.drop_client(store.client, writing=False)
    assert use.forget_oldest_idle() == ns


# --- demand ---------------------------------------------------------------------------------------------


def test_lookups_are_counted_by_tenant_and_fed_to_their_curves() -> None:
    store = SmallStore(extents=2)
    demand = Demand(store.core)
    asked = store.prompt(list(range(2 * CHUNK + 16)))
    demand.looked_up("alice", asked, CHUNK)
    counts = store.core.place.accounts.of("alice").counts
    assert (counts.asked_tokens, counts.hit_tokens) == (2 * CHUNK + 16, CHUNK)
    curve = demand.curves.of("alice")
    position = sum(entry.slot_bytes for entry in filter(None, (store.store(c) for c in store.chunks([7] * CHUNK))))
    assert curve.asked == 2 * position, "two whole chunks, in both groups; the tail is another one each turn"
    assert curve.measured == CHUNK / (2 * CHUNK + 16)


def test_the_past_fades_after_a_while_and_not_before() -> None:
    store = SmallStore(extents=2)
    demand = Demand(store.core)
    demand.looked_up("a", store.prompt([1] * CHUNK), 0)
    asked = demand.curves.of("a").asked
    for now in (0.0, 7000.0):
        demand.fade(now)
    assert demand.curves.of("a").asked == asked
    demand.fade(7300.0)
    assert demand.curves.of("a").asked == asked / 2


def test_streams_of_forgotten_namespaces_make_room(tmp_path: Path) -> None:
    from forebay.events.streams import NamespaceStreams

    async def scenario() -> None:
        streams = NamespaceStreams(f"ipc://{tmp_path}/events", owner="test", max_streams=2)
        try:
            first = streams.open(b"a" * 32, "a").endpoint
            streams.open(b"b" * 32, "b")
            streams.end(b"a" * 32)
            assert streams.open(b"c" * 32, "c").endpoint == first, "its place is taken by the next"
            assert len(streams) == 2
        finally:
            streams.close()

    asyncio.run(scenario())


def test_another_namespace_of_the_same_weights_is_another_account_of_chunks() -> None:
    store = SmallStore(extents=4)
    other = store.core.register(namespace(epoch=1))
    store.store_prompt([1] * CHUNK)
    assert store.core.use.of(store.namespace_id).chunks == 2 and store.core.use.of(other).chunks == 0
