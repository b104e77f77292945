"""Each fault does what its name says: else a campaign would survive what never happened."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from forebay.errors import ConfigError
from forebay.testing.conformance import Driver, InProcess, Pool, numbered
from forebay.testing.faults import tier as faulty
from forebay.testing.faults.dice import Dice, rates_of, read_log
from forebay.testing.faults.files import FAULTS as DISK
from forebay.testing.faults.files import FaultyFs
from forebay.testing.faults.tier import FAULTS, LIES, FaultyTier
from tests.conformance.campaign import acceptable

CHUNK, OTHER = numbered(1), numbered(2)


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()


class Rig:
    """A memory tier with one fault around it that strikes always, or from `strike` on."""

    def __init__(self, pool: Pool, log: Path) -> None:
        options = {"fault_kind": "memory", "fault_seed": 1, "fault_log": str(log), "quota_bytes": 1 << 20}
        self.tier = FaultyTier("t", options)
        self.log = log
        self.driver = Driver(pool, InProcess(self.tier, pool))

    def strike(self, name: str) -> None:
        self.tier._dice = Dice(1, {name: 1.0}, str(self.log))


@pytest.fixture
def rig(pool: Pool, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(pool, tmp_path / "log")
    assert made.driver.store(CHUNK).ok and made.driver.store(OTHER).ok
    assert made.driver.serves(OTHER)
    yield made
    made.driver.close()


@pytest.mark.parametrize("lie", ["flip", "short", "length", "header", "other"])
def test_a_lie_of_a_load_is_one_and_is_noticed_by_whoever_verifies(rig: Rig, lie: str) -> None:
    rig.strike(lie)
    job = rig.driver.load_job(CHUNK)
    result = rig.driver.finish([job])[job.id]
    at = job.payload_offset
    payload = bytes(rig.driver.pool.memory[at : at + result.length])
    assert result.ok
    assert (payload, result.header, result.length) != (CHUNK.payload, CHUNK.block, len(CHUNK.payload))
    assert not acceptable(CHUNK, result, payload)
    assert read_log(rig.log)[lie] == 1


def test_lookups_claim_and_mismeasure(rig: Rig) -> None:
    rig.strike("claim")
    assert rig.driver.has(numbered(77)) and not rig.driver.serves(numbered(77))
    rig.strike("measure")
    (found,) = rig.driver.lookup(CHUNK.query())
    assert found.outcome == "hit" and found.length != CHUNK.length


@pytest.mark.parametrize(("fault", "reason"), [("error", "io"), ("partition", "io"), ("full", "full")])
def test_jobs_fail(rig: Rig, fault: str, reason: str) -> None:
    rig.strike(fault)
    assert rig.driver.store(numbered(3)).reason == reason
    assert not rig.driver.has(numbered(3)) if fault != "partition" else True
    if fault == "partition":
        assert rig.tier.lookup([CHUNK.query()])[0].outcome == "retry"


def test_results_are_lost_told_twice_told_late_and_told_of_nobodys_job(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.strike("lose")
    rig.tier.submit_store(rig.driver.store_job(numbered(3)))
    assert list(rig.tier.get_finished_jobs()) == []
    rig.strike("twice")
    rig.tier.submit_store(rig.driver.store_job(numbered(4)))
    one, two = rig.tier.get_finished_jobs()
    assert one == two
    rig.strike("stray")
    rig.tier.submit_store(rig.driver.store_job(numbered(5)))
    assert len({result.id for result in rig.tier.get_finished_jobs()}) == 2
    rig.strike("delay")
    rig.tier.submit_store(job := rig.driver.store_job(numbered(6)))
    now = time.monotonic()
    monkeypatch.setattr(faulty, "time", SimpleNamespace(monotonic=lambda: now))
    assert list(rig.tier.get_finished_jobs()) == []
    now += faulty.DELAY_S
    assert [result.id for result in rig.tier.get_finished_jobs()] == [job.id]


def test_a_store_is_pretended_and_a_call_raises(rig: Rig) -> None:
    rig.strike("pretend")
    assert rig.driver.store(numbered(3)).ok and not rig.driver.has(numbered(3))
    rig.strike("raise")
    with pytest.raises(RuntimeError, match="a fault in lookup"):
        rig.tier.lookup([CHUNK.query()])


_CALL = """
from forebay.testing.faults.tier import FaultyTier
FaultyTier('t', {'fault_kind': 'memory', 'fault_rates': %r}).lookup([])
"""


def test_a_process_dies_and_another_hangs() -> None:
    died = subprocess.run([sys.executable, "-c", _CALL % "die=1"], check=False)
    assert died.returncode == -9
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, "-c", _CALL % "hang=1"], check=False, timeout=2)


def test_every_fault_around_a_tier_is_tested_here() -> None:
    tested = {"flip", "short", "length", "header", "other", "claim", "measure", "error", "partition", "full", "lose",
              "twice", "stray", "delay", "pretend", "raise", "die", "hang"}  # fmt: skip
    assert tested == FAULTS.keys() | LIES.keys()


# --- the disk ----------------------------------------------------------------------------------------------

WRITES = {"write_error": "io", "name_error": "io", "short_write": "io", "full": "full"}
LOSSES = ("flip", "cut", "gone")
READS = ("read_error", "short_read")
SLOW = ("slow", "hang", "remove_error")


@pytest.fixture
def disk(pool: Pool, tmp_path: Path) -> Iterator[Driver]:
    tier = FaultyFs("f", {"directory": str(tmp_path / "fs"), "quota_bytes": 4 << 20})
    driver = Driver(pool, InProcess(tier, pool))
    yield driver
    driver.close()


def sick(driver: Driver, name: str) -> None:
    assert isinstance(driver.engine, InProcess) and isinstance(driver.engine.tier, FaultyFs)
    driver.engine.tier._bad.dice = Dice(1, {name: 1.0})


@pytest.mark.parametrize("fault", WRITES)
def test_a_bad_write_is_a_store_that_failed(disk: Driver, fault: str) -> None:
    sick(disk, fault)
    assert disk.store(CHUNK).reason == WRITES[fault]
    sick(disk, "none")
    assert not disk.serves(CHUNK)
    assert disk.store(CHUNK).ok and disk.serves(CHUNK)


@pytest.mark.parametrize("fault", LOSSES)
def test_what_a_disk_loses_is_a_miss(disk: Driver, fault: str) -> None:
    sick(disk, fault)
    disk.store(CHUNK)
    sick(disk, "none")
    assert not disk.serves(CHUNK)
    assert disk.store(CHUNK).ok and disk.serves(CHUNK)


@pytest.mark.parametrize("fault", READS)
def test_a_bad_read_is_a_load_that_failed(disk: Driver, fault: str) -> None:
    assert disk.store(CHUNK).ok
    sick(disk, fault)
    assert not disk.serves(CHUNK)


def test_a_slow_disk_is_slow(disk: Driver) -> None:
    sick(disk, "slow")
    begun = time.monotonic()
    for number in range(5):
        assert disk.store(numbered(number)).ok
    assert time.monotonic() - begun > 0.05


def test_every_fault_of_the_disk_is_tested_here_or_in_the_campaign() -> None:
    assert {*WRITES, *LOSSES, *READS, *SLOW} == DISK.keys()


# --- when --------------------------------------------------------------------------------------------------


def test_the_same_seed_strikes_at_the_same_draws_and_another_start_at_others(tmp_path: Path) -> None:
    def draws(log: str) -> list[bool]:
        dice = Dice(7, {"x": 0.3}, log)
        struck = [dice.strikes("x") for _ in range(200)]
        dice.close()
        return struck

    assert draws("") == draws("")
    log = str(tmp_path / "log")
    first, second = draws(log), draws(log)
    assert first != second
    assert read_log(tmp_path / "log") == {"start": 2, "x": sum(first) + sum(second)}


@pytest.mark.parametrize("text", ["no=1", "flip=often", "flip"])
def test_rates_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        rates_of(text, DISK)
