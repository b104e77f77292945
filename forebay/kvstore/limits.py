"""Every cap of the daemon in one table. Each has a gauge or counter of the same name in `forebay stat`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Caps. Bytes first: what is bounded in bytes can't be exceeded by many small things or few big ones."""

    connections: int = 1024
    namespaces: int = 256
    tenants: int = 1024
    requests_per_connection: int = 256
    leases_per_client: int = 4096
    pins_per_lease: int = 1 << 18
    reservations_per_client: int = 4096
    reply_bytes_per_connection: int = 64 << 20
    removed_remembered: int = 1 << 16
    # Shares of the pool, so that a flood of stores can't starve promotions, nor the other way round.
    reserved_share: float = 0.5
    promoting_share: float = 0.5
    # Bytes that one tier's cascade may keep pinned in the pool: a hung tier can't fill it.
    cascade_share: float = 0.25
