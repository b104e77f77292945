"""Settings: which source wins, and what a wrong value is told."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from forebay.cli import serve, settings_page, store, worker
from forebay.config import Arguments, Setting, add_settings, at_least, boolean, duration, one_of, path, resolve, size
from forebay.errors import ConfigError

SETTINGS = (
    Setting("model", path, None, "a model", positional=True),
    Setting("memory", size, 1 << 20, "bytes"),
    Setting("deadline", duration, 2.0, "seconds"),
    Setting("count", at_least(1), 4, "a number"),
    Setting("sync", one_of("none", "file"), "none", "a word"),
    Setting("quiet", boolean, False, "a switch", switch=True),
)


def settled(*flags: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    parser = Arguments(prog="x")
    add_settings(parser, SETTINGS)
    return resolve("x", SETTINGS, vars(parser.parse_args(flags)), environment or {})


def refusal(*flags: str, environment: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        settled(*flags, environment=environment)
    assert caught.value.exit_code == 2
    return str(caught.value)


def toml(folder: Path, text: str) -> str:
    file = folder / "forebay.toml"
    file.write_text(text)
    return str(file)


def test_defaults_hold_if_nobody_says_otherwise() -> None:
    assert settled() == {
        "model": None, "memory": 1 << 20, "deadline": 2.0, "count": 4, "sync": "none", "quiet": False,
    }  # fmt: skip


def test_a_flag_beats_the_environment_and_that_beats_the_file(tmp_path: Path) -> None:
    file = toml(tmp_path, '[x]\nmemory = "1MiB"\ncount = 2\nsync = "file"\nquiet = true\n')
    environment = {"FOREBAY_X_MEMORY": "2MiB", "FOREBAY_X_COUNT": "3"}
    found = settled("--config", file, "--memory", "3MiB", environment=environment)
    assert (found["memory"], found["count"], found["sync"], found["quiet"]) == (3 << 20, 3, "file", True)


@pytest.mark.parametrize(
    ("text", "value"),
    [("512MiB", 512 << 20), ("2GiB", 2 << 30), ("1.5 kb", 1500), ("10GB", 10**10), ("4096", 4096), ("1tib", 2**40)],
)
def test_sizes_read_as_people_write_them(text: str, value: int) -> None:
    assert settled("--memory", text)["memory"] == value


@pytest.mark.parametrize("text", ["", "2 GiBs", "-1", "0", "GiB", "1e9", "nan", "0.1"])
def test_a_size_that_is_none_is_refused_by_name(text: str) -> None:
    told = refusal(f"--memory={text}")
    assert "--memory" in told and repr(text) in told


@pytest.mark.parametrize(("text", "value"), [("500ms", 0.5), ("2s", 2.0), ("5m", 300.0), ("1h", 3600.0)])
def test_durations_read_as_people_write_them(text: str, value: float) -> None:
    assert settled("--deadline", text)["deadline"] == value


@pytest.mark.parametrize(
    ("flag", "text", "takes"),
    [
        ("--deadline", "5", "500ms"),
        ("--count", "0", "at least 1"),
        ("--count", "many", "whole number"),
        ("--sync", "sometimes", "none, file"),
    ],
)
def test_a_wrong_value_is_told_what_it_takes(flag: str, text: str, takes: str) -> None:
    told = refusal(flag, text)
    assert flag in told and takes in told


def test_a_wrong_value_of_the_environment_names_the_variable() -> None:
    assert "FOREBAY_X_COUNT" in refusal(environment={"FOREBAY_X_COUNT": "-3"})


def test_a_wrong_value_of_the_file_names_key_and_file(tmp_path: Path) -> None:
    file = toml(tmp_path, "[x]\ncount = 0\n")
    told = refusal("--config", file)
    assert "count" in told and file in told


def test_an_unknown_key_of_the_file_is_refused_with_those_that_exist(tmp_path: Path) -> None:
    told = refusal("--config", toml(tmp_path, "[x]\nmemroy = 1\n"))
    assert "'memroy'" in told and "memory" in told


def test_keys_of_other_commands_are_none_of_our_business(tmp_path: Path) -> None:
    assert settled("--config", toml(tmp_path, "[y]\nwhatever = 1\n"))["count"] == 4


@pytest.mark.parametrize("text", ["[x", "x = 1", "[x.memory]\na = 1", "[x]\nmemory = [1]"])
def test_a_file_that_is_no_settings_is_refused(tmp_path: Path, text: str) -> None:
    assert "forebay.toml" in refusal("--config", toml(tmp_path, text))


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    assert "nowhere.toml" in refusal("--config", str(tmp_path / "nowhere.toml"))


def test_an_unknown_flag_is_a_config_error() -> None:
    assert "--memroy" in refusal("--memroy", "1")


@pytest.mark.parametrize("command", [serve, store, worker], ids=lambda command: command.__name__)
def test_every_setting_of_a_command_has_a_flag_and_a_help_text(command: Any) -> None:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    text = parser.format_help()
    for setting in command.SETTINGS:
        assert (setting.name if setting.positional else setting.flag) in text and setting.help


def test_the_settings_page_is_that_of_the_tables() -> None:
    written = Path(__file__).parents[2] / "docs" / "settings.md"
    assert written.read_text() == settings_page.page(), "python -m forebay.cli.settings_page > docs/settings.md"
