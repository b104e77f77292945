"""When a fault strikes: drawn from a seed, and written down, so that a run can tell what it has survived."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from forebay.errors import ConfigError

START = "start"
SPAN_CALLS = (10, 60)
"""A fault that lasts does so for this many draws of its name, drawn between these."""


class Dice:
    """Seeded draws by fault name; may be used from any thread.

    `rates` are probabilities a draw. `log` (a path, or empty) gets a line for each fault and one for each start: a
    process that dies of a fault and is started again goes on with other draws, not with the one it died of.
    """

    def __init__(self, seed: int, rates: Mapping[str, float], log: str = "") -> None:
        self._rates = dict(rates)
        self._lock = threading.Lock()
        self._left: dict[str, int] = {}
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600) if log else -1
        starts = read_log(Path(log))[START] if log else 0
        self._random = random.Random(f"{seed} {starts}")
        self._note(START)

    def _note(self, name: str) -> None:
        if self._log >= 0:
            os.write(self._log, name.encode() + b"\n")

    def strikes(self, name: str) -> bool:
        """Does it happen now? Noted if so."""
        with self._lock:
            struck = self._random.random() < self._rates.get(name, 0.0)
        if struck:
            self._note(name)
        return struck

    def lasts(self, name: str) -> bool:
        """The same of a fault that goes on for a number of draws once it has begun."""
        with self._lock:
            left = self._left.get(name, 0)
            if left:
                self._left[name] = left - 1
                return True
        if self.strikes(name):
            self._left[name] = self.between(*SPAN_CALLS)
            return True
        return False

    def between(self, least: int, most: int) -> int:
        """A whole number from `least` to `most`."""
        with self._lock:
            return self._random.randint(least, most)

    def part(self) -> float:
        """A number from 0 to 1."""
        with self._lock:
            return self._random.random()

    def flip(self, memory: memoryview | bytearray) -> None:
        """Flip one bit."""
        if len(memory):
            memory[self.between(0, len(memory) - 1)] ^= 1 << self.between(0, 7)

    def close(self) -> None:
        """Close the log."""
        if self._log >= 0:
            os.close(self._log)
            self._log = -1


def read_log(path: Path) -> Counter[str]:
    """How often each fault has struck so far."""
    return Counter(path.read_text().split()) if path.exists() else Counter()


def rates_of(text: str, known: Mapping[str, str]) -> dict[str, float]:
    """Rates from `name=0.01,other=0.2`. Raises ConfigError for a name that isn't known or no number."""
    rates = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in known:
            raise ConfigError(f"{name!r} is no fault; there are {', '.join(known)}")
        try:
            rates[name] = float(value)
        except ValueError as error:
            raise ConfigError(f"{part!r}: take a number from 0 to 1") from error
    return rates


def rates_text(rates: Mapping[str, float]) -> str:
    """What `rates_of` reads."""
    return ",".join(f"{name}={rate}" for name, rate in rates.items())
