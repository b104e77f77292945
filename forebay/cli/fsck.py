"""Check every byte: of a store's memory, of a file tier's directory, or of both.

Prints a list of what is wrong and exits with 1; --repair moves it aside. A directory can be checked with or
without a store running on it. --pools instead lists the pools in shared memory: one whose store was killed keeps its
memory until a store starts on the same socket again, or --repair removes it.

example:
  forebay fsck --socket /run/forebay/store.sock --fs /var/lib/forebay --repair
  forebay fsck --pools
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from forebay.cli.places import default_socket
from forebay.cli.tables import bytes_text
from forebay.config import Setting, add_settings, boolean, path, resolve, unix_socket
from forebay.kvstore.client import StoreClient

SETTINGS = (
    Setting("socket", unix_socket, None, "check this store's memory", shown="without fs: the usual one"),
    Setting("fs", path, None, "check this file tier's directory"),
    Setting("fs_state_dir", path, None, "where its manifest is", shown="inside the directory"),
    Setting("fs_key", path, None, "key file or folder, where its chunks are encrypted", shown="none"),
    Setting("pools", boolean, False, "list pools, and which of them no store holds", shown="no", switch=True),
    Setting("pool_dir", path, path("/dev/shm"), "where those pools are"),  # noqa: S108
    Setting("repair", boolean, False, "take out what is wrong; files are moved aside", shown="no", switch=True),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_settings(parser, SETTINGS)


def run(flags: dict[str, Any]) -> int:
    """Check; 1 if anything is wrong."""
    values = resolve("fsck", SETTINGS, flags)
    if values["pools"]:
        return int(_pools(values["pool_dir"], values["repair"]) > 0)
    wrong = 0
    if values["fs"] is not None:
        wrong += _files(values["fs"], values["fs_state_dir"], values["fs_key"], values["repair"])
    if values["socket"] is not None or values["fs"] is None:
        wrong += _memory(values["socket"] or default_socket(), values["repair"])
    return int(wrong > 0)


def _memory(socket: Path, repair: bool) -> int:
    # Reading a large pool takes a while: the answer comes when it is done.
    with StoreClient(str(socket)) as client:
        checked = client.check(repair=repair)
    for line in checked.damaged:
        print(f"memory: {line}: checksums differ{' (taken out)' if repair else ''}")
    print(f"memory: {checked.chunks} chunks, {bytes_text(checked.bytes)} read, {len(checked.damaged)} damaged")
    return len(checked.damaged)


def _pools(pool_dir: Path, repair: bool) -> int:
    from forebay.kvstore import leftovers

    found = list(leftovers.pools(pool_dir))
    left = 0
    for pool in found:
        state = "in use"
        if not pool.held:
            left += 1
            state = "removed" if repair and leftovers.remove(pool) else "its store is gone"
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(pool.used_at))
        print(f"pools: {pool.path}: {bytes_text(pool.bytes)}, used {used}, {pool.formats or 'unmarked'}: {state}")
    print(f"pools: {len(found)} in {pool_dir}, {left} of stores that are gone")
    return left


def _files(folder: Path, state_dir: Path | None, key: Path | None, repair: bool) -> int:
    from forebay.tiers.codec.codec import open_codec
    from forebay.tiers.fs.fsck import check_directory

    terminal = sys.stderr.isatty()
    codec = open_codec("fsck", "none", str(key.absolute()) if key else "")
    report = check_directory(folder, repair, _progress if terminal else None, state_dir=state_dir, codec=codec)
    if terminal:
        print(file=sys.stderr)
    for problem in report.problems:
        print(f"files: {problem.path}: {problem.why}{' (moved aside)' if problem.repaired else ''}")
    if report.problem_count > len(report.problems):
        print(f"files: and {report.problem_count - len(report.problems)} more")
    for key_id, count in sorted(report.sealed.items()):
        print(f"files: {count} chunks are encrypted under key {key_id}: undamaged; --fs-key checks what they say")
    print(
        f"files: {report.chunks} chunks, {bytes_text(report.bytes)} read, {report.problem_count} damaged; "
        f"{len(report.leftovers)} unfinished, {report.quarantined} moved aside, manifest {report.manifest}"
    )
    return report.problem_count


def _progress(files: int, read: int) -> None:
    print(f"\rchecking: {files} files, {bytes_text(read)}", end="", file=sys.stderr, flush=True)
