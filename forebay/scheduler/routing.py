"""The router's mind: where a prompt goes, and what becomes of what was believed of it. Pure: time comes in.

    decide      the prompt's keys -> matches (real and predicted) -> reach -> estimate -> a policy's choice
    sent        it was dispatched: load and predictions count it from now on
    first_token, ended
                every request ends, once, whatever becomes of it
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from forebay.scheduler.cost import Estimate, estimate
from forebay.scheduler.fleet import Fleet
from forebay.scheduler.index import PrefixIndex
from forebay.scheduler.key_table import Keys
from forebay.scheduler.load import Load
from forebay.scheduler.policies import Policy, View
from forebay.scheduler.predicted import Predicted
from forebay.scheduler.prefix_keys import Tokens, prefix_keys, root_of
from forebay.scheduler.reach import Reach, reach_of

SESSIONS_MAX = 1 << 16
NO_KEYS: Keys = np.empty(0, np.uint64)
KNOWN_MAX = 8
"""Keys of one text are kept for so many block sizes, models, adapters and salts."""

KeysName: TypeAlias = tuple[int, int, int]
"""Block size, root, and what beside tokens makes the first block."""
KnownKeys: TypeAlias = dict[KeysName, Keys]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be routed. `extra` is what beside tokens makes its first block (see `extra_of`). Without `tokens`
    (nobody could tokenise it) nothing is known of it but its length.

    `known` are prefix keys that were computed of these tokens, `begun` those of whole blocks that they begin with; both
    may be shared with other prompts of the same text, and are no part of what it is."""

    model: str
    tokens: Tokens | None
    length: int
    extra: int = 0
    lora: str | None = None
    session: str | None = None
    known: KnownKeys = field(default_factory=dict, compare=False, repr=False)
    begun: Mapping[KeysName, Keys] = field(default_factory=dict, compare=False, repr=False)

    def keys(self, block_tokens: int) -> Keys:
        """Its prefix keys in blocks of this size; computed once, however often it is decided."""
        if self.tokens is None:
            return NO_KEYS
        name = (block_tokens, root_of(self.model, block_tokens, self.lora), self.extra)
        known = self.known.get(name)
        if known is None:
            if len(self.known) >= KNOWN_MAX:
                self.known.pop(next(iter(self.known)))
            known = self.known[name] = self._computed(self.tokens, name)
        return known

    def _computed(self, tokens: Tokens, name: KeysName) -> Keys:
        size, root, extra = name
        begun = self.begun.get(name, NO_KEYS)
        if not begun.size:
            return prefix_keys(root, tokens, size, extras=[extra])
        rest = prefix_keys(int(begun[-1]), tokens[begun.size * size :], size, depth=begun.size)
        return np.concatenate([begun, rest])


@dataclass(slots=True)
class Decision:
    """Where a prompt goes. `cached` are the tokens that the worker is believed not to have to compute; `source` the
    store from which the rest of the prefix should be moved."""

    worker: int
    reason: str
    cached: int
    source: str | None
    reach: Reach
    estimate: Estimate
    keys: dict[int, Keys]
    prompt: Prompt


@dataclass(slots=True)
class Belief:
    """Sums over answered requests whose realised hit is known."""

    answers: int = 0
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    realised_tokens: int = 0
    error_tokens: int = 0

    def add(self, prompt: int, predicted: int, realised: int) -> None:
        """One answer."""
        self.answers += 1
        self.prompt_tokens += prompt
        self.predicted_tokens += predicted
        self.realised_tokens += realised
        self.error_tokens += abs(predicted - realised)


@dataclass
class Routing:
    """Decides for one fleet. One thread. `reasons` counts decisions."""

    fleet: Fleet
    index: PrefixIndex
    policy: Policy
    predicted: Predicted
    load: Load
    belief: Belief = field(default_factory=Belief)
    reasons: dict[str, int] = field(default_factory=dict)
    _sessions: OrderedDict[str, int] = field(default_factory=OrderedDict)

    @property
    def sessions(self) -> int:
        """Sessions whose last worker is remembered, at most SESSIONS_MAX."""
        return len(self._sessions)

    @classmethod
    def of(
        cls, fleet: Fleet, index: PrefixIndex, policy: Policy, *, predict_s: float = 5.0, max_in_flight: int = 1 << 16
    ) -> Routing:
        """With nothing in flight."""
        predicted = Predicted(len(fleet), ttl_s=predict_s)
        return cls(fleet, index, policy, predicted, Load(len(fleet), max_in_flight=max_in_flight))

    def decide(self, prompt: Prompt, now: float, open_workers: npt.NDArray[np.bool_]) -> Decision:
        """Choose among the open workers, of which there is at least one. Changes nothing but the policy's state."""
        keys = {size: prompt.keys(size) for size in self.fleet.sizes}
        reach = self._reach(keys, prompt, now)
        made: list[Estimate] = []

        def estimated() -> Estimate:
            if not made:
                waits = self.load.wait_s(now), self.load.link_s(now)
                made.append(estimate(prompt.length, reach, self.fleet, *waits, self.load.decoding))
            return made[0]

        session = None if prompt.session is None else self._sessions.get(prompt.session)
        choice = self.policy.choose(
            View(prompt.length, reach, self.load.requests, open_workers, estimated, session)
        )
        costs, worker = estimated(), choice.worker
        self.reasons[choice.reason] = self.reasons.get(choice.reason, 0) + 1
        moves = bool(costs.moves[worker])
        source = self.fleet.stores[int(reach.source[worker])] if moves else None
        return Decision(worker, choice.reason, int(costs.cached[worker]), source, reach, costs, keys, prompt)

    def sent(self, decision: Decision, now: float) -> int:
        """The request was dispatched to the decision's worker. Returns its ticket."""
        worker, costs = decision.worker, decision.estimate
        size = int(self.fleet.block_tokens[worker])
        self.predicted.add(worker, decision.keys[size], now)
        session = decision.prompt.session
        if session is not None:
            self._sessions[session] = worker
            self._sessions.move_to_end(session)
            if len(self._sessions) > SESSIONS_MAX:
                self._sessions.popitem(last=False)
        return self.load.routed(
            worker, now, work_s=float(costs.work_s[worker]), load_s=float(costs.load_s[worker]),
            tokens=decision.prompt.length - decision.cached,
        )  # fmt: skip

    def first_token(self, ticket: int, now: float) -> None:
        """The request's prompt is computed."""
        self.load.first_token(ticket, now)

    def ended(self, ticket: int, now: float) -> None:
        """The request is over. Idempotent."""
        self.load.ended(ticket, now)

    def _reach(self, keys: dict[int, Keys], prompt: Prompt, now: float) -> Reach:
        parts = [self._reach_in(size, keys[size], prompt, now) for size in self.fleet.sizes]
        if len(parts) == 1:
            return parts[0]
        return _by_size(parts, self.fleet)

    def _reach_in(self, size: int, keys: Keys, prompt: Prompt, now: float) -> Reach:
        reach = reach_of(self.index.match(keys), self.fleet, size, prompt.length)
        soon = np.minimum(self.predicted.leading(keys, now) * size, max(0, prompt.length - 1))
        if not soon.any():
            return reach
        # What it will have computed by then is on its device; what lies behind that is still to be loaded.
        near, far = np.maximum(reach.near, soon), np.maximum(reach.far, soon)
        spared = np.clip((soon - reach.device) / np.maximum(reach.near - reach.device, 1), 0.0, 1.0)
        source = np.where(far > near, reach.source, -1)
        return Reach(np.maximum(reach.device, soon), near, far, reach.load_s * (1 - spared), source)


def _by_size(parts: Sequence[Reach], fleet: Fleet) -> Reach:
    """Each worker's entry from the part of its block size."""
    which = np.searchsorted(np.array(fleet.sizes), fleet.block_tokens)
    every = np.arange(len(fleet))
    stacked = {
        name: np.stack([getattr(part, name) for part in parts])[which, every]
        for name in ("device", "near", "far", "load_s", "source")
    }
    return Reach(**stacked)
