"""Where `forebay serve` says that peers get this host's KV."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.cli.serve import _kv_address
from forebay.cli.tiers import host_port, rules_of
from forebay.errors import ConfigError

P2P = {"kind": "p2p"}


@pytest.mark.parametrize(
    ("given", "tiers", "told"),
    [
        (None, {}, None), (None, {"peers": P2P}, None), (None, {"disk": {"kind": "fs", "listen": "a:1"}}, None),
        (None, {"peers": P2P | {"listen": "10.0.0.2:7450"}}, "10.0.0.2:7450"),
        (None, {"peers": P2P | {"listen": "[fd00::2]:7450"}}, "[fd00::2]:7450"),
        (None, {"peers": P2P | {"listen": "*:7450"}}, None), (None, {"peers": P2P | {"listen": "[::]:7450"}}, None),
        ("kv.example:7450", {"peers": P2P | {"listen": "*:7450"}}, "kv.example:7450"),
    ],
)  # fmt: skip
def test_it_is_what_was_said_or_where_the_peer_tier_listens(
    given: str | None, tiers: dict[str, Any], told: str | None
) -> None:
    address = None if given is None else host_port(given)
    assert _kv_address({"kv_address": address, "tiers": rules_of(tiers)}) == told


def test_a_listen_that_is_no_address_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"tier 'peers': listen .*HOST:PORT"):
        _kv_address({"kv_address": None, "tiers": rules_of({"peers": P2P | {"listen": "here"}})})
