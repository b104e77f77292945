"""`kv_transfer_params` as orchestrators send them, and what is answered."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.tiers.p2p.options import Address, PeerAddress
from forebay.tiers.p2p.transfer_params import (
    Party,
    TransferParams,
    peer_of,
    prefill_request,
    prefilled,
    read_header,
    read_params,
)

HERE = Address("10.0.0.2", 7450)
PLACE = {"kv_request_id": "r1", "remote_host": "10.0.0.2", "remote_port": 7450}


@pytest.mark.parametrize("nothing", [None, {}, {"do_remote_decode": False, "do_remote_prefill": None}, {"other": 1}])
def test_nothing_is_nothing(nothing: object) -> None:
    assert read_params(nothing) == TransferParams()
    assert prefilled(read_params(nothing), HERE) is None


def test_a_prompt_goes_to_a_prefill_worker_and_its_answer_to_a_decode_worker() -> None:
    """The sidecar's round: both sides see JSON."""
    asked = read_params(json.loads(json.dumps(prefill_request())))
    assert asked == TransferParams(decoder=Party()) and asked.origin is None
    answer = prefilled(asked, HERE)
    forwarded = read_params(json.loads(json.dumps(answer)))
    assert forwarded.origin == forwarded.prefiller == Party("forebay", HERE)
    assert forwarded.decoder is None


def test_a_transfer_that_has_a_name_keeps_it() -> None:
    asked = read_params({"remote_decoder": {"kv_request_id": "r1"}})
    answer = prefilled(asked, HERE)
    assert answer == {"remote_prefiller": PLACE}
    assert read_params(answer).origin == Party("r1", HERE)


def test_a_prefill_worker_may_be_told_of_a_source_for_itself() -> None:
    both = read_params({"remote_decoder": {"kv_request_id": "r1"}, "remote_kv_source": PLACE})
    assert both == TransferParams(decoder=Party("r1"), source=Party("r1", HERE))
    assert both.origin == Party("r1", HERE)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([], "takes an object"),
        ({"remote_decoder": {}, "remote_prefiller": PLACE}, "remote_prefiller stands alone"),
        ({"remote_kv_source": PLACE, "remote_prefiller": PLACE}, "remote_prefiller stands alone"),
        ({"do_remote_decode": True, "do_remote_prefill": True}, "can't both be true"),
        ({"do_remote_decode": True, "remote_decoder": {}}, "not both"),
        ({"do_remote_decode": 1}, "true or false"),
        ({"remote_decoder": "r1"}, "takes an object with kv_request_id"),
        ({"remote_decoder": {"kv_request_id": 5}}, "short text"),
        ({"remote_decoder": {"kv_request_id": "x" * 300}}, "short text"),
        ({"remote_prefiller": {"kv_request_id": "r1"}}, "takes remote_host and remote_port"),
        ({"remote_kv_source": PLACE | {"remote_port": 0}}, "a host and its port"),
        ({"remote_kv_source": PLACE | {"remote_port": True}}, "a host and its port"),
        ({"remote_kv_source": PLACE | {"remote_host": None}}, "a host and its port"),
        ({"do_remote_prefill": True, "remote_host": "a\nb", "remote_port": 1}, "short text"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(wrong: object, words: str) -> None:
    with pytest.raises(ValueError, match="kv_transfer_params") as refused:
        read_params(wrong)
    assert words in str(refused.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["remote_decoder", "remote_kv_source", "remote_prefiller", "kv_request_id", "remote_host",
                         "remote_port", "do_remote_decode", "do_remote_prefill"]), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip


@given(JSON)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_whatever_comes_is_read_or_refused(value: object) -> None:
    try:
        params = read_params(value)
    except ValueError:
        return
    assert params.prefiller is None or (params.decoder is None and params.source is None)


def test_headers_name_a_host_and_a_port() -> None:
    assert read_header(" 10.0.0.2:7450 ") == HERE
    assert read_header("[fd00::1]:7450") == Address("fd00::1", 7450)
    for wrong in ("", "10.0.0.2", ":7450", "a:b", "a:0", "a:65536", "x" * 400 + ":1"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            read_header(wrong)


def test_an_address_can_only_name_a_peer_that_is_configured() -> None:
    peers = [PeerAddress("a", Address("10.0.0.1", 7450)), PeerAddress("b", HERE)]
    assert peer_of(read_params({"remote_kv_source": PLACE}).origin.address, peers) == "b"  # type: ignore[union-attr]
    assert peer_of(Address("169.254.169.254", 80), peers) is None
    assert peer_of(None, peers) is None
