"""How long a prefix of a prompt each tier has, and why it ends where it does.

The prompt is text (tokenised by a front end, --url) or token ids. The namespace is the front end's worker's,
or the only one that the store knows, or --namespace.

example:
  forebay explain --url http://127.0.0.1:8000 "Notes on the history of the river"
  forebay explain --token-ids 2,818,5279,529 --namespace 3fa1
"""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from typing import Any

from forebay.cli.places import add_socket
from forebay.cli.tables import table
from forebay.errors import ConfigError, StoreUnavailable
from forebay.kvstore.client import StoreClient
from forebay.kvstore.identity import MATCH_UNIT, Chain, pack_tokens, root_key


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("prompt", nargs="?", help="text; needs --url")
    add_socket(parser)
    parser.add_argument("--url", help="a front end that tokenises and names its namespace")
    parser.add_argument("--api-key", help="for a front end that wants one")
    parser.add_argument("--token-ids", metavar="N,N,...", help="the prompt as token ids")
    parser.add_argument("--namespace", metavar="HEX", help="a namespace's id, or its beginning")
    parser.add_argument("--salt", metavar="HEX", default="", help="the chain's salt, if it has one")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(flags: dict[str, Any]) -> int:
    """Explain one prompt."""
    tokens = _tokens(flags)
    with StoreClient(flags["socket"]) as client:
        namespace = _namespace(flags, [ns["id"] for ns in client.stats().namespaces])
        chain = Chain(root_key(namespace, bytes.fromhex(flags["salt"])), tokens)
        told = client.explain(namespace, chain.root, pack_tokens(tokens), b"".join(chain.keys))
    rows = [[r.tier, r.group, str(r.tokens), r.reason, r.detail] for r in told.reaches]
    if flags["json"]:
        names = ("tier", "group", "tokens", "reason", "detail")
        reaches = [dict(zip(names, (r.tier, r.group, r.tokens, r.reason, r.detail), strict=True)) for r in told.reaches]
        print(json.dumps({"tokens": len(tokens), "hit": told.hit, "reaches": reaches}))
        return 0
    whole = len(tokens) // MATCH_UNIT * MATCH_UNIT
    print(f"{len(tokens)} tokens ({whole} in whole units): a hit of {told.hit} from memory now\n")
    print(table(("tier", "group", "tokens", "why it ends there", ""), rows, right=(2,)))
    return 0


def _tokens(flags: dict[str, Any]) -> list[int]:
    if flags["token_ids"]:
        try:
            tokens = [int(text) for text in flags["token_ids"].split(",")]
            pack_tokens(tokens)
        except (ValueError, OverflowError) as error:
            raise ConfigError(f"--token-ids takes numbers from 0 with commas between: {error}") from error
        return tokens
    if flags["prompt"] is None or flags["url"] is None:
        raise ConfigError("give a prompt as text with --url, or --token-ids")
    answer = _call(flags, "/tokenize", {"prompt": flags["prompt"]})
    return list(answer["tokens"])


def _namespace(flags: dict[str, Any], known: list[str]) -> bytes:
    if flags["url"] and not flags["namespace"]:
        flags["namespace"] = _call(flags, "/forebay/namespace", None)["id"]
    wanted = flags["namespace"] or ""
    found = [namespace for namespace in known if namespace.startswith(wanted)]
    if len(found) != 1:
        listed = ", ".join(namespace[:16] for namespace in known) or "none"
        raise ConfigError(f"--namespace {wanted!r} names {len(found)} of the store's namespaces; it knows {listed}")
    return bytes.fromhex(found[0])


def _call(flags: dict[str, Any], path: str, body: object | None) -> dict[str, Any]:
    if not flags["url"].startswith(("http://", "https://")):
        raise ConfigError(f"--url {flags['url']!r}: takes http://HOST:PORT")
    headers = {"content-type": "application/json"}
    if flags["api_key"]:
        headers["authorization"] = f"Bearer {flags['api_key']}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(flags["url"].rstrip("/") + path, data, headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return dict(json.load(answer))
    except (urllib.error.URLError, OSError) as error:
        raise StoreUnavailable(f"the front end at {flags['url']} doesn't answer {path}: {error}") from error
