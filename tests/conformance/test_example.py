"""A tier that isn't ours: its own tests pass, and a store takes it by its name."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.kvstore.test_daemon_tiers import CHUNKS, TOKENS, TierStore

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tier"
SOME = "object or restart or close or queue or deadline or history or at_once or damage or another_extent"
"""Through a process of its own, what is most different there; as an object, everything."""


def test_its_own_tests_pass(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(EXAMPLE), str(EXAMPLE.parents[1])))}
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={EXAMPLE}", "-k", SOME,
        str(EXAMPLE),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert "failed" not in done.stdout and " passed" in done.stdout


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TierStore]:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE), prepend=os.pathsep)
    running = TierStore(tmp_path)
    yield running
    if running.process is not None and running.process.poll() is None:
        assert running.stop() == 0


def test_a_store_keeps_its_chunks_there_and_finds_them_again(store: TierStore, tmp_path: Path) -> None:
    path = tmp_path / "chunks.db"
    tier = f'[tiers.rows]\nkind = "sqlite_tier:SqliteTier"\npath = "{path}"\nquota_bytes = "64MiB"\n'
    store.start(tier)
    store.fill(TOKENS)
    store.until(lambda values: values["tier.rows.chunks"] == CHUNKS)
    store.forget()
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*) FROM chunks").fetchone() == (CHUNKS,)
    store.start(tier)
    assert store.lookup(TOKENS).from_tier == {"rows": len(TOKENS)}
    values = store.until(lambda _: True)
    assert values["tier.rows.promoted_bytes"] > 0 and values["tier.rows.bytes_quota"] == 64 << 20


def test_options_that_are_wrong_keep_the_store_from_starting(store: TierStore, tmp_path: Path) -> None:
    config = tmp_path / "wrong.toml"
    config.write_text('[tiers.rows]\nkind = "sqlite_tier:SqliteTier"\npath = "/nowhere/at/all.db"\n')
    command = [sys.executable, "-m", "forebay", "store", "--config", str(config), "--socket", str(tmp_path / "s.sock")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert "rows" in done.stderr and "create it" in done.stderr, done.stderr
