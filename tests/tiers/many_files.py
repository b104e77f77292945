"""A directory with very many chunks, and how long a store that starts on it takes to answer.

    python -m tests.tiers.many_files --files 1000000 [--directory DIR] [--whole]

With `--whole` the chunks are as small as they can be, 8 KiB on the disk each: for a million, 8 GB and as many inodes
are needed. Without, they are names alone, hard links to a few of them: whoever looked into one would find another
chunk there, but nobody does before the first hit. All is removed at the end.

What is measured starts with the store's command and ends with a prompt's first hit, every byte of which is compared;
the walk over all files has only begun by then.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from forebay.tiers.fs.device import AlignedBuffer, Device
from forebay.tiers.fs.inspect import Front
from forebay.tiers.fs.manifest import Manifest
from forebay.tiers.fs.options import FsOptions
from forebay.tiers.fs.paths import FOLDERS, Paths, folder_name
from forebay.tiers.fs.shelf import record_of
from tests.kvstore.support import CHUNK
from tests.kvstore.test_daemon_tiers import TierStore
from tests.tiers.support import make_chunk

QUOTA = 64 << 30
PROMPT = list(range(1, 2 * CHUNK + 1))
BATCH = 5000
LINKS_MAX = 50_000
"""To one file; ext4 takes 65,000."""


@dataclass(frozen=True)
class Times:
    """Seconds from the command to the first hit, and how many files had been walked over by then. `few`: before the
    many files were added, for a comparison in the same minutes."""

    few: float
    clean: float
    killed: float
    walked: float
    chunks: float


def add_files(paths: Paths, manifest: Manifest, count: int, *, whole: bool) -> None:
    """Make so many tiny chunks and enter them, as a store would have."""
    device, buffer = Device(paths, "off", fsync=False), AlignedBuffer()
    for folder in range(FOLDERS):
        os.makedirs(f"{paths.chunks}/{folder_name(folder)}", mode=0o700, exist_ok=True)
    for first in range(0, count, BATCH):
        with manifest._writing() as txn:
            for number in range(first, min(first + BATCH, count)):
                chunk = make_chunk([number % 60_000, number // 60_000, *range(14)], granule=16)
                path, block = paths.chunk(chunk.id), chunk.block
                if whole or number % LINKS_MAX == 0:
                    temp = device.write(path, block, memoryview(chunk.payload), buffer, aligned=False)
                    device.publish(temp, path)
                    linked = path
                else:
                    os.link(linked, path)
                front = Front(chunk.header, block, temp.disk, temp.inode)
                manifest._commit(txn, chunk.id, record_of(front, cold=False), found=False)


def tiers(folder: Path) -> str:
    """The store's configuration."""
    return f'[tiers.files]\nkind = "fs"\ndirectory = "{folder / "files"}"\nquota_bytes = {QUOTA}\n'


def first_hit(store: TierStore, folder: Path) -> float:
    """Seconds from the command to a hit."""
    began = time.monotonic()
    store.start(tiers(folder))
    assert store.lookup(PROMPT).from_tier == {"files": len(PROMPT)}
    return time.monotonic() - began


def measure(folder: Path, count: int, *, whole: bool = True) -> Times:
    """Make the directory, start twice on it: after a clean end, and after SIGKILL."""
    store = TierStore(folder)
    try:
        return _measure(store, folder, count, whole=whole)
    finally:
        if store.process is not None and store.process.poll() is None:
            store.stop()


def _measure(store: TierStore, folder: Path, count: int, *, whole: bool) -> Times:
    store.start(tiers(folder))
    store.fill(PROMPT)
    store.until(lambda values: values["tier.files.chunks"] >= 4)
    assert store.stop() == 0
    few = first_hit(store, folder)
    assert store.stop() == 0
    directory = folder / "files"
    manifest = Manifest(directory / ".state" / "manifest", FsOptions(directory="/", quota_bytes=QUOTA).map_bytes)
    add_files(Paths(directory), manifest, count, whole=whole)
    manifest.close()
    clean = first_hit(store, folder)
    assert store.process is not None
    store.process.send_signal(signal.SIGKILL)
    store.process.wait(20)
    shutil.rmtree(store.pool)  # or its memory would be found again
    killed = first_hit(store, folder)
    values = store.until(lambda values: True)
    assert values["tier.files.chunks"] >= count
    return Times(few, clean, killed, values["tier.files.walked"], values["tier.files.chunks"])


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--directory", type=Path, help="where (default: the temporary folder)")
    parser.add_argument("--whole", action="store_true", help="no hard links: a file a chunk")
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="forebay-many-", dir=options.directory))
    try:
        found = measure(folder, options.files, whole=options.whole)
        print(
            f"{found.chunks:,.0f} chunks: first hit {found.clean:.2f} s after the command, {found.killed:.2f} s after "
            f"SIGKILL and the command, {found.few:.2f} s with few files; {found.walked:,.0f} files walked over by then",
            flush=True,
        )  # fmt: skip
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
