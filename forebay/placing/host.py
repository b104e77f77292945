"""One host: a `forebay serve` that is started again when it ends. Nothing runs between two calls but that process."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from forebay.errors import NotWritable
from forebay.parent import PARENT_VARIABLE
from forebay.placing.asking import status_of
from forebay.placing.spec import ROUTER, HostSpec, Place

log = logging.getLogger(__name__)

PAUSES_S = (0.5, 1.0, 2.0, 5.0, 15.0)
"""How long it stays down after it has ended so many times in a row within `EARLY_S`."""
EARLY_S = 30.0
STOP_S = 60.0
ASK_S = 2.0


class Host:
    """Serves at `address`, from the first `look` on. Calls come one at a time, from the main thread (the kernel ties
    the process to it), and block for moments; `stop` until all is ended.

    Keys, sockets and the log are in a private directory that `name` names: who is started in the place of one that was
    killed removes what that one has left. Raises NotWritable."""

    def __init__(self, spec: HostSpec, address: str, name: str) -> None:
        self._spec, self._address = spec, address
        self._folder = _hosts_folder() / name
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700)
        self._write_keys()
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: list[int] = []
        self._starts = self._early = 0
        self._since = self._not_before = 0.0
        self._trouble = ""

    def look(self) -> Place:
        """Where it serves now. Starts it if it isn't running and has rested."""
        if self._process is not None and self._process.poll() is not None:
            self._ended(self._process.returncode)
        now = time.monotonic()
        if self._process is None and now >= self._not_before:
            self._start(now)
        running = self._process is not None
        return Place(
            self._url(0, "http"), self._url(1, "tcp"), self._url(2, "tcp"),
            self._process.pid if self._process is not None else 0, self._starts, running, running and self._ready(),
            self._trouble,
        )  # fmt: skip

    def log_tail(self, size: int = 4000) -> str:
        """The end of what its processes said."""
        with contextlib.suppress(OSError):
            return (self._folder / "log").read_text(errors="replace")[-size:]
        return ""

    def stop(self) -> None:
        """End it: open answers are finished (`--shutdown-timeout`). Idempotent."""
        process, self._process, self._not_before = self._process, None, float("inf")
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            if process.poll() is None:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- inside ------------------------------------------------------------------------------------------

    def _write_keys(self) -> None:
        spec, keys, state = self._spec, self._folder / "keys", self._folder / "state"
        keys.mkdir(mode=0o700)
        state.mkdir(mode=0o700)
        _private(keys / "secret.key", spec.pair.public + b"\n" + spec.pair.secret + b"\n")
        (keys / f"{ROUTER}.pub").write_bytes(spec.router_key + b"\n")
        _private(state / "server-secret", spec.secret)
        if spec.api_keys is not None:
            _private(self._folder / "api-keys", spec.api_keys.encode())

    def _start(self, now: float) -> None:
        self._ports = free_ports(3, self._address)
        command = [
            sys.executable, "-m", "forebay", "serve", *self._spec.arguments, "--host", self._address,
            "--port", str(self._ports[0]), "--events", self._url(1, "tcp"), "--replay", self._url(2, "tcp"),
        ]  # fmt: skip
        if self._spec.api_keys is not None:
            command += ["--api-keys", str(self._folder / "api-keys")]
        environment = os.environ | self._spec.environment | {
            "FOREBAY_STORE_EVENT_KEYS": str(self._folder / "keys"),
            "FOREBAY_FRONTEND_STATE_DIR": str(self._folder / "state"),
            "XDG_RUNTIME_DIR": str(self._runtime()),
            PARENT_VARIABLE: str(os.getpid()),
        }  # fmt: skip
        with (self._folder / "log").open("ab") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
        self._starts, self._since = self._starts + 1, now
        log.info("serving at %s, start %d", self._url(0, "http"), self._starts)

    def _runtime(self) -> Path:
        """An empty directory for its sockets: one that was killed has left its own."""
        for old in self._folder.glob("run-*"):
            shutil.rmtree(old, ignore_errors=True)
        made = self._folder / f"run-{self._starts + 1}"
        made.mkdir(mode=0o700)
        return made

    def _ended(self, code: int) -> None:
        now = time.monotonic()
        self._early = self._early + 1 if now - self._since < EARLY_S else 0
        self._not_before = now + PAUSES_S[min(self._early, len(PAUSES_S) - 1)]
        self._process = None
        said = [line for line in self.log_tail(2000).splitlines() if line.strip()]
        self._trouble = f"forebay serve ended with {code}: {said[-1] if said else 'it said nothing'}"
        log.error("%s", self._trouble)

    def _ready(self) -> bool:
        try:
            return status_of(f"{self._url(0, 'http')}/health", timeout_s=ASK_S)[0] == 200
        except OSError:
            return False

    def _url(self, port: int, scheme: str) -> str:
        host = f"[{self._address}]" if ":" in self._address else self._address
        return f"{scheme}://{host}:{self._ports[port] if self._ports else 0}"


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Ports that were free a moment ago, all different. Raises OSError if the address isn't this host's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.ExitStack() as open_now:
        probes = [open_now.enter_context(socket.socket(family)) for _ in range(count)]
        for probe in probes:
            probe.bind((address, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _hosts_folder() -> Path:
    """Of this user's hosts; nobody else can look into it."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    folder = base / f"forebay-hosts-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise NotWritable(f"can't make {folder}: {error.strerror}; set XDG_RUNTIME_DIR") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise NotWritable(f"{folder} isn't a private directory of this user; remove it, or set XDG_RUNTIME_DIR")
    return folder


def _private(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
