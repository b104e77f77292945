"""Every cap of the daemon in one table. Each has a gauge or counter of the same name in `forebay stat`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Caps. Bytes first: what is bounded in bytes can't be exceeded by many small things or few big ones."""

    connections: int = 1024
    namespaces: int = 256
    namespaces_per_client: int = 64
    tenants: int = 1024
    requests_per_connection: int = 256
    leases_per_client: int = 4096
    pins_per_lease: int = 1 << 18
    reservations_per_client: int = 4096
    reply_bytes_per_connection: int = 64 << 20
    intake_bytes: int = 256 << 20
    removed_remembered: int = 1 << 16
    clears: int = 16
    # How long a client may take to say who it is, and to send the rest of a message.
    hello_s: float = 10.0
    frame_s: float = 30.0
    # Promises end by themselves, in seconds: leases that ask for no time of their own, the longest that may be
    # asked for, reservations, and pins.
    lease_s: float = 120.0
    lease_s_max: float = 3600.0
    reservation_s: float = 60.0
    pin_s_max: float = 7 * 86400.0
    # Keeps: a pin or retention of one chunk by one owner.
    keeps: int = 1 << 20
    keep_owners: int = 1024
    # Shares of the pool, so that a flood of stores can't starve promotions, nor the other way round.
    reserved_share: float = 0.5
    promoting_share: float = 0.5
    # What may be set aside for chunks that aren't there yet: the rest stays for those who ask for nothing in advance.
    aside_share: float = 0.75
    # What all hard pins together may hold, and what one tenant may retain.
    pin_share: float = 0.25
    retain_share: float = 0.1
    # Bytes that one tier's cascade may keep pinned in the pool: a hung tier can't fill it.
    cascade_share: float = 0.25
