"""Can a tenant tell by the time of its own lookups what another tenant has stored?

    python -m benchmarks.tenant_timing [--prompts N] [--chunks N]

One tenant stores prompts in a store of its own. Another one asks for those same prompts and for prompts that nobody
ever stored, in turn and in random order; both are misses. If their times come from one distribution, an observer who
sees one time guesses right half of the time: the chance that a foreign prompt took longer than an unknown one is 0.5.
As a check that the measurement could tell, the owner's own hits are timed beside them.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Measure, Report, parser
from forebay.errors import StoreUnavailable
from forebay.kvstore.client import StoreClient
from forebay.kvstore.header import granule_checksums
from forebay.kvstore.identity import GroupGeometry, Namespace, chunk_keys, pack_tokens, root_key, tenant_salt
from forebay.kvstore.lookup import Prompt
from forebay.kvstore.protocol import Written

SPEC = Namespace(b"timing", (GroupGeometry("full", "full", (0,), 1, 16, "float32"),), chunk_tokens=64)
GRANULE = SPEC.groups[0].granule_bytes
TELLING = 0.05
"""How far from one half the chance may be, at a few thousand lookups."""
PERCENTILES = (0.5, 0.9, 0.99)


def prompt_of(tenant: str, tokens: Sequence[int]) -> Prompt:
    """A tenant's question."""
    root = root_key(SPEC.id, tenant_salt(tenant.encode() * 8, ""))
    packed = pack_tokens(tokens)
    return Prompt(SPEC.id, SPEC, root, packed, chunk_keys(root, packed, SPEC.chunk_tokens), len(tokens))


def put(client: StoreClient, tenant: str, prompt: Prompt) -> None:
    """Store all chunks of a prompt."""
    chunks = [prompt.chunk(0, position) for position in range(prompt.positions)]
    written = []
    for slot in client.reserve(SPEC.id, tenant, chunks).slots:
        assert slot.status == "reserved", slot
        room = client.room(slot, GRANULE * (SPEC.chunk_tokens // 16))
        room[:] = bytes(len(room))
        written.append(Written(slot.reservation, granule_checksums(room, GRANULE)))
    assert client.commit(written).committed == len(chunks)


def ask(client: StoreClient, tenant: str, prompt: Prompt, deadline_ms: int) -> tuple[float, int]:
    """Microseconds of one lookup, and its hit."""
    began = time.perf_counter()
    found = client.lookup(
        SPEC.id, prompt.root, prompt.tokens, prompt.keys, limit=prompt.limit, deadline_ms=deadline_ms, tenant=tenant
    )
    took = (time.perf_counter() - began) * 1e6
    if found.lease:
        client.release([found.lease])
    return took, found.hit


def longer(left: Sequence[float], right: Sequence[float]) -> float:
    """The chance that one of `left` is greater than one of `right`; ties count half."""
    ordered = sorted(right)
    wins = sum((bisect_left(ordered, value) + bisect_right(ordered, value)) / 2 for value in left)
    return wins / len(left) / len(right)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of them doesn't exceed."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def start(folder: Path) -> subprocess.Popen[bytes]:
    """A store with a file tier, ready."""
    socket = folder / "store.sock"
    command = ["store", "--socket", str(socket), "--memory", "256MiB", "--fs", str(folder / "files")]
    process = subprocess.Popen([sys.executable, "-m", "forebay", *command], stderr=subprocess.DEVNULL)
    for _ in range(500):
        try:
            with StoreClient(str(socket)) as client:
                if client.stats().values["host.bytes_budget"] >= 256 << 20:
                    return process
        except StoreUnavailable:
            pass
        time.sleep(0.05)
    process.kill()
    raise RuntimeError("the store did not start")


def measure(report: Report, client: StoreClient, prompts: int, chunks: int, deadline_ms: int) -> None:
    """Time foreign, unknown and own prompts, in random order."""
    chance = random.Random(deadline_ms)
    length = chunks * SPEC.chunk_tokens
    stored = [[chance.randrange(50_000) for _ in range(length)] for _ in range(prompts)]
    unknown = [[chance.randrange(50_000) for _ in range(length)] for _ in range(prompts)]
    for tokens in stored:
        put(client, "alice", prompt_of("alice", tokens))
    asked: list[tuple[str, str, list[int]]] = []
    for mine, never in zip(stored, unknown, strict=True):
        # One of each kind at a time: a machine that grows slower or faster favours none of them.
        three = [("foreign", "bob", mine), ("unknown", "bob", never), ("own", "alice", mine)]
        asked += chance.sample(three, 3)
    # Made in the order in which they are asked, so that where they lie in our own memory tells nothing either.
    questions = [(kind, tenant, prompt_of(tenant, tokens)) for kind, tenant, tokens in asked]
    while client.stats().values["tier.fs.stores_running"]:
        time.sleep(0.05)
    times: dict[str, list[float]] = {"foreign": [], "unknown": [], "own": []}
    for kind, tenant, prompt in questions:
        took, hit = ask(client, tenant, prompt, deadline_ms)
        assert hit == (length if kind == "own" else 0), (kind, hit)
        times[kind].append(took)
    where = "tiers asked" if deadline_ms else "memory only"
    for kind, values in times.items():
        for share in PERCENTILES:
            report.add(Measure(f"{kind}, {where}, p{share * 100:g}", percentile(values, share), "us"))
    telling = longer(times["foreign"], times["unknown"])
    ok = abs(telling - 0.5) <= TELLING
    report.add(Measure(f"foreign longer than unknown, {where}", telling, "chance", target="0.45 to 0.55", ok=ok))
    report.add(Measure(f"own longer than unknown, {where}", longer(times["own"], times["unknown"]), "chance"))


def main() -> int:
    """Run all."""
    options = parser(__doc__)
    options.add_argument("--prompts", type=int, default=1000, help="prompts of each kind (default: 1000)")
    options.add_argument("--chunks", type=int, default=16, help="chunks of a prompt (default: 16)")
    arguments = options.parse_args()
    report = Report("lookups of another tenant's prompts beside those of unknown ones")
    folder = Path(tempfile.mkdtemp(prefix="forebay-bench-"))
    process = start(folder)
    try:
        with StoreClient(str(folder / "store.sock")) as client:
            client.register(SPEC)
            measure(report, client, arguments.prompts, arguments.chunks, 0)
            measure(report, client, arguments.prompts, arguments.chunks, 1000)
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(folder)
    return report.print(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
