"""The policies by name, and what the policies of one store share."""

from __future__ import annotations

from collections.abc import Callable

from forebay.errors import ConfigError
from forebay.kvstore.policies.arc import Arc
from forebay.kvstore.policies.base import EvictionPolicy, Lineage, LookedUp, NoLineage
from forebay.kvstore.policies.foresight.policy import Foresight, RecomputeCost
from forebay.kvstore.policies.foresight.sessions import Sessions
from forebay.kvstore.policies.lru import Lru
from forebay.kvstore.policies.s3fifo import S3Fifo

POLICY_NAMES = ("lru", "arc", "s3fifo", "foresight")


class Policies:
    """Makes the policies of one store, one an account, and tells them of lookups.

    Raises ConfigError if there is no policy of this name.
    """

    def __init__(self, name: str = "lru", lineage: Lineage | None = None, cost: RecomputeCost | None = None) -> None:
        if name not in POLICY_NAMES:
            raise ConfigError(f"policy {name!r}: there are {', '.join(POLICY_NAMES)}")
        self.name = name
        lineage = lineage or NoLineage()
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


def make_policy(name: str = "lru", lineage: Lineage | None = None) -> EvictionPolicy:
    """One policy of this name. Raises ConfigError if there is none."""
    return Policies(name, lineage).new()
