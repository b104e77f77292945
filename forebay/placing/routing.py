"""The router of a placed cluster: a process with a worker and a store for every slot, told where each is."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forebay.parent import PARENT_VARIABLE
from forebay.placing.asking import status_of
from forebay.placing.spec import SERVER, Place

log = logging.getLogger(__name__)

NOWHERE = Place("http://127.0.0.1:9", "tcp://127.0.0.1:9", "tcp://127.0.0.1:9", 0, 0, running=False)
"""Where a vacant slot is: a port on which nobody answers."""
ASK_S = 10.0
STOP_S = 30.0


@dataclass
class RouterProcess:
    """`forebay router` with `slots` workers, started again when it ends. `flags` are more of its flags."""

    folder: Path
    slots: int
    port: int
    flags: Sequence[str] = ()
    restarts: int = -1
    _process: subprocess.Popen[bytes] | None = None
    _told: dict[int, Place] = field(default_factory=dict)

    def look(self, places: dict[int, Place]) -> None:
        """Keep it running, and tell it of every slot that is elsewhere than it was told. What it can't be told now (it
        has just been started) it is told next time."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        for slot in range(self.slots):
            place = places.get(slot, NOWHERE)
            if self._address(self._told.get(slot, NOWHERE)) != self._address(place) and self._tell(slot, place):
                self._told[slot] = place

    def stop(self) -> None:
        """End it."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()

    @staticmethod
    def _address(place: Place) -> tuple[str, str, str]:
        return place.url, place.events, place.replay

    def _start(self) -> None:
        if self._process is not None:
            log.error("the router ended with %d; it is started again", self._process.returncode)
        tables = []
        for slot in range(self.slots):
            streams = f'events = "{NOWHERE.events}"\nreplay = "{NOWHERE.replay}"\nserver = "{SERVER}"\n'
            tables.append(f'[workers.h{slot}]\nurl = "{NOWHERE.url}"\nstore = "s{slot}"\n\n[stores.s{slot}]\n{streams}')
        (self.folder / "router.toml").write_text("\n".join(tables))
        command = [
            sys.executable, "-m", "forebay", "router", "--config", str(self.folder / "router.toml"),
            "--port", str(self.port), "--event-keys", str(self.folder / "keys"), *self.flags,
        ]  # fmt: skip
        environment = os.environ | {PARENT_VARIABLE: str(os.getpid())}
        self._process = subprocess.Popen(command, env=environment, start_new_session=True)
        self._told, self.restarts = {}, self.restarts + 1

    def _tell(self, slot: int, place: Place) -> bool:
        body = {"worker": f"h{slot}", "url": place.url, "store": {"events": place.events, "replay": place.replay}}
        try:
            status, told = status_of(f"http://127.0.0.1:{self.port}/router/place", body, ASK_S)
        except OSError:
            return False  # it has just been started
        if status != 200:
            log.error("the router doesn't take slot %d: %s", slot, told.decode(errors="replace"))
        return status == 200
