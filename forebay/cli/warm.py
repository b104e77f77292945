"""Bring a prompt's chunks from the tiers into memory, before anybody asks for them. Nothing stays pinned.

A chain can be named by its keys alone: those at the ends of its whole chunks, in order, as KV events tell them.

example:
  forebay warm --url http://127.0.0.1:8000 --deadline 10s "You are a helpful assistant of the river authority."
  forebay warm --token-ids 2,818,5279,529
  forebay warm --keys 5f0c...,91ab... --deadline 1m
"""

from __future__ import annotations

import argparse
from typing import Any

from forebay.cli.places import SOCKET
from forebay.cli.prompts import PROMPT, Where, tokens_of, where
from forebay.config import Kind, Setting, add_settings, duration, resolve, text
from forebay.kvstore.client import StoreClient
from forebay.kvstore.identity import KEY_BYTES, chunk_keys, pack_tokens


def _keys(given: str) -> bytes:
    words = [word.strip() for word in given.split(",")]
    if any(len(word) != 2 * KEY_BYTES for word in words):
        raise ValueError(f"takes keys of {2 * KEY_BYTES} hexadecimal digits, with commas between")
    return bytes.fromhex("".join(words))


SETTINGS = (
    PROMPT[0],
    SOCKET,
    *PROMPT[1:],
    Setting("keys", Kind("HEX,HEX,...", _keys), None, "the chain's keys, instead of a prompt"),
    Setting("tenant", text, "", "at whose expense", shown="the one of requests without a key"),
    Setting("deadline", duration, 30.0, "how long to wait for it", shown="30s"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_settings(parser, SETTINGS)


def run(flags: dict[str, Any]) -> int:
    """Warm; exit code 1 if not all of it is in memory now."""
    values = resolve("warm", SETTINGS, flags)
    tokens = tokens_of(values) if values["keys"] is None else None
    deadline_ms = int(values["deadline"] * 1000)
    with StoreClient(str(values["socket"]), maps=False) as client:
        place = where(values, client)
        if tokens is None:
            wanted = len(values["keys"]) // KEY_BYTES * place.chunk_tokens
            warmed = client.warm(
                place.namespace, place.root, values["keys"], deadline_ms=deadline_ms, tenant=values["tenant"]
            )  # fmt: skip
            hit, brought, pending = warmed.hit, warmed.from_tier, warmed.pending
        else:
            wanted = len(tokens) // 16 * 16
            hit, brought, pending = _lookup(client, place, tokens, deadline_ms, values["tenant"])
    came = ", ".join(f"{count} of them from {tier}" for tier, count in sorted(brought.items()))
    more = "; more is under way" if pending else ""
    print(f"{hit} of {wanted} tokens are in memory{', ' + came if came else ''}{more}")
    return 0 if hit >= wanted else 1


def _lookup(
    client: StoreClient, place: Where, tokens: list[int], deadline_ms: int, tenant: str
) -> tuple[int, dict[str, int], bool]:
    """With the tokens themselves tails are found too, which have no whole chunk."""
    packed = pack_tokens(tokens)
    keys = chunk_keys(place.root, packed, place.chunk_tokens)
    found = client.lookup(
        place.namespace, place.root, packed, keys, limit=len(tokens), deadline_ms=deadline_ms, tenant=tenant
    )  # fmt: skip
    client.release([found.lease])
    return found.hit, found.from_tier, found.pending
