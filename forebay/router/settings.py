"""What a router is told: workers, stores, and how patient it is."""

from __future__ import annotations

import math
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from forebay.errors import ConfigError
from forebay.events.errors import EndpointRefused
from forebay.events.sockets import CurveClient, check_remote
from forebay.scheduler.fleet import Rates
from forebay.scheduler.prefix_keys import BLOCK_TOKENS_MAX
from forebay.tiers.p2p.keys import own_pair, peer_key

BACKENDS_MAX = 1024


@dataclass(frozen=True)
class Backend:
    """One worker's HTTP address. `events` and `replay` are the endpoints of its own KV events, `store` the name of the
    store that it is attached to. `server` names the public key of who publishes, for streams with CURVE. A `prefill`
    worker computes long prompts for the others, and else gets nothing as long as one of those is there."""

    name: str
    host: str
    port: int
    events: str | None = None
    replay: str | None = None
    server: str | None = None
    store: str | None = None
    block_tokens: int = 16
    prefill: bool = False
    rates: Rates = field(default_factory=Rates)


@dataclass(frozen=True)
class StoreStream:
    """Where a store tells what it holds; `server` as above. `kv_address` (HOST:PORT) is where others get its KV."""

    name: str
    events: str
    replay: str | None = None
    server: str | None = None
    kv_address: str | None = None


@dataclass(frozen=True)
class RouterConfig:
    """Settings of one router. Times in seconds. Requests under way are capped for each worker that is up. Of a prompt
    that prefill workers compute, `split_at` tokens or more aren't cached.

    `event_keys` is a directory with the router's own CURVE keys and the public ones of who publishes; `worker_key` a
    file with the API key for the router's own questions to front ends that ask for one."""

    backends: tuple[Backend, ...]
    stores: tuple[StoreStream, ...] = ()
    policy: str = "ttft"
    host: str = "127.0.0.1"
    port: int = 8080
    per_worker: int = 256
    split_at: int = 512
    attempts: int = 3
    health_s: float = 0.5
    connect_s: float = 2.0
    answer_s: float = 600.0
    predict_s: float = 5.0
    breaker_failures: int = 5
    breaker_s: float = 5.0
    seed: int | None = None
    event_keys: Path | None = None
    worker_key: Path | None = None


def backends_of(table: Mapping[str, Any]) -> tuple[Backend, ...]:
    """Workers by name. Raises ValueError that names what is wrong."""
    if not 0 < len(table) <= BACKENDS_MAX:
        raise ValueError(f"has {len(table)} workers; it takes 1 to {BACKENDS_MAX}")
    return tuple(_backend(name, given) for name, given in table.items())


def moved(backend: Backend, given: Mapping[str, Any]) -> Backend:
    """The same worker at another address: `url`, and `events` and `replay` of its own stream. Raises ValueError."""
    table = {name: given[name] for name in ("url", "events", "replay") if given.get(name) is not None}
    there = _backend(backend.name, table)
    return replace(backend, host=there.host, port=there.port, events=there.events, replay=there.replay)


def stores_of(table: Mapping[str, Any]) -> tuple[StoreStream, ...]:
    """Stores by name. Raises ValueError that names what is wrong."""
    made = []
    for name, given in table.items():
        options = _options(name, given, {field.name for field in fields(StoreStream)} - {"name"})
        if "events" not in options:
            raise ValueError(f"store {name!r}: takes events, the endpoint of its stream")
        _check_stream(f"store {name!r}", options)
        made.append(StoreStream(name, **options))
    return tuple(made)


def _backend(name: str, given: object) -> Backend:
    known = {"url", "events", "replay", "server", "store", "block_tokens", "prefill"}
    known |= {field.name for field in fields(Rates)}
    options = _options(name, {"url": given} if isinstance(given, str) else given, known)
    address = urllib.parse.urlsplit(str(options.pop("url", "")))
    if address.scheme != "http" or not address.hostname or address.path not in ("", "/"):
        raise ValueError(f"worker {name!r}: url takes http://HOST:PORT")
    rates = {key: options.pop(key) for key in [field.name for field in fields(Rates)] if key in options}
    if "load_s" in rates:
        rates["load_s"] = tuple(rates["load_s"]) if isinstance(rates["load_s"], list | tuple) else ()
        if len(rates["load_s"]) != 4:
            raise ValueError(f"worker {name!r}: load_s takes four numbers: device, host, disk, remote")
    _check_stream(f"worker {name!r}", options)
    _check_rates(f"worker {name!r}", rates)
    size = options.get("block_tokens", 16)
    if type(size) is not int or not 0 < size <= BLOCK_TOKENS_MAX:
        raise ValueError(f"worker {name!r}: block_tokens takes a number from 1 to {BLOCK_TOKENS_MAX}")
    if type(options.get("prefill", False)) is not bool:
        raise ValueError(f"worker {name!r}: prefill takes true or false")
    return Backend(name, address.hostname, address.port or 80, rates=Rates(**rates), **options)


def _check_stream(whose: str, options: Mapping[str, Any]) -> None:
    for name in ("events", "replay"):
        if name in options:
            try:
                check_remote(options[name])
            except EndpointRefused as error:
                raise ValueError(f"{whose}: {name}: {error}") from error
    if "replay" in options and "events" not in options:
        raise ValueError(f"{whose}: replay without events: nothing would be heard")
    for name in ("server", "store", "kv_address"):
        if not isinstance(options.get(name, ""), str):
            raise ValueError(f"{whose}: {name} takes text")


def _check_rates(whose: str, rates: Mapping[str, Any]) -> None:
    if type(rates.get("overlaps", True)) is not bool:
        raise ValueError(f"{whose}: overlaps takes true or false")
    for name, told in rates.items():
        for value in told if isinstance(told, tuple) else (told,):
            if name != "overlaps" and (not isinstance(value, int | float) or not 0 <= value < math.inf):
                raise ValueError(f"{whose}: {name} takes a number of seconds or tokens, 0 or more; not {value!r}")


def _options(name: str, given: object, known: set[str]) -> dict[str, Any]:
    if not re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}", name):
        raise ValueError(f"{name!r}: a name has up to 64 letters, digits, dots, dashes")
    if not isinstance(given, Mapping):
        raise ValueError(f"{name!r}: takes a table with {', '.join(sorted(known))}")
    if unknown := sorted(set(given) - known):
        raise ValueError(f"{name!r}: unknown key {unknown[0]!r}; takes {', '.join(sorted(known))}")
    return dict(given)


def inline(text: str) -> dict[str, Any]:
    """`NAME=URL,NAME=URL`: workers of which nothing more is told."""
    table: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, url = part.strip().partition("=")
        if not equals:
            raise ValueError("takes NAME=http://HOST:PORT, with commas between")
        table[name] = url
    return table


def check(config: RouterConfig) -> None:
    """Raise ConfigError for stores that nobody named, and for streams whose keys aren't to be had."""
    known = {store.name for store in config.stores}
    if both := sorted(known & {backend.name for backend in config.backends}):
        raise ConfigError(f"{both[0]!r} is a worker and a store: each needs a name of its own, by which its events go")
    for backend in config.backends:
        if backend.store is not None and backend.store not in known:
            raise ConfigError(f"worker {backend.name!r} is attached to store {backend.store!r}, which has no table")
    if all(backend.prefill for backend in config.backends):
        raise ConfigError("all workers are for prefill: somebody must decode")
    for name, server in servers_of(config).items():
        if server is not None and config.event_keys is None:
            raise ConfigError(f"{name!r} has server = {server!r}: its key is looked up in --event-keys DIR")


def servers_of(config: RouterConfig) -> dict[str, str | None]:
    """For each worker and store, whose key its stream is read with."""
    return {one.name: one.server for one in config.backends} | {one.name: one.server for one in config.stores}


def curve_of(config: RouterConfig, server: str | None) -> CurveClient | None:
    """Keys for a stream of this publisher; None for one without. Raises ConfigError."""
    if server is None or config.event_keys is None:
        return None
    return CurveClient(own_pair(config.event_keys).secret, peer_key(config.event_keys, server))


def own_headers(config: RouterConfig) -> dict[str, str]:
    """What the router's own questions to workers carry. Raises ConfigError for a key that can't be read."""
    if config.worker_key is None:
        return {}
    try:
        words = config.worker_key.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--worker-key {config.worker_key}: can't be read ({error})") from error
    if not words:
        raise ConfigError(f"--worker-key {config.worker_key}: is empty; it takes an API key of the workers' front ends")
    return {"authorization": f"Bearer {words[0]}"}
