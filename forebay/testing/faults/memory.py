"""Bad memory below the memory tier: what it holds loses a bit now and then."""

from __future__ import annotations

from collections.abc import Mapping

from forebay.testing.faults.dice import Dice, rates_of
from forebay.tiers.base import LoadJob
from forebay.tiers.memory import MemoryTier

FAULTS = {"flip": "a held chunk has lost a bit when it is read"}


class FaultyMemory(MemoryTier):
    """A memory tier with the options `disk_rates`, `disk_seed`, `disk_log` beside its own."""

    def __init__(self, name: str, options: Mapping[str, object]) -> None:
        ours, inner = split(options)
        self._dice = Dice(int(ours.get("disk_seed", "0")), rates_of(ours.get("disk_rates", ""), FAULTS),
                          ours.get("disk_log", ""))  # fmt: skip
        super().__init__(name, inner)

    def submit_load(self, job: LoadJob) -> None:
        held = self._chunks.get(job.chunk)
        if held is not None and self._dice.strikes("flip"):
            changed = bytearray(held.payload)
            self._dice.flip(changed)
            held.payload = bytes(changed)
        super().submit_load(job)


def split(options: Mapping[str, object]) -> tuple[dict[str, str], dict[str, object]]:
    """The options of the device's faults, as text, and the others."""
    ours = {key: str(value) for key, value in options.items() if key.startswith("disk_")}
    return ours, {key: value for key, value in options.items() if key not in ours}
