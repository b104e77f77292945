"""What a store holds and does: figures by tier, namespaces, tenants, event streams.

With --what-if it tells what each tenant's hit rate would be with another budget of memory.

example:
  forebay stat --socket /run/forebay/store.sock --watch
  forebay stat --what-if +64GiB
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from forebay.cli.places import SOCKET
from forebay.cli.tables import bytes_text, figure, plain, table
from forebay.cli.tenant_tables import budget_of, change, forecast_json, forecast_text, tenants_json, tenants_table
from forebay.config import Setting, add_settings, boolean, resolve
from forebay.errors import ConfigError
from forebay.kvstore.client import StoreClient
from forebay.kvstore.protocol import Stats

SETTINGS = (
    SOCKET,
    Setting("json", boolean, False, "one JSON object instead of tables", shown="no", switch=True),
    Setting("watch", boolean, False, "again every second, until interrupted", shown="no", switch=True),
    Setting("what_if", change, None, "hit rates to expect of a larger or smaller pool"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_settings(parser, SETTINGS)


def run(flags: dict[str, Any]) -> int:
    """Print the store's figures."""
    values = resolve("stat", SETTINGS, flags)
    with StoreClient(str(values["socket"]), maps=False) as client:
        if values["what_if"] is not None:
            return _what_if(client, values)
        while True:
            stats = client.stats()
            if values["watch"] and sys.stdout.isatty():
                print("\033[2J\033[H", end="")
            print(as_json(stats) if values["json"] else as_text(stats), flush=True)
            if not values["watch"]:
                return 0
            time.sleep(1)


def _what_if(client: StoreClient, values: dict[str, Any]) -> int:
    now = int(client.stats().values["host.bytes_budget"])
    try:
        budget = budget_of(now, values["what_if"])
    except ValueError as error:
        raise ConfigError(f"--what-if: {error}") from error
    told = client.what_if(budget)
    print(forecast_json(told) if values["json"] else forecast_text(told), flush=True)
    return 0


def as_json(stats: Stats) -> str:
    """All of it as one line."""
    return json.dumps(
        {
            "boot": stats.boot.hex(), "pid": stats.pid, "values": stats.values, "info": stats.info,
            "namespaces": stats.namespaces, "tiers": stats.tiers, "pins": stats.pins,
            "tenants": tenants_json(stats.tenants),
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
        parts.append(plain(f"  tier {tier['name']}: {rest}"))
    if stats.namespaces:
        columns = ("id", "label", "chunks", "bytes", "chunk_tokens", "compute", "groups")
        rows = [
            [ns["id"][:16], ns["label"], ns["chunks"], bytes_text(float(ns["bytes"])), *(ns[c] for c in columns[4:])]
            for ns in stats.namespaces
        ]
        parts += ["", table(("namespace", *columns[1:]), rows, right=(2, 3, 4))]
    if stats.tenants:
        parts += ["", tenants_table(stats.tenants)]
    if stats.pins:
        rows = [
            [pin["kind"], pin["by"] or "-", pin["chunks"], bytes_text(float(pin["bytes"])), pin["until"]]
            for pin in stats.pins
        ]
        parts += ["", table(("kept", "by", "chunks", "bytes", "until"), rows, right=(2, 3))]
    rows = [[name, figure(name, value)] for name, value in sorted(values.items())]
    parts += ["", table(("figure", "value"), rows, right=(1,))]
    return "\n".join(parts)
