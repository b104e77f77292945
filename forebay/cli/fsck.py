"""Check every byte: of a store's memory, of a file tier's directory, of a tier of its configuration.

Prints a list of what is wrong and exits with 1; --repair moves it aside. A directory or a bucket can be checked with or
without a store running on it; --tier takes the settings of [tiers.NAME]. --pools instead lists the pools in shared
memory: one whose store was killed keeps its memory until a store starts on the same socket again, or --repair removes
it.

example:
  forebay fsck --socket /run/forebay/store.sock --fs /var/lib/forebay --repair
  forebay fsck --config forebay.toml --tier bucket
  forebay fsck --pools
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forebay.cli import tiers
from forebay.cli.places import default_socket
from forebay.cli.tables import bytes_text
from forebay.config import Setting, add_settings, boolean, path, resolve, text, unix_socket
from forebay.errors import ConfigError
from forebay.kvstore.client import StoreClient
from forebay.tiers.messages import OptionValue
from forebay.tiers.rules import TierRule

SETTINGS = (
    Setting("socket", unix_socket, None, "check this store's memory", shown="without fs: the usual one"),
    Setting("fs", path, None, "check this file tier's directory"),
    Setting("fs_state_dir", path, None, "where its manifest is", shown="inside the directory"),
    Setting("fs_key", path, None, "key file or folder, where its chunks are encrypted", shown="none"),
    Setting("tier", text, None, "check this tier of the configuration, of kind fs or s3"),
    tiers.TIERS,
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
    if values["tier"] is not None:
        wrong += _tier(values["tier"], values["tiers"], values["repair"])
    if values["socket"] is not None or (values["fs"] is None and values["tier"] is None):
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


def _tier(name: str, rules: Mapping[str, TierRule], repair: bool) -> int:
    rule = rules.get(name)
    if rule is None:
        known = f"there are {', '.join(rules)}" if rules else "name the store's file with --config"
        raise ConfigError(f"--tier {name}: the configuration has no such tier; {known}")
    if rule.kind == "fs":
        from forebay.tiers.fs.options import fs_options

        options = fs_options(name, rule.options)
        state = Path(options.state_dir) if options.state_dir else None
        key = Path(options.encrypt_key_file) if options.encrypt_key_file else None
        return _files(Path(options.directory), state, key, repair)
    if rule.kind == "s3":
        return _bucket(name, rule.options, repair)
    raise ConfigError(f"--tier {name}: a tier of kind {rule.kind} keeps nothing that could be checked; fs and s3 do")


def _bucket(name: str, given: Mapping[str, OptionValue], repair: bool) -> int:
    from forebay.tiers.s3.fsck import check_prefix
    from forebay.tiers.s3.options import s3_options

    options, terminal = s3_options(name, given), sys.stderr.isatty()
    report = check_prefix(name, options, repair, _progress if terminal else None)
    if terminal:
        print(file=sys.stderr)
    for problem in report.problems:
        print(f"{name}: {problem.name}: {problem.why}{' (moved aside)' if problem.repaired else ''}")
    if report.problem_count > len(report.problems):
        print(f"{name}: and {report.problem_count - len(report.problems)} more")
    for key_id, count in sorted(report.sealed.items()):
        print(f"{name}: {count} chunks are encrypted under key {key_id}: undamaged; encrypt_key_file opens them")
    print(
        f"{name}: {report.chunks} chunks in {report.objects} objects of {options.where}, {bytes_text(report.bytes)} "
        f"read, {report.problem_count} damaged, {report.quarantined} moved aside"
    )
    return report.problem_count


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
