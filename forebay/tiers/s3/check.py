"""Before a tier starts: is the bucket there, may we use it, and what can its endpoint do?"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass

from forebay.errors import ConfigError, TierUnavailable
from forebay.tiers.s3.bucket import Bucket
from forebay.tiers.s3.failures import Kind, RequestFailed
from forebay.tiers.s3.names import Names
from forebay.tiers.s3.objects import NixlObjects
from forebay.tiers.s3.options import S3Options

log = logging.getLogger("forebay.tier.s3")

_WORDS = b"forebay looks what this endpoint can do"


@dataclass
class _Step:
    """What is being tried, for messages."""

    text: str = "reading"


def check_bucket(name: str, bucket: Bucket, names: Names, where: str) -> str:
    """Write, read and remove a small object; notes in `bucket` whether the endpoint knows If-None-Match. Returns the
    name of an object that isn't there. Blocks.

    Raises TierUnavailable if the service can't be reached now, ConfigError if it won't do what a tier needs.
    """
    mine = names.probe(secrets.token_hex(16))
    step = _Step()
    try:
        _try(bucket, mine, step)
    except RequestFailed as failure:
        told = f"tier {name!r}: {step.text} {where}: {failure}"
        if failure.kind is Kind.REFUSED:
            raise ConfigError(
                f"{told}; check the credentials of the AWS chain (environment, profile, role), the region, and that "
                "they may get, put, delete and list there"
            ) from None
        if failure.kind is Kind.NO_BUCKET:
            raise ConfigError(f"{told}; make the bucket first, or name another one") from None
        if failure.kind.passing or failure.kind is Kind.OPEN:
            raise TierUnavailable(f"{told}; the store goes on without this tier and tries again") from None
        raise ConfigError(f"{told}; check bucket, addressing and endpoint_url") from None
    return names.probe("never-written")


def _try(bucket: Bucket, mine: str, step: _Step) -> None:
    try:
        bucket.front(mine, 1)
    except RequestFailed as failure:  # without the right to list, a missing object looks like a forbidden one
        if failure.kind is not Kind.MISSING:
            raise
    step.text = "listing"
    next(bucket.listing(mine))
    step.text = "writing"
    bucket.put(mine, _WORDS)
    try:
        step.text = "reading"
        if bucket.front(mine, 8).data != _WORDS[:8]:
            raise RequestFailed(Kind.OTHER, "what was written isn't what is read")
        step.text = "writing"
        bucket.conditional = _knows_conditions(bucket, mine)
    finally:
        step.text = "deleting"
        left = bucket.delete([mine])
    if left:
        raise RequestFailed(Kind.REFUSED, "a small object that was written can't be deleted")


def _knows_conditions(bucket: Bucket, mine: str) -> bool:
    """Is a put refused if the object is there already? An endpoint that writes it again is one that doesn't know."""
    bucket.conditional = True
    try:
        bucket.put(mine, _WORDS, fresh=True)
    except RequestFailed as failure:
        if failure.kind.passing or failure.kind is Kind.REFUSED:
            raise
        return failure.kind is Kind.EXISTS
    return False


def open_engine(name: str, options: S3Options, bucket: Bucket, names: Names) -> NixlObjects | None:
    """NIXL's engine for `bucket`, if it can be used here: None, and the log says why, if not. Blocks.

    It knows no conditional puts, so there are none from then on. Raises ConfigError if it isn't installed.
    """
    mine, words = names.probe(secrets.token_hex(16)), _WORDS * 512
    try:
        engine = NixlObjects(options)
        until = bucket.requests.clock() + 2 * options.timeout_s
        stored = engine.put(mine, words, until)
        came = engine.get(mine, len(_WORDS), len(_WORDS), until) if stored else None
    except ConfigError:
        raise
    except Exception as error:  # the library's, one for each way to fail
        log.warning("tier %r: NIXL has no OBJ engine here (%s): everything goes by boto3", name, type(error).__name__)
        return None
    finally:
        bucket.delete([mine])
    if came is None or bytes(came) != _WORDS:
        log.warning("tier %r: NIXL's OBJ engine doesn't bring what it has taken: everything goes by boto3", name)
        return None
    bucket.engine, bucket.conditional = engine, False
    return engine
