"""Prompts and prefixes that a command is given: as text that a front end tokenises, or as token ids.

The namespace is that of the front end's worker, or the only one that the store knows, or --namespace. A front end with
API keys takes one from the variable FOREBAY_API_KEY, and then it is about the chains of its tenant.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

from forebay.config import Setting, hexadecimal, text, token_ids
from forebay.errors import ConfigError, StoreUnavailable
from forebay.kvstore.client import StoreClient
from forebay.kvstore.identity import root_key

ANSWER_S = 30

PROMPT = (
    Setting("prompt", text, None, "text; needs url", positional=True),
    Setting("url", text, None, "a front end that tokenises and names its namespace"),
    Setting("token_ids", token_ids, None, "the prompt as token ids"),
    Setting("cache_salt", text, "", "the request's cache_salt; needs url", shown="none"),
    Setting("namespace", hexadecimal, "", "a namespace's id, or its beginning", shown="the front end's or only one"),
    Setting("root", hexadecimal, "", "where the chain begins", shown="the front end's, or that of no salt"),
)
"""Settings of commands that take a prompt."""


@dataclass(frozen=True)
class Where:
    """A namespace, tokens in one of its chunks, and the root of the prompt's chain in it."""

    namespace: bytes
    chunk_tokens: int
    root: bytes


def tokens_of(values: dict[str, Any]) -> list[int]:
    """The prompt's token ids. Raises ConfigError if there is none."""
    if values["token_ids"] is not None:
        return list(values["token_ids"])
    if values["prompt"] is None or values["url"] is None:
        raise ConfigError("give a prompt as text with --url, or --token-ids")
    return list(call(values["url"], "/tokenize", {"prompt": values["prompt"]})["tokens"])


def where(values: dict[str, Any], client: StoreClient) -> Where:
    """The chain that the settings name. Raises ConfigError if they name none, or several."""
    wanted, root = values["namespace"], values["root"]
    if values["url"] and not wanted:
        query = urllib.parse.urlencode({"cache_salt": values["cache_salt"]}) if values["cache_salt"] else ""
        told = call(values["url"], "/forebay/namespace" + (f"?{query}" if query else ""), None)
        wanted, root = told["id"], root or told["root"]
    elif values["cache_salt"]:
        raise ConfigError("--cache-salt needs --url: only a front end knows the secret that makes it a root")
    known = _one_of(wanted, client)
    namespace = bytes.fromhex(known["id"])
    if root and len(root) != 2 * len(namespace):
        raise ConfigError(f"--root {root!r}: takes {2 * len(namespace)} hexadecimal digits")
    return Where(namespace, int(known["chunk_tokens"]), bytes.fromhex(root) if root else root_key(namespace))


def namespace_of(wanted: str, client: StoreClient) -> bytes:
    """The id that begins so. Raises ConfigError if none does, or several."""
    return bytes.fromhex(_one_of(wanted, client)["id"])


def _one_of(wanted: str, client: StoreClient) -> dict[str, str]:
    known = client.stats().namespaces
    found = [namespace for namespace in known if namespace["id"].startswith(wanted)]
    if len(found) != 1:
        listed = ", ".join(namespace["id"][:16] for namespace in known) or "none"
        raise ConfigError(f"--namespace {wanted!r} names {len(found)} of the store's namespaces; it knows {listed}")
    return found[0]


def call(url: str, path: str, body: object | None) -> dict[str, Any]:
    """What a front end (or router) answers. Raises ConfigError for what is no URL, StoreUnavailable for no answer."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url!r}: takes http://HOST:PORT")
    headers = {"content-type": "application/json"}
    if key := os.environ.get("FOREBAY_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    who = f"the {'router' if path.startswith('/router/') else 'front end'} at {url}"
    request = urllib.request.Request(url.rstrip("/") + path, data, headers)  # noqa: S310 - checked above
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:  # noqa: S310
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        raise StoreUnavailable(f"{who} answers {path} with {error.code}: {_why(error)}") from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise StoreUnavailable(f"{who} doesn't answer {path}: {error}") from error


def _why(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return error.reason
