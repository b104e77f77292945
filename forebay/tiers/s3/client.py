"""The boto3 client: built once, used by all threads."""

from __future__ import annotations

import logging
from typing import Any

from forebay.errors import ConfigError
from forebay.tiers.s3.options import S3Options

QUIET = ("boto3", "botocore", "urllib3", "s3transfer")


def make_client(name: str, options: S3Options, session: Any = None) -> Any:
    """A thread-safe client with as many connections as there are threads. Does no request. `session` is boto3's, by
    default a new one of the profile.

    Its own retries are off: ours have a budget. Checksums that the library would add or want are left out where the
    protocol allows it, since every chunk carries its own. Raises ConfigError if boto3 isn't installed or the AWS
    chain can't be set up as asked.
    """
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise ConfigError(f"tier {name!r}: kind s3 needs boto3: pip install 'forebay[s3]'") from error
    for library in QUIET:  # at DEBUG they log headers and signatures, whatever the root logger is set to
        logging.getLogger(library).setLevel(logging.WARNING)
    config = Config(
        max_pool_connections=options.read_threads + options.write_threads + options.lookup_threads + 2,
        tcp_keepalive=True,
        connect_timeout=options.connect_timeout_s,
        read_timeout=options.timeout_s,
        retries={"total_max_attempts": 1, "mode": "standard"},
        s3={"addressing_style": options.addressing},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        user_agent_extra="forebay",
    )
    try:
        session = session or boto3.session.Session(profile_name=options.profile)
        region = options.region or session.region_name or "us-east-1"
        return session.client(
            "s3", endpoint_url=options.endpoint_url, region_name=region, config=config,
            verify=options.ca_bundle or options.verify_tls,
        )  # fmt: skip
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(
            f"tier {name!r}: no S3 client can be made ({type(error).__name__}): check profile, region and endpoint_url"
        ) from None
