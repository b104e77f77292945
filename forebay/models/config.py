"""A checkpoint's `config.json`, read with care: every value is checked where it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forebay.models.errors import CheckpointBroken, UnsupportedArchitecture
from forebay.models.json_file import read_json

CONFIG_FILE = "config.json"

INDEX_KEYS = "index_key_dtype"
"""Added to the settings of a file, none of which has it: how index keys are stored, "model" or "fp8"."""


class Config:
    """Typed access to the values of a configuration. `origin` is the file, for messages."""

    def __init__(self, values: Mapping[str, Any], origin: Path) -> None:
        self._values = values
        self.origin = origin

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def names(self) -> set[str]:
        """The keys whose values aren't null."""
        return {key for key, value in self._values.items() if value is not None}

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is in the file; null counts as absent."""
        value = self._values.get(key)
        return default if value is None else value

    def having(self, **values: Any) -> Config:
        """The same configuration with these values."""
        return Config({**self._values, **values}, self.origin)

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number. Raises CheckpointBroken if it is absent or anything else."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.broken(f"{key} must be a positive whole number, found {value!r}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Like `size`, or 0."""
        return 0 if self.get(key, default) == 0 else self.size(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.broken(f"{key} must be a positive number, found {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.broken(f"{key} must be true or false, found {value!r}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.broken(f"{key} must be a string, found {value!r}")
        return value

    def section(self, key: str) -> Config:
        """A nested table, empty if it is absent."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.broken(f"{key} must be a table, found {value!r}")
        return Config(value, self.origin)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them, or nothing."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self.broken(f"{key} must be token ids, found {value!r}")
        return tuple(ids)

    def broken(self, why: str) -> CheckpointBroken:
        """An error about this file."""
        return CheckpointBroken(f"{self.origin}: {why}; restore the file from the model's source")

    def unsupported(self, why: str) -> UnsupportedArchitecture:
        """An error about a setting that no family here computes."""
        return UnsupportedArchitecture(f"{self.origin}: {why}; choose another model")


def read_config(directory: Path) -> Config:
    """The configuration of the checkpoint in `directory`."""
    return Config(read_json(directory / CONFIG_FILE), directory / CONFIG_FILE)
