"""The chunks that a store holds in memory, or that a file tier's directory holds.

example:
  forebay ls --socket /run/forebay/store.sock
  forebay ls --fs /var/lib/forebay --json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from forebay.cli.places import SOCKET
from forebay.cli.tables import bytes_text, table
from forebay.config import Setting, add_settings, at_least, boolean, hexadecimal, path, resolve, text
from forebay.errors import NotWritable
from forebay.kvstore.client import StoreClient

COLUMNS = ("namespace", "group", "tokens", "key", "bytes", "state", "pins", "tiers", "tenant", "kept")
PAGE = 500

SETTINGS = (
    SOCKET,
    Setting("fs", path, None, "list this directory's files instead; no store is needed"),
    Setting("namespace", hexadecimal, "", "only this one; the beginning of its id is enough", shown="all"),
    Setting("tenant", text, None, "only the chunks of this tenant", shown="all"),
    Setting("limit", at_least(0), 0, "stop after so many chunks", shown="all"),
    Setting("json", boolean, False, "one JSON object a chunk", shown="no", switch=True),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_settings(parser, SETTINGS)


def run(flags: dict[str, Any]) -> int:
    """List."""
    values = resolve("ls", SETTINGS, flags)
    tenant = values["tenant"]
    source = _files(values["fs"]) if values["fs"] is not None else _store(values["socket"], tenant)
    lines = (
        line
        for line in source
        if line["namespace"].startswith(values["namespace"]) and tenant in (None, line["tenant"])
    )
    limited = islice(lines, values["limit"] or None)
    if values["json"]:
        for line in limited:
            print(json.dumps(line))
        return 0
    shown = list(limited)
    rows = [[_cell(line, column) for column in COLUMNS] for line in shown]
    print(table(COLUMNS, rows, right=(4, 6)))
    print(f"\n{len(shown)} chunks, {bytes_text(sum(line['bytes'] for line in shown))}")
    return 0


def _cell(line: dict[str, Any], column: str) -> str:
    if column in ("namespace", "key"):
        return str(line[column])[:16]
    if column == "tokens":
        return f"[{line['start']}, {line['end']})"
    if column == "kept":
        return ", ".join(f"{k['kind']} by {k['by'] or '-'} for {k['seconds']:.0f} s" for k in line["kept"])
    return bytes_text(line["bytes"]) if column == "bytes" else str(line[column])


def _store(socket: Path, tenant: str | None) -> Iterator[dict[str, Any]]:
    with StoreClient(str(socket), tenant=tenant) as client:
        cursor = 0
        while True:
            page = client.list_chunks(cursor=cursor, limit=PAGE)
            for row in page.rows:
                yield {
                    "namespace": row.namespace.hex(), "group": row.group, "key": row.key.hex(),
                    "parent": row.parent.hex(), "start": row.start, "end": row.start + row.tokens,
                    "bytes": row.payload, "state": row.state, "pins": row.pins,
                    "tiers": "+".join(["host", *row.tiers]), "tenant": row.tenant,
                    "kept": [{"kind": kept.kind, "by": kept.by, "seconds": kept.seconds} for kept in row.kept],
                }  # fmt: skip
            cursor = page.cursor
            if not cursor:
                return


def _files(folder: Path) -> Iterator[dict[str, Any]]:
    from forebay.tiers.fs.fsck import list_directory

    if not folder.is_dir():
        raise NotWritable(f"there is no directory {folder}; give the one of `forebay store --fs`")
    for found in list_directory(folder):
        header = found.header
        yield {
            "namespace": header.namespace.hex(), "group": header.group, "key": header.key.hex(),
            "parent": header.parent.hex(), "start": header.start, "end": header.start + header.token_count,
            "bytes": header.payload_length, "state": "file", "pins": 0, "tiers": "fs", "tenant": header.tenant,
            "kept": [], "path": found.path,
        }  # fmt: skip
