"""Keep a prompt's chunks in memory for a while, or stop keeping them.

A soft pin lets go only when everything that nobody keeps is gone; with --hard it doesn't, within the store's budget for
that (--pin-budget of `forebay store`). Pins end with their time, with --unpin, and with the store.

example:
  forebay pin --url http://127.0.0.1:8000 --ttl 8h "You are a helpful assistant of the river authority."
  forebay pin --token-ids 2,818,5279,529 --hard --ttl 30m --by ops
"""

from __future__ import annotations

import argparse
import getpass
from typing import Any

from forebay.cli.places import SOCKET
from forebay.cli.prompts import PROMPT, tokens_of, where
from forebay.cli.tables import bytes_text
from forebay.config import Setting, add_settings, boolean, duration, resolve, text
from forebay.errors import StoreError
from forebay.kvstore.client import StoreClient
from forebay.kvstore.identity import chunk_keys, pack_tokens
from forebay.kvstore.protocol import BATCH_ITEMS_MAX, Found, Kept

Chunk = tuple[int, bytes]

SETTINGS = (
    PROMPT[0],
    SOCKET,
    *PROMPT[1:],
    Setting("hard", boolean, False, "keep them whatever else is wanted", shown="no", switch=True),
    Setting("ttl", duration, 3600.0, "how long", shown="1h"),
    Setting("by", text, None, "who wants it", shown="the user's name"),
    Setting("unpin", boolean, False, "end the pins instead", shown="no", switch=True),
    Setting("deadline", duration, 2.0, "how long tiers may take to bring what memory lacks", shown="2s"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_settings(parser, SETTINGS)


def run(flags: dict[str, Any]) -> int:
    """Pin, or unpin."""
    values = resolve("pin", SETTINGS, flags)
    tokens, by = tokens_of(values), values["by"] or getpass.getuser()
    with StoreClient(str(values["socket"]), maps=False) as client:
        found = find(client, values, tokens)
        chunks = [(chunk.group, chunk.key) for chunk in found.chunks]
        kept = _unpin(client, chunks, by) if values["unpin"] else _pin(client, values, chunks, by)
    count, size = sum(k.chunks for k in kept), sum(k.size for k in kept)
    what = "unpinned" if values["unpin"] else f"pinned {'hard' if values['hard'] else 'softly'}"
    until = "" if values["unpin"] else f" for {values['ttl']:g} s"
    print(f"{found.hit} of {len(tokens)} tokens are stored: {count} chunks, {bytes_text(size)} {what} by {by}{until}")
    return 0 if count else 1


def find(client: StoreClient, values: dict[str, Any], tokens: list[int]) -> Found:
    """What the store has of a prompt, as a lookup finds and pins it."""
    place, packed = where(values, client), pack_tokens(tokens)
    keys = chunk_keys(place.root, packed, place.chunk_tokens)
    deadline_ms = int(values["deadline"] * 1000)
    return client.lookup(place.namespace, place.root, packed, keys, limit=len(tokens), deadline_ms=deadline_ms)


def batches(chunks: list[Chunk]) -> list[list[Chunk]]:
    """So many at a time as one message holds."""
    return [chunks[at : at + BATCH_ITEMS_MAX] for at in range(0, len(chunks), BATCH_ITEMS_MAX)]


def _pin(client: StoreClient, values: dict[str, Any], chunks: list[Chunk], by: str) -> list[Kept]:
    kept: list[Kept] = []
    try:
        for some in batches(chunks):
            kept.append(client.pin(some, kind="hard" if values["hard"] else "soft", by=by, ttl_s=values["ttl"]))
    except StoreError:
        # All or nothing, also where it takes several messages.
        _unpin(client, chunks[: len(kept) * BATCH_ITEMS_MAX], by)
        raise
    return kept


def _unpin(client: StoreClient, chunks: list[Chunk], by: str) -> list[Kept]:
    return [client.unpin(some, by=by) for some in batches(chunks)]
