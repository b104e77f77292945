"""How long a prefix of a prompt each tier has, and why it ends where it does.

The prompt is text (a front end tokenises it: --url) or token ids. The namespace is that of the front end's
worker, or the only one that the store knows, or --namespace. A front end with API keys takes one from the
variable FOREBAY_API_KEY, and then explains the chains of its tenant.

example:
  forebay explain --url http://127.0.0.1:8000 "Notes on the history of the river"
  forebay explain --token-ids 2,818,5279,529 --namespace 3fa1
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from forebay.cli.places import SOCKET
from forebay.cli.prompts import PROMPT, tokens_of, where
from forebay.cli.tables import table
from forebay.config import Setting, add_settings, boolean, resolve
from forebay.kvstore.client import StoreClient
from forebay.kvstore.identity import MATCH_UNIT, pack_tokens

SETTINGS = (
    PROMPT[0],
    SOCKET,
    *PROMPT[1:],
    Setting("json", boolean, False, "one JSON object", shown="no", switch=True),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_settings(parser, SETTINGS)


def run(flags: dict[str, Any]) -> int:
    """Explain one prompt."""
    values = resolve("explain", SETTINGS, flags)
    tokens = tokens_of(values)
    with StoreClient(str(values["socket"]), maps=False) as client:
        place = where(values, client)
        told = client.explain(place.namespace, place.root, pack_tokens(tokens))
    if values["json"]:
        names = ("tier", "group", "tokens", "reason", "detail")
        reaches = [dict(zip(names, (r.tier, r.group, r.tokens, r.reason, r.detail), strict=True)) for r in told.reaches]
        print(json.dumps({"tokens": len(tokens), "hit": told.hit, "reaches": reaches}))
        return 0
    whole = len(tokens) // MATCH_UNIT * MATCH_UNIT
    print(f"{len(tokens)} tokens ({whole} in whole units): a hit of {told.hit} from memory now\n")
    rows = [[r.tier, r.group, str(r.tokens), r.reason, r.detail] for r in told.reaches]
    print(table(("tier", "group", "tokens", "why it ends there", ""), rows, right=(2,)))
    return 0
