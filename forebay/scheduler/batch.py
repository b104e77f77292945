"""Continuous batching with chunked prefill.

    WAITING --admit--> LOADING --load ended--> RUNNING --> FINISHED
       ^        \\--no load wanted--------------^  |
       \\------------------preempt----------------/

A request with a cut runs while it is being loaded, as long as there is something before the load for it to compute;
else it is LOADING, until its load has ended or isn't worth waiting for. It isn't preempted meanwhile.

Four invariants, and why they hold:

I1  Who holds blocks never waits behind one that holds none: a plan serves RUNNING requests first, and
    admits nobody in a step in which one of them could not go on.
I2  Admission reserves all that the known tokens need, so a prefill never runs out of blocks halfway. Only
    the growth of decoding may preempt, and then the last in rank goes: the first always gets on.
I3  A load that ended goes to the ready set; nobody scans the queue for it.
I4  A load that failed is ready like any other, only with more to compute.

Nobody starves: who is first in rank among all gets on in every step that has the blocks, and ranks never change, so
everybody is first some day (see `Limits.ageing_s` for how late that can be).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Hashable

from forebay.scheduler.memory import Growth, Memory
from forebay.scheduler.plan import Limits, Plan
from forebay.scheduler.request import Request, RequestState
from forebay.scheduler.waiting import WaitingQueue


class BatchScheduler:
    """Decides who runs. Owned by one thread; pure but for what it asks of `memory` and `clock` (seconds)."""

    def __init__(self, limits: Limits, memory: Memory, clock: Callable[[], float]) -> None:
        self.limits = limits
        self._clock = clock
        self.preemptions = 0
        self._memory = memory
        self._waiting = WaitingQueue(limits.waiting)
        self._loading: dict[Hashable, Request] = {}
        self._cut: dict[Hashable, Request] = {}
        self._ready: list[Request] = []
        self._running: list[Request] = []
        self._submitted = 0

    # --- what happens to requests ----------------------------------------------------------------------

    def submit(self, request: Request, waited_s: float = 0.0) -> None:
        """Queue a new request, which has waited so long elsewhere. Raises QueueFull. Its key must not be in use."""
        assert request.state is RequestState.WAITING and self.find(request.key) is None, request.key
        request.order = self._submitted
        request.standing = self._clock() - waited_s + request.priority * self.limits.ageing_s
        self._waiting.push(request)
        self._submitted += 1

    def load_opened(self, key: Hashable) -> None:
        """There is something for `key` to compute while it is being loaded. Does nothing unless it is LOADING."""
        request = self._loading.get(key)
        if request is not None and request.state is RequestState.LOADING:
            self._cut[key] = self._loading.pop(key)
            self._ready.append(request)

    def load_ended(self, key: Hashable) -> Request | None:
        """The load of `key` ended, well or not, and `computed` says how far it got. Returns the request, or
        None if it was cancelled or has finished meanwhile; its blocks are then released."""
        request = self._cut.pop(key, None)
        if request is not None:
            request.loading = False
            return request
        request = self._loading.pop(key)
        request.loading = False
        if request.state is RequestState.FINISHED:
            self._memory.release(request)
            return None
        self._ready.append(request)
        return request

    def finish(self, request: Request) -> None:
        """A running request is done. If it is still being loaded, its blocks stay until that has ended."""
        (self._ready if request in self._ready else self._running).remove(request)
        request.state = RequestState.FINISHED
        if request.loading:
            self._loading[request.key] = self._cut.pop(request.key)
        else:
            self._memory.release(request)

    def cancel(self, key: Hashable) -> Request | None:
        """Stop a request, wherever it is. None if nobody has this key. The blocks of one that is LOADING
        stay until its load has ended: somebody is writing them."""
        request = self._waiting.remove(key)
        if request is not None:
            request.state = RequestState.FINISHED
            return request
        request = self._loading.get(key)
        if request is not None:
            if request.state is RequestState.FINISHED:
                return None
            request.state = RequestState.FINISHED
            return request
        request = next((r for r in (*self._running, *self._ready) if r.key == key), None)
        if request is not None:
            self.finish(request)
        return request

    def find(self, key: Hashable) -> Request | None:
        """The request with this key, unless it is finished and gone."""
        if key in self._loading:
            return self._loading[key]
        held = next((r for r in (*self._running, *self._ready) if r.key == key), None)
        return held or self._waiting.find(key)

    # --- the plan --------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """The next step. Mutates states and blocks; every work in it must then be fed."""
        plan = Plan(self.limits.batch_tokens, self.limits.fresh_tokens)
        plan.started += self._start_ready()
        # Snapshots: a preemption takes requests out of the list while it is walked.
        for request in [r for r in self._running if r.remaining == 1]:
            self._schedule(request, plan)
        for request in [r for r in self._running if r.remaining > 1]:
            self._schedule(request, plan)
        if not plan.blocked and not plan.preempted:
            self._admit(plan)
        assert 0 <= plan.budget <= self.limits.batch_tokens
        return plan

    def _start_ready(self) -> list[Request]:
        ready, self._ready = self._ready, []
        for request in ready:
            self._run(request)
        return ready

    def _run(self, request: Request) -> None:
        request.state = RequestState.RUNNING
        bisect.insort(self._running, request, key=lambda r: r.rank)

    def _schedule(self, request: Request, plan: Plan) -> None:
        if request.state is not RequestState.RUNNING or plan.budget == 0:
            return
        count = min(request.remaining, plan.budget, self.limits.prefill_tokens or plan.budget)
        count = min(count, request.step_tokens or count)
        if request.cut:
            count = self._memory.claim(request, count)
            if count == 0:
                self._park(request)
                return
        if request.fresh:
            count = min(count, plan.fresh_budget)
        if count == 0:
            plan.blocked = True
        elif self._make_room(request, request.computed + count, plan):
            plan.add(request, count)

    def _park(self, request: Request) -> None:
        """There is nothing to do for it before its load gets on."""
        assert request.loading, request.key
        self._running.remove(request)
        request.state = RequestState.LOADING
        self._loading[request.key] = self._cut.pop(request.key)

    def _make_room(self, request: Request, upto: int, plan: Plan) -> bool:
        """Get blocks, by preemption if need be. False: `request` sits this step out."""
        while True:
            growth = self._memory.grow(request, upto)
            if growth is Growth.READY:
                return True
            if growth is Growth.PARKED:  # what it needs is promised: newcomers take nothing from it
                return False
            victim = None if growth is Growth.DRAINING else self._victim(request, plan)
            if victim is None:
                plan.draining |= growth is Growth.DRAINING
                plan.blocked = True
                return False
            self._preempt(victim, plan)
            if victim is request:
                return False

    def _victim(self, request: Request, plan: Plan) -> Request | None:
        """The last in rank of those that run and aren't in this plan; maybe `request` itself, unless it is the
        only one: then its blocks are with requests that are being loaded, which ends."""
        settled = [r for r in self._running if not r.loading]
        candidates = [r for r in settled if not plan.includes(r)]
        last = candidates[-1] if candidates else None
        return None if last is request and len(settled) == 1 else last

    def put_off(self, key: Hashable) -> Request | None:
        """A running request can't go on as it is: it lets go of everything, and waits to be computed anew. None: nobody
        runs with this key."""
        held = next((r for r in (*self._running, *self._ready) if r.key == key), None)
        if held is None or held.loading:
            return None
        if held in self._ready:
            self._ready.remove(held)
            self._run(held)
        self._let_go(held)
        return held

    def _preempt(self, victim: Request, plan: Plan) -> None:
        self._let_go(victim)
        plan.preempted.append(victim)

    def _let_go(self, victim: Request) -> None:
        self._running.remove(victim)
        victim.state = RequestState.WAITING
        self._memory.release(victim)
        victim.computed = 0
        self._waiting.put_back(victim)
        self.preemptions += 1

    def _admit(self, plan: Plan) -> None:
        while (request := self._waiting.head()) is not None and self.holding < self.limits.running:
            # One block stays for each that decodes, lest the newcomer be preempted at once.
            admission = self._memory.admit(request, leave=len(self._running))
            if admission is None:
                return
            self._waiting.pop()
            if admission.load:
                request.state, request.loading = RequestState.LOADING, True
                self._loading[request.key] = request
                plan.loads.append(request)
            else:
                self._run(request)
                plan.started.append(request)
                self._schedule(request, plan)

    # --- gauges ----------------------------------------------------------------------------------------

    @property
    def holding(self) -> int:
        """Requests that hold blocks."""
        return len(self._running) + len(self._ready) + len(self._loading)

    @property
    def running(self) -> int:
        return len(self._running) + len(self._ready)

    @property
    def loading(self) -> int:
        return len(self._loading)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def active(self) -> list[Request]:
        """Running requests, by rank, then those whose load has just ended."""
        return [*self._running, *self._ready]
