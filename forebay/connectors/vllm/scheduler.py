"""The half that lives beside vLLM's scheduler: looks up, pins, orders."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.kv_cache_interface import KVCacheConfig

from forebay.connectors.adapters import Adapters
from forebay.connectors.guard import guarded, guarded_errors, nothing
from forebay.connectors.keys import Input, RequestKeys, extra_of, is_digest, salt_of
from forebay.connectors.link import GRACE_S, StoreLink
from forebay.connectors.orders import Orders, Tables
from forebay.connectors.questions import Question
from forebay.connectors.relay import Relay, stream_of
from forebay.connectors.settings import Settings
from forebay.connectors.tracking import Tracked, Tracker
from forebay.connectors.vllm.events import as_vllm
from forebay.connectors.vllm.metrics import COUNTS, GAUGES, Differences, ForebayStats
from forebay.connectors.vllm.model import grouping_of, namespace_of
from forebay.errors import ForebayError
from forebay.kvstore.identity import Namespace, encode_namespace
from forebay.kvstore.protocol import Stats

log = logging.getLogger(__name__)

ADAPTERS_WAITING_MAX = 1024
ADAPTER_S = 10.0
"""How long a request may wait until its adapter's files have been read; after that it is served without the store."""

ANSWER_S = 3.0
"""How much longer than it should take a lookup is waited for, whatever has become of it."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A request's adapter is being read, until `until` at the latest."""

    keys: Future[RequestKeys]
    until: float


@dataclass(frozen=True, slots=True)
class Connection:
    """What the tracker knows of the link."""

    link: StoreLink
    deadline_ms: int

    def boot(self) -> bytes:
        """See `tracking.Store`."""
        return self.link.boot()

    def ask(self, question: Question) -> None:
        """See `tracking.Store`."""
        self.link.ask(question, self.deadline_ms)

    def release(self, boot: bytes, lease: int) -> None:
        """See `tracking.Store`."""
        self.link.release(boot, lease)


class SchedulerSide:
    """Its methods are vLLM's, as `ForebayConnector` passes them on. Until the weights are known by their contents,
    requests are served without the store."""

    def __init__(self, config: VllmConfig, caches: KVCacheConfig, settings: Settings, group: bytes) -> None:
        assert config.kv_transfer_config is not None
        if config.kv_transfer_config.kv_load_failure_policy != "recompute":
            log.warning('requests whose load fails will fail: set "kv_load_failure_policy" to "recompute"')
        self._settings = settings
        self._loads = config.kv_transfer_config.is_kv_consumer
        self._stores = config.kv_transfer_config.is_kv_producer
        self._grouping = grouping_of(config, caches)
        self._relay = Relay() if settings.events else None
        self._link = StoreLink(
            settings.store, name="forebay-lookups", group=group, label=settings.label, hung_s=settings.hung_ms / 1000,
            introduced=self._introduced if settings.events else None,
        )  # fmt: skip
        self._tracker: Tracker | None = None
        self._lock = threading.Lock()
        """Held while the epoch and what belongs to it change."""
        self._epoch = 0
        self._encoded = b""
        self._adapters = Adapters()
        self._reader = ThreadPoolExecutor(1, "forebay-adapters")
        self._waiting: dict[str, Reading] = {}
        self._patience_s = settings.patience_ms / 1000
        self._differences = Differences()
        self._link.start()
        threading.Thread(target=self._identify, args=(config,), name="forebay-weights", daemon=True).start()

    def _identify(self, config: VllmConfig) -> None:
        settings = self._settings
        if _lacks_prefixes(config):
            log.error("this model is served without the store: vLLM has no prefix cache for it on this platform")
            return
        try:
            namespace = namespace_of(config, self._grouping, settings.chunk_tokens, settings.cache_dir)
        except (ForebayError, OSError) as error:
            log.error("this model is served without the store: %s", error)
            return
        except Exception:
            log.exception("this model is served without the store, for a reason that should not be")
            return
        with self._lock:
            namespace = msgspec.structs.replace(namespace, epoch=self._epoch)
            self._serve(namespace)
        log.info("chunks of this model are shared in namespace %s", namespace.id.hex()[:16])

    def _serve(self, namespace: Namespace) -> None:
        settings = self._settings
        self._encoded = encode_namespace(namespace)
        self._link.use(namespace)
        self._tracker = Tracker(
            namespace=namespace,
            groups=self._grouping.engine,
            store=Connection(self._link, settings.lookup_deadline_ms),
            clock=time.monotonic,
            requests_max=settings.requests_max,
            tenant=settings.tenant,
            load_min=settings.load_tokens_min,
            ask_s=settings.lookup_deadline_ms / 1000 + GRACE_S + ANSWER_S,
        )

    def _introduced(self, namespace: bytes, stats: Stats) -> None:
        """The store has said where its events are."""
        stream = stream_of(namespace, stats.namespaces, stats.info)
        if stream is None:
            log.warning("the store has no event stream of this model: start it with --events")
        if self._relay is not None:
            self._relay.listen(stream)

    def events(self) -> list[KVCacheEvent]:
        """The store's, since the last time."""
        return as_vllm(self._relay.take()) if self._relay is not None else []

    # --- a request comes -------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Follow it, if its KV can be told by what it consists of."""
        tracker = self._tracker
        if tracker is None or not _can_be_told(request):
            return
        if request.lora_request is None:
            tracker.add(request, self._keys(tracker, request, b""))
        elif len(self._waiting) < ADAPTERS_WAITING_MAX and tracker.add(request, self._keys(tracker, request, b"?")):
            keys = self._reader.submit(self._adapter_keys, tracker, request)
            self._waiting[request.request_id] = Reading(keys, time.monotonic() + ADAPTER_S)

    def _adapter_keys(self, tracker: Tracker, request: Any) -> RequestKeys:
        adapter = request.lora_request
        return self._keys(tracker, request, self._adapters.of_engine(adapter.lora_int_id, Path(adapter.lora_path)))

    def _read(self, tracker: Tracker, request_id: str) -> bool:
        """Has the request's adapter been read, if it has one? One that can't be is not followed any more."""
        reading = self._waiting.get(request_id)
        if reading is None:
            return True
        if not reading.keys.done() and time.monotonic() < reading.until:
            return False
        del self._waiting[request_id]
        error = reading.keys.exception() if reading.keys.done() else TimeoutError("its files take too long to read")
        if error is not None:
            log.warning("an adapter can't be told by its contents: %s", error)
            tracker.drop(request_id)
        elif request_id in tracker.requests:
            tracker.requests[request_id].keys = reading.keys.result()
        return True

    def _keys(self, tracker: Tracker, request: Any, adapter: bytes) -> RequestKeys:
        inputs = [
            Input(f"{f.modality}:{f.mm_hash or f.identifier}", f.mm_position.offset, f.mm_position.length)
            for f in request.mm_features or ()
        ]
        salt = salt_of(self._settings.salt_secret, self._settings.tenant, request.cache_salt)
        return RequestKeys(tracker.namespace, salt, extra_of(adapter, inputs))

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded, asynchronously; None: ask again."""
        tracker = self._tracker
        if tracker is None or not self._loads or request.skip_reading_prefix_cache:
            return 0, False
        if not self._read(tracker, request.request_id):
            return None, False
        found = tracker.matched(request.request_id, computed, self._wait)
        return found, bool(found)

    def _wait(self, question: Question) -> None:
        """An answer from memory takes less than going round once more; a step has so much patience in all."""
        if self._patience_s <= 0:
            return
        began = time.monotonic()
        question.wait(self._patience_s)
        self._patience_s -= time.monotonic() - began

    def allocated(self, request: Any, tables: Tables, external: int) -> None:
        """vLLM has given blocks."""
        if self._tracker is not None:
            self._tracker.allocated(request.request_id, tables, external)

    def sources(self, request: Any) -> dict[str, int]:
        """Tokens of the request's load, by tier."""
        return self._tracker.hits.get(request.request_id, {}) if self._tracker is not None else {}

    # --- steps -------------------------------------------------------------------------------------------

    def orders(self, output: Any) -> Orders:
        """What the ranks are to do in this step."""
        self._patience_s = self._settings.patience_ms / 1000
        tracker = self._tracker
        if tracker is None:
            return Orders()
        self._order_stores(tracker, output)
        orders = tracker.take_orders()
        orders.namespace = self._encoded
        orders.idle = not output.total_num_scheduled_tokens
        return orders

    @guarded(nothing)
    def _order_stores(self, tracker: Tracker, output: Any) -> None:
        """Apart from the rest: a load that was promised must be ordered, whatever else goes wrong."""
        if not self._stores:
            return
        state = output.kv_connector_block_state
        for request_id, scheduled in output.num_scheduled_tokens.items():
            if self._read(tracker, request_id):
                tracker.step(request_id, scheduled, partial(_tables, state, request_id))

    def output(self, output: Any) -> None:
        """What the ranks have done."""
        if self._tracker is not None:
            self._tracker.received(tuple(output.finished_recving or ()), tuple(output.failed_recving or ()))
            self._tracker.sent(tuple(output.finished_sending or ()))

    def finished(self, request: Any, tables: Tables) -> bool:
        """The request has ended; True: its blocks are needed a little longer."""
        waiting = self._waiting.pop(request.request_id, None)
        tracker = self._tracker
        if tracker is None:
            return False
        if waiting is not None or not self._stores:
            tracker.drop(request.request_id)
            return False
        return tracker.finished(request.request_id, tables)

    def reset(self) -> bool:
        """Weights may have changed in place: nothing that is stored belongs to them, here or for anybody else."""
        with self._lock:
            # Not a count: another engine's first update is another one.
            self._epoch = int.from_bytes(os.urandom(7), "little")
            tracker = self._tracker
        if tracker is None:
            return True  # they aren't known by their files yet, which hold the old ones
        namespace = msgspec.structs.replace(tracker.namespace, epoch=self._epoch)
        tracker.forget_all(namespace, lambda tracked: _rekeyed(namespace, tracked))
        self._waiting.clear()  # keys that are being made are of the old weights
        self._encoded = encode_namespace(namespace)
        self._link.use(namespace)
        return True

    def shutdown(self) -> None:
        """vLLM ends."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        if self._relay is not None:
            self._relay.close()
        self._link.stop()

    def statistics(self) -> ForebayStats | None:
        """Since the last time."""
        if self._tracker is None:
            return None
        now = Counter(self._tracker.counters)
        now.update({f"errors.{name}": count for name, count in guarded_errors.items()})
        now.update({"store.connects": self._link.connects, "store.losses": self._link.losses})
        if self._relay is not None:
            now["events.lost"] = self._relay.lost
        counts = self._differences.since(now)
        gauges = self._tracker.gauges() | {
            "adapters.waiting": len(self._waiting),
            "adapters.known": len(self._adapters),
            "events.waiting": len(self._relay) if self._relay is not None else 0,
            "store.connected": int(bool(self._link.boot())),
        }
        return ForebayStats({COUNTS: counts, GAUGES: self._differences.changed(gauges)})


def _can_be_told(request: Any) -> bool:
    """Is all that a request's KV depends on known now, by content? Not of embeddings, of a session whose inputs come
    one by one, nor of an input that its client has only given a name."""
    embedded = request.prompt_token_ids is None or request.prompt_embeds is not None
    named = any(not is_digest(f.mm_hash or f.identifier) for f in request.mm_features or ())
    return not (embedded or named or request.resumable)


def _lacks_prefixes(config: VllmConfig) -> bool:
    """Does vLLM turn its own prefix cache off for latent attention? It does on CPUs, where its prefill lets tokens see
    those behind them: what it computes for a prefix then isn't that prefix's, and must not be stored for anybody."""
    return bool(config.model_config.use_mla) and not config.cache_config.enable_prefix_caching


def _tables(state: Any, request_id: str) -> Tables | None:
    found = state.get_block_ids(request_id)
    return None if found is None else tuple(tuple(table) for table in found)


def _rekeyed(namespace: Any, tracked: Tracked) -> RequestKeys:
    """Keys that nobody has: what the request computed is of two sets of weights."""
    return RequestKeys(namespace, os.urandom(32), tracked.keys.extra)
