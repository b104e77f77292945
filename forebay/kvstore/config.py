"""Settings of one store daemon, already checked. `forebay.config` makes them from TOML, environment and flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from forebay.errors import ConfigError
from forebay.events.endpoints import EndpointRule
from forebay.kvstore.limits import Limits
from forebay.kvstore.policies.registry import POLICY_NAMES
from forebay.kvstore.tenancy import TenantRule
from forebay.tiers.messages import OptionValue
from forebay.tiers.rules import TierRule

EXTENT_BYTES_MIN = 1 << 20
EXTENT_BYTES_MAX = 256 << 20


@dataclass(frozen=True)
class StoreConfig:
    """One store daemon. Sizes in bytes; None switches a part off.

    `extent` None picks a size from `memory`. `fs_state_dir` None keeps the file tier's manifest beside its
    files. `pin_budget` and `retain_budget` are shares of the pool; `lease`, `reservation` and `tier_hang` are
    seconds. `events` and `replay` are ZMQ endpoints, `endpoints` more of them for consumers of other kinds,
    `event_keys` a directory of CURVE keys, which an endpoint off loopback needs; `metrics` is a `host:port` for
    Prometheus. `tenants` are the rules of those who have some; `policy` orders each tenant's chunks, and
    `attention_tokens` tells it what they cost.
    `tiers` are asked in their order, after the one of `fs`.
    Raises ConfigError if rules can't all be kept, or for a policy that there isn't.
    """

    socket: Path
    memory: int = 2 << 30
    extent: int | None = None
    fs: Path | None = None
    fs_quota: int = 10 << 30
    fs_state_dir: Path | None = None
    fsync: str = "none"
    events: str | None = None
    replay: str | None = None
    endpoints: Mapping[str, EndpointRule] = field(default_factory=dict)
    event_keys: Path | None = None
    metrics: str | None = None
    socket_group: str | None = None
    pin_budget: float = 0.25
    retain_budget: float = 0.1
    lease: float = 120.0
    reservation: float = 60.0
    tier_hang: float = 10.0
    pool_dir: Path = Path("/dev/shm")  # noqa: S108
    tenants: Mapping[str, TenantRule] = field(default_factory=dict)
    policy: str = "lru"
    attention_tokens: int = 0
    tiers: Mapping[str, TierRule] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.fs is not None and "fs" in self.tiers:
            raise ConfigError("--fs is tier 'fs': leave it out, or give the one in tiers another name")
        if self.policy not in POLICY_NAMES:
            raise ConfigError(f"policy {self.policy!r}: takes one of {', '.join(POLICY_NAMES)}")
        guaranteed = sum(rule.guarantee for rule in self.tenants.values())
        if guaranteed and guaranteed > self.extents * self.extent_bytes:
            most = max(self.tenants, key=lambda name: self.tenants[name].guarantee)
            raise ConfigError(
                f"tenants: {guaranteed} bytes are guaranteed in all (most of them to {most!r}), the pool has "
                f"{self.extents * self.extent_bytes}: lower guarantees, or raise --memory"
            )

    @property
    def extent_bytes(self) -> int:
        """Size of one extent: a 64th of the pool between 8 and 256 MiB, if it isn't set.

        Raises ConfigError if the pool holds not even one.
        """
        size = self.extent or min(max(self.memory // 64, 8 << 20), EXTENT_BYTES_MAX)
        size = size // 4096 * 4096
        if size < EXTENT_BYTES_MIN:
            raise ConfigError(f"extent {self.extent}: must be at least {EXTENT_BYTES_MIN >> 20} MiB")
        if size > self.memory:
            raise ConfigError(f"memory {self.memory}: must hold at least one extent of {size} bytes; raise --memory")
        return size

    @property
    def all_tiers(self) -> dict[str, TierRule]:
        """Every tier by name, in the order in which they are asked; --fs is one of them."""
        if self.fs is None:
            return dict(self.tiers)
        options: dict[str, OptionValue] = {
            "directory": str(self.fs.absolute()), "quota_bytes": self.fs_quota, "fsync": self.fsync
        }  # fmt: skip
        if self.fs_state_dir is not None:
            options["state_dir"] = str(self.fs_state_dir.absolute())
        return {"fs": TierRule("fs", options), **self.tiers}

    @property
    def limits(self) -> Limits:
        """The daemon's caps, with what is set here."""
        return Limits(
            pin_share=self.pin_budget, retain_share=self.retain_budget, lease_s=self.lease,
            reservation_s=self.reservation,
        )  # fmt: skip

    @property
    def extents(self) -> int:
        """How many extents the budget allows."""
        return self.memory // self.extent_bytes
