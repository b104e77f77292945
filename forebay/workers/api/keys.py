"""API keys: who asks, as an opaque tenant, and the salt that keeps tenants' caches apart.

The file of `--api-keys` has one `KEY TENANT` a line (`#` begins a comment), or, if its name ends in .toml, a
table `[keys]` of tenants by key. Without it everybody is one tenant. Keys are kept as digests: none is ever shown.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import stat
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from forebay.errors import ConfigError
from forebay.kvstore.identity import tenant_salt
from forebay.workers.api.errors import ApiError, missing_key

log = logging.getLogger(__name__)

MAX_KEYS = 10_000
SECRET_BYTES = 32
SALT_CHARACTERS_MAX = 256
TENANT_BYTES_MAX = 128


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks. `secret` never leaves the server; the id is what headers and quotas show."""

    id: str
    secret: bytes = field(repr=False)

    def salt(self, cache_salt: str | None) -> bytes:
        """The salt of this tenant's chains: empty only for the one tenant of an open server without salt."""
        if cache_salt is not None and len(cache_salt) > SALT_CHARACTERS_MAX:
            raise ApiError(400, f"cache_salt has over {SALT_CHARACTERS_MAX} characters", param="cache_salt")
        if not self.id and not cache_salt:
            return b""
        return tenant_salt(self.secret, cache_salt or "")


@dataclass(frozen=True)
class Keys:
    """All keys, as digests. `open` servers ask for none."""

    tenants: tuple[tuple[bytes, Tenant], ...] = field(repr=False)
    everyone: Tenant | None = None

    def who(self, authorization: str | None) -> Tenant:
        """The tenant of an Authorization header. Compares with every key, so that time tells nothing.

        Raises ApiError 401.
        """
        if self.everyone is not None:
            return self.everyone
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip() if scheme.lower() == "bearer" else "")
        found = None
        for digest, tenant in self.tenants:
            if hmac.compare_digest(given, digest):
                found = tenant
        if found is None:
            raise missing_key("no valid API key; send Authorization: Bearer KEY")
        return found


def open_to_all(state: Path) -> Keys:
    """Keys of a server that asks for none: one tenant, with the server's own secret for salts."""
    return Keys((), Tenant("", _server_secret(state)))


def load_keys(file: Path, state: Path) -> Keys:
    """Keys from a file. `state` keeps the server's secret across restarts. Raises ConfigError."""
    try:
        text = file.read_text(encoding="utf-8")
        mode = stat.S_IMODE(file.stat().st_mode)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-keys {file}: can't be read ({error})") from error
    if mode & 0o077:
        log.warning("--api-keys %s can be read by others (mode %o); chmod 600 it", file, mode)
    pairs = _table(file, text) if file.suffix == ".toml" else _lines(file, text)
    if not 0 < len(pairs) <= MAX_KEYS:
        raise ConfigError(f"--api-keys {file}: has {len(pairs)} keys; it takes 1 to {MAX_KEYS}")
    secret = _server_secret(state)
    tenants = []
    for key, name in pairs:
        if not 0 < len(name.encode()) <= TENANT_BYTES_MAX or not key:
            raise ConfigError(f"--api-keys {file}: tenant {name!r} must have 1 to {TENANT_BYTES_MAX} bytes, and a key")
        derived = hmac.new(secret, name.encode(), hashlib.sha256).digest()
        tenants.append((_digest(key), Tenant(name, derived)))
    if len({digest for digest, _ in tenants}) != len(tenants):
        raise ConfigError(f"--api-keys {file}: one key stands there twice; whose is it?")
    return Keys(tuple(tenants))


def _lines(file: Path, text: str) -> list[tuple[str, str]]:
    pairs = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if len(words) not in (0, 2):
            raise ConfigError(f"--api-keys {file}, line {number}: takes `KEY TENANT`")
        if words:
            pairs.append((words[0], words[1]))
    return pairs


def _table(file: Path, text: str) -> list[tuple[str, str]]:
    try:
        table = tomllib.loads(text).get("keys")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--api-keys {file}: not TOML: {error}") from error
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise ConfigError(f'--api-keys {file}: takes a table [keys] of "KEY" = "TENANT"')
    return list(table.items())


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _server_secret(state: Path) -> bytes:
    """The server's secret, made once with mode 0600: tenants' salts, and so their caches, survive a restart."""
    file = state / "server-secret"
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = state / f"server-secret.{os.getpid()}"
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            out.write(secrets.token_bytes(SECRET_BYTES))
        try:
            os.link(partial, file)  # the first of several front ends decides
        except FileExistsError:
            pass
        finally:
            partial.unlink()
        secret = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"--state-dir {state}: can't keep the server's secret there ({error.strerror})") from error
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"{file} is damaged; remove it (cached prompts of tenants are then lost)")
    return secret
