"""Run in a mount namespace of its own with a small file system: fills it, and checks what is served."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.tiers.fs_rig import FsRig
from tests.tiers.support import Pool, numbered

GRANULE = 48 << 10


def main(disk: Path, state: str) -> None:
    """Store ten times what fits, with a restart in the middle; somebody else takes a quarter of the room."""
    rig = FsRig(Pool(), disk / "fs", quota_bytes=64 << 20, state_dir=state)
    stored = []
    for round_ in range(2):
        with rig.opened() as driver:
            for i in range(200):
                if (round_, i) == (0, 10):
                    (disk / "other").write_bytes(os.urandom(1 << 20))
                chunk = numbered(1000 * round_ + i, granule=GRANULE)
                result = driver.store(chunk)
                assert result.ok or result.reason in ("full", "io"), result
                if result.ok:
                    stored.append(chunk)
            held = [chunk for chunk in stored if driver.has(chunk)]
            assert len(held) >= 10, f"only {len(held)} of {len(stored)} held"
            assert all(driver.serves(chunk) for chunk in held)
            assert driver.value("stores_ok") > 50, driver.engine.stats().values
            assert driver.value("bytes") == rig.usage(), (driver.value("bytes"), rig.usage())
    print(f"{len(stored)} stored, {len(held)} held: all served chunks were right")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
