"""An OpenAI-compatible HTTP server in front of workers. It outlives them: streams go on at another one, or the next.

example:
  forebay frontend --worker unix:///run/forebay/w0.sock,unix:///run/forebay/w1.sock --model ./gemma-3-270m
  forebay frontend --worker unix:///run/forebay/w0.sock --prefill unix:///run/forebay/p0.sock \\
      --store unix:///run/forebay/store.sock --model ./gemma-3-270m
"""

from __future__ import annotations

import argparse
from typing import Any

from forebay.cli.places import cache_dir
from forebay.cli.tiers import host_port
from forebay.config import Kind, Setting, add_settings, at_least, duration, one_of, path, port, resolve, text
from forebay.errors import ConfigError
from forebay.importing import nothing_collected
from forebay.ipc.sockets import socket_path
from forebay.tiers.p2p.options import Address


def _sockets(given: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in given.split(","))
    try:
        for name in names:
            socket_path(name)
    except ConfigError as error:
        raise ValueError(f"takes unix sockets, with commas between: {error}") from error
    return names


def _places(given: str) -> tuple[str | Address, ...]:
    """Unix sockets, and front ends of other hosts as http://HOST:PORT."""
    places: list[str | Address] = []
    for name in (name.strip() for name in given.split(",")):
        if name.startswith("http://"):
            places.append(host_port(name.removeprefix("http://").rstrip("/")))
        else:
            places += _sockets(name)
    return tuple(places)


TOOL_CALL_PARSER = Setting(
    "tool_call_parser", one_of("auto", "hermes", "llama3_json", "glm45", "minimax_m2", "deepseek_v3", "openai"),
    "auto", "how the model writes calls of tools; auto: as its chat template says",
)  # fmt: skip
SETTINGS = (
    Setting("worker", Kind("SOCKET,...", _sockets), None, "unix sockets of the workers, with commas between"),
    Setting(
        "prefill", Kind("PLACE,...", _places), (),
        "workers (unix sockets) or front ends of other hosts (http://HOST:PORT) that compute long prompts for the "
        "others", shown="none",
    ),
    Setting("store", text, None, "unix socket of the store; --prefill needs it", shown="none"),
    Setting("split_at", at_least(1), 512, "tokens of a prompt that must be uncached for --prefill to get it"),
    Setting("model", path, None, "safetensors directory or GGUF file, for its tokenizer and chat template"),
    Setting("host", text, "127.0.0.1", "address to serve on; others than loopback need --api-keys"),
    Setting("port", port, 8000, "port to serve on"),
    Setting("label", text, "", "the model's name in the API", shown="last part of its path"),
    Setting("api_keys", path, None, "file with `KEY TENANT` lines; without it everybody is one tenant"),
    Setting("max_queue", at_least(1), 256, "generations under way; beyond it 429 with Retry-After"),
    Setting("give_up", duration, 120.0, "how long streams wait for a worker to come back", shown="2m"),
    Setting("listen_fd", at_least(0), None, "descriptor of a bound socket to serve on, instead of host and port"),
    Setting(
        "kv_address", host_port, None,
        "where peers get this host's KV (its p2p tier's listen), for kv_transfer_params", shown="none",
    ),
    Setting(
        "shutdown_timeout", duration, 20.0, "how long open answers may go on after SIGTERM; 0s ends them", shown="20s"
    ),
    TOOL_CALL_PARSER,
    Setting("state_dir", path, None, "keeps the server's secret", shown="cache directory"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_settings(parser, SETTINGS)


def run(flags: dict[str, Any]) -> int:
    """Run the front end until it is stopped."""
    values = resolve("frontend", SETTINGS, flags)
    if values["worker"] is None or values["model"] is None:
        raise ConfigError("a front end needs --worker and --model")
    with nothing_collected():
        from forebay.workers.api.frontend import FrontendConfig, run_frontend

    values["workers"] = values.pop("worker")
    values["shutdown_s"] = values.pop("shutdown_timeout")
    values["give_up_s"] = values.pop("give_up")
    values["state_dir"] = values["state_dir"] or cache_dir() / "state"
    return run_frontend(FrontendConfig(**values))
