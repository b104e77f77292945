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
import os
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

from forebay.cli.places import SOCKET
from forebay.cli.tables import table
from forebay.config import Setting, add_settings, boolean, hexadecimal, resolve, text, token_ids
from forebay.errors import ConfigError, StoreUnavailable
from forebay.kvstore.client import StoreClient
from forebay.kvstore.identity import MATCH_UNIT, pack_tokens, root_key

ANSWER_S = 30

SETTINGS = (
    Setting("prompt", text, None, "text; needs url", positional=True),
    SOCKET,
    Setting("url", text, None, "a front end that tokenises and names its namespace"),
    Setting("token_ids", token_ids, None, "the prompt as token ids"),
    Setting("cache_salt", text, "", "the request's cache_salt; needs url", shown="none"),
    Setting("namespace", hexadecimal, "", "a namespace's id, or its beginning", shown="the front end's or only one"),
    Setting("root", hexadecimal, "", "where the chain begins", shown="the front end's, or that of no salt"),
    Setting("json", boolean, False, "one JSON object", shown="no", switch=True),
)


@dataclass(frozen=True)
class Where:
    """A namespace and the root of the prompt's chain in it."""

    namespace: bytes
    root: bytes


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_settings(parser, SETTINGS)


def run(flags: dict[str, Any]) -> int:
    """Explain one prompt."""
    values = resolve("explain", SETTINGS, flags)
    tokens = _tokens(values)
    with StoreClient(str(values["socket"])) as client:
        where = _where(values, [namespace["id"] for namespace in client.stats().namespaces])
        told = client.explain(where.namespace, where.root, pack_tokens(tokens))
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


def _tokens(values: dict[str, Any]) -> list[int]:
    if values["token_ids"] is not None:
        return list(values["token_ids"])
    if values["prompt"] is None or values["url"] is None:
        raise ConfigError("give a prompt as text with --url, or --token-ids")
    return list(_call(values["url"], "/tokenize", {"prompt": values["prompt"]})["tokens"])


def _where(values: dict[str, Any], known: list[str]) -> Where:
    wanted, root = values["namespace"], values["root"]
    if values["url"] and not wanted:
        query = urllib.parse.urlencode({"cache_salt": values["cache_salt"]}) if values["cache_salt"] else ""
        told = _call(values["url"], "/forebay/namespace" + (f"?{query}" if query else ""), None)
        wanted, root = told["id"], root or told["root"]
    elif values["cache_salt"]:
        raise ConfigError("--cache-salt needs --url: only a front end knows the secret that makes it a root")
    found = [namespace for namespace in known if namespace.startswith(wanted)]
    if len(found) != 1:
        listed = ", ".join(namespace[:16] for namespace in known) or "none"
        raise ConfigError(f"--namespace {wanted!r} names {len(found)} of the store's namespaces; it knows {listed}")
    namespace = bytes.fromhex(found[0])
    if root and len(root) != 2 * len(namespace):
        raise ConfigError(f"--root {root!r}: takes {2 * len(namespace)} hexadecimal digits")
    return Where(namespace, bytes.fromhex(root) if root else root_key(namespace))


def _call(url: str, path: str, body: object | None) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url!r}: takes http://HOST:PORT")
    headers = {"content-type": "application/json"}
    if key := os.environ.get("FOREBAY_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url.rstrip("/") + path, data, headers)  # noqa: S310 - checked above
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:  # noqa: S310
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        raise StoreUnavailable(f"the front end at {url} answers {path} with {error.code}: {_why(error)}") from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise StoreUnavailable(f"the front end at {url} doesn't answer {path}: {error}") from error


def _why(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return error.reason
