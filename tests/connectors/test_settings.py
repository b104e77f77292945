"""What a user says in vLLM's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.connectors.settings import Settings
from forebay.errors import ConfigError

STORE = {"store": "unix:///run/x.sock"}


def test_the_address_alone_is_enough() -> None:
    assert Settings.read(STORE).chunk_tokens == 256


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "store"),
        ({"store": 3}, "store"),
        (STORE | {"chunk_tokens": 100}, "chunk_tokens"),
        (STORE | {"chunk_tokens": "256"}, "chunk_tokens"),
        (STORE | {"chunk_tokens": True}, "chunk_tokens"),
        (STORE | {"chunk_tokens": 0}, "chunk_tokens"),
        (STORE | {"patience_ms": -1}, "patience_ms"),
        (STORE | {"events": "yes"}, "events"),
        (STORE | {"stroe": "x"}, "stroe"),
        (STORE | {"salt_secret": "x"}, "salt_secret"),
        (STORE | {"salt_file": "/nowhere/at/all"}, "salt_file"),
    ],
)
def test_what_is_wrong_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Settings.read(given)


def test_a_secret_comes_from_a_file_and_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "salt"
    file.write_bytes(b"0123456789abcdef\n")
    settings = Settings.read(STORE | {"salt_file": str(file)})
    assert settings.salt_secret == b"0123456789abcdef" and "0123456789abcdef" not in repr(settings)
    file.write_bytes(b"short")
    with pytest.raises(ConfigError, match="16 bytes"):
        Settings.read(STORE | {"salt_file": str(file)})
