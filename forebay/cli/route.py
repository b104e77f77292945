"""Where a router would send a prompt, and why: each candidate's cost, term by term. Sends nothing.

    device   tokens that the worker has on its device        wait     what is queued before the prompt
    near     and in its own tiers and its store's            load     loading what is cached
    far      tokens that another store has                   cut      computing and loading the cached, until they meet
    cached   what it wouldn't have to compute                compute  computing the rest

A router before front ends with API keys takes one from the variable FOREBAY_API_KEY.

example:
  forebay route --explain --url http://127.0.0.1:8080 "Notes on the history of the river"
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from forebay.cli.prompts import call
from forebay.cli.tables import table
from forebay.config import Setting, add_settings, boolean, resolve, text, token_ids
from forebay.errors import ConfigError

SETTINGS = (
    Setting("prompt", text, None, "the prompt as text", positional=True),
    Setting("url", text, "http://127.0.0.1:8080", "the router"),
    Setting("token_ids", token_ids, None, "the prompt as token ids"),
    Setting("model", text, None, "for this model", shown="the workers' first"),
    Setting("cache_salt", text, "", "the request's cache_salt", shown="none"),
    Setting("explain", boolean, False, "show the candidates too", shown="no", switch=True),
    Setting("json", boolean, False, "one JSON object", shown="no", switch=True),
)

HEAD = ("worker", "state", "in flight", "device", "near", "far", "cached", "wait", "load", "cut", "compute", "ttft", "")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_settings(parser, SETTINGS)


def run(flags: dict[str, Any]) -> int:
    """Ask the router."""
    values = resolve("route", SETTINGS, flags)
    prompt = values["prompt"] if values["token_ids"] is None else values["token_ids"]
    if prompt is None:
        raise ConfigError("give a prompt as text, or --token-ids")
    body = {"prompt": prompt} | {name: values[name] for name in ("model", "cache_salt") if values[name]}
    told = call(values["url"], "/router/explain", body)
    if values["json"]:
        print(json.dumps(told))
        return 0
    moved = f", moving the prefix from {told['move_from']}" if told["move_from"] else ""
    print(
        f"{told['prompt_tokens']} tokens go to {told['worker']} ({told['reason']}{moved}): {told['cached_tokens']} of "
        f"them cached; decided by {told['policy']} in {told['took_ms']:.2f} ms"
    )
    if values["explain"]:
        rows = [_row(candidate, told["worker"]) for candidate in told["candidates"]]
        print("\n" + table(HEAD, rows, right=range(2, len(HEAD) - 1)))
    return 0


def _row(candidate: dict[str, Any], chosen: str) -> list[str]:
    state = "draining" if candidate["draining"] else "up" if candidate["up"] else "down"
    far = f"{candidate['far_tokens']} ({candidate['far_from']})" if candidate["far_from"] else "-"
    tokens = [str(candidate[name]) for name in ("in_flight", "device_tokens", "near_tokens")]
    seconds = [f"{1000 * candidate[name]:.1f} ms" for name in ("wait_s", "load_s", "cut_s", "compute_s", "ttft_s")]
    mark = "<" if candidate["worker"] == chosen else ""
    return [candidate["worker"], state, *tokens, far, str(candidate["cached_tokens"]), *seconds, mark]
