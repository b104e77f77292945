"""The command itself: help, wrong usage, exit codes, and what can't be had."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from forebay import __version__
from forebay.cli.main import COMMANDS
from forebay.kvstore.extents import pool_path
from tests.cli.commands import RunningStore, forebay, told


def test_help_names_every_command_and_exit_code() -> None:
    text = told("--help")
    assert all(command in text for command in COMMANDS) and "exit codes" in text
    assert told("--version").strip() == f"forebay {__version__}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    text = told(command, "--help")
    assert "example:" in text and f"forebay {command}" in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nothing"], "nothing"), (["stat", "--nothing"], "--nothing"), (["store", "--memory", "lots"], "--memory"),
        (["store", "--memory", "1KiB"], "--memory"), (["store", "--fsync", "maybe"], "--fsync"),
        (["worker"], "MODEL"), (["frontend"], "--worker"), (["serve"], "--demo"), (["serve", "x", "--demo"], "--demo"),
        (["serve", "/nowhere/model"], "/nowhere/model"), (["serve", ".", "--port", "0"], "--port"),
        (["serve", ".", "--host", "192.0.2.1"], "--api-keys"), (["prepare"], "--demo"),
        (["stat", "--config", "/nowhere.toml"], "/nowhere.toml"),
    ],
)  # fmt: skip
def test_wrong_usage_is_2_and_named(arguments: list[str], named: str) -> None:
    assert named in told(*arguments, code=2)


@pytest.mark.parametrize("module", ["torch", "fastapi"])
def test_a_worker_without_its_extra_says_what_to_install(tmp_path: Path, module: str) -> None:
    hidden = f"import sys; sys.modules[{module!r}] = None; import forebay.cli.main as m; sys.exit(m.main(sys.argv[1:]))"
    command = {
        "torch": ["worker", str(tmp_path), "--listen", f"{tmp_path}/w.sock"],
        "fastapi": ["frontend", "--worker", f"{tmp_path}/w.sock", "--model", str(tmp_path)],
    }[module]
    done = subprocess.run([sys.executable, "-c", hidden, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "pip install 'forebay[worker]'" in done.stderr and "Traceback" not in done.stderr


def test_a_second_store_on_a_socket_or_a_manifest_is_refused(tmp_path: Path) -> None:
    store = RunningStore(tmp_path)
    store.start("--fs-state-dir", str(tmp_path / "state"))
    try:
        assert str(store.socket) in told("store", "--socket", store.socket, code=4)
        other = tmp_path / "other.sock"
        arguments = ["--memory", "16MiB", "--fs", store.files, "--fs-state-dir", tmp_path / "state"]
        refused = told("store", "--socket", other, *arguments, code=4)
        assert str(tmp_path / "state") in refused and not other.exists()
    finally:
        assert store.stop() == 0
    assert not store.socket.exists()


def test_a_store_that_does_not_fit_is_refused_with_the_remedy_and_leaves_nothing(tmp_path: Path) -> None:
    store = tmp_path / "s.sock"
    assert "--memory" in told("store", "--socket", store, "--memory", "100TiB", code=4)
    assert not store.exists() and not pool_path(Path("/dev/shm"), store).exists()


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = forebay("store", "--socket", tmp_path / "s.sock", "--memory", "16MiB", "--fs", tmp_path / "file")
    assert done.returncode == 4 and str(tmp_path / "file") in done.stderr and "Traceback" not in done.stderr


def test_a_taken_port_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        (tmp_path / "model").mkdir()
        assert f"port {number}" in told("serve", tmp_path / "model", "--port", number, code=4)


def test_output_that_nobody_reads_to_its_end_is_no_failure() -> None:
    command = f"{sys.executable} -m forebay --help | head -1"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr
