"""Settings of a Mooncake tier."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from forebay.errors import ConfigError
from forebay.tiers.registry import convert_options

SEGMENT_BYTES_MIN = 16 << 20
_PREFIX = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Address:
    """Where somebody listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class MooncakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One pool, named by its master's address.

    `segment_bytes` of memory are lent to the pool by this host, from this tier's process, as long as it lives; 0 lends
    none. `quota_bytes` bounds what this store keeps in the pool, its own least recently used chunks making room (0: the
    pool's own eviction alone). `hostname`: where others reach this host; empty for the address that faces the master.
    `prefix` keeps pools of several purposes apart: one whose keys begin otherwise is never touched. `trusted_network`
    must be set: Mooncake's ports, on all of this host's addresses, let whoever reaches them read and write its memory.
    """

    master: str
    trusted_network: bool = False
    hostname: str = ""
    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = ""
    segment_bytes: int = 1 << 30
    quota_bytes: int = 0
    prefix: str = "forebay"
    replicas: int = 1
    read_threads: int = 2
    write_threads: int = 2
    read_queue_bytes: int = 256 << 20
    write_queue_bytes: int = 256 << 20
    rpc_timeout_s: float = 3.0
    transfer_timeout_s: float = 2.0
    master_metrics: str = ""

    @property
    def address(self) -> Address:
        """The master's."""
        return _address(self.master)


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} must be HOST:PORT")
    return Address(host, int(port))


def mooncake_options(name: str, options: Mapping[str, object]) -> MooncakeOptions:
    """Typed and checked options. Raises ConfigError that names the option."""
    found = convert_options(name, options, MooncakeOptions)
    for option, text in (("master", found.master), ("master_metrics", found.master_metrics)):
        try:
            if text or option == "master":
                _address(text)
        except ValueError as error:
            raise ConfigError(f"tier {name!r}: {option} {error}") from error
    if not found.trusted_network:
        raise ConfigError(
            f"tier {name!r}: Mooncake knows no authentication: whoever reaches its ports on this host can read and "
            "write the memory of this tier and its pool. Set trusted_network = true if only hosts that may do so can"
        )
    if found.segment_bytes and found.segment_bytes < SEGMENT_BYTES_MIN:
        raise ConfigError(f"tier {name!r}: segment_bytes {found.segment_bytes} must be 0, or at least 16 MiB")
    if found.quota_bytes and found.quota_bytes < 1 << 20:
        raise ConfigError(f"tier {name!r}: quota_bytes {found.quota_bytes} must be 0, or at least 1 MiB")
    if not _PREFIX.fullmatch(found.prefix):
        raise ConfigError(f"tier {name!r}: prefix {found.prefix!r} must be 1 to 64 of A-Z a-z 0-9 . _ -")
    for option, least, most in (
        ("replicas", 1, 16), ("read_threads", 1, 32), ("write_threads", 1, 32), ("segment_bytes", 0, 1 << 50),
        ("quota_bytes", 0, 1 << 50), ("read_queue_bytes", 1, 1 << 40), ("write_queue_bytes", 1, 1 << 40),
        ("rpc_timeout_s", 0.1, 60), ("transfer_timeout_s", 1, 60),
    ):  # fmt: skip
        if not least <= getattr(found, option) <= most:
            raise ConfigError(f"tier {name!r}: {option} must be from {least:,} to {most:,}")
    return found
