"""What a user says in the engine's configuration, checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from forebay.errors import ConfigError
from forebay.kvstore.identity import MATCH_UNIT

SECRET_BYTES_MIN = 16


@dataclass(frozen=True)
class Settings:
    """`store` is its address; `chunk_tokens` must be that of whoever shares chunks; `tenant` goes into headers and
    quotas. Salts are derived from the bytes of `salt_file`, if there is one. `lookup_deadline_ms` is how long tiers
    may take to promote, `hung_ms` how long the store may take to answer before it counts as gone, `load_tokens_min`
    what is worth a load, `patience_ms` how long a scheduling step may wait for an answer from memory in all,
    `store_wait_ms` how long a step waits for room that it asked for before its forward. `queue_bytes` caps what waits
    to be hashed and committed, `requests_max` the requests that are followed at once. `cache_dir` keeps fingerprints
    of weights. With `events` the engine tells the store's events about this model as well, for routers that hear only
    engines.
    """

    store: str
    chunk_tokens: int = 256
    tenant: str = ""
    salt_file: str = ""
    label: str = ""
    cache_dir: str = ""
    events: bool = False
    lookup_deadline_ms: int = 2000
    hung_ms: int = 5000
    load_tokens_min: int = 32
    patience_ms: float = 2.0
    store_wait_ms: float = 2.0
    queue_bytes: int = 1 << 30
    requests_max: int = 16384
    salt_secret: bytes = field(default=b"", repr=False)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Settings:
        """From the engine's `kv_connector_extra_config`. Raises ConfigError that names the setting."""
        known = {entry.name: entry for entry in fields(cls) if entry.name != "salt_secret"}
        for name, value in given.items():
            if name not in known:
                raise ConfigError(f"kv_connector_extra_config: {name!r} is none of {', '.join(known)}")
            _check(name, value, str(known[name].type))
        if "store" not in given:
            raise ConfigError('kv_connector_extra_config: "store" is missing: give the store\'s address, unix:///PATH')
        settings = cls(**given)
        if settings.chunk_tokens % MATCH_UNIT:
            raise ConfigError(f"kv_connector_extra_config: chunk_tokens must be a multiple of {MATCH_UNIT}")
        if not settings.salt_file:
            return settings
        return cls(**given, salt_secret=_secret(Path(settings.salt_file)))


def _check(name: str, value: Any, wanted: str) -> None:
    if wanted == "str":
        right = isinstance(value, str)
    elif wanted == "bool":
        right = isinstance(value, bool)
    elif wanted == "int":
        right = isinstance(value, int) and not isinstance(value, bool) and value > 0
    else:
        right = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    if not right:
        kinds = {"str": "a string", "bool": "true or false", "int": "a positive whole number"}
        what = kinds.get(wanted, "a number of at least 0")
        raise ConfigError(f"kv_connector_extra_config: {name} must be {what}, found {value!r}")


def _secret(path: Path) -> bytes:
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"kv_connector_extra_config: salt_file {path} can't be read ({error.strerror})") from error
    if len(secret) < SECRET_BYTES_MIN:
        raise ConfigError(f"kv_connector_extra_config: salt_file {path} has under {SECRET_BYTES_MIN} bytes")
    return secret
