"""Compression and encryption at rest, on the KV of a real model: how much smaller, how fast.

    python -m benchmarks.tiers.codec [--chunks DIR] [--prompts 6]

The demo model computes the KV of this repository's own texts; the chunks are taken from the file tier (or from the
directory of one, if given). Each codec encodes and decodes all of them, in one thread, from and to warm memory; what
is decoded is compared. Beside zstd over byte planes stand zstd as it is (peer) and the entropy of the planes' bytes,
below which no coder of single bytes gets (limit).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import zstandard

from benchmarks.report import Measure, Report, parser
from benchmarks.ttft import demo_model
from forebay.kvstore.header import encode_header
from forebay.testing.cluster import Cluster
from forebay.tiers.codec.codec import Codec
from forebay.tiers.codec.keys import KEY_BYTES, Key, KeyRing
from forebay.tiers.fs.fsck import list_directory

PROMPT_CHARACTERS = 9000
GROUPS = {0: "full", 1: "window"}
CHUNKS_MAX = 12
ROUNDS = 3


@dataclass(frozen=True)
class Stored:
    """One chunk of the model."""

    block: bytes
    payload: bytes

    @property
    def length(self) -> int:
        return len(self.block) + len(self.payload)


@dataclass
class Figures:
    """What one codec made of some chunks: bytes before and after, seconds there and back (the best of all rounds)."""

    plain: int
    stored: int
    encode_s: float
    decode_s: float


def texts() -> list[str]:
    """Prose and code that everybody has who has this benchmark."""
    root = Path(__file__).parents[2]
    files = [*sorted((root / "docs").glob("*.md")), *sorted((root / "forebay" / "tiers").glob("*.py"))]
    whole = [file.read_text(encoding="utf-8")[:PROMPT_CHARACTERS] for file in files]
    return [text for text in whole if len(text) == PROMPT_CHARACTERS]


def fill(folder: Path, model: Path, prompts: Sequence[str]) -> Path:
    """Compute the prompts' KV into a file tier; its directory."""
    cluster = Cluster(folder, model, "bfloat16", chunk_tokens=256, memory="512MiB", device_memory="256MiB")
    try:
        cluster.start_store()
        cluster.start_pair("worker", "front")
        for prompt in prompts:
            body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
            httpx.post(f"{cluster.url('front')}/v1/completions", json=body, timeout=600).raise_for_status()
        cluster.settle("front")
    finally:
        cluster.stop()
    return folder / "files"


def chunks_of(directory: Path, group: int) -> list[Stored]:
    """Whole chunks of a group, evenly from all of them."""
    listed = [one for one in list_directory(directory) if one.header.group == group and one.header.token_count == 256]
    listed.sort(key=lambda one: one.header.key)
    return [
        Stored(encode_header(one.header), Path(one.path).read_bytes()[-one.header.payload_length :])
        for one in listed[:CHUNKS_MAX]
    ]


def figures(codec: Codec, chunks: Sequence[Stored]) -> Figures:
    """Encode and decode all chunks, several times. Raises AssertionError if anything comes back otherwise."""
    most = max(codec.stored_bytes_max(len(chunk.block), len(chunk.payload)) for chunk in chunks)
    out, back = memoryview(bytearray(most)), memoryview(bytearray(most))
    best = Figures(sum(chunk.length for chunk in chunks), 0, float("inf"), float("inf"))
    for _ in range(ROUNDS):
        encode_s = decode_s = 0.0
        best.stored = 0
        for chunk in chunks:
            payload = memoryview(chunk.payload)
            began = time.perf_counter()
            stored = codec.encode(chunk.block, payload, out)
            middle = time.perf_counter()
            front = codec.decode(stored, back)
            decode_s += time.perf_counter() - middle
            encode_s += middle - began
            best.stored += len(stored)
            assert front.block == chunk.block and back[: len(payload)] == payload, "another chunk came back"
        best.encode_s, best.decode_s = min(best.encode_s, encode_s), min(best.decode_s, decode_s)
    return best


def plain_zstd(chunks: Sequence[Stored]) -> float:
    """How much smaller zstd makes the payloads as they are."""
    compressor = zstandard.ZstdCompressor(level=1)
    return sum(len(c.payload) for c in chunks) / sum(len(compressor.compress(c.payload)) for c in chunks)


def entropy_bound(chunks: Sequence[Stored]) -> float:
    """How much smaller a perfect coder of single bytes could make the planes of two-byte values."""
    bits = 0.0
    for chunk in chunks:
        for plane in np.frombuffer(chunk.payload, np.uint8).reshape(-1, 2).T:
            share = np.bincount(plane, minlength=256) / len(plane)
            share = share[share > 0]
            bits -= float((share * np.log2(share)).sum()) * len(plane)
    return 8 * sum(len(chunk.payload) for chunk in chunks) / bits


def measure(report: Report, directory: Path) -> None:
    """All codecs on the chunks of a file tier's directory."""
    keys = KeyRing([Key(os.urandom(KEY_BYTES))])
    codecs = {"zstd": Codec(compress=True), "AES": Codec(keys=keys), "zstd + AES": Codec(compress=True, keys=keys)}
    for group, name in GROUPS.items():
        chunks = chunks_of(directory, group)
        assert chunks, f"no whole chunk of group {group} in {directory}"
        length = chunks[0].length
        for kind, codec in codecs.items():
            found = figures(codec, chunks)
            what = f"{kind}, {name} group, {length / 1e6:.2f} MB"
            if codec.active and kind != "AES":
                ratio, bound = found.plain / found.stored, entropy_bound(chunks)
                report.add(
                    Measure(
                        f"{what}: smaller by", ratio, "times", peer=plain_zstd(chunks), limit=bound, ratio=ratio / bound
                    )
                )  # fmt: skip
            report.add(Measure(f"{what}: encode", found.plain / found.encode_s / 1e9, "GB/s"))
            report.add(Measure(f"{what}: decode", found.plain / found.decode_s / 1e9, "GB/s"))


def main() -> int:
    """Run all."""
    options = parser(__doc__ or "")
    options.add_argument("--chunks", type=Path, help="a file tier's directory (default: the demo model fills one)")
    options.add_argument("--prompts", type=int, default=6)
    arguments = options.parse_args()
    report = Report("codec: compression and encryption of a real model's chunks, one thread")
    if arguments.chunks:
        measure(report, arguments.chunks)
    else:
        with tempfile.TemporaryDirectory(prefix="forebay-codec-") as folder:
            measure(report, fill(Path(folder), demo_model(), texts()[: arguments.prompts]))
    return report.print(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
