"""Before a tier starts: is the bucket there, may we use it, and what can its endpoint do?"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from forebay.errors import ConfigError, TierUnavailable
from forebay.tiers.s3.bucket import Bucket
from forebay.tiers.s3.failures import Kind, RequestFailed
from forebay.tiers.s3.names import Names

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
