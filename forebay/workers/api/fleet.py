"""All calls of one front end, and the workers that run them: who gets which, and who goes on when one is gone.

    waits for a worker --offered--> at a worker --Finished--> over
         ^                              |
         +--- its worker died, stopped, stands still, drains, was full, or has done its part (prefill)

A call's whole state is its prompt and the ids that were emitted, so any worker of the same model can go on with it.
Attempts are numbered: what is said of an older one is dropped. A call that finds no worker for `give_up_s` ends.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from forebay.errors import ProtocolError
from forebay.kvstore.identity import decode_namespace
from forebay.workers.api.calls import Call
from forebay.workers.api.errors import busy, unavailable
from forebay.workers.api.link import Role, WorkerLink
from forebay.workers.protocol import (
    BUSY,
    LEAVING,
    Cancel,
    Description,
    Finished,
    FinishReason,
    FromWorker,
    Outputs,
    PromptScores,
    Sampling,
    Started,
    WorkerStats,
)

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1
OFFER_AGAIN_S = 0.2
LOOK_S = 0.1
DEATHS_MAX = 4
"""A call that has lost so many workers in a row, none of which got further with it, is taken for what ends them. One
fewer than how often in a row `forebay serve` starts a worker again that ends early."""
SLACK_CALLS = 2
"""A prompt's own worker is taken unless it has so many calls more than another one."""


@dataclass
class FleetCounters:
    """What happened so far. `resubmitted` went on after a loss, `moved` on request (a drain, a prefill that is done);
    `recomputed` are tokens that second and later attempts computed although an earlier one had, `recomputed_most` the
    most of one attempt; `late` messages were of attempts that are over. `resume_most_s` is the longest time from
    the notice of a loss to the next token."""

    resubmitted: int = 0
    moved: int = 0
    refused: int = 0
    given_up: int = 0
    late: int = 0
    recomputed: int = 0
    recomputed_most: int = 0
    split: int = 0
    resume_most_s: float = 0.0


class Fleet:
    """Lives on the front end's loop. `description` is what all workers have in common."""

    def __init__(
        self, workers: Sequence[Path], max_calls: int, give_up_s: float = 120.0, prefill: Sequence[Path] = ()
    ) -> None:
        self.links = [WorkerLink(path, self) for path in workers]
        self.links += [WorkerLink(path, self, Role.PREFILL) for path in prefill]
        self.max_calls = max_calls
        self.give_up_s = give_up_s
        self.calls: dict[str, Call] = {}
        self.counters = FleetCounters()
        self.description: Description | None = None
        self._alone_since = 0.0
        self._met = asyncio.Event()

    @property
    def connected(self) -> bool:
        """Is any worker there that serves our model?"""
        return any(link.connected and not link.misfit for link in self.links)

    @property
    def prefills(self) -> bool:
        """Is there a worker that prefills for the others, and one that would decode?"""
        return all(any(link.able and link.role is role for link in self.links) for role in Role)

    async def run(self) -> None:
        """Keep all connections, and give up calls that wait too long; for ever."""
        self._alone_since = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            for link in self.links:
                tasks.create_task(link.run())
            while True:
                await asyncio.sleep(LOOK_S)
                self._give_up(asyncio.get_running_loop().time())

    async def met_any(self, timeout_s: float) -> bool:
        """Wait until a worker has said what it is; False if none has in time."""
        try:
            await asyncio.wait_for(self._met.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    # --- what clients want -------------------------------------------------------------------------------

    def start(
        self, prompt: bytes, sampling: Sampling, salt: bytes, tenant: str, *,
        name: str = "", held: bool = False, retain_s: float = 0.0, settled: bool = False,
        emitted: Sequence[int] = (), priority: int = 0, beside: Call | None = None, split: bool = False,
    ) -> Call:  # fmt: skip
        """Begin a generation. Raises ApiError 503 if there never was a worker, 429 at the cap.

        A `held` one has its place, but is sent only by `release`. For `settled` see `Generate`. `emitted` are tokens
        that it goes on from. Its id begins with `name`, by which logs know it. It goes where `beside` is, if that can
        be; a `split` one is prefilled by a worker that is for that.
        """
        if self.description is None:
            raise unavailable("no worker is ready yet; try again in a moment")
        if len(self.calls) >= self.max_calls:
            self.counters.refused += 1
            raise busy(f"{len(self.calls)} generations are under way already; try again later", RETRY_AFTER_S)
        # A name may be the client's and come twice: what is told of one must never be taken for the other's.
        unique = f"{name}.{secrets.token_hex(6)}" if name else secrets.token_hex(12)
        call = Call(unique, prompt, sampling, salt, tenant, held, retain_s, settled, priority, beside, split)
        if emitted:
            call.emitted.extend(emitted)
            call.begun.set()
        self.calls[call.id] = call
        self._offer(call)
        return call

    def release(self, call: Call) -> None:
        """Send a held call."""
        if call.held:
            call.held = False
            self._offer(call)

    def stop(self, call: Call) -> None:
        """The client has gone, or has all that it wants (a stop string). Idempotent."""
        if self.calls.pop(call.id, None) is not None:
            call.ended = True
            self._take_from(call)

    def end_all(self, why: str) -> None:
        """End every call; their clients are told why."""
        for call in list(self.calls.values()):
            self._take_from(call)
            self._end(call, call.attempt, "cancelled", why)

    # --- who gets it -------------------------------------------------------------------------------------

    def _offer(self, call: Call) -> None:
        """Send a call to a worker, if it has none and there is one; else it waits."""
        if call.held or call.ended or call.link is not None or call.id not in self.calls:
            return
        link = self._choose(call)
        if link is None:
            return
        hand_over = call.split and not call.emitted and link.role is Role.PREFILL and self.prefills
        self.counters.split += hand_over
        call.link = call.last = link
        link.calls[call.id] = call
        link.send(call.request(hand_over=hand_over))

    def _choose(self, call: Call) -> WorkerLink | None:
        able = [link for link in self.links if link.able and link not in call.full]
        wanted = Role.PREFILL if call.split and not call.emitted else Role.DECODE
        # Where one kind is all gone, the other one does its work.
        able = [link for link in able if link.role is wanted] or able
        if not able:
            return None
        if call.beside is not None and call.beside.last in able:
            return call.beside.last
        least = min(len(link.calls) for link in able)
        near = [link for link in able if len(link.calls) <= least + SLACK_CALLS]
        return max(near, key=lambda link: xxhash.xxh3_64_intdigest(link.name.encode() + call.home))

    def _take_from(self, call: Call) -> None:
        """Its worker, if it has one, is not to go on with it."""
        link, call.link, call.moving = call.link, None, False
        if link is not None:
            link.calls.pop(call.id, None)
            if link.connected:
                link.send(Cancel(id=call.id, attempt=call.attempt))

    def _offer_all(self, calls: Iterable[Call]) -> None:
        for call in list(calls):
            self._offer(call)

    def _let_go(self, link: WorkerLink) -> None:
        """Move calls away from a worker that stands still or drains, as soon as another one could go on."""
        for call in list(link.calls.values()):
            if not any(other.able for other in self.links if other is not link):
                return
            if link.stalled:
                self._take_from(call)
                self._lost_worker(call)
                self._go_on(call)
            elif link.draining and not call.moving:
                call.moving = True
                link.send(Cancel(id=call.id, attempt=call.attempt, move=True))

    def _lost_worker(self, call: Call) -> None:
        now = asyncio.get_running_loop().time()
        call.alone_since, call.lost_at, call.fresh, call.deaths = now, call.lost_at or now, False, call.deaths + 1
        if call.deaths < DEATHS_MAX:
            self.counters.resubmitted += 1
            return
        self.counters.given_up += 1
        why = f"no worker is risked any more: {call.deaths} in a row have ended or hung with this request"
        self._end(call, call.attempt, "error", why)

    def _give_up(self, now: float) -> None:
        for call in list(self.calls.values()):
            if call.link is not None or call.held:
                call.alone_since = None
                continue
            since = call.alone_since = call.alone_since or now
            if not self.connected:  # who comes when nobody has been there for long doesn't wait as long again
                since = min(since, self._alone_since)
            if now - since >= self.give_up_s:
                self.counters.given_up += 1
                self._end(call, call.attempt, "error", f"no worker came back within {self.give_up_s:.0f} s")

    # --- what links tell ---------------------------------------------------------------------------------

    def met(self, link: WorkerLink, description: Description) -> None:
        """`Hears`: a worker is there. It gets what waits, and what stands at others that can't go on."""
        known, model = self.description, _model(description)
        if known is not None and _model(known) != model:
            if any(other.connected and not other.misfit for other in self.links if other is not link):
                log.error("the worker on %s serves %s, the others %s%s: it gets no calls", link.path, description.model,
                          known.model, " of other weights" if known.model == description.model else "")  # fmt: skip
                link.misfit = True
                return
            for call in list(self.calls.values()):
                came = description.model + (" with other weights" if known.model == description.model else "")
                why = f"no worker of {known.model} is left: {came} came instead"
                self._end(call, call.attempt, "error", why)
        self._agree()
        for other in self.links:
            if other.misfit and other.description is not None:  # now it may be the others that have changed
                other.misfit = _model(other.description) != model
        self._met.set()
        self._offer_all(self.calls.values())
        for other in self.links:
            self._let_go(other)

    def lost(self, link: WorkerLink) -> None:
        """`Hears`: a worker is gone; its calls go on elsewhere."""
        calls, link.calls = list(link.calls.values()), {}
        if not self.connected:
            self._alone_since = asyncio.get_running_loop().time()
        for call in calls:
            call.link, call.moving = None, False
            self._lost_worker(call)
        self._agree()
        for call in calls:
            self._go_on(call)

    def changed(self, link: WorkerLink) -> None:
        """`Hears`: a worker stands still or drains, or no longer does."""
        if link.able:
            self._offer_all(self.calls.values())
            for other in self.links:
                self._let_go(other)
        else:
            self._let_go(link)

    def heard(self, link: WorkerLink, message: FromWorker) -> None:
        """`Hears`: something was said of calls. Raises ProtocolError if tokens are missing, and for what can't be."""
        match message:
            case Outputs():
                for out in message.tokens:
                    if self.description is not None and out.token >= self.description.vocab_size:
                        raise ProtocolError(f"token {out.token} came, which the model doesn't have")
                    if (call := self._current(link, out.id, out.attempt)) is not None and call.token(out):
                        self._resumed(call)
            case Started():
                if (call := self._current(link, message.id, message.attempt)) is not None:
                    call.began(message.attempt, message.cached)
                    call.full.clear()
                    if message.attempt > 1:
                        # The last token is computed in any case: nobody had come to it.
                        again = max(0, call.known - 1 - message.cached_tokens)
                        self.counters.recomputed += again
                        self.counters.recomputed_most = max(self.counters.recomputed_most, again)
            case PromptScores():
                if (call := self._current(link, message.id, message.attempt)) is not None:
                    call.scored(message.attempt, message.start, message.scores)
            case Finished():
                if (call := self._current(link, message.id, message.attempt)) is not None:
                    self._finished(link, call, message)

    def _current(self, link: WorkerLink, id: str, attempt: int) -> Call | None:
        """The call that this is said of, if it is said of its present attempt."""
        call = self.calls.get(id)
        if call is None:  # it has ended
            return None
        if call.link is not link or call.attempt != attempt:
            self.counters.late += 1
            return None
        return call

    def _resumed(self, call: Call) -> None:
        if call.lost_at is not None:
            took = asyncio.get_running_loop().time() - call.lost_at
            self.counters.resume_most_s = max(self.counters.resume_most_s, took)
            call.lost_at = None

    def _finished(self, link: WorkerLink, call: Call, message: Finished) -> None:
        if message.reason == "moved" and not (call.moving or call.handed):
            raise ProtocolError(f"{call.id} was moved, which nobody had asked for")
        link.calls.pop(call.id, None)
        call.link, call.moving = None, False
        if message.reason == "moved":
            self.counters.moved += 1
            call.fresh = False
            self._go_on(call)
        elif message.reason == "cancelled" or message.error == LEAVING:
            self._go_on(call)  # the worker is leaving; another one goes on
        elif message.error == BUSY:
            self._turned_away(link, call, message)
        else:
            self._end(call, message.attempt, message.reason, message.error)

    def _go_on(self, call: Call) -> None:
        """Its worker has it no more. Those that once had no room for it are asked anew: there may be nobody else."""
        call.full.clear()
        self._offer(call)

    def _turned_away(self, link: WorkerLink, call: Call, message: Finished) -> None:
        """It was full: another one is asked; where all are, who had begun is offered again, and who is new ends."""
        call.full.add(link)
        if self._choose(call) is not None:
            self._offer(call)
            return
        call.full.clear()
        loop = asyncio.get_running_loop()
        call.turned_away_at = call.turned_away_at or loop.time()
        if (call.fresh and not call.emitted) or loop.time() - call.turned_away_at > self.give_up_s:
            self._end(call, message.attempt, message.reason, message.error)
        else:
            loop.call_later(OFFER_AGAIN_S, self._offer, call)

    def _end(self, call: Call, attempt: int, reason: FinishReason, error: str = "") -> None:
        if call.end(attempt, reason, error):
            self.calls.pop(call.id, None)
            if call.link is not None:
                call.link.calls.pop(call.id, None)

    def _agree(self) -> None:
        """What may be asked of any of those who are there; while nobody is, what was last known."""
        there = [link.description for link in self.links if link.connected and not link.misfit]
        found = [description for description in there if description is not None]
        if found:
            self.description = msgspec.structs.replace(
                found[0], max_context=min(one.max_context for one in found), guided=all(one.guided for one in found)
            )

    # --- how they are ------------------------------------------------------------------------------------

    async def stats(self) -> dict[str, WorkerStats]:
        """Present figures by worker; the last known ones of those that don't answer in time."""
        answers = await asyncio.gather(*(link.stats() for link in self.links))
        return {link.name: stats for link, stats in zip(self.links, answers, strict=True) if stats is not None}

    def refresh(self) -> None:
        """Ask all for new descriptions: their views of the store change."""
        for link in self.links:
            link.refresh()

    @property
    def store(self) -> str:
        """`connected` if any worker has its store; else what the first one says."""
        states = [one.description.store for one in self.links if one.connected and one.description is not None]
        return "connected" if "connected" in states else states[0] if states else "unknown"


def _model(description: Description) -> tuple[object, ...]:
    """What decides the tokens of an answer. A name proves nothing: somebody may have replaced the weights behind it."""
    try:
        found = decode_namespace(description.namespace)
    except ValueError as error:
        raise ProtocolError(f"the worker's namespace can't be read: {error}") from error
    arithmetic = found.weights, found.epoch, found.compute, found.quantisation, found.positions
    return description.model, description.vocab_size, *arithmetic
