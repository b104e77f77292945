"""Key files: what is taken, what is refused and why, and which key writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forebay.errors import ConfigError
from forebay.tiers.codec.codec import open_codec
from forebay.tiers.codec.keys import KEYS_MAX, Key, load_keys

SECRET = bytes(range(32))


def key_file(path: Path, data: bytes = SECRET, mode: int = 0o600) -> Path:
    path.touch(mode=0o600)
    path.write_bytes(data)
    path.chmod(mode)
    return path


DIGITS = SECRET.hex().encode()


@pytest.mark.parametrize("data", [SECRET, DIGITS, DIGITS + b"\n", DIGITS.upper()])
def test_a_key_is_32_bytes_or_their_hexadecimal_digits(tmp_path: Path, data: bytes) -> None:
    assert load_keys("t", key_file(tmp_path / "k", data)).writing == Key(SECRET)


@pytest.mark.parametrize("data", [b"", SECRET[:-1], SECRET + b"x", b"g" * 64, DIGITS + b"00", b" " * 66])
def test_anything_else_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ConfigError, match="must hold 32 bytes"):
        load_keys("t", key_file(tmp_path / "k", data))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o610])
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        load_keys("t", key_file(tmp_path / "k", mode=mode))


def test_a_key_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = key_file(tmp_path / "k")
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="another user"):
        load_keys("t", path)


def test_of_a_directory_the_last_name_writes_whatever_the_times(tmp_path: Path) -> None:
    key_file(tmp_path / "2026-02.key", b"b" * 32)
    key_file(tmp_path / "2026-01.key", b"a" * 32)
    key_file(tmp_path / ".hidden", b"no key", 0o644)
    os.utime(tmp_path / "2026-02.key", (0, 0))
    ring = load_keys("t", tmp_path)
    assert ring.writing == Key(b"b" * 32)
    assert len(ring) == 2 and ring.get(Key(b"a" * 32).id) == Key(b"a" * 32)


def test_a_key_has_the_same_id_under_any_name(tmp_path: Path) -> None:
    one, other = (load_keys("t", key_file(tmp_path / name)).writing for name in ("one", "other"))
    assert one.id == other.id != Key(b"x" * 32).id


def test_a_directory_without_keys_with_too_many_or_with_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without a key"):
        load_keys("t", tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="no regular file"):
        load_keys("t", tmp_path)
    (tmp_path / "folder").rmdir()
    for number in range(KEYS_MAX + 1):
        key_file(tmp_path / f"{number}")
    with pytest.raises(ConfigError, match=f"{KEYS_MAX} at most"):
        load_keys("t", tmp_path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.*No such file"):
        open_codec("cold", "none", str(tmp_path / "absent"))


def test_no_message_and_no_text_of_a_key_shows_it(tmp_path: Path) -> None:
    assert SECRET.hex() not in repr(Key(SECRET)) and str(SECRET) not in repr(load_keys("t", key_file(tmp_path / "k")))
    with pytest.raises(ConfigError) as refused:
        load_keys("t", key_file(tmp_path / "wrong", DIGITS + b"zz"))
    assert SECRET.hex() not in str(refused.value)
