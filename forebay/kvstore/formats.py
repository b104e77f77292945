"""In which formats a pool or a directory is: one line in its lock file, compared before anything in it is read.

    pool/1 header/1 layout/1 namespace/2

Another version's pool or directory is refused as it is, neither read nor touched. It is a cache: whoever doesn't want
to go back to the version that wrote it may remove it.
"""

from __future__ import annotations

import os
import re

from forebay.kvstore.header import HEADER_VERSION
from forebay.kvstore.identity import LAYOUT_VERSION, NAMESPACE_VERSION

VERSIONS = {"pool": 1, "files": 1}
_LINE = re.compile(r"(pool|files)/\d+ header/\d+ layout/\d+ namespace/\d+(?: [a-z]+/\d+)*")
"""What this version writes, and what a later one may add. Anything else is damage, and says nothing."""
_BYTES_MAX = 256


def format_line(kind: str) -> str:
    """What this build writes; `kind` is pool or files."""
    return f"{kind}/{VERSIONS[kind]} header/{HEADER_VERSION} layout/{LAYOUT_VERSION} namespace/{NAMESPACE_VERSION}"


def read_line(descriptor: int, offset: int = 0) -> str:
    """The line in an open file from `offset` on; empty if there is none, or none that can be one."""
    text = os.pread(descriptor, _BYTES_MAX, offset).decode("ascii", "replace").strip()
    return text if _LINE.fullmatch(text) else ""


def write_line(descriptor: int, kind: str, offset: int = 0) -> None:
    """Put this build's line into an open file, from `offset` on; nothing is behind it."""
    line = format_line(kind).encode() + b"\n"
    os.pwrite(descriptor, line, offset)
    os.ftruncate(descriptor, offset + len(line))


def refusal(where: object, found: str, kind: str, remedy: str) -> str:
    """The sentence for people."""
    return f"{where} was left by another version of Forebay ({found}; this one is {format_line(kind)}): {remedy}"
