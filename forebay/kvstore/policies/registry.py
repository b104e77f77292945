"""The policies by name, and what the policies of one store share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from forebay.errors import ConfigError
from forebay.kvstore.entry import Entry
from forebay.kvstore.header import SlotState
from forebay.kvstore.identity import KEY_BYTES
from forebay.kvstore.policies.arc import Arc
from forebay.kvstore.policies.base import EvictionPolicy, Lineage, LookedUp, NoLineage
from forebay.kvstore.policies.foresight.policy import Foresight, RecomputeCost
from forebay.kvstore.policies.foresight.sessions import Sessions
from forebay.kvstore.policies.lru import Lru
from forebay.kvstore.policies.s3fifo import S3Fifo

POLICY_NAMES = ("lru", "arc", "s3fifo", "foresight")


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """Which policy. `attention_tokens`: where attention costs a model as much as all else does, so that deep chunks
    count for more; 0: all tokens cost the same. Only `foresight` weighs that."""

    name: str = "lru"
    attention_tokens: int = 0


class Policies:
    """Makes the policies of one store, one an account, and tells them of lookups.

    Raises ConfigError if there is no policy of this name.
    """

    def __init__(self, choice: PolicyChoice | str = "lru", lineage: Lineage | None = None) -> None:
        self.choice = PolicyChoice(choice) if isinstance(choice, str) else choice
        name, cost = self.choice.name, RecomputeCost(self.choice.attention_tokens or None)
        if name not in POLICY_NAMES:
            raise ConfigError(f"policy {name!r}: there are {', '.join(POLICY_NAMES)}")
        self.lineage = lineage = lineage or NoLineage()
        sessions = Sessions()
        makers: dict[str, Callable[[], EvictionPolicy]] = {
            "lru": lambda: Lru(lineage),
            "arc": lambda: Arc(lineage),
            "s3fifo": lambda: S3Fifo(lineage),
            "foresight": lambda: Foresight(lineage, sessions, cost),
        }
        self.new = makers[name]
        self._observer = self.new() if name == "foresight" else None

    @property
    def observes(self) -> bool:
        """Is it worth telling of lookups?"""
        return self._observer is not None

    def observe(self, lookup: LookedUp) -> None:
        """A lookup was answered, whoever's it was."""
        if self._observer is not None:
            self._observer.observe(lookup)

    def looked_up(self, keys: bytes, entries: Sequence[Entry], now: float, chunk_tokens: int) -> None:
        """The same, from the keys of all chunks that were asked for, joined, and the entries that served."""
        separate = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        # What was taken out since the answer went is nobody's.
        here = [entry for entry in entries if entry.state is SlotState.COMMITTED]
        self.observe(LookedUp(separate, here, now, chunk_tokens))

    def gauges(self, policies: Iterable[EvictionPolicy]) -> dict[str, int]:
        """How full the tables of these policies are, all of them this one's."""
        if self._observer is not None:  # they share everything
            return dict(self._observer.gauges())
        sums: dict[str, int] = {}
        for policy in policies:
            for name, value in policy.gauges().items():
                sums[name] = sums.get(name, 0) + value
        return sums


def make_policy(name: str = "lru", lineage: Lineage | None = None) -> EvictionPolicy:
    """One policy of this name. Raises ConfigError if there is none."""
    return Policies(name, lineage).new()
