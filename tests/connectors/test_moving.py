"""A rank with a real store: what is stored is loaded again, and whatever goes wrong is reported, never waited for."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.connectors.keys import RequestKeys
from forebay.connectors.link import StoreLink
from forebay.connectors.moving import Done, Mover
from forebay.connectors.orders import Load, Orders, Span
from forebay.connectors.questions import Answer, Question
from forebay.kvstore.client import StoreClient
from forebay.kvstore.geometry import GroupGeometry
from forebay.kvstore.identity import Namespace, encode_namespace, pack_tokens
from forebay.kvstore.layout import payload_bytes
from forebay.kvstore.layout.ownership import split_heads
from forebay.testing.cluster import Cluster, wait_for
from forebay.testing.standstill import pause, resume
from tests.connectors.test_copying import CHUNK, FULL, Engine, engine, fill

TOKENS = tuple(range(1000, 1000 + 2 * CHUNK))


def namespace(geometry: GroupGeometry = FULL) -> Namespace:
    return Namespace(weights=b"w" * 32, groups=(geometry,), chunk_tokens=CHUNK)


@dataclass
class Rank:
    """One rank of an engine, and its connection."""

    engine: Engine
    link: StoreLink
    mover: Mover
    namespace: Namespace

    def span(self, request: str, start: int, end: int, salt: bytes = b"") -> Span:
        keys = RequestKeys(self.namespace, salt, b"")
        parent = keys.parent(start, lambda first, last: TOKENS[first:last])
        packed = pack_tokens(TOKENS[start:end])
        size = next(iter(self.engine.caches.values())).shape[2]
        cuts = tuple(table[start // size : -(-end // size)] for table in self.engine.tables)
        return Span(request, "", start, end, keys.key(parent, packed), parent, packed, b"", (0,), cuts)

    def orders(self, **some: object) -> Orders:
        return replace(Orders(encode_namespace(self.namespace)), **some)  # type: ignore[arg-type]

    def step(self, orders: Orders) -> None:
        """One step of the engine. Its forward is as long as the store takes to answer."""
        self.mover.begin(orders)
        batch = self.mover._batch
        if batch is not None:
            assert batch.ready.wait(30)
        self.mover.end(idle=orders.idle)

    def done(self) -> Done:
        found = Done(set(), set(), set())

        def some() -> bool:
            done = self.mover.take_done()
            found.sent.update(done.sent)
            found.received.update(done.received)
            found.failed.update(done.failed)
            return bool(found.sent or found.received)

        wait_for("a report", some, 30)
        return found

    def settled(self) -> None:
        wait_for("an empty queue", lambda: self.mover.queued_bytes == 0, 30)

    def ask(self, limit: int = 2 * CHUNK, salt: bytes = b"") -> Answer | None:
        question = Question(RequestKeys(self.namespace, salt, b"").prefix(TOKENS, limit), "")
        self.link.ask(question, 1000)
        wait_for("an answer", lambda: question.answered, 30)
        return question.take()

    def load(self, answer: Answer, first: int = 0, **changes: object) -> Load:
        load = Load("r", answer.boot, first, answer.hit, answer.chunks, self.engine.tables)
        return replace(load, **changes)  # type: ignore[arg-type]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, tmp_path / "no-model", memory="64MiB")
    cluster.start_store()
    yield cluster
    cluster.stop()


@pytest.fixture
def ranks(cluster: Cluster) -> Iterator[list[Rank]]:
    """Ranks that are closed at the end; `rank` adds to them."""
    made: list[Rank] = []
    yield made
    for rank in made:
        rank.mover.close()


WINDOW = GroupGeometry("window", "window", (0, 1, 2), 4, 6, "float32", 20)


def rank(
    cluster: Cluster, ranks: list[Rank], *, seed: int = 0, place: int = 0, size: int = 1, queue_bytes: int = 1 << 30,
    block_tokens: int = 32, connected: bool = True, name: Namespace | None = None,
    geometry: GroupGeometry = FULL,
) -> Rank:  # fmt: skip
    one = engine(geometry, block_tokens=block_tokens, seed=seed, rank=place, ranks=size)
    link = StoreLink(cluster.store_address, name="test", group=b"g" * 16)
    mover = Mover(
        link, [geometry], [one.copier], writers=[size], writes=[split_heads(4, place, size).replica == 0],
        queue_bytes=queue_bytes, store_wait_s=0.05,
    )  # fmt: skip
    made = Rank(one, link, mover, name or namespace(geometry))
    ranks.append(made)
    link.start()
    link.use(made.namespace)
    if connected:
        wait_for("a connection", link.boot, 30)
    return made


def same(one: Engine, other: Engine, first: int, last: int) -> bool:
    """Have both engines the same rows for tokens [first, last)?"""
    for mine, theirs in zip(one.caches.values(), other.caches.values(), strict=True):
        for token in range(first, last):
            rows = []
            for cache, table in ((mine, one.tables[0]), (theirs, other.tables[0])):
                block, slot = divmod(token, cache.shape[2])
                rows.append(cache[table[block], :, slot])
            if not torch.equal(*rows):
                return False
    return True


def test_what_one_rank_stores_another_one_loads(cluster: Cluster, ranks: list[Rank]) -> None:
    writer, reader = rank(cluster, ranks), rank(cluster, ranks, seed=1, block_tokens=16)
    fill(writer.engine, range(2 * CHUNK))
    writer.step(writer.orders(spans=[writer.span("w", 0, CHUNK)]))
    writer.step(writer.orders(tails=[writer.span("w", CHUNK, CHUNK + 48)]))
    assert writer.done().sent == {"w"}
    writer.settled()
    answer = reader.ask()
    assert answer is not None and answer.hit == CHUNK + 48
    reader.step(reader.orders(loads=[reader.load(answer, 32)], idle=True))
    done = reader.done()
    assert done.received == {"r"} and not done.failed
    assert same(reader.engine, writer.engine, 32, CHUNK + 48)
    assert not any(cache[reader.engine.tables[0][:2],].any() for cache in reader.engine.caches.values())
    assert reader.mover.counters["loaded.host.bytes"] == payload_bytes(FULL, CHUNK + 48 - 32)
    reader.link.release(answer.boot, answer.lease)
    wait_for("released pins", lambda: cluster.store_values()["store.leases"] == 0, 30)


def test_ranks_write_a_chunk_together_and_it_appears_once(cluster: Cluster, ranks: list[Rank]) -> None:
    writers = [rank(cluster, ranks, seed=place, place=place, size=2) for place in range(2)]
    reader = rank(cluster, ranks, seed=5)
    for writer in writers:
        fill(writer.engine, range(CHUNK))
    writers[0].step(writers[0].orders(spans=[writers[0].span("w", 0, CHUNK)]))
    answer = reader.ask()
    assert answer is not None and answer.hit == 0, "half of it isn't a chunk"
    writers[1].step(writers[1].orders(spans=[writers[1].span("w", 0, CHUNK)]))
    for writer in writers:
        writer.settled()
    answer = reader.ask()
    assert answer is not None and answer.hit == CHUNK
    reader.step(reader.orders(loads=[reader.load(answer)]))
    assert not reader.done().failed
    whole = engine(FULL, block_tokens=32, seed=5)
    fill(whole, range(CHUNK))
    assert same(reader.engine, whole, 0, CHUNK)


@pytest.mark.parametrize("late", [(0,), (1,), (0, 1)])
def test_a_rank_that_is_told_its_place_late_touches_no_other_ranks_part(
    cluster: Cluster, ranks: list[Rank], late: tuple[int, ...]
) -> None:
    writers = [rank(cluster, ranks, seed=place, place=place, size=2) for place in range(2)]
    for writer in writers:
        fill(writer.engine, range(CHUNK))
    for place, writer in sorted(enumerate(writers), key=lambda item: item[0] in late):
        orders = writer.orders(spans=[writer.span("w", 0, CHUNK)])
        if place not in late:
            writer.step(orders)
            continue
        with writer.link.room_lock:  # as while a connection is made anew
            writer.mover.begin(orders)
            writer.mover.end(idle=False)
        assert writer.mover.counters["stores.late"] == 1
    for writer in writers:
        writer.settled()
    reader = rank(cluster, ranks, seed=5)
    answer = reader.ask()
    assert answer is not None and answer.hit == CHUNK
    reader.step(reader.orders(loads=[reader.load(answer)]))
    assert not reader.done().failed
    whole = engine(FULL, block_tokens=32, seed=5)
    fill(whole, range(CHUNK))
    assert same(reader.engine, whole, 0, CHUNK)


def test_a_damaged_chunk_is_a_failed_load_and_is_not_served_again(cluster: Cluster, ranks: list[Rank]) -> None:
    one = rank(cluster, ranks)
    fill(one.engine, range(CHUNK))
    one.step(one.orders(spans=[one.span("w", 0, CHUNK)]))
    one.settled()
    answer = one.ask()
    assert answer is not None
    one.link.client.payload(answer.chunks[0])[70] ^= 1
    one.step(one.orders(loads=[one.load(answer)]))
    assert one.done().failed == {"r"} and one.mover.counters["loads.corrupt"] == 1
    one.link.release(answer.boot, answer.lease)
    again = one.ask()
    assert again is not None
    if again.hit:  # the good copy in the files, if it had got there
        assert again.from_tier == {"fs": CHUNK}
        one.step(one.orders(loads=[one.load(again)]))
        assert not one.done().failed


def test_what_is_no_longer_pinned_and_was_given_to_another_chunk_is_a_failed_load(
    cluster: Cluster, ranks: list[Rank]
) -> None:
    """A rank that is so late that the lease has ended: the slot's generation tells."""
    one = rank(cluster, ranks)
    fill(one.engine, range(2 * CHUNK))
    one.step(one.orders(spans=[one.span("w", 0, CHUNK)]))
    one.settled()
    answer = one.ask()
    assert answer is not None and answer.hit == CHUNK
    one.link.release(answer.boot, answer.lease)
    with StoreClient(cluster.store_address) as client:
        client.clear()
        for number in range(4):  # until it has the slot
            one.step(one.orders(spans=[one.span("w", 0, CHUNK, b"salt %d" % number)]))
            one.settled()
        kept = {row.key for row in client.list_chunks().rows}
    assert len(kept) == 4 and answer.chunks[0].key not in kept
    one.step(one.orders(loads=[one.load(answer)]))
    assert one.done().failed == {"r"} and one.mover.counters["loaded.host.chunks"] == 0


def test_orders_that_can_not_be_begun_are_refused_and_answered_once(
    cluster: Cluster, ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine ends if it hears of a request twice, and waits for ever if it doesn't hear of it at all."""
    one = rank(cluster, ranks)
    load = Load("r", one.link.boot(), 0, CHUNK, (), one.engine.tables)
    orders = one.orders(loads=[load], tails=[one.span("t", 0, 48)], spans=[one.span("w", 0, CHUNK)])
    calls: list[int] = []

    def broken(geometry: GroupGeometry, tokens: int) -> int:
        calls.append(tokens)
        if len(calls) == 2:
            raise OverflowError("too many tokens")
        return payload_bytes(geometry, tokens)

    monkeypatch.setattr("forebay.connectors.moving.payload_bytes", broken)
    with pytest.raises(OverflowError):
        one.mover.begin(orders)
    assert one.mover.loading == one.mover.sending == 0
    one.mover.refuse(orders)
    assert one.mover.take_done() == Done({"t"}, {"r"}, {"r"})


def test_a_copy_that_fails_leaves_nothing_in_the_queue_nor_reserved(
    cluster: Cluster, ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rank(cluster, ranks)

    def broken(*arguments: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(one.engine.copier, "store", broken)
    with pytest.raises(RuntimeError):
        one.step(one.orders(spans=[one.span("w", 0, CHUNK), one.span("w", CHUNK, 2 * CHUNK)]))
    one.settled()
    wait_for("nothing reserved", lambda: cluster.store_values()["host.reserved_bytes"] == 0, 30)


def test_tails_are_read_behind_what_the_engines_own_thread_has_started(
    cluster: Cluster, ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an accelerator each thread has a stream of its own, and tails are copied on another one."""
    one = rank(cluster, ranks)
    seen: list[tuple[str, int]] = []
    store = one.engine.copier.store
    monkeypatch.setattr(one.engine.copier, "follow_engine", lambda: seen.append(("engine", threading.get_ident())))

    def storing(*arguments: Any) -> Any:
        seen.append(("store", threading.get_ident()))
        return store(*arguments)

    monkeypatch.setattr(one.engine.copier, "store", storing)
    one.step(one.orders(tails=[one.span("t", 0, 48)]))
    assert one.done().sent == {"t"}
    assert [what for what, _ in seen] == ["engine", "store"]
    assert seen[0][1] == threading.get_ident() != seen[1][1]


def test_a_failed_load_is_not_reported_while_a_part_of_it_still_writes(
    cluster: Cluster, ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine gives the blocks to others as soon as it hears of it."""
    one = rank(cluster, ranks)
    fill(one.engine, range(2 * CHUNK))
    one.step(one.orders(spans=[one.span("w", 0, CHUNK), one.span("w", CHUNK, 2 * CHUNK)]))
    one.settled()
    answer = one.ask()
    assert answer is not None and len(answer.chunks) == 2
    writing, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def loading(payload: memoryview, start: int, *rest: object) -> None:
        if start == 0:
            assert writing.wait(30)
            raise LookupError("no block")
        writing.set()
        go_on.wait(30)
        ended.set()

    monkeypatch.setattr(one.engine.copier, "load", loading)
    one.step(one.orders(loads=[one.load(answer)]))
    assert writing.wait(30)
    time.sleep(0.1)  # the other half fails meanwhile
    early = one.mover.take_done()
    go_on.set()
    assert early == Done(set(), set(), set())
    assert one.done().failed == {"r"} and ended.is_set()


def test_a_load_into_a_hole_fails_and_is_reported(cluster: Cluster, ranks: list[Rank]) -> None:
    one = rank(cluster, ranks)
    fill(one.engine, range(CHUNK))
    one.step(one.orders(spans=[one.span("w", 0, CHUNK)]))
    one.settled()
    answer = one.ask()
    assert answer is not None
    one.step(one.orders(loads=[one.load(answer, tables=((0, 0),))]))
    assert one.done().failed == {"r"}


@pytest.mark.parametrize("block_tokens", [16, 32, 64])
def test_every_block_that_the_engine_has_of_a_window_is_filled_whole(
    cluster: Cluster, ranks: list[Rank], block_tokens: int
) -> None:
    """It serves a block to other requests, which need more of it than this one's window."""
    writer = rank(cluster, ranks, geometry=WINDOW)
    reader = rank(cluster, ranks, seed=1, block_tokens=block_tokens, geometry=WINDOW)
    fill(writer.engine, range(2 * CHUNK))
    writer.step(writer.orders(spans=[writer.span("w", 0, CHUNK), writer.span("w", CHUNK, 2 * CHUNK)]))
    writer.settled()
    answer = reader.ask(limit=CHUNK + 48)
    assert answer is not None and answer.hit == CHUNK + 48
    skipped = (answer.hit - 20 + 1) // block_tokens  # as the engine counts: those are holes
    tables = ((0,) * skipped + reader.engine.tables[0][skipped:],)
    reader.step(reader.orders(loads=[reader.load(answer, tables=tables)], idle=True))
    done = reader.done()
    assert done.received == {"r"} and not done.failed
    assert same(reader.engine, writer.engine, skipped * block_tokens, answer.hit)


def test_a_load_that_would_leave_a_block_half_empty_fails(cluster: Cluster, ranks: list[Rank]) -> None:
    writer, reader = rank(cluster, ranks, geometry=WINDOW), rank(cluster, ranks, seed=1, geometry=WINDOW)
    fill(writer.engine, range(2 * CHUNK))
    writer.step(writer.orders(spans=[writer.span("w", 0, CHUNK), writer.span("w", CHUNK, 2 * CHUNK)]))
    writer.settled()
    answer = reader.ask()
    assert answer is not None and [chunk.start for chunk in answer.chunks] == [CHUNK]
    # The engine has blocks from the very beginning, and only the window's chunk is pinned.
    reader.step(reader.orders(loads=[reader.load(answer)], idle=True))
    assert reader.done().failed == {"r"}


def test_other_weights_dtypes_and_salts_miss(cluster: Cluster, ranks: list[Rank]) -> None:
    one = rank(cluster, ranks)
    fill(one.engine, range(CHUNK))
    one.step(one.orders(spans=[one.span("w", 0, CHUNK, b"salt")]))
    one.settled()
    changed = [replace_namespace(weights=b"v" * 32), replace_namespace(compute="float16"), replace_namespace(epoch=1)]
    others = [(rank(cluster, ranks, name=name), b"salt") for name in changed]
    hits = [answer.hit for other, salt in [*others, (one, b""), (one, b"pepper"), (one, b"salt")]
            if (answer := other.ask(salt=salt)) is not None]  # fmt: skip
    assert hits == [0, 0, 0, 0, 0, CHUNK]


def replace_namespace(**changes: object) -> Namespace:
    base = namespace()
    fields = {name: getattr(base, name) for name in base.__struct_fields__}
    return Namespace(**{**fields, **changes})


def test_without_a_store_everything_is_answered_with_nothing_done(cluster: Cluster, ranks: list[Rank]) -> None:
    one = rank(cluster, ranks)
    fill(one.engine, range(CHUNK))
    one.step(one.orders(spans=[one.span("w", 0, CHUNK)]))
    one.settled()
    answer = one.ask()
    assert answer is not None
    cluster.processes["store"].end(signal.SIGKILL)
    wait_for("the loss", lambda: not one.link.boot(), 30)
    assert one.ask() is None
    load, tail = one.load(answer), one.span("t", 0, 48)
    one.step(one.orders(loads=[load], tails=[tail], spans=[one.span("w", CHUNK, 2 * CHUNK)]))
    wait_for("all reports", lambda: one.mover.loading + one.mover.sending == 0, 30)
    done = one.done()
    assert (done.sent, done.received, done.failed) == ({"t"}, {"r"}, {"r"})
    one.settled()
    assert one.mover.counters["stores.lost"] == 2


def test_after_the_store_has_come_back_old_promises_fail_and_new_ones_hold(cluster: Cluster, ranks: list[Rank]) -> None:
    one = rank(cluster, ranks)
    fill(one.engine, range(CHUNK))
    one.step(one.orders(spans=[one.span("w", 0, CHUNK)]))
    one.settled()
    answer = one.ask()
    assert answer is not None
    cluster.processes["store"].end(signal.SIGKILL)
    cluster.start_store()
    wait_for("the new store", lambda: one.link.boot() not in (b"", answer.boot), 30)
    one.step(one.orders(loads=[one.load(answer)]))
    assert one.done().failed == {"r"}
    again = one.ask()
    assert again is not None and again.hit == CHUNK, "the pool has outlived the daemon"
    one.step(one.orders(loads=[one.load(again)]))
    assert not one.done().failed


def test_what_a_slow_store_has_no_place_for_yet_is_copied_aside_and_stored_later(
    cluster: Cluster, ranks: list[Rank]
) -> None:
    one, other = rank(cluster, ranks), rank(cluster, ranks, seed=4)
    fill(one.engine, range(CHUNK))
    pid = cluster.processes["store"].pid
    pause(pid)
    try:
        one.mover.begin(one.orders(spans=[one.span("w", 0, CHUNK)]))
        one.mover.end(idle=False)
        assert one.mover.counters["stores.late"] == 1
        for cache in one.engine.caches.values():
            cache.zero_()  # the engine has given the blocks to somebody else
    finally:
        resume(pid)
    one.settled()
    answer = other.ask()
    assert answer is not None and answer.hit == CHUNK
    other.step(other.orders(loads=[other.load(answer)]))
    assert not other.done().failed
    whole = engine(FULL, block_tokens=32, seed=4)
    fill(whole, range(CHUNK))
    assert same(other.engine, whole, 0, CHUNK)
    assert cluster.store_values()["host.reserved_bytes"] == 0


def test_a_store_that_hangs_for_good_is_given_up_and_comes_back(cluster: Cluster, ranks: list[Rank]) -> None:
    one = rank(cluster, ranks)
    one.link.hung_s = 0.2
    fill(one.engine, range(CHUNK))
    pid = cluster.processes["store"].pid
    pause(pid)
    try:
        one.mover.begin(one.orders(spans=[one.span("w", 0, CHUNK)]))
        one.mover.end(idle=False)
        one.settled()
        assert not one.link.boot()
    finally:
        resume(pid)
    wait_for("a new connection", one.link.boot, 30)
    one.link.hung_s = 30
    one.step(one.orders(spans=[one.span("w", 0, CHUNK)]))
    one.settled()
    answer = one.ask()
    assert answer is not None and answer.hit == CHUNK


def test_a_store_that_hangs_before_it_knows_a_namespace_is_given_up_and_comes_back(
    cluster: Cluster, ranks: list[Rank]
) -> None:
    one = rank(cluster, ranks)
    one.link.hung_s = 0.2
    pid = cluster.processes["store"].pid
    pause(pid)
    try:
        one.link.use(replace_namespace(epoch=1))
        wait_for("the loss", lambda: one.link.losses, 30)
        assert not one.link.boot()
    finally:
        resume(pid)
    one.link.hung_s = 30
    wait_for("a new connection", one.link.boot, 30)


def test_whatever_goes_wrong_on_its_thread_a_link_goes_on(cluster: Cluster, ranks: list[Rank]) -> None:
    told: list[bytes] = []

    def introduced(namespace: bytes, stats: object) -> None:
        told.append(namespace)
        if len(told) == 2:
            raise KeyError("a store says what nobody expects")

    link = StoreLink(cluster.store_address, name="test", group=b"g" * 16, introduced=introduced)
    link.start()
    try:
        link.use(namespace())
        wait_for("a connection", link.boot, 30)
        link.use(replace_namespace(epoch=1))
        wait_for("another one", lambda: link.connects == 2 and link.boot(), 30)
        assert link.losses == 1
    finally:
        link.stop()


def test_what_is_asked_of_a_link_that_has_ended_is_answered(cluster: Cluster, ranks: list[Rank]) -> None:
    one = rank(cluster, ranks)
    one.link.stop()
    assert not one.link.boot() and one.ask() is None


def test_the_queue_is_bounded_in_bytes(cluster: Cluster, ranks: list[Rank]) -> None:
    one = rank(cluster, ranks, queue_bytes=payload_bytes(FULL, CHUNK) + 1)
    fill(one.engine, range(2 * CHUNK))
    one.step(one.orders(spans=[one.span("w", 0, CHUNK), one.span("w", CHUNK, 2 * CHUNK)]))
    assert one.mover.gauges()["queue.bytes"] <= payload_bytes(FULL, CHUNK) + 1
    assert one.mover.counters["stores.dropped"] == 1
    one.settled()
    answer = one.ask()
    assert answer is not None and answer.hit == CHUNK


def test_a_question_that_nobody_waits_for_leaves_no_pin(cluster: Cluster, ranks: list[Rank]) -> None:
    one = rank(cluster, ranks)
    fill(one.engine, range(CHUNK))
    one.step(one.orders(spans=[one.span("w", 0, CHUNK)]))
    one.settled()
    question = Question(RequestKeys(one.namespace, b"", b"").prefix(TOKENS, CHUNK), "")
    one.link.ask(question, 1000)
    late = question.drop()
    if late is not None:
        one.link.release(late.boot, late.lease)
    assert one.ask() is not None  # asked later, so the first has been answered
    with StoreClient(cluster.store_address) as client:
        wait_for("one lease", lambda: client.stats().values["store.leases"] == 1, 30)


def test_closing_waits_for_what_is_under_way(cluster: Cluster, ranks: list[Rank]) -> None:
    one, other = rank(cluster, ranks), rank(cluster, ranks, seed=3)
    fill(one.engine, range(CHUNK))
    one.step(one.orders(spans=[one.span("w", 0, CHUNK)]))
    ranks.remove(one)
    one.mover.close()
    answer = other.ask()
    assert answer is not None and answer.hit == CHUNK
    with suppress(RuntimeError):
        one.link.release(answer.boot, answer.lease)  # of no effect, and no error


