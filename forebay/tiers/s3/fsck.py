"""Checking a prefix of a bucket from its objects alone, whether a store uses it or not.

Every object is read once and verified as a load would: header, key, checksums, through the codec where chunks are
compressed or encrypted. What is put aside with `repair` moves to PREFIX/quarantine/, a shared object as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from forebay.errors import ConfigError, CorruptChunk, TierUnavailable
from forebay.kvstore.header import ChunkHeader
from forebay.kvstore.identity import chunk_key
from forebay.tiers.base import ChunkId
from forebay.tiers.chunks import verify_payload
from forebay.tiers.codec.codec import Codec, check_sealed, open_codec
from forebay.tiers.codec.errors import CannotDecode
from forebay.tiers.s3.breaker import Breaker
from forebay.tiers.s3.bucket import Bucket, Listed
from forebay.tiers.s3.budget import RetryBudget
from forebay.tiers.s3.client import make_client
from forebay.tiers.s3.failures import Kind, RequestFailed
from forebay.tiers.s3.names import Names
from forebay.tiers.s3.options import S3Options
from forebay.tiers.s3.requests import Requests
from forebay.tiers.s3.segment import parse

PROBLEMS_MAX = 10_000
OBJECT_BYTES_MAX = 1 << 30
"""No chunk or shared object is larger; one that is isn't read."""

Progress = Callable[[int, int], None]
"""Called now and then with the objects and bytes that have been checked."""


@dataclass(frozen=True, slots=True)
class Problem:
    """An object of which something would never be served. `repaired`: it has been put aside."""

    name: str
    why: str
    repaired: bool = False


@dataclass
class BucketReport:
    """What a check found; `problems` lists at most the first `PROBLEMS_MAX` of `problem_count`. `sealed` counts, by the
    id of their key, chunks whose key isn't here: they are what was stored."""

    objects: int = 0
    chunks: int = 0
    bytes: int = 0
    problem_count: int = 0
    problems: list[Problem] = field(default_factory=list)
    sealed: dict[str, int] = field(default_factory=dict)
    quarantined: int = 0


@dataclass(frozen=True, slots=True)
class _Found:
    """One object's verdict: `why` is empty if all is well."""

    name: str
    body: bytes = b""
    chunks: int = 0
    sealed: tuple[str, ...] = ()
    why: str = ""
    unread: bool = False
    vanished: bool = False


def open_bucket(name: str, options: S3Options) -> Bucket:
    """The bucket of a tier's options. Does no request. Raises ConfigError."""
    requests = Requests(
        options.where, Breaker(options.failures_max, options.open_s, time.monotonic), RetryBudget(options.retry_budget),
        options.attempts,
    )  # fmt: skip
    return Bucket(make_client(name, options), options.bucket, requests, options.timeout_s)


def check_prefix(
    name: str, options: S3Options, repair: bool, progress: Progress | None = None, bucket: Bucket | None = None
) -> BucketReport:
    """Read and verify every object below the prefix. Raises TierUnavailable if the service can't be reached,
    ConfigError if it refuses."""
    bucket = bucket or open_bucket(name, options)
    codec = open_codec(name, options.compress, options.encrypt_key_file)
    names, report = Names(options.prefix), BucketReport()
    try:
        for found in _verdicts(bucket, names, codec, options.read_threads):
            _note(bucket, names, found, report, repair)
            if progress is not None:
                progress(report.objects, report.bytes)
        report.quarantined = sum(len(page) for page in bucket.listing(names.quarantine))
    except RequestFailed as failure:
        kind = TierUnavailable if failure.kind.passing or failure.kind is Kind.OPEN else ConfigError
        raise kind(f"checking {options.where}: {failure}") from None
    return report


def _verdicts(bucket: Bucket, names: Names, codec: Codec, threads: int) -> Iterator[_Found]:
    """Of every object, a listing's page at a time, so that no more than a page of verdicts waits."""
    with ThreadPoolExecutor(threads) as pool:
        for prefix, judge in ((names.chunks, _judge_chunk), (names.segments, _judge_segment)):
            for page in bucket.listing(prefix):
                for at in range(0, len(page), threads):
                    some = page[at : at + threads]
                    yield from pool.map(lambda listed: _judge(bucket, names, codec, listed, judge), some)  # noqa: B023


Judge = Callable[[Names, Codec, str, bytes], tuple[int, tuple[str, ...]]]


def _judge(bucket: Bucket, names: Names, codec: Codec, listed: Listed, judge: Judge) -> _Found:
    if listed.size > OBJECT_BYTES_MAX:
        return _Found(listed.name, why=f"{listed.size} bytes, more than any chunk has", unread=True)
    body = b""
    try:
        front = bucket.front(listed.name, max(1, listed.size))
        body = front.data
        if front.size != len(body):
            raise CorruptChunk(f"{front.size} bytes, the listing says {listed.size}")
        chunks, sealed = judge(names, codec, listed.name, body)
    except RequestFailed as failure:
        if failure.kind is not Kind.MISSING:
            raise
        return _Found(listed.name, vanished=True)  # a running store has removed it
    except CorruptChunk as error:
        return _Found(listed.name, body, why=str(error))
    return _Found(listed.name, body, chunks, sealed)


def _judge_chunk(names: Names, codec: Codec, name: str, body: bytes) -> tuple[int, tuple[str, ...]]:
    chunk = names.parse_chunk(name)
    if chunk is None:
        raise CorruptChunk("the name is no chunk's")
    sealed = _check(codec, memoryview(body), chunk)
    return 1, (sealed,) if sealed else ()


def _judge_segment(names: Names, codec: Codec, name: str, body: bytes) -> tuple[int, tuple[str, ...]]:
    if names.parse_segment(name) is None:
        raise CorruptChunk("the name is no shared object's")
    entries, sealed = parse(body), []
    for entry in entries:
        part = memoryview(body)[entry.offset : entry.offset + entry.length]
        try:
            if len(part) != entry.length:
                raise CorruptChunk("it is cut off")
            sealed.append(_check(codec, part, entry.chunk))
        except CorruptChunk as error:
            raise CorruptChunk(f"chunk {entry.key.hex()[:16]} of group {entry.group}: {error}") from error
    return len(entries), tuple(filter(None, sealed))


def _check(codec: Codec, stored: memoryview, chunk: ChunkId) -> str:
    """Raises CorruptChunk unless `stored` is all of `chunk`; the id of its key, if that isn't here to look inside."""
    try:
        length = codec.front(stored).header.payload_length
        payload = memoryview(bytearray(min(length, OBJECT_BYTES_MAX)))
        header = codec.decode(stored, payload).header
    except CannotDecode:
        envelope = check_sealed(stored)
        if envelope.chunk != chunk:
            raise CorruptChunk("the envelope is another chunk's than the name says") from None
        return envelope.key_id.hex()
    _check_header(header, chunk)
    verify_payload(header, payload)
    return ""


def _check_header(header: ChunkHeader, chunk: ChunkId) -> None:
    if (header.group, header.key) != (chunk.group, chunk.key):
        raise CorruptChunk("it holds another chunk than the name says")
    if chunk_key(header.parent, header.tokens, header.extra) != header.key:
        raise CorruptChunk("the key doesn't follow from the parent and the tokens")


def _note(bucket: Bucket, names: Names, found: _Found, report: BucketReport, repair: bool) -> None:
    if found.vanished:
        return
    report.objects += 1
    report.bytes += len(found.body)
    report.chunks += found.chunks
    for key_id in found.sealed:
        report.sealed[key_id] = report.sealed.get(key_id, 0) + 1
    if not found.why:
        return
    repaired = repair and _put_aside(bucket, names, found)
    report.problem_count += 1
    if len(report.problems) < PROBLEMS_MAX:
        report.problems.append(Problem(found.name, found.why, repaired))


def _put_aside(bucket: Bucket, names: Names, found: _Found) -> bool:
    """Copied before it goes; what is too large to be read stays where it is."""
    if found.unread:
        return False
    bucket.put(names.quarantine + found.name.removeprefix(f"{names.prefix}/").replace("/", "-"), found.body)
    return not bucket.delete([found.name])
