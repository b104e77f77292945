"""The store daemon: KV chunks in shared memory, cascaded to files; one on every host.

example:
  forebay store --memory 8GiB --fs /var/lib/forebay --fs-quota 200GiB
"""

from __future__ import annotations

import argparse
from typing import Any

from forebay.cli.endpoints import ENDPOINTS
from forebay.cli.places import default_socket, private, runtime_dir
from forebay.cli.tenants import ATTENTION, POLICY, TENANTS
from forebay.cli.tiers import TIERS
from forebay.config import Setting, add_settings, duration, one_of, path, resolve, share, size, text, unix_socket
from forebay.kvstore.config import StoreConfig

SETTINGS = (
    Setting("socket", unix_socket, None, "unix socket to serve on, mode 0600", shown="runtime directory"),
    Setting("socket_group", text, None, "let members of this group connect too (mode 0660)"),
    Setting("memory", size, 2 << 30, "hard budget of the shared-memory pool", shown="2GiB"),
    Setting("extent", size, None, "unit in which memory changes its use", shown="a 64th of memory, 8 to 256 MiB"),
    Setting("pool_dir", path, path("/dev/shm"), "where the pool's files are; a tmpfs"),  # noqa: S108
    Setting("fs", path, None, "directory of the file tier; none without it"),
    Setting("fs_quota", size, 10 << 30, "hard quota of that directory", shown="10GiB"),
    Setting("fs_state_dir", path, None, "where its manifest is; a local disk", shown="inside the directory"),
    Setting("fsync", one_of("none", "file"), "none", "sync each file before it is published"),
    Setting("events", text, None, "ZMQ endpoint of KV events, such as tcp://127.0.0.1:5557"),
    Setting("replay", text, None, "ZMQ endpoint of their replay"),
    Setting("event_keys", path, None, "directory of CURVE keys, for --events off loopback"),
    ENDPOINTS,
    Setting("pin_budget", share, 0.25, "share of memory that hard pins may hold, all together", shown="25%"),
    Setting("retain_budget", share, 0.1, "share of memory that one tenant's requests may retain", shown="10%"),
    Setting("lease", duration, 120.0, "how long a lookup's pins last if nobody gives them back", shown="2m"),
    Setting("reservation", duration, 60.0, "how long a store may take; its slot is never given up", shown="1m"),
    Setting("tier_hang", duration, 10.0, "end a tier's process that gives no sign of life for so long", shown="10s"),
    Setting("metrics", text, None, "HOST:PORT of Prometheus metrics, on loopback"),
    TIERS,
    TENANTS,
    POLICY,
    ATTENTION,
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_settings(parser, SETTINGS)


def run(flags: dict[str, Any]) -> int:
    """Run the daemon until it is stopped."""
    from forebay.kvstore.daemon import run_store

    values = resolve("store", SETTINGS, flags)
    if values["socket"] is None:
        private(runtime_dir())
        values["socket"] = default_socket()
    return run_store(StoreConfig(**values))
