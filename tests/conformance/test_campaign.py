"""The campaign's short form on every kind of tier; and it notices tiers that do what none may."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from forebay.testing.faults.dice import START
from forebay.tiers.base import JobResult, LoadJob
from forebay.tiers.memory import MemoryTier
from forebay.tiers.messages import OptionValue
from tests.conformance import campaign
from tests.conformance.campaign import Outcome
from tests.conformance.worlds import WORLDS, MemoryWorld


def enough(outcome: Outcome, operations: int) -> None:
    """The run was one: chunks came back, faults struck, lies were told and caught."""
    told = "\n".join(outcome.lines())
    below, lies, calm = (tally.counts for tally in outcome.parts.values())
    assert all(part["load ok"] >= operations / 50 for part in (below, lies, calm)), told
    # Some 15 in 250 on the average; how many is chance, because what happens at the same time is.
    assert sum(count for name, count in outcome.faults.items() if name != START) >= operations / 60, told
    assert lies["load refused by its reader"] >= 1, told


@pytest.mark.parametrize("tier", WORLDS)
def test_a_short_campaign_serves_no_wrong_byte_and_leaves_nothing(tier: str, tmp_path: Path) -> None:
    if why := WORLDS[tier].absent():
        pytest.skip(why)
    outcome = campaign.run(tier, WORLDS[tier].short, 1, tmp_path)
    assert not outcome.wrong, "\n".join(outcome.lines())
    enough(outcome, WORLDS[tier].short)


# --- the campaign itself: what it must notice ------------------------------------------------------------------


class Wrong(MemoryTier):
    """A bit of every fifth load is another than was stored."""

    loads = 0

    def submit_load(self, job: LoadJob) -> None:
        super().submit_load(job)
        self.loads += 1
        if self.loads % 5 == 0:
            self._extents[job.extent][job.payload_offset] ^= 1


class Late(MemoryTier):
    """Goes on writing into the slots of loads that are finished."""

    def submit_load(self, job: LoadJob) -> None:
        super().submit_load(job)
        threading.Thread(target=self._write, args=(job,), daemon=True).start()

    def _write(self, job: LoadJob) -> None:
        time.sleep(0.05)
        self._extents[job.extent][job.payload_offset] = 1


class Wide(MemoryTier):
    """Writes one byte too many."""

    def submit_load(self, job: LoadJob) -> None:
        super().submit_load(job)
        self._extents[job.extent][job.payload_offset + job.capacity] = 1


class Greedy(MemoryTier):
    """Opens a file for each load and keeps it."""

    def __init__(self, name: str, options: Mapping[str, object]) -> None:
        super().__init__(name, options)
        self.files: list[object] = []

    def submit_load(self, job: LoadJob) -> None:
        super().submit_load(job)
        self.files.append(open("/dev/null"))  # noqa: SIM115 - this is what is to be noticed


class Forgetful(MemoryTier):
    """Says that it has stored, and hasn't."""

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._chunks.clear()
        return super().get_finished_jobs()


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (Wrong, "WRONG BYTES"), (Late, "written"), (Wide, "behind a slot"), (Greedy, "grown without end"),
        (Forgetful, "isn't stored and served"),
    ],
)  # fmt: skip
def test_a_tier_with_a_mistake_does_not_pass(mistake: type, words: str, tmp_path: Path) -> None:
    class World(MemoryWorld):
        kind = sick_kind = f"{__name__}:{mistake.__name__}"

        def sick_options(self) -> dict[str, OptionValue]:
            return self.options()

    WORLDS["mistaken"] = World
    try:
        said = "\n".join(campaign.run("mistaken", 140, 2, tmp_path, {}).wrong)
    finally:
        del WORLDS["mistaken"]
    assert any(word in said for word in words.split("|")), said
