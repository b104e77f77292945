"""The `forebay` command as processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from forebay.errors import StoreUnavailable
from forebay.kvstore.client import StoreClient

PATIENCE_S = 60.0


def forebay(*arguments: object, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "forebay", *map(str, arguments)],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=os.environ | (environment or {}),
    )  # fmt: skip


def told(*arguments: object, code: int = 0, environment: dict[str, str] | None = None) -> str:
    """What a command prints, if it ends with this code: its output, or for a failure its complaint."""
    done = forebay(*arguments, environment=environment)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout if code == 0 else done.stdout + done.stderr


@dataclass
class RunningStore:
    """`forebay store` on a socket in a folder, with a file tier."""

    folder: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self.folder / "store.sock"

    @property
    def files(self) -> Path:
        return self.folder / "files"

    def start(self, *more: str) -> None:
        command = ["store", "--socket", str(self.socket), "--memory", "32MiB", "--fs", str(self.files), *more]
        self.process = subprocess.Popen([sys.executable, "-m", "forebay", *command])
        self.wait_for(lambda values: values["host.bytes_budget"] >= 32 << 20)

    def wait_for(self, true: object) -> None:
        """Wait until the store answers with figures for which this holds."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            assert self.process is not None and self.process.poll() is None, "the store has ended"
            try:
                with StoreClient(str(self.socket), maps=False) as client:
                    if true(client.stats().values):  # type: ignore[operator]
                        return
            except StoreUnavailable:
                pass
            time.sleep(0.05)
        raise AssertionError("the store never came so far")

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(PATIENCE_S)
