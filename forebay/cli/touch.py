"""Count a prompt's chunks as just used: they are the last to be evicted. With --retain, keep them for a tenant.

example:
  forebay touch --token-ids 2,818,5279,529
  forebay touch --url http://127.0.0.1:8000 --retain 1h --tenant acme "You are a helpful assistant."
"""

from __future__ import annotations

import argparse
from typing import Any

from forebay.cli.pin import batches, find
from forebay.cli.places import SOCKET
from forebay.cli.prompts import PROMPT, tokens_of
from forebay.cli.tables import bytes_text
from forebay.config import Setting, add_settings, duration, resolve, text
from forebay.kvstore.client import StoreClient

SETTINGS = (
    PROMPT[0],
    SOCKET,
    *PROMPT[1:],
    Setting("retain", duration, 0.0, "keep them so long, within the tenant's budget", shown="no"),
    Setting("tenant", text, "", "whose budget that is", shown="the one of requests without a key"),
    Setting("deadline", duration, 2.0, "how long tiers may take to bring what memory lacks", shown="2s"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_settings(parser, SETTINGS)


def run(flags: dict[str, Any]) -> int:
    """Touch."""
    values = resolve("touch", SETTINGS, flags)
    tokens = tokens_of(values)
    with StoreClient(str(values["socket"]), maps=False) as client:
        found = find(client, values, tokens)
        chunks = [(chunk.group, chunk.key) for chunk in found.chunks]
        kept = [client.touch(c, tenant=values["tenant"], retain_s=values["retain"]) for c in batches(chunks)]
    count, size = sum(k.chunks for k in kept), sum(k.size for k in kept)
    print(f"{found.hit} of {len(tokens)} tokens are stored: {count} chunks, {bytes_text(size)} touched")
    return 0 if count else 1
