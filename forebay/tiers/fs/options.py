"""Settings of a file tier."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from forebay.errors import ConfigError
from forebay.tiers.registry import convert_options


class FsOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One directory of chunk files. `compress` ("none", "zstd") and `encrypt_key_file` say how they lie there.

    `quota_bytes` bounds what chunks, files being written, quarantine and namespaces take on disk; the
    manifest comes on top and is bounded by `manifest_bytes` (0: chosen from the quota). Several stores may use
    the directory; then the quota is that of all together. `state_dir` must be on a local disk, and each store's own.
    `liveness` says how they see that one of them is gone: "auto" goes by the kind of file system; by a beat, after
    `dead_after_s` of silence. `takeover_s` later another one takes its files over. `fsync` "file"
    has each chunk and then its name on the disk before its store is done: without it a power cut costs chunks, never
    correctness. `recover` "rebuild" throws the manifest away at start.
    """

    directory: str
    quota_bytes: int = 10 << 30
    state_dir: str | None = None
    read_threads: int = 4
    write_threads: int = 2
    read_queue_bytes: int = 256 << 20
    write_queue_bytes: int = 256 << 20
    fsync: Literal["none", "file"] = "none"
    odirect: Literal["auto", "on", "off"] = "auto"
    recover: Literal["auto", "rebuild"] = "auto"
    compress: str = "none"
    encrypt_key_file: str = ""
    liveness: Literal["auto", "flock", "heartbeat"] = "auto"
    dead_after_s: float = 30.0
    takeover_s: float = 60.0
    manifest_bytes: int = 0
    quarantine_files: int = 64
    quarantine_bytes: int = 0

    @property
    def path(self) -> Path:
        return Path(self.directory)

    @property
    def map_bytes(self) -> int:
        """Size of the manifest's map: a 64th of the quota between 64 MiB and 16 GiB."""
        return self.manifest_bytes or min(max(self.quota_bytes // 64, 64 << 20), 16 << 30)

    @property
    def quarantine_cap(self) -> int:
        """Bytes that moved-aside files may keep: a 16th of the quota, at most 1 GiB."""
        return self.quarantine_bytes or min(self.quota_bytes // 16, 1 << 30)


def fs_options(name: str, options: Mapping[str, object]) -> FsOptions:
    """Typed and checked options. Raises ConfigError that names the option."""
    found = convert_options(name, options, FsOptions)
    if not found.directory or not found.path.is_absolute():
        raise ConfigError(f"tier {name!r}: directory {found.directory!r} must be an absolute path")
    if found.quota_bytes < 1 << 20:
        raise ConfigError(f"tier {name!r}: quota_bytes {found.quota_bytes} must be at least 1 MiB")
    for option in ("read_threads", "write_threads"):
        if not 1 <= getattr(found, option) <= 64:
            raise ConfigError(f"tier {name!r}: {option} must be from 1 to 64")
    for option in ("read_queue_bytes", "write_queue_bytes"):
        if getattr(found, option) < 1:
            raise ConfigError(f"tier {name!r}: {option} must be positive")
    for option in ("dead_after_s", "takeover_s"):
        if getattr(found, option) <= 0:
            raise ConfigError(f"tier {name!r}: {option} must be positive")
    for option in ("manifest_bytes", "quarantine_files", "quarantine_bytes"):
        if getattr(found, option) < 0:
            raise ConfigError(f"tier {name!r}: {option} can't be negative")
    return found
