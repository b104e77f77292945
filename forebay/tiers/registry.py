"""From a tier's kind to its object: ours by short name, others as `module:Class`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from forebay.errors import ConfigError
from forebay.tiers.base import SecondaryTier

KINDS = {
    "memory": "forebay.tiers.memory:MemoryTier",
    "fs": "forebay.tiers.fs.tier:FsTier",
    "s3": "forebay.tiers.s3.tier:S3Tier",
    "p2p": "forebay.tiers.p2p.tier:P2pTier",
    "mooncake": "forebay.tiers.mooncake.tier:MooncakeTier",
}

Options = TypeVar("Options")


def create_tier(kind: str, name: str, options: Mapping[str, object]) -> SecondaryTier:
    """The tier `kind`, constructed as `Class(name, options)`.

    May block (a tier opens its devices here). Raises ConfigError for an unknown kind or bad options, and
    whatever ForebayError the tier has to say about its device.
    """
    target = KINDS.get(kind, kind)
    module_name, _, class_name = target.partition(":")
    if not module_name or not class_name:
        known = ", ".join(KINDS)
        raise ConfigError(f"tier {name!r}: unknown kind {kind!r}; take {known}, or name a class as module:Class")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"tier {name!r}: can't load {target}: {error}; is its package installed?") from error
    if not (isinstance(found, type) and issubclass(found, SecondaryTier)):
        raise ConfigError(f"tier {name!r}: {target} is no SecondaryTier")
    return found(name, options)  # type: ignore[call-arg]  # the constructor is a convention, not an interface


def convert_options(name: str, options: Mapping[str, object], kind: type[Options]) -> Options:
    """`options` as the tier's typed struct. Raises ConfigError that names the option."""
    takes = [option.encode_name for option in msgspec.structs.fields(kind)]  # type: ignore[arg-type]
    for option in options:
        if option not in takes:
            raise ConfigError(f"tier {name!r} has no option {option!r}; it takes {', '.join(takes)}")
    try:
        return msgspec.convert(dict(options), kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"tier {name!r}: {error}") from error
