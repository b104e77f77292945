"""Every so manieth call of the scenario fails once. All of them, as each kind: `python -m tests.faults.every_call`."""

from __future__ import annotations

import os

from tests.faults.calls import KINDS
from tests.faults.every_call import inject, planned

EVERY = int(os.environ.get("FOREBAY_EVERY_CALL", "24"))


def test_a_call_that_fails_leaves_nothing_behind_and_the_store_serves_on() -> None:
    outcome = inject(EVERY, jobs=2)
    print("\n".join(outcome.lines()))
    assert outcome.failures == []
    assert outcome.calls > 300 and outcome.missed < outcome.runs.total() / 2


def test_the_long_form_fails_every_call_as_every_kind() -> None:
    names = {"open": 2, "preadv": 1, "mmap": 1, "commit": 1, "listdir": 61}
    plan = {str(fault) for fault in planned(names, 1)}
    assert {f"preadv:0:{kind}" for kind in KINDS} <= plan
    assert {"open:1:EIO", "commit:0:ENOSPC", "mmap:0:reset", "listdir:60:hang"} <= plan
