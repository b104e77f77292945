"""`forebay serve --ray`: what the hosts of a Ray cluster are told, out of this command's settings."""

from __future__ import annotations

import os
import secrets
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forebay.cli.places import cache_dir, private
from forebay.config import Setting, at_least, text
from forebay.errors import ConfigError

RAY = (
    Setting("ray", text, None, "address of a Ray cluster (auto: this machine's): serve on its hosts, behind a router"),
    Setting("ray_hosts", at_least(1), 1, "with --ray: hosts that serve at most; vacant places are filled as they come"),
    Setting("ray_cpus", at_least(0), 1, "with --ray: CPUs of Ray's that a host's processes take"),
    Setting("ray_gpus", at_least(0), 0, "with --ray: GPUs of Ray's that a host's processes take"),
)
OWN = ("host", "port", "events", "replay", "api_keys", "ray", "ray_hosts", "ray_cpus", "ray_gpus")
"""Settings that aren't the hosts' to have: the command's own, and those that each host chooses for itself."""
SECRET_BYTES = 32
WORKER_KEY_TENANT = "forebay-router"


def run(values: Mapping[str, Any], flags: Mapping[str, Any], settings: Sequence[Setting]) -> int:
    """Serve until stopped. Raises ConfigError for settings that don't go with --ray."""
    from forebay.placing.on_ray import RayConfig, serve_on_ray
    from forebay.placing.spec import HostSpec, new_pair

    _check(values, flags)
    own, worker_key = new_pair(), None
    keys = None
    if values["api_keys"] is not None:
        worker_key = secrets.token_urlsafe(32)
        keys = f"{_lines(values['api_keys'])}\n{worker_key} {WORKER_KEY_TENANT}\n"
    environment = {
        name: value for name, value in os.environ.items()
        if name.startswith("FOREBAY_") and name not in {f"FOREBAY_SERVE_{setting.upper()}" for setting in OWN}
    }  # fmt: skip
    spec = HostSpec(arguments_of(flags, settings), environment, keys, _secret(), new_pair(), own.public)
    config = RayConfig(
        values["ray"], values["ray_hosts"], spec, own, values["port"], worker_key, cpus=values["ray_cpus"],
        gpus=values["ray_gpus"],
    )  # fmt: skip
    return serve_on_ray(config, _tell, lambda hosts: _ready(values))


def arguments_of(flags: Mapping[str, Any], settings: Sequence[Setting]) -> tuple[str, ...]:
    """The flags that were given, for a host's `forebay serve`; `settings` are all that the command has."""
    switches = {setting.name for setting in settings if setting.switch}
    words: list[str] = [str(Path(flags["model"]).absolute())] if flags.get("model") is not None else []
    for name, value in flags.items():
        if name in OWN or name == "model" or value is None:
            continue
        flag = f"--{name.replace('_', '-')}"
        words += [flag] if name in switches else [flag, str(value)]
    return tuple(words)


def _check(values: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
    if values["host"] not in ("127.0.0.1", "localhost", "::1"):
        raise ConfigError("with --ray a router serves, on loopback: leave --host out, and put what ends TLS before it")
    if values["events"] is not None or values["replay"] is not None:
        raise ConfigError("with --ray each host chooses the ports of its events; leave --events and --replay out")
    if values["trace"] is not None:
        raise ConfigError("--trace is of one worker; leave it out with --ray")
    if flags.get("config") is not None and flags.get("ray") is None and "FOREBAY_SERVE_RAY" not in os.environ:
        raise ConfigError("the hosts read the same --config: give --ray as a flag, not in it")


def _lines(file: Path) -> str:
    """An API keys file as `KEY TENANT` lines."""
    try:
        given = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-keys {file}: can't be read ({error})") from error
    if file.suffix != ".toml":
        return given
    try:
        return "\n".join(f"{key} {tenant}" for key, tenant in tomllib.loads(given).get("keys", {}).items())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--api-keys {file}: not TOML: {error}") from error


def _secret() -> bytes:
    """Of tenants' salts, the same for all hosts and over restarts."""
    file = private(cache_dir() / "state") / "ray-secret"
    try:
        if not file.exists():
            new = file.with_suffix(f".{os.getpid()}")
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                out.write(secrets.token_bytes(SECRET_BYTES))
            new.replace(file)
        found = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: can't keep the secret of the hosts there ({error.strerror})") from error
    if len(found) != SECRET_BYTES:
        raise ConfigError(f"{file} is damaged; remove it (cached prompts of tenants are then lost)")
    return found


def _tell(line: str) -> None:
    print(f"forebay serve: {line}", file=sys.stderr, flush=True)


def _ready(values: Mapping[str, Any]) -> None:
    url = f"http://127.0.0.1:{values['port']}"
    print(f"serving on {url} (Ctrl-C stops everything)\nits hosts: curl {url}/router/workers", flush=True)
