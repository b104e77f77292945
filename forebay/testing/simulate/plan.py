"""What one seed switches on: swarm testing. A run in which everything goes wrong at once never gets anywhere, so
each seed has some of the faults, some of the policies, and sizes of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from forebay.kvstore.identity import GroupGeometry, Namespace
from forebay.kvstore.limits import Limits
from forebay.kvstore.policies.registry import POLICY_NAMES
from forebay.kvstore.tenancy import TenantRule
from forebay.tiers.rules import EVICT, SECOND_HIT, WRITE_THROUGH

FAULTS = (
    "network_slow", "network_sliced", "network_small_buffers", "connection_reset",
    "worker_killed", "worker_stopped", "worker_slow_writer", "worker_slow_reader", "request_abandoned", "writer_aborts",
    "daemon_killed", "daemon_killed_writing", "daemon_restarted", "daemon_stopped", "pool_rot_while_down", "memory_rot",
    "tier_slow", "tier_hung", "tier_killed", "tier_error", "tier_wrong_bytes", "tier_wrong_chunk", "tier_lies",
    "tier_dies_slowly",
    "disk_full", "disk_error", "disk_rot", "power_loss",
    "bucket_deletes", "bucket_lists_late",
    "events_lost", "replay_fails",
    "clears",
)  # fmt: skip

# Some mistakes need two things to go wrong at about the same time: half of the seeds have one of these for sure.
THEMES = (
    ("connection_reset", "worker_slow_reader"),
    ("connection_reset", "worker_slow_writer", "worker_stopped"),
    ("daemon_killed", "pool_rot_while_down"),
    ("daemon_killed", "worker_slow_writer", "worker_stopped"),
    ("tier_slow", "tier_wrong_bytes", "tier_wrong_chunk"),
    ("clears", "tier_slow"),
    ("worker_slow_reader", "tier_slow"),
    ("disk_rot", "power_loss", "tier_killed"),
)
# Something dies in the middle: what a tier was just writing when it was told to forget may be found again.
BRING_BACK = frozenset(fault for fault in FAULTS if fault.startswith(("daemon_", "tier_killed", "power", "tier_hung")))


@dataclass(frozen=True)
class Plan:
    """One seed's world. `faults` are those of FAULTS that may happen; `rate` scales how often. `copies` says when
    chunks go to each of `tiers`, `sets_aside` whether workers have room set aside."""

    seed: int
    faults: frozenset[str]
    rate: float
    nodes: int
    workers: int
    tiers: tuple[str, ...]
    subscribers: int
    tenants: int
    extras: int
    namespaces: tuple[Namespace, ...]
    extent_bytes: int
    extents: int
    limits: Limits
    rules: dict[str, TenantRule]
    policy: str
    topics: int
    depth: int
    deadline_ms: tuple[int, ...]
    shuffle: bool
    replay: bool
    readers_verify: bool
    seconds: float
    pause: float
    copies: tuple[str, ...]
    sets_aside: bool
    notes: dict[str, str] = field(default_factory=dict)

    def has(self, fault: str) -> bool:
        """Is this fault switched on?"""
        return fault in self.faults

    def describe(self) -> str:
        """One line for people."""
        groups = "+".join(f"{g.kind}{g.window or ''}" for g in self.namespaces[0].groups)
        faults = ", ".join(sorted(self.faults)) or "none"
        tiers = ", ".join(f"{kind} ({copy})" for kind, copy in zip(self.tiers, self.copies, strict=True)) or "none"
        return (
            f"{self.nodes} daemons x {self.extents} extents of {self.extent_bytes >> 10} KiB, {self.workers} workers, "
            f"tiers {tiers}, {self.subscribers} subscribers, {self.tenants} tenants, "
            f"policy {self.policy}, groups {groups}, chunks of {self.namespaces[0].chunk_tokens}; faults: {faults}"
        )


def draw_plan(seed: int) -> Plan:
    """The plan of a seed: the same for the same seed, always."""
    rng = random.Random(f"{seed}/plan")
    share = rng.choice((0.0, 0.2, 0.35, 0.5))
    faults = {fault for fault in FAULTS if rng.random() < share}
    theme = rng.choice(THEMES) if rng.random() < 0.5 else ()
    faults.update(theme)
    nodes = rng.choice((1, 1, 1, 2))
    if "clears" in theme:  # a world in which what was cleared must not come back
        faults, nodes = faults - BRING_BACK, 1
    tiers = [kind for kind in ("fs", "disk", "bucket") if rng.random() < (0.7 if "clears" in theme else 0.4)]
    if nodes > 1:
        tiers.insert(rng.randrange(len(tiers) + 1), "peer")
    chunk_tokens = rng.choice((32, 48, 64))
    groups = _groups(rng)
    # Wrong bytes in memory are for checksums to find; readers that trust the generation need a memory that keeps.
    readers_verify = "memory_rot" in faults or rng.random() < 0.5
    extent_bytes, extents = rng.choice((9, 13, 17, 25)) * 4096, rng.choice((2, 2, 3, 4))
    return Plan(
        seed=seed,
        faults=frozenset(faults),
        rate=rng.choice((0.5, 1.0, 2.0)),
        nodes=nodes,
        workers=rng.choice((2, 2, 3)) * nodes,
        tiers=tuple(tiers),
        subscribers=rng.choice((0, 1, 1)),
        tenants=rng.choice((1, 2, 2)),
        extras=rng.choice((1, 1, 2)),
        namespaces=tuple(
            Namespace(weights=bytes([n + 1]) * 32, groups=groups, chunk_tokens=chunk_tokens)
            for n in range(rng.choice((1, 1, 2)))
        ),
        extent_bytes=extent_bytes,
        extents=extents,
        limits=_limits(rng),
        rules=_tenants(rng, extent_bytes * extents),
        policy=rng.choice(POLICY_NAMES),
        topics=rng.choice((1, 2, 3)),
        depth=rng.choice((2, 4, 6, 8)),
        deadline_ms=tuple(rng.sample((0, 0, 20, 100, 500, 3000), 3)),
        shuffle=rng.random() < 0.5,
        replay=rng.random() < 0.8,
        readers_verify=readers_verify,
        seconds=rng.choice((0.7, 1.0, 1.5)),
        pause=rng.choice((0.5, 1.0, 2.0)),
        copies=tuple(rng.choice((WRITE_THROUGH, WRITE_THROUGH, SECOND_HIT, EVICT)) for _ in tiers),
        sets_aside=rng.random() < 0.35,
    )


def _groups(rng: random.Random) -> tuple[GroupGeometry, ...]:
    full = GroupGeometry("full", "full", (0,), 1, rng.choice((4, 8)), "float32")
    window = GroupGeometry("window", "window", (1,), 1, 4, "float32", rng.choice((1, 17, 40, 100)))
    latent = GroupGeometry("latent", "latent", (2,), 1, 12, "bfloat16")
    state = GroupGeometry("state", "recurrent", (3,), 1, 8, "float32")
    kinds = ((full,), (full,), (full, window), (full, latent), (full, window, latent), (full, state), (window, state))
    return rng.choice(kinds)


def _tenants(rng: random.Random, pool: int) -> dict[str, TenantRule]:
    """Rules for some seeds' first tenants."""
    if rng.random() < 0.7:
        return {}
    return {
        "tenant0": TenantRule(quota=pool // rng.choice((2, 3)), weight=rng.choice((0.5, 2.0))),
        "tenant1": TenantRule(guarantee=pool // rng.choice((3, 5))),
    }


def _limits(rng: random.Random) -> Limits:
    if rng.random() < 0.6:
        return Limits()
    return Limits(
        reserved_share=rng.choice((0.2, 0.5, 1.0)),
        promoting_share=rng.choice((0.2, 0.5, 1.0)),
        cascade_share=rng.choice((0.1, 0.25, 0.5)),
        leases_per_client=rng.choice((1, 2, 8)),
        reservations_per_client=rng.choice((2, 8)),
        removed_remembered=rng.choice((4, 1 << 16)),
        lease_s=rng.choice((0.1, 0.3, 120.0)),
        reservation_s=rng.choice((0.1, 0.5, 60.0)),
        pin_share=rng.choice((0.1, 0.25, 0.5)),
        retain_share=rng.choice((0.1, 0.3)),
    )
