"""The chunks that a store holds in memory, or that a file tier's directory holds.

example:
  forebay ls --socket /run/forebay/store.sock
  forebay ls --fs /var/lib/forebay --json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forebay.cli.places import add_socket
from forebay.cli.tables import bytes_text, table
from forebay.kvstore.client import StoreClient

COLUMNS = ("namespace", "group", "tokens", "key", "bytes", "state", "pins", "tiers", "tenant")
PAGE = 500


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_socket(parser)
    parser.add_argument("--fs", metavar="DIR", help="list this directory's files instead; no store is needed")
    parser.add_argument("--namespace", metavar="HEX", default="", help="only this one (a prefix of its id is enough)")
    parser.add_argument("--json", action="store_true", help="one JSON object a chunk")
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="stop after N chunks")


def run(flags: dict[str, Any]) -> int:
    """List."""
    source = _files(Path(flags["fs"])) if flags["fs"] else _store(flags["socket"])
    shown = []
    for line in source:
        if not line["namespace"].startswith(flags["namespace"]):
            continue
        if flags["json"]:
            print(json.dumps(line))
        shown.append(line)
        if flags["limit"] and len(shown) >= flags["limit"]:
            break
    if not flags["json"]:
        rows = [[_cell(line, column) for column in COLUMNS] for line in shown]
        print(table(COLUMNS, rows, right=(4, 6)))
        print(f"\n{len(shown)} chunks, {bytes_text(sum(line['bytes'] for line in shown))}")
    return 0


def _cell(line: dict[str, Any], column: str) -> str:
    if column in ("namespace", "key"):
        return str(line[column])[:16]
    return bytes_text(line["bytes"]) if column == "bytes" else str(line[column])


def _store(socket: str) -> Iterator[dict[str, Any]]:
    with StoreClient(socket) as client:
        cursor = 0
        while True:
            page = client.list_chunks(cursor=cursor, limit=PAGE)
            for row in page.rows:
                yield {
                    "namespace": row.namespace.hex(), "group": row.group, "key": row.key.hex(),
                    "parent": row.parent.hex(), "tokens": f"[{row.start}, {row.start + row.tokens})",
                    "bytes": row.payload, "state": row.state, "pins": row.pins,
                    "tiers": "+".join(["host", *row.tiers]), "tenant": row.tenant,
                }  # fmt: skip
            cursor = page.cursor
            if not cursor:
                return


def _files(folder: Path) -> Iterator[dict[str, Any]]:
    from forebay.tiers.fs.fsck import list_directory

    for found in list_directory(folder):
        header = found.header
        yield {
            "namespace": header.namespace.hex(), "group": header.group, "key": header.key.hex(),
            "parent": header.parent.hex(), "tokens": f"[{header.start}, {header.end})", "bytes": header.payload_length,
            "state": "file", "pins": 0, "tiers": "fs", "tenant": header.tenant,
        }  # fmt: skip
