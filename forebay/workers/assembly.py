"""Puts an engine together: namespace, pools, scheduler, transfer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forebay.kernels.batch import pack_batch
from forebay.kernels.dispatch import dispatch
from forebay.kvstore.geometry import RowField
from forebay.kvstore.identity import GroupGeometry, Namespace, check_namespace
from forebay.models.base import CausalLM, KVGroup, ModelInfo
from forebay.scheduler.batch import BatchScheduler
from forebay.scheduler.plan import Limits
from forebay.workers.block_pool import GroupPool
from forebay.workers.config import WorkerConfig
from forebay.workers.counters import Counters
from forebay.workers.engine import Engine, EngineParts
from forebay.workers.generation import Bounds
from forebay.workers.guiding import Compiler, Guides
from forebay.workers.holdings import Holdings, PoolListener
from forebay.workers.hot.holdings import HotHoldings
from forebay.workers.hot.making import make_holdings
from forebay.workers.inbox import Inbox
from forebay.workers.messages import Message
from forebay.workers.outbox import Batch, Outbox
from forebay.workers.prefix import GroupShape
from forebay.workers.pulse import Pulse
from forebay.workers.sealing import DeviceMemory
from forebay.workers.stepping import Stepper
from forebay.workers.tracing import NO_TRACE, Trace
from forebay.workers.transfer import Transfer, TransferConfig

if TYPE_CHECKING:
    from forebay.workers.ranks.leading import Shared

WARM_UP_TOKENS = 16
NOT_QUANTISED = "none"


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def namespace_of(
    info: ModelInfo, dtype: str, weights: bytes, chunk_tokens: int, kv_dtype: str | None = None
) -> Namespace:
    """Everything that changes this model's KV bytes."""
    groups = geometries(info.kv_groups, kv_dtype or dtype)
    positions = tuple(sorted((name, str(value)) for name, value in info.rope.items()))
    namespace = Namespace(
        weights=weights, groups=groups, chunk_tokens=chunk_tokens, compute=dtype, positions=positions,
        quantisation=NOT_QUANTISED if kv_dtype in (None, dtype) else f"kv {kv_dtype}",
    )  # fmt: skip
    refusal = check_namespace(namespace)
    assert refusal is None, refusal
    return namespace


def geometries(groups: Sequence[KVGroup], dtype: str) -> tuple[GroupGeometry, ...]:
    """Cache groups as the store names them."""
    return tuple(_geometry(group, dtype) for group in groups)


def _geometry(group: KVGroup, dtype: str) -> GroupGeometry:
    scale = (RowField("scale", 1, "float32"),) if group.scaled else ()
    return GroupGeometry(
        group.name, group.kind, tuple(group.layers), group.kv_heads, group.head_dim,
        "float8_e4m3fn" if group.scaled else dtype, group.window, beside=scale,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Assembled:
    """A worker's insides, not yet running."""

    engine: Engine
    inbox: Inbox[Message]
    namespace: Namespace
    bounds: Bounds
    holdings: Holdings
    scheduler: BatchScheduler
    memory: DeviceMemory
    counters: Counters
    transfer: Transfer | None
    stepper: Stepper
    trace: Trace
    pulse: Pulse

    def stats(self) -> dict[str, float]:
        """Counters and gauges by dotted name. Callable from any thread; values may be a moment apart."""
        values = self.counters.values()
        values.update(dispatch().figures())
        values.update(
            {
                "requests.running": self.scheduler.running,
                "requests.loading": self.scheduler.loading,
                "requests.waiting": self.scheduler.waiting,
                "requests.compiling": self.engine.compiling,
                "requests.settling": self.engine.settling,
                "inbox.messages": len(self.inbox),
                "push.incomplete": self.memory.incomplete,
                "pushes.running": int(self.engine.unsealed),
                "trace.events": self.trace.recorded - self.trace.dropped,
                "trace.dropped": self.trace.dropped,
            }
        )
        if isinstance(self.holdings, HotHoldings):
            values.update(self.holdings.book.gauges())
        for shape, pool in zip(self.holdings.shapes, self.holdings.pools, strict=True):
            values.update(_pool_gauges(shape.geometry.name, pool))
        if self.transfer is not None:
            values.update(self.transfer.counters.values())
            values.update(self.transfer.gauges())
            values["pushes.running"] += self.transfer.pushes_running
        return values

    def stalled_seconds(self) -> float:
        """How long the engine's thread has had work and not got on with it. Callable from one other thread."""
        return self.pulse.stalled_s(len(self.inbox))

    def store_state(self) -> str:
        """`connected`, `down` or `none`."""
        if self.transfer is None:
            return "none"
        return "connected" if self.transfer.connected else "down"


def assemble(
    model: CausalLM,
    weights: bytes,
    config: WorkerConfig,
    listener: PoolListener,
    flush_events: Callable[[], None],
    send: Callable[[Batch], None],
    guides: Guides | None = None,
    trace: Trace = NO_TRACE,
    shared: Shared | None = None,
) -> Assembled:
    """Build everything but the threads; `shared` is what ranks that share the model have in common. Raises ConfigError
    if the memory can't hold even a short request."""
    dtype, kv_dtype = dtype_name(model.dtype), dtype_name(model.kv_dtype)
    namespace = namespace_of(model.info, dtype, weights, config.chunk_tokens, kv_dtype)
    shapes = [GroupShape(g, config.chunk_tokens, config.max_num_batched_tokens) for g in namespace.groups]
    # Memory is that of one rank, so what counts is what one has of a block.
    held = [group.granule_bytes(model.kv_dtype) for group in model.held_groups()]
    holdings = make_holdings(config, model.info, shapes, held, listener, lambda leases: _give_back(transfer, leases))
    by_group = {s.geometry.name: p.blocks for s, p in zip(shapes, holdings.pools, strict=True)}
    pools = new_pools(model, by_group)
    if shared is not None:
        shape = holdings.share() if isinstance(holdings, HotHoldings) else None
        shared.make_pools(namespace, config.model_label, by_group, shape)
    inbox: Inbox[Message] = Inbox()
    transfer = _transfer(config, namespace, shapes, pools, inbox, trace, shared)
    memory = DeviceMemory(holdings, config.chunk_tokens, transfer.push if transfer else lambda push: False)
    limits = Limits(
        config.max_num_batched_tokens, config.max_num_seqs, config.max_waiting,
        prefill_tokens=config.long_prefill_token_threshold, ageing_s=config.ageing_s,
    )  # fmt: skip
    scheduler = BatchScheduler(limits, memory, time.monotonic)
    context = min(model.info.max_context, config.max_model_len or model.info.max_context)
    bounds = Bounds(model.info.vocab_size, context, holdings.capacity(), frozenset(model.info.eos_ids))
    counters, outbox = Counters(), Outbox(send)
    hot = holdings if isinstance(holdings, HotHoldings) else None
    stepper, pulse = Stepper(model, pools, holdings, outbox, hot), Pulse()
    engine = Engine(
        EngineParts(
            stepper=stepper,
            namespace_id=namespace.id,
            bounds=bounds,
            memory=memory,
            scheduler=scheduler,
            inbox=inbox,
            outbox=outbox,
            counters=counters,
            transfer=transfer,
            flush_events=flush_events,
            compiler=None if guides is None else Compiler(guides, inbox.put),
            trace=trace,
            pulse=pulse,
        )
    )
    return Assembled(
        engine, inbox, namespace, bounds, holdings, scheduler, memory, counters, transfer, stepper, trace, pulse
    )


def _give_back(transfer: Transfer | None, leases: Sequence[int]) -> None:
    if transfer is not None:
        transfer.release(leases)


def _transfer(
    config: WorkerConfig,
    namespace: Namespace,
    shapes: list[GroupShape],
    pools: Mapping[str, Tensor],
    inbox: Inbox[Message],
    trace: Trace,
    shared: Shared | None,
) -> Transfer | None:
    if config.store is None:
        return None
    settings = TransferConfig(
        address=config.store,
        namespace=namespace,
        label=config.model_label,
        lookup_deadline_ms=config.lookup_deadline_ms,
        queue_bytes_max=config.push_queue_bytes,
        prefixes=config.prefixes,
    )
    doors = None if shared is None else shared.doors(config.store, namespace, shapes, pools)
    return Transfer(settings, shapes, pools, inbox.put, trace=trace, doors=doors)


def new_pools(model: CausalLM, blocks: Mapping[str, int]) -> dict[str, Tensor]:
    """KV pools whose every page has been written once: a first touch on the way to the first token would
    cost ten times a copy."""
    pools = model.new_pools(blocks)
    for pool in pools.values():
        pool.fill_(0)
    return pools


def warm_up(model: CausalLM, pools: Mapping[str, Tensor]) -> None:
    """One small prefill and one decode, so that no request pays for what is set up at first use. Writes into
    blocks that nobody knows yet."""
    ids = [0] * WARM_UP_TOKENS
    tables = {name: [[0, 1]] for name in pools}
    with torch.inference_mode():
        model.forward(pack_batch([(ids, 0)], tables, device=model.device), pools)
        model.forward(pack_batch([([0], WARM_UP_TOKENS)], tables, device=model.device), pools)


def _pool_gauges(name: str, pool: GroupPool) -> dict[str, float]:
    return {
        f"blocks.{name}.total": pool.blocks,
        f"blocks.{name}.used": pool.blocks - pool.takeable,
        f"blocks.{name}.cached": pool.cached,
        f"blocks.{name}.draining": pool.draining,
        f"blocks.{name}.evictions": pool.evictions,
    }
