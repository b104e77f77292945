"""One machine, one command: an OpenAI-compatible server whose prefix cache survives restarts and crashes.

Runs a store, workers and a front end, starts again what dies, and stops all of it on Ctrl-C or SIGTERM.

example:
  forebay serve --demo
  forebay serve ./Qwen3-0.6B --port 8080 --memory 8GiB --fs-quota 100GiB
  forebay serve ./Qwen3-0.6B --ray auto --ray-hosts 4
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli import serve_ray, tenants, tiers
from forebay.cli.frontend import TOOL_CALL_PARSER
from forebay.cli.places import cache_dir, runtime_dir
from forebay.cli.tables import bytes_text
from forebay.cli.worker import HOT, INDEX_KEYS, KV_CACHE_DTYPE, PREFIXES, RANKS
from forebay.config import Setting, add_settings, at_least, boolean, duration, one_of, path, port, resolve, size, text
from forebay.errors import ConfigError
from forebay.parent import PARENT_VARIABLE

if TYPE_CHECKING:
    from forebay.workers.health import Health
    from forebay.workers.supervisor import ServeConfig

MEMORY_DEFAULT = 2 << 30
SHARE_OF_FREE = 2
"""A default pool takes at most one part in this many of the free shared memory."""

SETTINGS = (
    Setting("model", path, None, "safetensors directory or GGUF file", positional=True),
    Setting("demo", boolean, False, "serve Gemma 3 270M from the installed demo package", shown="no", switch=True),
    Setting("host", text, "127.0.0.1", "address to listen on; other than loopback needs api_keys"),
    Setting("port", port, 8000, "port to listen on"),
    Setting("memory", size, None, "hard budget of the cache in shared memory", shown="2GiB, or half of what is free"),
    Setting("pool_dir", path, path("/dev/shm"), "where that memory is; a tmpfs"),  # noqa: S108
    Setting("fs", path, None, "directory of the cache's files", shown="kv in the cache directory"),
    Setting("fs_quota", size, 10 << 30, "hard quota of that directory", shown="10GiB"),
    Setting("no_fs", boolean, False, "keep no files: the cache ends with the command", shown="no", switch=True),
    Setting("dtype", one_of("auto", "float32", "bfloat16", "float16", "float64"), "auto", "of weights, arithmetic, KV"),
    KV_CACHE_DTYPE,
    Setting("workers", at_least(1), 1, "worker processes; where one dies or drains, others go on with its requests"),
    Setting("device", text, "cpu", "cpu, cuda or cuda:N"),
    Setting("device_memory", size, None, "bytes of each worker's block pool", shown="1GiB"),
    Setting("chunk_tokens", at_least(16), None, "tokens of a sealed chunk", shown="256"),
    Setting("threads", at_least(0), None, "compute threads", shown="what torch chooses"),
    *RANKS,
    *HOT,
    INDEX_KEYS,
    PREFIXES,
    Setting("label", text, None, "the model's name for clients", shown="last part of its path"),
    Setting("api_keys", path, None, "file with one `KEY TENANT` a line; without it nobody is asked"),
    Setting("max_queue", at_least(1), None, "requests under way at once; more get 429", shown="256"),
    Setting("max_num_seqs", at_least(1), None, "requests that hold blocks at once", shown="16"),
    Setting("max_num_batched_tokens", at_least(1), None, "tokens that one step feeds at most", shown="512"),
    Setting("max_model_len", at_least(2), None, "tokens of prompt and answer together", shown="the model's limit"),
    Setting(
        "structured_outputs", boolean, False, "take JSON schemas and grammars; needs the extra `guided`",
        shown="no", switch=True,
    ),
    TOOL_CALL_PARSER,
    Setting("trace", path, None, "file for a Chrome trace of the worker, written at the end"),
    Setting("shutdown_timeout", duration, 20.0, "how long open answers may go on when it stops", shown="20s"),
    Setting(
        "kv_address", tiers.host_port, None,
        "where peers get this host's KV, for kv_transfer_params", shown="listen of the p2p tier",
    ),
    Setting("events", text, None, "ZMQ endpoint of the store's KV events, such as tcp://127.0.0.1:5557"),
    Setting("replay", text, None, "ZMQ endpoint of their replay"),
    tiers.TIERS,
    tenants.TENANTS,
    tenants.POLICY,
    tenants.ATTENTION,
    *serve_ray.RAY,
)

_CURL = """try
  curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_settings(parser, SETTINGS)


def run(flags: dict[str, Any]) -> int:
    """Serve until stopped."""
    values = resolve("serve", SETTINGS, flags)
    _check(values)
    if values["ray"] is not None:
        return serve_ray.run(values, flags, SETTINGS)
    from forebay.workers.supervisor import serve, take_port

    # The port first: whoever can't have it should not wait for a model to be converted.
    with take_port(values["host"], values["port"]) as listener:
        model = _model(values)
        config = _config(values, model)
        _tell(f"starting {_label(values)}; this takes a moment")
        began = time.monotonic()
        return serve(config, listener, _tell, lambda health: _ready(values, config, health, time.monotonic() - began))


def _check(values: dict[str, Any]) -> None:
    if values["demo"] and values["model"] is not None:
        raise ConfigError("give a MODEL or --demo, not both")
    if values["model"] is None and not values["demo"]:
        raise ConfigError("which model? give a safetensors directory or a GGUF file, or --demo for Gemma 3 270M")
    if values["model"] is not None and not values["model"].exists():
        raise ConfigError(f"there is no model at {values['model']}; give a safetensors directory or a GGUF file")
    if values["no_fs"] and values["fs"] is not None:
        raise ConfigError("give --fs or --no-fs, not both")
    if values["trace"] is not None and values["workers"] > 1:
        raise ConfigError("--trace shows one worker; give --workers 1, or start workers with `forebay worker --trace`")
    if values["host"] not in ("127.0.0.1", "localhost", "::1") and values["api_keys"] is None:
        raise ConfigError(
            f"--host {values['host']}: a server that others can reach needs --api-keys FILE; or leave --host out"
        )


def _model(values: dict[str, Any]) -> Path:
    """The model's directory; a GGUF file is converted first, by a process of its own, since that takes memory."""
    if values["model"] is not None and values["model"].is_dir():
        return Path(values["model"]).absolute()
    what = ["--demo"] if values["demo"] else [str(values["model"])]
    command = [sys.executable, "-m", "forebay", "prepare", *what]
    environment = os.environ | {PARENT_VARIABLE: str(os.getpid())}
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    prepared = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if prepared.returncode != 0:
        sys.exit(prepared.returncode)  # it has said why
    return Path(prepared.stdout.strip())


def _label(values: dict[str, Any]) -> str:
    if values["label"]:
        return str(values["label"])
    return "gemma-3-270m" if values["demo"] else values["model"].absolute().name.removesuffix(".gguf")


def _config(values: dict[str, Any], model: Path) -> ServeConfig:
    from forebay.workers.supervisor import ServeConfig

    store = {name: values[name] for name in ("events", "replay")}
    store["memory"] = values["memory"] or default_memory(values["pool_dir"])
    store["tenants"] = tenants.inline(values["tenants"]) if values["tenants"] else None
    store["tiers"] = tiers.inline(values["tiers"]) if values["tiers"] else None
    store["policy"], store["attention_tokens"] = values["policy"], values["attention_tokens"]
    if not values["no_fs"]:
        store["fs"] = _files(values)
        store["fs_quota"] = values["fs_quota"]
    worker = {
        name: values[name] for name in (
            "dtype", "kv_cache_dtype", "device", "device_memory", "chunk_tokens", "threads", "max_num_seqs",
            "max_num_batched_tokens", "max_model_len", "structured_outputs", "trace", "index_cache_dtype", "prefixes",
            *(setting.name for setting in (*RANKS, *HOT) if setting.parse is not duration),
        )
    }  # fmt: skip
    for name in ("distributed_timeout", "hot_buffer_deadline"):
        worker[name] = f"{values[name]}s"
    frontend = {name: values[name] for name in ("api_keys", "max_queue", "tool_call_parser")}
    frontend["shutdown_timeout"] = f"{values['shutdown_timeout']}s"
    frontend["kv_address"] = _kv_address(values)
    worker["label"] = frontend["label"] = _label(values)
    return ServeConfig(
        model=model, runtime=runtime_dir() / f"serve-{values['port']}", host=values["host"], port=values["port"],
        pool_dir=values["pool_dir"].absolute(), store_arguments=_arguments(store),
        worker_arguments=_arguments(worker), frontend_arguments=_arguments(frontend),
        shutdown_s=values["shutdown_timeout"], workers=values["workers"],
    )  # fmt: skip


def _kv_address(values: dict[str, Any]) -> str | None:
    """Where peers ask: what was said, else where the first p2p tier listens, unless that is every address."""
    if values["kv_address"] is not None:
        return str(values["kv_address"])
    for name, rule in values["tiers"].items():
        if rule.kind == "p2p" and rule.options.get("listen"):
            try:
                listen = tiers.host_port(str(rule.options["listen"]))
            except ValueError as error:
                raise ConfigError(f"tier {name!r}: listen {error}") from error
            return None if listen.unspecified else str(listen)
    return None


def _files(values: dict[str, Any]) -> Path:
    folder: Path = values["fs"] or cache_dir() / "kv"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder.absolute()


def _arguments(settings: dict[str, Any]) -> list[str]:
    """Settings as flags of another command; those that aren't set are left to it."""
    flags: list[str] = []
    for name, value in settings.items():
        if isinstance(value, bool):
            flags += [f"--{name.replace('_', '-')}"] * value
        elif value is not None:
            flags += [f"--{name.replace('_', '-')}", str(value)]
    return flags


def default_memory(pool_dir: Path) -> int:
    """2 GiB, or half of what the tmpfs has free if that is less. Whole MiB."""
    try:
        found = os.statvfs(pool_dir)
    except OSError as error:
        raise ConfigError(f"--pool-dir {pool_dir}: {error.strerror}; give a tmpfs such as /dev/shm") from error
    free = found.f_bavail * found.f_frsize
    return max(min(MEMORY_DEFAULT, free // SHARE_OF_FREE) >> 20 << 20, 16 << 20)


def _tell(line: str) -> None:
    print(f"forebay serve: {line}", file=sys.stderr, flush=True)


def _ready(values: dict[str, Any], config: ServeConfig, health: Health, took_s: float) -> None:
    """The end of the beginning: the URL, and a line to paste."""
    host = f"[{values['host']}]" if ":" in values["host"] else values["host"]
    url = f"http://{host}:{values['port']}"
    memory = values["memory"] or default_memory(values["pool_dir"])
    kept = "no files" if values["no_fs"] else f"files in {values['fs'] or cache_dir() / 'kv'}"
    body = json.dumps({"model": health.model, "prompt": "The capital of France is", "max_tokens": 20, "temperature": 0})
    _tell(f"{health.model} is ready after {took_s:.0f} s; cache: {bytes_text(memory)} of memory, {kept}")
    watch = f"what the cache holds\n  forebay stat --socket {config.runtime / 'store.sock'}"
    print(f"\n{_CURL.format(url=url, body=body)}\n\n{watch}\n\nserving on {url} (Ctrl-C stops everything)", flush=True)
