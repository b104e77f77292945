"""An OpenAI-compatible HTTP server in front of one worker. It outlives the worker: streams go on at the next.

example:
  forebay frontend --worker unix:///run/forebay/w0.sock --model ./gemma-3-270m --port 8000
"""

from __future__ import annotations

import argparse
from typing import Any

from forebay.cli.places import cache_dir
from forebay.cli.tiers import host_port
from forebay.config import Setting, add_settings, at_least, duration, one_of, path, port, resolve, text
from forebay.errors import ConfigError

TOOL_CALL_PARSER = Setting(
    "tool_call_parser", one_of("auto", "hermes", "llama3_json", "glm45", "minimax_m2", "deepseek_v3", "openai"),
    "auto", "how the model writes calls of tools; auto: as its chat template says",
)  # fmt: skip
SETTINGS = (
    Setting("worker", text, None, "unix socket of the worker"),
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
    from forebay.workers.api.frontend import FrontendConfig, run_frontend

    values["shutdown_s"] = values.pop("shutdown_timeout")
    values["give_up_s"] = values.pop("give_up")
    values["state_dir"] = values["state_dir"] or cache_dir() / "state"
    return run_frontend(FrontendConfig(**values))
