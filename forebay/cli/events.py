"""KV events: show them, compare them with what a store holds, or retell them for each worker.

tail   one line an event, as they come; --from-start begins with a snapshot
diff   follow a store's stream from a snapshot, list the store's chunks, and say where the two differ
relay  publish a store's chunks once for each of its workers, for routers that know only workers

Without --events, tail and diff ask the store at --socket where its streams are.

example:
  forebay events tail --socket /run/forebay/store.sock
  forebay events diff --socket /run/forebay/store.sock
  forebay events relay --events tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558 --publish tcp://127.0.0.1:6001 \\
      --publish-replay tcp://127.0.0.1:6002 --workers '{ w0 = { events = "tcp://127.0.0.1:5601" }, w1 = {} }'
"""

from __future__ import annotations

import argparse
import json
import re
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.cli.endpoints import WORKERS, OwnStream
from forebay.cli.places import SOCKET
from forebay.cli.tables import plain, table
from forebay.config import Setting, add_settings, boolean, duration, one_of, path, resolve, text
from forebay.errors import ConfigError
from forebay.events.difference import Difference, HeldChunk, compare
from forebay.events.endpoints import CONSUMERS, EndpointRule
from forebay.events.fanout import WorkerStreams
from forebay.events.holdings import HeldIn, Holdings
from forebay.events.relay import Relay
from forebay.events.schema import CPU, LOCAL, AllBlocksCleared, BlockHash, BlockStored, KVEvent, low64
from forebay.events.sockets import CurveClient
from forebay.events.subscriber import EventSubscriber, Received
from forebay.events.units import GroupKind
from forebay.kvstore.client import StoreClient
from forebay.kvstore.protocol import Stats

PAGE = 500
POLL_S = 0.2
IDLE_S = 0.02

SETTINGS = (
    Setting("action", one_of("tail", "diff", "relay"), None, "what to do", positional=True),
    SOCKET,
    Setting("events", text, None, "endpoint of the stream; none: what the store at --socket says"),
    Setting("replay", text, None, "endpoint of its replay"),
    Setting("namespace", text, "", "the stream of this namespace: the beginning of its id or label", shown="the first"),
    Setting("from_start", boolean, False, "tail: begin with what is held already", shown="no", switch=True),
    Setting("json", boolean, False, "one JSON object a line", shown="no", switch=True),
    Setting("settle", duration, 2.0, "diff: what differs for so long counts", shown="2s"),
    Setting("keys", path, None, "directory of CURVE keys, for a stream off loopback"),
    Setting("server", text, None, "whose stream that is: NAME of the NAME.pub there"),
    Setting("publish", text, None, "relay: endpoint of the first worker's stream; the i-th has the port + 2i"),
    Setting("publish_replay", text, None, "relay: endpoint of its replay"),
    Setting("label", text, "model", "relay: the model's name in topics"),
    Setting("consumer", one_of(*CONSUMERS), "dynamo", "relay: for whom"),
    WORKERS,
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_settings(parser, SETTINGS)


def run(flags: dict[str, Any]) -> int:
    """Do what was asked for."""
    values = resolve("events", SETTINGS, flags)
    match values["action"]:
        case "tail":
            return _tail(values)
        case "diff":
            return _diff(values)
        case "relay":
            return _relay(values)
    raise ConfigError("forebay events takes one of tail, diff and relay")


# --- where the stream is ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stream:
    """A stream of a store: its namespace's id as hex, and where it is."""

    namespace: str
    events: str
    replay: str | None


def _stream_of(stats: Stats, wanted: str) -> _Stream:
    """The stream of the namespace whose id or label begins so. Raises ConfigError if there is none."""
    for space in stats.namespaces:
        label = space["label"] or space["id"][:16]
        if not (space["id"].startswith(wanted) or label.startswith(wanted)):
            continue
        for name, told in stats.info.items():
            if re.fullmatch(rf"events kv@[^@]*@{re.escape(label.replace('@', '_'))}", name):
                events, _, replay = told.partition(", replay ")
                return _Stream(space["id"], events, None if replay == "off" else replay)
    raise ConfigError(
        f"the store has no event stream of a namespace {wanted!r}: start it with --events, or name another one"
        if wanted else "the store has no event stream: start it with --events and --replay, and use it once"
    )  # fmt: skip


def _subscriber(values: Mapping[str, Any], *, from_start: bool) -> EventSubscriber:
    events, replay = values["events"], values["replay"]
    if events is None:
        with StoreClient(str(values["socket"]), maps=False) as client:
            found = _stream_of(client.stats(), values["namespace"])
        events, replay = found.events, found.replay
    return EventSubscriber(events, replay=replay, from_start=from_start, curve=_curve(values))


def _curve(values: Mapping[str, Any]) -> CurveClient | None:
    if values["keys"] is None:
        return None
    from forebay.tiers.p2p.keys import own_pair, peer_key

    if values["server"] is None:
        raise ConfigError("--keys needs --server NAME: the stream's public key is NAME.pub there")
    directory = Path(values["keys"])
    return CurveClient(own_pair(directory).secret, peer_key(directory, values["server"]))


# --- tail ------------------------------------------------------------------------------------------------


def _tail(values: Mapping[str, Any]) -> int:
    with _subscriber(values, from_start=values["from_start"]) as subscriber:
        print(f"listening to {subscriber.endpoint}; Ctrl-C ends it", file=sys.stderr, flush=True)
        while True:
            received = subscriber.receive(POLL_S)
            if received is None:
                continue
            for line in _json_lines(received) if values["json"] else _lines(received):
                print(line, flush=True)


def _lines(received: Received) -> Iterator[str]:
    """A batch for people."""
    head = f"{time.strftime('%H:%M:%S', time.localtime(received.batch.ts))} {received.seq}"
    if received.restart is not None:
        yield f"{head} --- all that was known is void ({received.restart}) ---"
    if received.missed:
        yield f"{head} --- {received.missed} batches are lost ---"
    if received.batch.undecodable:
        yield f"{head} --- {received.batch.undecodable} events can't be read ---"
    for at, event in enumerate(received.batch.events):
        unknown = "  unknown medium, not usable" if at in received.batch.unknown else ""
        yield plain(f"{head} {_line(event)}{unknown}")


def _line(event: KVEvent) -> str:
    if isinstance(event, AllBlocksCleared):
        return "cleared"
    place = "/".join(part for part in (event.medium, event.locality) if part) or "?"
    blocks = f"{len(event.block_hashes)} blocks {_short(event.block_hashes[0] if event.block_hashes else None)}"
    why = f"  {event.reason}" if event.reason else ""
    if not isinstance(event, BlockStored):
        return f"removed  {place:<14} {blocks}{why}"
    tokens = f"{len(event.token_ids)} tokens" if event.token_ids else "no tokens"
    return f"stored   {place:<14} {blocks} after {_short(event.parent_block_hash)}, {tokens}{why}"


def _short(block: BlockHash | None) -> str:
    if block is None:
        return "the root"
    return (block[-8:].hex() if isinstance(block, bytes) else f"{block:016x}")[:8]


def _json_lines(received: Received) -> Iterator[str]:
    for event in received.batch.events or (None,):
        told: dict[str, Any] = {"seq": received.seq, "ts": received.batch.ts, "topic": received.topic}
        told |= {"restart": received.restart, "missed": received.missed, "replayed": received.replayed}
        if event is not None:
            told["type"] = type(event).__name__
            told |= {name: _plain(getattr(event, name)) for name in event.__struct_fields__}
        yield json.dumps(told)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


# --- diff ------------------------------------------------------------------------------------------------


def _diff(values: Mapping[str, Any]) -> int:
    """0: belief and store agree about memory; 1: they don't."""
    with StoreClient(str(values["socket"]), maps=False) as client:
        stream = _stream_of(client.stats(), values["namespace"])
        if stream.replay is None:
            raise ConfigError("the store's stream has no replay, so nobody can join late: start it with --replay")
        followed = dict(values)
        followed |= {"events": values["events"] or stream.events, "replay": values["replay"] or stream.replay}
        believed = Holdings(max_blocks=1 << 24)
        with _subscriber(followed, from_start=True) as subscriber:
            first = _compared(client, subscriber, believed, stream.namespace)
            time.sleep(values["settle"])
            found = first.still(_compared(client, subscriber, believed, stream.namespace))
    print(json.dumps(_difference_json(found)) if values["json"] else _difference_text(found, believed))
    return 0 if found.is_none else 1


def _compared(client: StoreClient, subscriber: EventSubscriber, believed: Holdings, namespace: str) -> Difference:
    while (received := subscriber.receive(POLL_S)) is not None:
        believed.apply(received)
    chunks: list[HeldChunk] = []
    cursor = 0
    while True:
        page = client.list_chunks(cursor=cursor, limit=PAGE, namespace=bytes.fromhex(namespace))
        chunks += [HeldChunk(row.group, low64(row.key), row.tokens) for row in page.rows if row.state == "committed"]
        cursor = page.cursor
        if not cursor:
            break
    names = next(space["groups"] for space in client.stats().namespaces if space["id"] == namespace)
    return compare(believed, HeldIn(CPU, LOCAL), chunks, _kinds(names))


def _kinds(groups: str) -> list[GroupKind]:
    """Of the cache groups, from how the store lists them: windows and states are named so."""
    names = [part.strip() for part in re.split(r"\),?", groups) if part.strip()]
    return ["window" if re.match(r"window|sliding|state|recurrent", name) else "full" for name in names]


def _difference_text(found: Difference, believed: Holdings) -> str:
    counted = (("agreed", found.agreed), ("held, not believed", len(found.missing)))
    rows = [[name, str(count)] for name, count in counted]
    rows += [["believed, not held", str(len(found.stale))]]
    rows += [["chunks nothing is known of", str(len(found.unseen_chunks))]]
    rows += [["belief", believed.trust], ["parked blocks", str(believed.parked)]]
    verdict = "the stream tells what memory holds" if found.is_none else "the stream and the store differ"
    return table(("memory", "blocks"), rows, right=(1,)) + f"\n\n{verdict}"


def _difference_json(found: Difference) -> dict[str, Any]:
    return {
        "agreed": found.agreed, "missing": [_plain(block) for block in found.missing],
        "stale": [_plain(block) for block in found.stale],
        "unseen_chunks": [_plain(block) for block in found.unseen_chunks],
    }  # fmt: skip


# --- relay -----------------------------------------------------------------------------------------------


def _relay(values: Mapping[str, Any]) -> int:
    if values["events"] is None or values["publish"] is None or not values["workers"]:
        raise ConfigError("a relay needs --events of the store, --publish, and --workers such as '{ w0 = {} }'")
    rule = EndpointRule(values["publish"], values["publish_replay"], values["consumer"])
    options = rule.options(secrets.token_hex(16), time.time())
    store = EventSubscriber(
        values["events"], replay=values["replay"], from_start=True, replay_timeout=1.0, curve=_curve(values)
    )
    workers = {name: _own(own) for name, own in values["workers"].items()}
    relay = Relay(
        store, workers,
        lambda shared: WorkerStreams(
            rule.endpoint, model=values["label"], shared=shared, replay=rule.replay, options=options, topic=rule.topic
        ),
        anchored=rule.anchored,
    )  # fmt: skip
    try:
        for worker, stream in relay.streams.workers.items():
            print(f"{worker}: {stream.endpoint}, replay {stream.replay_endpoint or 'off'}", file=sys.stderr, flush=True)
        while True:
            if not relay.turn(IDLE_S):
                time.sleep(IDLE_S / 10)
    finally:
        relay.close()


def _own(stream: OwnStream) -> EventSubscriber | None:
    if stream.events is None:
        return None
    return EventSubscriber(stream.events, replay=stream.replay, from_start=True, replay_timeout=1.0)
