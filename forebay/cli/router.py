"""An OpenAI-compatible proxy before any mix of Forebay front ends and vLLM servers: each request goes to where its
first token will be there soonest.

Workers and stores stand in a TOML file (--config), with the streams of their KV events:

  [workers.w0]
  url = "http://127.0.0.1:8000"
  events = "tcp://127.0.0.1:5557"
  replay = "tcp://127.0.0.1:5558"
  store = "s0"

  [stores.s0]
  events = "tcp://127.0.0.1:5600"
  replay = "tcp://127.0.0.1:5601"

example:
  forebay router --config router.toml --port 8080
  forebay router --workers a=http://127.0.0.1:8000,b=http://127.0.0.1:8001
"""

from __future__ import annotations

import argparse
from typing import Any

from forebay.config import Kind, Setting, add_settings, at_least, duration, one_of, path, port, resolve, text
from forebay.errors import ConfigError
from forebay.router import settings

POLICY_NAMES = ("ttft", "cache-aware", "longest-prefix", "least-load", "power-of-two", "round-robin")

_WORKERS = Kind("NAME=URL,...", lambda given: settings.backends_of(settings.inline(given)), settings.backends_of)
_STORES = Kind("TABLES", lambda given: settings.stores_of({given: None}), settings.stores_of)

SETTINGS = (
    Setting("workers", _WORKERS, (), "workers by name; in a file tables with their streams", shown="none"),
    Setting("stores", _STORES, (), "stores by name; only in a file", shown="none"),
    Setting("policy", one_of(*POLICY_NAMES), "ttft", "how a worker is chosen"),
    Setting("host", text, "127.0.0.1", "loopback address to serve on"),
    Setting("port", port, 8080, "port to serve on"),
    Setting("per_worker", at_least(1), 256, "requests under way at one worker; with so many at all of them: 429"),
    Setting("split_at", at_least(1), 512, "tokens of a prompt that must be uncached for `prefill` workers to get it"),
    Setting("attempts", at_least(1), 3, "workers that a request is offered to before it is answered with an error"),
    Setting("health", duration, 0.5, "how often workers are asked for their health", shown="500ms"),
    Setting("connect", duration, 2.0, "how long a connection may take", shown="2s"),
    Setting("answer", duration, 600.0, "how long a worker may be silent in an answer", shown="10m"),
    Setting("predict", duration, 5.0, "how long a prompt counts as being cached where it was sent", shown="5s"),
    Setting("breaker_failures", at_least(1), 5, "failures in a row after which a worker is left alone"),
    Setting("breaker", duration, 5.0, "for so long", shown="5s"),
    Setting("event_keys", path, None, "directory of CURVE keys, for streams with `server`"),
    Setting("worker_key", path, None, "file with an API key for the router's own questions to workers", shown="none"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_settings(parser, SETTINGS)


def run(flags: dict[str, Any]) -> int:
    """Run the router until it is stopped."""
    values = resolve("router", SETTINGS, flags)
    if not values["workers"]:
        raise ConfigError("a router needs workers: --workers NAME=URL,... or tables [workers.NAME] in --config FILE")
    from forebay.router.router import run_router

    values["backends"] = values.pop("workers")
    for name in ("health", "connect", "answer", "predict", "breaker"):
        values[f"{name}_s"] = values.pop(name)
    return run_router(settings.RouterConfig(**values))
