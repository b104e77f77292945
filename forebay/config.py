"""Settings of commands: one table each, from which flags, environment, TOML and help all come.

    flags  >  FOREBAY_<COMMAND>_<NAME>  >  [command] in the TOML file of --config  >  default

A value that can't be used is refused by name, with where it came from and what it takes.
"""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from forebay.errors import ConfigError
from forebay.ipc.sockets import socket_path


@dataclass(frozen=True)
class Kind:
    """A kind of value: how help texts call it, and how its text is read (ValueError says what it takes). One with
    `read_table` stands in TOML as a top-level table of the setting's name, which that reads."""

    takes: str
    read: Callable[[str], Any]
    read_table: Callable[[Mapping[str, Any]], Any] | None = None

    def __call__(self, text: str) -> Any:
        """The value of a text."""
        return self.read(text)


_SIZES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_TIMES = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    unit = _SIZES.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError("takes a size such as 512MiB or 2GiB")
    value = int(float(match[1]) * unit)
    if value <= 0:
        raise ValueError("must be more than nothing")
    return value


def _duration(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)", text.strip())
    if match is None:
        raise ValueError("takes a duration such as 500ms, 2s or 5m")
    return float(match[1]) * _TIMES[match[2]]


def _share(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip())
    value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= value <= 1:
        raise ValueError("takes a share such as 0.25 or 25%")
    return value


def at_least(low: int) -> Kind:
    """An integer not below `low`."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"-?\d+", text.strip()) or int(text) < low:
            raise ValueError(f"takes a whole number of at least {low}")
        return int(text)

    return Kind("N", parse)


def _port(text: str) -> int:
    if not text.strip().isdigit() or not 0 < int(text) < 65536:
        raise ValueError("takes a port between 1 and 65535")
    return int(text)


def one_of(*names: str) -> Kind:
    """One of these words."""

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"takes one of {', '.join(names)}")
        return text

    return Kind("|".join(names), parse)


def _path(text: str) -> Path:
    if not text:
        raise ValueError("takes a path")
    return Path(text).expanduser()


def _boolean(text: str) -> bool:
    if text.lower() in ("true", "yes", "1", "on"):
        return True
    if text.lower() in ("false", "no", "0", "off"):
        return False
    raise ValueError("takes true or false")


def _token_ids(text: str) -> list[int]:
    numbers = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"\d{1,10}", number) and int(number) < 2**32 for number in numbers):
        raise ValueError("takes token ids from 0, with commas between")
    return [int(number) for number in numbers]


def _hexadecimal(text: str) -> str:
    if not re.fullmatch(r"[0-9a-fA-F]*", text):
        raise ValueError("takes hexadecimal digits")
    return text.lower()


text = Kind("TEXT", str)
size = Kind("SIZE", _size)
"""Bytes: 1048576, 512MiB, 2GiB, 10GB."""
share = Kind("SHARE", _share)
"""A part of a whole: 0.25 or 25%."""
duration = Kind("TIME", _duration)
"""Seconds: 500ms, 2s, 5m, 1h."""
port = Kind("PORT", _port)
path = Kind("PATH", _path)
"""A path; ~ is the home directory."""
unix_socket = Kind("PATH", lambda given: socket_path(given).expanduser())
"""A path, or unix:///path."""
boolean = Kind("true|false", _boolean)
token_ids = Kind("N,N,...", _token_ids)
hexadecimal = Kind("HEX", _hexadecimal)


@dataclass(frozen=True)
class Setting:
    """One setting. `name` as in TOML (with underscores); the flag has dashes. A `positional` one has no flag.
    `default` is shown as it is; `shown` replaces it in the help where it is computed."""

    name: str
    parse: Kind
    default: Any
    help: str
    shown: str = ""
    positional: bool = False
    switch: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def default_text(self) -> str:
        return self.shown or ("" if self.default is None else str(self.default))

    def variable(self, command: str) -> str:
        """Its environment variable."""
        return f"FOREBAY_{command}_{self.name}".upper()


class Arguments(argparse.ArgumentParser):
    """argparse that reports through ConfigError, so that every wrong setting ends the same way."""

    def error(self, message: str) -> NoReturn:
        """argparse: a wrong command line."""
        raise ConfigError(f"{message} (see `{self.prog} --help`)")


def add_settings(parser: argparse.ArgumentParser, settings: Sequence[Setting]) -> None:
    """Add a flag for each setting, and --config."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with these settings; flags and environment win")
    for setting in settings:
        told = setting.help + (f" (default: {setting.default_text})" if setting.default_text else "")
        told = told.replace("%", "%%")
        if setting.positional:
            parser.add_argument(setting.name, nargs="?", default=None, help=told)
        elif setting.switch:
            parser.add_argument(setting.flag, dest=setting.name, action="store_const", const="true", help=told)
        else:
            takes = setting.parse.takes
            parser.add_argument(setting.flag, dest=setting.name, default=None, metavar=takes, help=told)


def resolve(
    command: str, settings: Sequence[Setting], flags: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Every setting's value, parsed. Raises ConfigError that names the setting and where its value came from."""
    environment = os.environ if environment is None else environment
    file = _toml_file(flags.get("config"))
    table = _toml_table(command, settings, file, flags.get("config"))
    values = {}
    for setting in settings:
        variable = setting.variable(command)
        if flags.get(setting.name) is not None:
            values[setting.name] = _parsed(setting, str(flags[setting.name]), setting.flag)
        elif variable in environment:
            values[setting.name] = _parsed(setting, environment[variable], variable)
        elif setting.parse.read_table is not None and setting.name in file:
            values[setting.name] = _tabular(setting, file[setting.name], flags.get("config"))
        elif setting.name in table:
            where = f"{setting.name} in [{command}] of {flags.get('config')}"
            values[setting.name] = _parsed(setting, _toml_text(table[setting.name], where), where)
        else:
            values[setting.name] = setting.default
    return values


def _parsed(setting: Setting, given: str, where: str) -> Any:
    try:
        return setting.parse(given)
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"{where} {given!r}: {error}") from error


def _tabular(setting: Setting, given: object, file: str | None) -> Any:
    assert setting.parse.read_table is not None
    where = f"[{setting.name}] of {file}"
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: takes tables [{setting.name}.NAME]")
    try:
        return setting.parse.read_table(given)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def _toml_text(value: object, where: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    raise ConfigError(f"{where}: takes a plain value, not a table or list")


def _toml_file(file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        with open(file, "rb") as data:
            return tomllib.load(data)
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {file}: not TOML: {error}") from error


def _toml_table(
    command: str, settings: Sequence[Setting], content: Mapping[str, Any], file: str | None
) -> dict[str, Any]:
    table = content.get(command, {})
    if not isinstance(table, dict):
        raise ConfigError(f"--config {file}: [{command}] must be a table")
    plain = [setting for setting in settings if setting.parse.read_table is None]
    unknown = sorted(set(table) - {setting.name for setting in plain})
    if unknown:
        known = ", ".join(setting.name for setting in plain)
        raise ConfigError(f"--config {file}: [{command}] has no setting {unknown[0]!r}; it has {known}")
    return table
