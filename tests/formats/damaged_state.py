"""Opens a file tier's directory again and again, each time with other damage in one of its state files.

    python -m tests.formats.damaged_state DIRECTORY FILE STEP    FILE: .lock, marker.json or data.mdb

LMDB reads its file through a mapping, so damage in it may kill the process that looks: hence a child for each kind of
damage. Killed is all right (the daemon starts another tier, and gives the manifest up after some), and so is a typed
error or a miss. Wrong bytes, any other exception and a hang are not.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from forebay.errors import ForebayError
from tests.formats.mutations import PATTERNS
from tests.tiers.fs_rig import FsRig
from tests.tiers.support import Pool, make_chunk, numbered

CHUNKS = [numbered(number) for number in range(5)]
SHORT = make_chunk(range(64))
HANG_S = 60
LEFT_ALONE = (".lock", "marker.json")


def fill(directory: Path) -> None:
    """A directory with six chunks, closed cleanly."""
    with FsRig(Pool(), directory).opened() as driver:
        for chunk in (*CHUNKS, SHORT):
            assert driver.store(chunk).ok


def state_file(directory: Path, name: str) -> Path:
    """Where the file of this name is."""
    return {
        ".lock": directory / ".lock",
        "marker.json": directory / ".state" / "marker.json",
        "data.mdb": directory / ".state" / "manifest" / "data.mdb",
    }[name]


def damages(data: bytes, step: int) -> Iterator[tuple[str, bytes]]:
    """Flipped bytes where anything is, and cuts; of a large file a sample."""
    used = [at for at in range(len(data)) if data[at]][:: max(1, step)]
    for number, at in enumerate(used):
        pattern = PATTERNS[number % len(PATTERNS)]
        yield f"byte {at}", data[:at] + bytes([data[at] ^ pattern]) + data[at + 1 :]
    for length in range(0, len(data), max(1, len(data) // 24)):
        yield f"cut to {length}", data[:length]


def look(directory: Path) -> str:
    """Use a damaged directory as a tier does; says how that went. Raises on wrong bytes."""
    try:
        with FsRig(Pool(), directory).opened() as driver:
            served = [chunk for chunk in (*CHUNKS, SHORT) if driver.has(chunk) and driver.serves(chunk)]
            driver.lookup(SHORT.query())
            driver.store(numbered(77))
            driver.serves(numbered(77))
            crashed = driver.value("task_crashes")
            assert crashed == 0, "a task of the tier has crashed"
            return "whole" if len(served) == len(CHUNKS) + 1 else "misses"
    except ForebayError:
        return "typed error"


def in_a_child(directory: Path) -> str:
    """`look` in a child; raises AssertionError if that went in a way it must not."""
    child = os.fork()
    if child == 0:
        signal.alarm(HANG_S)
        code = 1
        try:
            code = {"whole": 0, "misses": 10, "typed error": 11}[look(directory)]
        except Exception:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        assert number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE), f"ended by signal {number}"
        return "killed"
    found = {0: "whole", 10: "misses", 11: "typed error"}.get(os.WEXITSTATUS(status))
    assert found is not None, "wrong bytes, or an exception of another kind"
    return found


def main(directory: Path, name: str, step: int) -> None:
    """Print how often what happened; the end of the line says which damage was not survived."""
    fill(directory / "good")
    data = state_file(directory / "good", name).read_bytes()
    counts: Counter[str] = Counter()
    rng = random.Random(1)
    for what, damaged in damages(data, step):
        copy = directory / f"copy-{rng.randrange(1 << 30)}"
        shutil.copytree(directory / "good", copy)
        state_file(copy, name).write_bytes(damaged)
        try:
            counts[in_a_child(copy)] += 1
        except AssertionError as error:
            print(f"{name}, {what}: {error}", file=sys.stderr)
            counts["failed"] += 1
        shutil.rmtree(copy)
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    sys.exit(int(counts["failed"] > 0))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
