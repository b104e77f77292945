"""`kv_transfer_params`: how orchestrators tell two engines that the KV of a request is to move between them. Pure.

Two forms are in use. The older one is flat, from a sidecar that first sends the prompt to a prefill worker with
`max_tokens` 1, and hands what that worker answers to the decode worker:

    to the prefill worker    {"do_remote_decode": true, "do_remote_prefill": false, "remote_host": null, ...}
    its answer               {"do_remote_decode": false, "do_remote_prefill": true, "remote_host": "10.0.0.2", ...}

The newer one names, in one object each, the party at the other end:

    {"remote_decoder": {"kv_request_id": "r1"}}
    {"remote_prefiller": {"kv_request_id": "r1", "remote_host": "10.0.0.2", "remote_port": 7450}}
    {"remote_kv_source": {"kv_request_id": "r1", "remote_host": "10.0.0.3", "remote_port": 7450}}

of which only `remote_decoder` and `remote_kv_source` may stand together. Both are hints here: chunks are found by their
keys, and a store asks its peers for what it lacks. An address in a request comes from whoever could send one, so it is
never dialled; it can only name a peer that is configured (`peer_of`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.tiers.p2p.options import Address, PeerAddress

SOURCE_HEADER = "x-kv-cache-source-host-port"
"""HTTP header in which a scheduler names the host that has most of a prompt's KV."""
PREFILLER_HEADER = "x-prefiller-host-port"
"""HTTP header in which it tells a sidecar where to prefill."""
_TEXT_MAX = 256
_FLAT = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")


@dataclass(frozen=True, slots=True)
class Party:
    """Who is at the other end. `request` is the name of the transfer; `address` is None where it isn't told."""

    request: str = ""
    address: Address | None = None


@dataclass(frozen=True, slots=True)
class TransferParams:
    """What a request says of its KV. All None: nothing.

    `decoder`: somebody else will decode, so what is computed here will be fetched. `prefiller`: somebody else has
    computed the prompt. `source`: some other cache has much of it.
    """

    decoder: Party | None = None
    prefiller: Party | None = None
    source: Party | None = None

    @property
    def origin(self) -> Party | None:
        """Where this request's KV is to be had, if anywhere."""
        return self.prefiller or self.source


def read_params(value: object) -> TransferParams:
    """The object in a request, of either form; None and {} say nothing. Fields that aren't known are left alone.

    Raises ValueError, in words for whoever sent it.
    """
    if value is None:
        return TransferParams()
    if not isinstance(value, Mapping):
        raise ValueError("kv_transfer_params: takes an object")
    named = {name: value.get(name) for name in ("remote_decoder", "remote_prefiller", "remote_kv_source")}
    flags = [_flag(value, name) for name in ("do_remote_decode", "do_remote_prefill")]
    if any(party is not None for party in named.values()):
        if any(flags):
            raise ValueError("kv_transfer_params: takes do_remote_* or remote_decoder and the like, not both")
        return _by_party(named)
    return _flat(value, decode=flags[0], prefill=flags[1])


def _by_party(named: Mapping[str, object]) -> TransferParams:
    decoder, prefiller, source = (None if v is None else _party(name, v) for name, v in named.items())
    if prefiller is not None and (decoder is not None or source is not None):
        raise ValueError("kv_transfer_params: remote_prefiller stands alone; only remote_decoder and remote_kv_source "
                         "may be given together")  # fmt: skip
    for name, party in (("remote_prefiller", prefiller), ("remote_kv_source", source)):
        if party is not None and party.address is None:
            raise ValueError(f"kv_transfer_params: {name} takes remote_host and remote_port")
    return TransferParams(decoder, prefiller, source)


def _flat(value: Mapping[Any, object], *, decode: bool, prefill: bool) -> TransferParams:
    if decode and prefill:
        raise ValueError("kv_transfer_params: do_remote_decode and do_remote_prefill can't both be true")
    party = Party(_text("remote_engine_id", value.get("remote_engine_id")), _address("", value))
    if decode:
        return TransferParams(decoder=party)
    return TransferParams(prefiller=party) if prefill else TransferParams()


def _flag(value: Mapping[Any, object], name: str) -> bool:
    flag = value.get(name)
    if flag is not None and not isinstance(flag, bool):
        raise ValueError(f"kv_transfer_params: {name}: takes true or false")
    return bool(flag)


def _party(name: str, value: object) -> Party:
    if not isinstance(value, Mapping):
        raise ValueError(f"kv_transfer_params: {name}: takes an object with kv_request_id")
    return Party(_text(f"{name}.kv_request_id", value.get("kv_request_id")), _address(f"{name}.", value))


def _text(name: str, value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > _TEXT_MAX or not value.isprintable():
        raise ValueError(f"kv_transfer_params: {name}: takes a short text")
    return value


def _address(where: str, value: Mapping[Any, object]) -> Address | None:
    host, port = value.get("remote_host"), value.get("remote_port")
    if host is None and port is None:
        return None
    text = _text(f"{where}remote_host", host)
    if isinstance(port, str) and port.isdecimal():
        port = int(port)
    if not text or isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 1 << 16:
        raise ValueError(f"kv_transfer_params: {where}remote_host and {where}remote_port: take a host and its port")
    return Address(text.removeprefix("[").removesuffix("]"), port)


def read_header(value: str) -> Address:
    """HOST:PORT of one of the headers. Raises ValueError."""
    host, colon, port = value.strip().rpartition(":")
    if not colon or not host or len(value) > _TEXT_MAX or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{value[:_TEXT_MAX]!r}: takes HOST:PORT")
    return Address(host.removeprefix("[").removesuffix("]"), int(port))


def peer_of(address: Address | None, peers: Sequence[PeerAddress]) -> str | None:
    """The configured peer at this address; None if there is none."""
    return next((peer.name for peer in peers if peer.address == address), None)


# --- answers ---------------------------------------------------------------------------------------------


def prefill_request() -> dict[str, object]:
    """What goes with a prompt to a prefill worker, in the flat form."""
    return {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(_FLAT)}


def prefilled(params: TransferParams, here: Address, engine: str = "forebay") -> dict[str, object] | None:
    """What a prefill worker answers, for the decode worker: that the KV is to be had at `here`. None if nobody asked.

    In the form in which it was asked: with a name for the transfer it goes on under that name.
    """
    if params.decoder is None:
        return None
    if params.decoder.request:
        place = {"kv_request_id": params.decoder.request, "remote_host": here.host, "remote_port": here.port}
        return {"remote_prefiller": place}
    return {
        "do_remote_decode": False, "do_remote_prefill": True, "remote_engine_id": engine, "remote_block_ids": [],
        "remote_host": here.host, "remote_port": here.port,
    }  # fmt: skip
