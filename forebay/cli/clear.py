"""Forget chunks in memory and in every tier, pinned or not: by namespace, by tenant, by prefix, or all.

A prefix takes the chunks that hold its end, and everything that goes on from there; give the whole of a prompt to
forget what follows it, or its first words to forget it altogether. What is being read stays for those who read it.

example:
  forebay clear --tenant acme
  forebay clear --namespace 3fa1
  forebay clear --url http://127.0.0.1:8000 "Minutes of the board meeting"
"""

from __future__ import annotations

import argparse
from typing import Any

from forebay.cli.places import SOCKET
from forebay.cli.prompts import PROMPT, namespace_of, tokens_of, where
from forebay.config import Setting, add_settings, boolean, resolve, text
from forebay.errors import ConfigError
from forebay.kvstore.client import StoreClient
from forebay.kvstore.identity import pack_tokens
from forebay.kvstore.protocol import Cleared

SETTINGS = (
    PROMPT[0],
    SOCKET,
    *PROMPT[1:],
    Setting("tenant", text, None, "only this tenant's"),
    Setting("all", boolean, False, "everything that the store holds", shown="no", switch=True),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_settings(parser, SETTINGS)


def run(flags: dict[str, Any]) -> int:
    """Clear."""
    values = resolve("clear", SETTINGS, flags)
    prefix = values["prompt"] is not None or values["token_ids"] is not None
    if not (prefix or values["namespace"] or values["tenant"] is not None or values["all"]):
        raise ConfigError("say what to forget: a prefix, --namespace, --tenant, or --all")
    if values["all"] and (prefix or values["namespace"] or values["tenant"] is not None):
        raise ConfigError("--all forgets everything: leave it out to forget a part")
    tokens = tokens_of(values) if prefix else []
    with StoreClient(str(values["socket"]), timeout_s=60.0, maps=False) as client:
        cleared = _clear(client, values, tokens if prefix else None)
    print(f"memory: {cleared.chunks} chunks are forgotten")
    for tier, count in sorted(cleared.tiers.items()):
        print(f"{tier}: {f'{count} chunks are forgotten' if count >= 0 else 'it does not say what it has forgotten'}")
    return int(any(count < 0 for count in cleared.tiers.values()))


def _clear(client: StoreClient, values: dict[str, Any], tokens: list[int] | None) -> Cleared:
    tenant = values["tenant"]
    if tokens is not None:
        place = where(values, client)
        return client.clear(place.namespace, tenant=tenant, root=place.root, tokens=pack_tokens(tokens))
    namespace = namespace_of(values["namespace"], client) if values["namespace"] else b""
    return client.clear(namespace, tenant=tenant)
