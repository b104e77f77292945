"""Check every byte: of a store's memory, of a file tier's directory, or of both.

Prints a list of what is wrong and exits with 1; --repair moves it aside. A directory can be checked with or
without a store running on it.

example:
  forebay fsck --socket /run/forebay/store.sock --fs /var/lib/forebay --repair
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from forebay.cli.places import default_socket
from forebay.cli.tables import bytes_text
from forebay.errors import StoreUnavailable
from forebay.kvstore.client import StoreClient


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("--socket", help=f"check this store's memory (default without --fs: {default_socket()})")
    parser.add_argument("--fs", metavar="DIR", help="check this directory")
    parser.add_argument("--repair", action="store_true", help="take out what is wrong; files are moved aside")


def run(flags: dict[str, Any]) -> int:
    """Check; 1 if anything is wrong."""
    wrong = 0
    if flags["fs"]:
        wrong += _files(Path(flags["fs"]), flags["repair"])
    if flags["socket"] or not flags["fs"]:
        wrong += _memory(flags["socket"] or str(default_socket()), flags["repair"])
    return int(wrong > 0)


def _memory(socket: str, repair: bool) -> int:
    # Reading a large pool takes a while: the answer comes when it is done.
    with StoreClient(socket) as client:
        try:
            checked = client.check(repair=repair)
        except StoreUnavailable as error:
            raise StoreUnavailable(f"the store went away during the check: {error}") from error
    for line in checked.damaged:
        print(f"memory: {line}: checksums differ{' (taken out)' if repair else ''}")
    print(f"memory: {checked.chunks} chunks, {bytes_text(checked.bytes)} read, {len(checked.damaged)} damaged")
    return len(checked.damaged)


def _files(folder: Path, repair: bool) -> int:
    from forebay.tiers.fs.fsck import check_directory

    report = check_directory(folder, repair, _progress if sys.stderr.isatty() else None)
    for problem in report.problems:
        print(f"files: {problem}")
    print(f"files: {report.chunks} chunks, {bytes_text(report.bytes)} read, {len(report.problems)} problems")
    return len(report.problems)


def _progress(done: int, total: int) -> None:
    end = "\n" if done == total else ""
    print(f"\rchecking {done}/{total}", end=end, file=sys.stderr, flush=True)
