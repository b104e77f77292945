"""Who removes a chunk that has just come into sight never finds its bytes uncounted."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from forebay.tiers.fs.manifest import Manifest
from tests.tiers.fs_rig import FsRig
from tests.tiers.support import numbered

MEANWHILE_S = 0.5
"""Time for the other thread; it needs none, if nothing holds it up."""


def test_a_chunk_that_is_removed_as_it_is_stored_leaves_the_account_right(
    rig: FsRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = numbered(1, granule=48 << 10)
    commit, failed = Manifest.commit, []

    def remove() -> None:
        try:
            rig.tier.forget([chunk.id], "cleared")
        except AssertionError as error:  # the account went below zero
            failed.append(error)

    remover = threading.Thread(target=remove)

    def seen_at_once(self: Manifest, *args: Any, **more: Any) -> Any:
        replaced = commit(self, *args, **more)
        remover.start()
        remover.join(MEANWHILE_S)
        return replaced

    with rig.opened() as driver:
        monkeypatch.setattr(Manifest, "commit", seen_at_once)
        driver.store(chunk)
        remover.join()
        monkeypatch.undo()
        assert not failed
        values = rig.tier.statistics().values
        assert values["bytes_reserved"] == values["bytes_stored"] == 0
        assert driver.store(chunk).ok
        assert rig.tier.statistics().values["bytes_stored"] >= len(chunk.payload)
