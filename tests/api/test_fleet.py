"""Several workers behind one front end: who gets a call, and who goes on with it when its worker can't."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.kvstore.identity import pack_tokens, unpack_tokens
from forebay.workers.api.fleet import DEATHS_MAX, SLACK_CALLS
from forebay.workers.protocol import (
    Drain,
    Finished,
    FromWorker,
    Generate,
    Outputs,
    PromptScores,
    Sampling,
    Started,
    TokenOut,
    TokenScore,
)
from tests.api.scripted import ScriptedWorker
from tests.api.serving import Front
from tests.api.test_failover import TEXT, Reader

AT = 10
"""Workers that hold stop after so many tokens of an answer."""


class Pair:
    """A front end with two workers."""

    def __init__(self, folder: Path, **more: object) -> None:
        names = ("a.sock", "b.sock")
        self.workers = [ScriptedWorker(folder / name, hold=AT) for name in names]
        self.front = Front(folder, sockets=names, workers=tuple(self.workers), **more)  # type: ignore[arg-type]

    def __enter__(self) -> Pair:
        self.front.__enter__()
        self.front.wait_until(lambda: all(link.connected for link in self.front.fleet.links))
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self.workers:
            self.front.run(worker.die())
        self.front.__exit__(*exc)

    def halted(self, **more: object) -> tuple[Reader, ScriptedWorker, ScriptedWorker]:
        """A stream in its middle, the worker that has it, and the other one, which would go on to the end."""
        reader = Reader(self.front, "|" + TEXT, **more)
        self.front.wait_until(lambda: len(reader.ids) == AT)
        holder = next(worker for worker in self.workers if worker.asked)
        other = next(worker for worker in self.workers if worker is not holder)
        other.hold = None
        return reader, holder, other


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with Pair(tmp_path) as pair:
        yield pair


def went_on(reader: Reader, other: ScriptedWorker) -> None:
    """The stream was ended by the other worker, each token was said once."""
    reader.done()
    assert reader.text == TEXT and reader.finish == "stop" and not reader.errors
    (ask,) = other.asked
    assert ask.attempt == 2 and list(unpack_tokens(ask.emitted)) == [ord(letter) + 2 for letter in TEXT[:AT]]


def test_prompts_that_begin_alike_go_to_one_worker_and_others_to_both(pair: Pair) -> None:
    for worker in pair.workers:
        worker.hold = None
    for number in range(4):
        pair.front.complete(f"{'same' * 20}{number}|x")
    assert sorted(len(worker.asked) for worker in pair.workers) == [0, 4]
    for number in range(20):
        pair.front.complete(f"{number} differs|x")
    assert all(len(worker.asked) > 1 for worker in pair.workers)


def test_a_worker_with_many_calls_more_is_not_asked_whatever_the_prompt(pair: Pair) -> None:
    readers = [Reader(pair.front, f"{'same' * 20}|{TEXT}") for _ in range(2 * SLACK_CALLS + 4)]
    pair.front.wait_until(lambda: all(len(reader.ids) == AT for reader in readers))
    counts = sorted(len(worker.asked) for worker in pair.workers)
    assert sum(counts) == len(readers) and counts[1] - counts[0] <= SLACK_CALLS + 1
    for worker in pair.workers:
        worker.hold = None
    for link in pair.front.fleet.links:  # who holds on is given up
        pair.front.run(_cut(link))
    for reader in readers:
        reader.done()
        assert reader.text == TEXT


async def _cut(link: object) -> None:
    link._writer.transport.abort()  # type: ignore[attr-defined]


def test_a_worker_that_is_asked_how_it_is_as_it_ends_is_asked_again_when_it_is_back(pair: Pair) -> None:
    worker, fleet = pair.workers[0], pair.front.fleet
    link = fleet.links[0]

    async def ask_until_it_is_gone() -> int:
        worker.hang_up()
        asked = 0
        while link.connected:  # its end is known to the loop before it is to the link
            fleet.refresh()
            asked += 1
            await asyncio.sleep(0)
        return asked

    assert pair.front.run(ask_until_it_is_gone()) > 2
    worker.store = "lost"
    pair.front.wait_until(lambda: link.connected and link.description is not None and link.description.store == "lost")
    worker.store = "connected"
    pair.front.wait_until(lambda: link.description is not None and link.description.store == "connected")


def dies(worker: ScriptedWorker, front: Front) -> None:
    front.run(worker.die())


def falls_silent(worker: ScriptedWorker, front: Front) -> None:
    worker.mute = True


def stands_still(worker: ScriptedWorker, front: Front) -> None:
    worker.stalled_s = 5.0


def drains(worker: ScriptedWorker, front: Front) -> None:
    front.run(_drain(worker))


async def _drain(worker: ScriptedWorker, on: bool = True) -> None:
    worker._take(Drain(on=on))


@pytest.mark.parametrize("happens", [dies, falls_silent, stands_still, drains])
def test_another_worker_goes_on(pair: Pair, happens: Callable[[ScriptedWorker, Front], None]) -> None:
    reader, holder, other = pair.halted()
    happens(holder, pair.front)
    went_on(reader, other)
    counters = pair.front.fleet.counters
    if happens is drains:
        assert (counters.moved, counters.resubmitted, len(holder.moved)) == (1, 0, 1)
    else:
        assert (counters.moved, counters.resubmitted) == (0, 1)
    assert counters.recomputed == len("|" + TEXT) + AT, "the scripted worker caches nothing"
    assert not any(link.calls for link in pair.front.fleet.links)


def test_late_output_of_a_worker_that_wakes_is_dropped_and_counted(pair: Pair) -> None:
    reader, holder, other = pair.halted()
    other.hold = AT + 5
    stands_still(holder, pair.front)
    pair.front.wait_until(lambda: len(reader.ids) == AT + 5)
    (ask,) = holder.asked

    async def wakes() -> None:
        holder.stalled_s = 0.0
        holder.say(Outputs(tokens=[TokenOut(ask.id, 1, AT + 5, ord("!") + 2)]))
        holder.say(Finished(id=ask.id, attempt=1, reason="stop"))
        holder.beat()

    pair.front.run(wakes())
    pair.front.wait_until(lambda: pair.front.fleet.counters.late == 3)  # and that it was cancelled
    assert ask.id in holder.cancelled, "it was told that nobody waits for it"
    holder.hold = None
    drains(other, pair.front)
    reader.done()
    assert reader.text == TEXT and reader.finish == "stop"


def test_a_stalled_worker_keeps_its_calls_while_there_is_nobody_else(tmp_path: Path) -> None:
    worker = ScriptedWorker(tmp_path / "worker.sock", hold=AT)
    with Front(tmp_path, worker=worker) as front:
        reader = Reader(front, "|" + TEXT)
        front.wait_until(lambda: len(reader.ids) == AT)
        stands_still(worker, front)
        front.wait_until(lambda: front.fleet.links[0].stalled)
        assert front.get("/health").status_code == 503 and front.get("/health").json()["status"] == "stalled"
        assert len(front.fleet.links[0].calls) == 1 and not worker.cancelled
        late = Reader(front, "|late")
        front.wait_until(lambda: len(front.fleet.calls) == 2)
        assert len(worker.asked) == 1, "what is new waits"
        worker.stalled_s = 0.0
        late.done()
        assert late.text == "late"
        front.replace_worker(ScriptedWorker(tmp_path / "worker.sock"))
        reader.done()
        assert reader.text == TEXT


def test_a_draining_worker_gets_nothing_new_and_undrained_it_does(pair: Pair) -> None:
    for worker in pair.workers:
        worker.hold = None
    drained, other = pair.workers
    drains(drained, pair.front)
    pair.front.wait_until(lambda: pair.front.fleet.links[0].draining)
    for number in range(10):
        assert pair.front.complete(f"{number}|x").status_code == 200
    assert not drained.asked and len(other.asked) == 10
    pair.front.run(_drain(drained, on=False))
    pair.front.wait_until(lambda: pair.front.fleet.links[0].able)
    for number in range(10):
        assert pair.front.complete(f"{number} again|x").status_code == 200
    assert drained.asked


def test_requests_stay_at_a_draining_worker_until_there_is_another_one(tmp_path: Path) -> None:
    with Pair(tmp_path) as pair:
        reader, holder, other = pair.halted()
        pair.front.run(other.die())
        pair.front.wait_until(lambda: not all(link.connected for link in pair.front.fleet.links))
        drains(holder, pair.front)
        pair.front.wait_until(lambda: any(link.draining for link in pair.front.fleet.links))
        assert not holder.moved
        at = pair.workers.index(other)
        pair.workers[at] = ScriptedWorker(other.path)
        pair.front.run(pair.workers[at].start())
        went_on(reader, pair.workers[at])
        assert len(holder.moved) == 1


def test_who_finds_one_worker_full_gets_the_other_and_429_only_from_both(pair: Pair) -> None:
    for worker in pair.workers:
        worker.hold, worker.refuse = None, "busy"
    assert pair.front.complete("|x").status_code == 429
    assert all(len(worker.asked) == 1 for worker in pair.workers)
    pair.workers[0].refuse = ""
    for number in range(6):
        assert pair.front.complete(f"{number}|x").status_code == 200


def test_a_request_that_ends_its_workers_is_not_offered_for_ever(tmp_path: Path) -> None:
    with Front(tmp_path, worker=ScriptedWorker(tmp_path / "worker.sock", silent=True)) as front:
        reader = Reader(front, "|" + TEXT)
        for _ in range(DEATHS_MAX):
            assert front.worker is not None
            front.wait_until(lambda: front.worker is not None and bool(front.worker.asked))
            front.replace_worker(ScriptedWorker(front.worker.path, silent=True))
        reader.done()
        assert reader.status == 503 and front.fleet.counters.resubmitted == DEATHS_MAX - 1
        assert not front.fleet.calls


def test_neither_is_one_whose_workers_die_after_they_have_begun_it(tmp_path: Path) -> None:
    """What ends them may come late in a long prompt. Only what a later worker finds stored is a sign of progress."""
    with Front(tmp_path, worker=ScriptedWorker(tmp_path / "worker.sock", hold=0)) as front:
        reader = Reader(front, "x" * 100 + "|" + TEXT)
        died = 0
        while reader.is_alive() and died < 2 * DEATHS_MAX:
            front.wait_until(lambda: not reader.is_alive() or bool(front.worker and front.worker.begun))
            front.replace_worker(ScriptedWorker(tmp_path / "worker.sock", hold=0))
            died += 1
            reader.join(0.1)
        reader.done()
        assert reader.status == 503 and died == DEATHS_MAX
        assert not front.fleet.calls


def test_who_once_had_no_room_is_asked_again_when_the_other_one_dies(pair: Pair) -> None:
    first, full, other = pair.halted()
    full.refuse, other.silent = "busy", True
    second = Reader(pair.front, "|" + TEXT)
    pair.front.wait_until(lambda: len(other.asked) == 1)
    full.refuse, full.hold = "", None
    dies(other, pair.front)
    second.done()
    assert second.text == TEXT and second.finish == "stop"
    dies(full, pair.front)  # it still has the first one
    pair.workers[pair.workers.index(full)] = replaced = ScriptedWorker(full.path)
    pair.front.run(replaced.start())
    first.done()
    assert first.text == TEXT


def test_choices_of_one_prompt_stay_together(pair: Pair) -> None:
    for worker in pair.workers:
        worker.hold = None
    assert pair.front.complete("x" * 100 + "|abc", n=4).status_code == 200
    assert sorted(len(worker.asked) for worker in pair.workers) == [0, 4]


@pytest.mark.parametrize("other", [{"model": "other"}, {"weights": b"v" * 32}])
def test_a_worker_of_another_model_or_other_weights_gets_nothing(pair: Pair, other: dict[str, object]) -> None:
    for worker in pair.workers:
        worker.hold = None
    pair.front.run(pair.workers[1].die())
    pair.front.wait_until(lambda: not pair.front.fleet.links[1].connected)
    pair.workers[1] = ScriptedWorker(pair.workers[1].path, **other)  # type: ignore[arg-type]
    pair.front.run(pair.workers[1].start())
    pair.front.wait_until(lambda: pair.front.fleet.links[1].misfit)
    for number in range(6):
        assert pair.front.complete(f"{number}|x").status_code == 200
    assert not pair.workers[1].asked
    assert pair.front.get("/health").json()["workers"]["b"]["state"] == "misfit"


def test_an_answer_does_not_go_on_with_other_weights(tmp_path: Path) -> None:
    with Front(tmp_path, worker=ScriptedWorker(tmp_path / "worker.sock", hold=AT)) as front:
        reader = Reader(front, "|" + TEXT)
        front.wait_until(lambda: len(reader.ids) == AT)
        front.replace_worker(ScriptedWorker(tmp_path / "worker.sock", weights=b"v" * 32))
        reader.done()
        assert reader.text == TEXT[:AT] and "other weights" in reader.errors[0]["message"]
        assert front.complete("|x").status_code == 200, "the next ones are answered by the new ones"


def test_when_all_have_other_weights_all_get_calls_again(pair: Pair) -> None:
    for number in (1, 0):
        pair.front.run(pair.workers[number].die())
        pair.front.wait_until(lambda: not pair.front.fleet.links[number].connected)  # noqa: B023 - called at once
        pair.workers[number] = ScriptedWorker(pair.workers[number].path, weights=b"v" * 32)
        pair.front.run(pair.workers[number].start())
        pair.front.wait_until(lambda: pair.front.fleet.links[number].connected)  # noqa: B023
    assert all(link.able for link in pair.front.fleet.links)


def test_health_and_metrics_tell_workers_apart(pair: Pair) -> None:
    told = pair.front.get("/health").json()
    assert set(told["workers"]) == {"a", "b"} and told["workers"]["a"]["state"] == "ok"
    text = pair.front.get("/metrics").text
    for line in ('forebay_worker_cached_host{worker="a"} 7.0', 'forebay_link_connects{worker="b"} 1.0'):
        assert line in text.splitlines(), line


def no_such_token(ask: Generate) -> FromWorker:
    return Outputs(tokens=[TokenOut(ask.id, ask.attempt, 0, 1 << 20)])


def one_token_too_many(ask: Generate) -> FromWorker:
    first = len(ask.emitted) // 4
    return Outputs(tokens=[TokenOut(ask.id, ask.attempt, first + n, ord("z") + 2) for n in range(101)])


def more_cached_than_there_is(ask: Generate) -> FromWorker:
    return Started(id=ask.id, attempt=ask.attempt, cached_tokens=len(ask.prompt), cached={"host": len(ask.prompt)})


def less_than_nothing_cached(ask: Generate) -> FromWorker:
    return Started(id=ask.id, attempt=ask.attempt, cached_tokens=0, cached={"host": 16, "fs": -16})


def scores_of_no_token(ask: Generate) -> FromWorker:
    return PromptScores(id=ask.id, attempt=ask.attempt, start=len(ask.prompt), scores=[TokenScore(-1.0, 1)])


def moved_by_itself(ask: Generate) -> FromWorker:
    return Finished(id=ask.id, attempt=ask.attempt, reason="moved")


LIES = [no_such_token, more_cached_than_there_is, less_than_nothing_cached, scores_of_no_token, moved_by_itself]


@pytest.mark.parametrize("lie", LIES)
def test_a_worker_that_says_what_cannot_be_loses_its_calls_to_another(
    pair: Pair, lie: Callable[[Generate], FromWorker]
) -> None:
    reader, liar, other = pair.halted()

    async def speak() -> None:
        (ask,) = liar.asked
        liar.say(lie(ask))

    pair.front.run(speak())
    went_on(reader, other)


def test_a_worker_that_never_stops_talking_is_not_listened_to_for_ever(tmp_path: Path) -> None:
    worker = ScriptedWorker(tmp_path / "worker.sock", silent=True)
    worker.on_ask = lambda ask: worker.say(one_token_too_many(ask))
    with Front(tmp_path, worker=worker) as front:
        answer = front.complete("|x")
        assert answer.status_code in (200, 503) and not front.fleet.calls
        assert len(answer.text) < 2000


# --- prefill and decode apart ----------------------------------------------------------------------------


class Apart:
    """Two workers, of which one prefills. Calls are started at the fleet: who decides is tested elsewhere."""

    def __init__(self, folder: Path) -> None:
        self.decode, self.prefill = ScriptedWorker(folder / "decode.sock"), ScriptedWorker(folder / "prefill.sock")
        workers = (self.decode, self.prefill)
        self.front = Front(folder, sockets=("decode.sock",), prefill=(folder / "prefill.sock",), workers=workers)

    def __enter__(self) -> Apart:
        self.front.__enter__()
        self.front.wait_until(lambda: self.front.fleet.prefills)
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in (self.decode, self.prefill):
            self.front.run(worker.die())
        self.front.__exit__(*exc)

    def text(self, *, split: bool) -> str:
        """The answer to a prompt, as the fleet's caller hears it."""
        return self.front.run(self._text(split))

    async def _text(self, split: bool) -> str:
        prompt = pack_tokens([ord(letter) + 2 for letter in "|" + TEXT])
        call = self.front.fleet.start(prompt, Sampling(max_tokens=100), b"", "", split=split)
        ids = [event.token async for event in call.outputs() if isinstance(event, TokenOut)]
        return "".join(chr(token - 2) for token in ids[:-1])


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Apart]:
    with Apart(tmp_path) as apart:
        yield apart


def test_the_first_token_comes_from_one_worker_and_the_rest_from_the_other(apart: Apart) -> None:
    assert apart.text(split=True) == TEXT
    (first,), (second,) = apart.prefill.asked, apart.decode.asked
    assert first.hand_over and not first.emitted
    assert not second.hand_over and len(second.emitted) == 4 and second.attempt == 2


def test_what_is_not_split_is_decoded_where_it_is_prefilled(apart: Apart) -> None:
    assert apart.text(split=False) == TEXT
    assert not apart.prefill.asked and len(apart.decode.asked) == 1


@pytest.mark.parametrize("dead", ["prefill", "decode"])
def test_a_dead_side_is_done_without(apart: Apart, dead: str) -> None:
    apart.front.run(getattr(apart, dead).die())
    apart.front.wait_until(lambda: not apart.front.fleet.prefills)
    assert apart.text(split=True) == TEXT
    alive = apart.decode if dead == "prefill" else apart.prefill
    (ask,) = alive.asked
    assert not ask.hand_over


@pytest.mark.parametrize("dies_at", ["prefill", "decode"])
def test_a_side_that_dies_in_the_middle_is_survived(apart: Apart, dies_at: str) -> None:
    victim: ScriptedWorker = getattr(apart, dies_at)
    victim.hold = 0 if dies_at == "prefill" else AT

    async def both() -> str:
        asking = asyncio.ensure_future(apart._text(True))
        await apart.front.until(lambda: bool(victim.asked))
        await asyncio.sleep(0.05)
        await victim.die()
        return await asking

    assert apart.front.run(both()) == TEXT
    assert apart.front.fleet.counters.resubmitted == 1
