"""What learning a tenant's miss-ratio curve costs: CPU a lookup, memory a tenant.

    python -m benchmarks.curves

Lookups are of conversations that grow, with reuse at all distances, so that every stack is full and every kind of
work is in it. A lookup's answer doesn't wait for this: it is done once the answer has been sent.
"""

from __future__ import annotations

import hashlib
import random
import time
import tracemalloc

from benchmarks.report import Measure, Report, median, parser
from forebay.kvstore.curves import KEY_BYTES, RUNGS, STACK_KEYS, TENANTS_MAX, Curve

CHUNK_BYTES = 1 << 20
LENGTHS = {"4 Ki tokens": 16, "64 Ki tokens": 256, "1 Mi tokens": 4096}
USERS = 400
ROUNDS = 200


def conversation(user: int, chunks: int) -> bytes:
    """The keys of a prompt."""
    return b"".join(hashlib.sha256(b"%d %d" % (user, number)).digest() for number in range(chunks))


def filled() -> Curve:
    """A curve that has seen much."""
    curve = Curve()
    for number in range(2_000):
        curve.observe(conversation(10_000 + number, 256), CHUNK_BYTES)
    return curve


def main() -> int:
    """Run all."""
    arguments = parser(__doc__).parse_args()
    report = Report("an online miss-ratio curve")
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    curve = filled()
    memory = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    chance = random.Random(1)
    for name, chunks in LENGTHS.items():
        prompts = [conversation(user, chunks) for user in range(max(2, USERS * 16 // chunks))]
        times = []
        for _ in range(ROUNDS):
            prompt = chance.choice(prompts)
            began = time.process_time()
            curve.observe(prompt, CHUNK_BYTES)
            times.append((time.process_time() - began) * 1e6)
        report.add(Measure(f"CPU a lookup, {name} ({len(prompts[0]) // KEY_BYTES} chunks)", median(times), "us"))
        report.add(Measure(f"CPU a chunk, {name}", median(times) / chunks, "us"))
    report.add(Measure(f"memory a tenant, {RUNGS} x {STACK_KEYS} keys", memory / 1024, "KiB"))
    report.add(
        Measure(f"memory at most, {TENANTS_MAX} tenants and the others", memory * (TENANTS_MAX + 1) / 2**20, "MiB")
    )
    return report.print(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
