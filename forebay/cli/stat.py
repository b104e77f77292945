"""What a store holds and does: figures by tier, namespaces, event streams.

example:
  forebay stat --socket /run/forebay/store.sock --watch
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from forebay.cli.places import SOCKET
from forebay.cli.tables import bytes_text, figure, table
from forebay.config import Setting, add_settings, boolean, resolve
from forebay.kvstore.client import StoreClient
from forebay.kvstore.protocol import Stats

SETTINGS = (
    SOCKET,
    Setting("json", boolean, False, "one JSON object instead of tables", shown="no", switch=True),
    Setting("watch", boolean, False, "again every second, until interrupted", shown="no", switch=True),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_settings(parser, SETTINGS)


def run(flags: dict[str, Any]) -> int:
    """Print the store's figures."""
    values = resolve("stat", SETTINGS, flags)
    with StoreClient(str(values["socket"])) as client:
        while True:
            stats = client.stats()
            if values["watch"] and sys.stdout.isatty():
                print("\033[2J\033[H", end="")
            print(as_json(stats) if values["json"] else as_text(stats), flush=True)
            if not values["watch"]:
                return 0
            time.sleep(1)


def as_json(stats: Stats) -> str:
    """All of it as one line."""
    return json.dumps(
        {
            "boot": stats.boot.hex(), "pid": stats.pid, "values": stats.values, "info": stats.info,
            "namespaces": stats.namespaces, "tiers": stats.tiers, "pins": stats.pins,
        }
    )  # fmt: skip


def as_text(stats: Stats) -> str:
    """All of it for people."""
    values = stats.values
    used, budget = values.get("host.bytes_used", 0), values.get("host.bytes_budget", 0)
    head = f"store {stats.boot.hex()[:8]}, pid {stats.pid}: {bytes_text(used)} of {bytes_text(budget)} in use"
    parts = [head, ""]
    parts += [f"  {name}: {told}" for name, told in sorted(stats.info.items())]
    for tier in stats.tiers:
        rest = ", ".join(f"{key} {value}" for key, value in tier.items() if key != "name")
        parts.append(f"  tier {tier['name']}: {rest}")
    if stats.namespaces:
        columns = ("id", "label", "chunks", "bytes", "chunk_tokens", "compute", "groups")
        rows = [
            [ns["id"][:16], ns["label"], ns["chunks"], bytes_text(float(ns["bytes"])), *(ns[c] for c in columns[4:])]
            for ns in stats.namespaces
        ]
        parts += ["", table(("namespace", *columns[1:]), rows, right=(2, 3, 4))]
    if stats.pins:
        rows = [
            [pin["kind"], pin["by"] or "-", pin["chunks"], bytes_text(float(pin["bytes"])), pin["until"]]
            for pin in stats.pins
        ]
        parts += ["", table(("kept", "by", "chunks", "bytes", "until"), rows, right=(2, 3))]
    rows = [[name, figure(name, value)] for name, value in sorted(values.items())]
    parts += ["", table(("figure", "value"), rows, right=(1,))]
    return "\n".join(parts)
