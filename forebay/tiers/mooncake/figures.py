"""What the master's metrics say of the whole pool."""

from __future__ import annotations

import logging
import urllib.request

from forebay.tiers.mooncake.complaints import complain

log = logging.getLogger("forebay.tier.mooncake")

TIMEOUT_S = 2.0
BYTES_MAX = 1 << 20
NAMES = {
    "master_allocated_bytes": "pool_bytes",
    "master_total_capacity_bytes": "pool_capacity_bytes",
    "master_key_count": "pool_keys",
    "master_active_clients": "pool_clients",
    "master_evicted_key_count": "pool_evicted",
}


def pool_figures(address: str) -> dict[str, float]:
    """The pool's figures by our names, none if the master's metrics can't be had. Blocks for seconds at most."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as answer:
            return parse(answer.read(BYTES_MAX).decode("utf-8", "replace"))
    except OSError as error:
        complain("metrics", "no metrics from %s: %s", address, error)
        return {}


def parse(text: str) -> dict[str, float]:
    """The figures in a Prometheus page, as far as we want them."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name in NAMES:
            try:
                found[NAMES[name]] = float(value)
            except ValueError:
                continue
    return found
