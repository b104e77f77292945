"""Settings of an object store tier. Credentials are none of them: those come from the usual AWS chain."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from forebay.errors import ConfigError
from forebay.tiers.registry import convert_options

CREDENTIALS = re.compile(r"secret|access_?key|token|password|credential", re.IGNORECASE)


class S3Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prefix of a bucket. `compress` ("none", "zstd") and `encrypt_key_file` say how chunks lie there.

    `quota_bytes` bounds the objects that this daemon has stored (0: nothing does, the bucket's lifecycle rules are
    what removes them). `state_dir`, on a local disk, remembers those across restarts. Chunks below `pack_below_bytes`
    wait up to `pack_wait_s` for others and share an object of about `segment_bytes`. `refresh_s` is how often shared
    objects of other daemons are looked for (0: never). What others have stored is believed for `found_s` and what
    wasn't there for `missing_s`, before the bucket is asked again. Connecting, and sending a few MiB, may take
    `connect_timeout_s`, an answer may be silent for `timeout_s`; retries are taken from a budget, and after
    `failures_max` failures in a row the circuit opens, first for `open_s`. With the `engine` nixl, bytes of own objects
    come and go by NIXL where it can be used, and the rest by boto3.
    """

    bucket: str
    prefix: str = "forebay"
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    addressing: Literal["auto", "path", "virtual"] = "auto"
    verify_tls: bool = True
    ca_bundle: str | None = None
    quota_bytes: int = 0
    state_dir: str | None = None
    engine: Literal["boto3", "nixl"] = "boto3"
    compress: str = "none"
    encrypt_key_file: str = ""
    read_threads: int = 8
    write_threads: int = 8
    lookup_threads: int = 8
    read_queue_bytes: int = 256 << 20
    write_queue_bytes: int = 256 << 20
    pack_below_bytes: int = 256 << 10
    segment_bytes: int = 4 << 20
    pack_wait_s: float = 0.05
    refresh_s: float = 10.0
    found_s: float = 60.0
    missing_s: float = 5.0
    remembered: int = 131_072
    chunks_max: int = 0
    connect_timeout_s: float = 5.0
    timeout_s: float = 10.0
    attempts: int = 3
    retry_budget: float = 20.0
    failures_max: int = 5
    open_s: float = 1.0

    @property
    def own_chunks_max(self) -> int:
        """How many chunks of its own the tier remembers: a million with a state directory, else 65,536."""
        return self.chunks_max or (1 << 20 if self.state_dir else 1 << 16)

    @property
    def where(self) -> str:
        """Bucket and prefix, for messages."""
        return f"s3://{self.bucket}/{self.prefix}"

    @property
    def identity(self) -> str:
        """What a state directory belongs to."""
        return f"{self.endpoint_url or 'aws'} {self.where}"


REMEMBERED_MIN = 4096
_AT_LEAST_ONE = ("read_queue_bytes", "write_queue_bytes", "segment_bytes", "attempts", "failures_max")
_NOT_NEGATIVE = (
    "quota_bytes", "pack_below_bytes", "pack_wait_s", "refresh_s", "found_s", "missing_s", "chunks_max", "retry_budget",
)  # fmt: skip
_POSITIVE = ("connect_timeout_s", "timeout_s", "open_s")


def s3_options(name: str, options: Mapping[str, object]) -> S3Options:
    """Typed and checked options. Raises ConfigError that names the option, and never repeats what looks secret."""
    secret = sorted(key for key in options if CREDENTIALS.search(key))
    if secret:
        raise ConfigError(
            f"tier {name!r}: {', '.join(secret)}: credentials don't belong into options; give them as AWS tools take "
            "them (environment, shared credentials file with `profile`, instance role)"
        )
    found = convert_options(name, options, S3Options)
    _check_place(name, found)
    for option in ("read_threads", "write_threads", "lookup_threads"):
        if not 1 <= getattr(found, option) <= 64:
            raise ConfigError(f"tier {name!r}: {option} must be from 1 to 64")
    for option in _AT_LEAST_ONE:
        if getattr(found, option) < 1:
            raise ConfigError(f"tier {name!r}: {option} must be at least 1")
    if found.remembered < REMEMBERED_MIN:  # one lookup's answers have to fit
        raise ConfigError(f"tier {name!r}: remembered must be at least {REMEMBERED_MIN}")
    for option in _NOT_NEGATIVE:
        if getattr(found, option) < 0:
            raise ConfigError(f"tier {name!r}: {option} can't be negative")
    for option in _POSITIVE:
        if getattr(found, option) <= 0:
            raise ConfigError(f"tier {name!r}: {option} must be positive")
    return found


def _check_place(name: str, found: S3Options) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}", found.bucket):
        raise ConfigError(f"tier {name!r}: bucket {found.bucket!r} is no bucket's name")
    if not re.fullmatch(r"[A-Za-z0-9!_.*'()-]+(/[A-Za-z0-9!_.*'()-]+)*", found.prefix) or len(found.prefix) > 256:
        raise ConfigError(f"tier {name!r}: prefix {found.prefix!r}: takes names of A-Z, 0-9 and -_. with / between")
    if found.endpoint_url is not None:
        try:
            parts = urlsplit(found.endpoint_url)
            plain = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            plain = False
        if not plain:
            raise ConfigError(f"tier {name!r}: endpoint_url: takes http://HOST[:PORT] or https://HOST[:PORT]")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ConfigError(f"tier {name!r}: endpoint_url: takes no user, password or query")
    if found.state_dir is not None and not Path(found.state_dir).is_absolute():
        raise ConfigError(f"tier {name!r}: state_dir {found.state_dir!r} must be an absolute path")
    if found.engine == "nixl" and (found.profile is not None or not found.verify_tls):
        raise ConfigError(
            f'tier {name!r}: engine = "nixl" takes its profile from AWS_PROFILE, and certificates that can be '
            "verified: leave out profile and verify_tls"
        )
    if found.ca_bundle is not None and not Path(found.ca_bundle).is_file():
        raise ConfigError(f"tier {name!r}: ca_bundle {found.ca_bundle!r} is no file")
