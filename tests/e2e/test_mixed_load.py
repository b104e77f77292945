"""Half a minute or more of everything at once while processes are killed; and a planted mistake, which must be noticed.

    FOREBAY_MIXED_SECONDS=3600 FOREBAY_MIXED_SEED=7 pytest tests/e2e/test_mixed_load.py      the long form
    FOREBAY_MIXED_MUTANTS=all pytest tests/e2e/test_mixed_load.py                            every planted mistake
"""

from __future__ import annotations

import os

import pytest

from tests.e2e.mixed_load import run
from tests.e2e.mutants import MUTANTS

SECONDS = float(os.environ.get("FOREBAY_MIXED_SECONDS", "30"))
SEED = int(os.environ.get("FOREBAY_MIXED_SEED", "1"))
MUTANT_S = 60.0
"""At most: a run with a mistake ends as soon as it is noticed."""
CHOSEN = sorted(MUTANTS) if os.environ.get("FOREBAY_MIXED_MUTANTS") == "all" else ["repeats"]

pytestmark = pytest.mark.timeout(SECONDS + 400)


def test_no_token_is_wrong_nothing_leaks_and_nobody_waits_for_ever() -> None:
    lines: list[str] = []
    tally = run(SECONDS, SEED, None, lines.append)
    assert not tally.wrong, "\n".join(lines[-60:])
    assert tally.tokens > 0 and sum(tally.done.values()) > 10
    assert {"kill_worker", "stop_worker", "drain_worker", "kill_store", "kill_peer"} <= set(tally.done)


@pytest.mark.parametrize("mutant", CHOSEN)
def test_a_planted_mistake_is_noticed(mutant: str) -> None:
    assert run(MUTANT_S, SEED, mutant, lambda line: None, entries=10).wrong
