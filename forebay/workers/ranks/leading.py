"""Rank 0's model: has the other ranks compute each batch, and computes its own part of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from forebay.errors import ConfigError
from forebay.kernels.batch import Batch
from forebay.kvstore.identity import Namespace, encode_namespace
from forebay.models.base import CausalLM, KVGroup
from forebay.models.loading import check_ranks, read_info
from forebay.models.parallel import ExpertSplit, Parallel, check_parallel
from forebay.models.traffic import Traffic
from forebay.workers.checkpoint import Checkpoint, find_checkpoint, fingerprint, load_found
from forebay.workers.compute import ComputeThread
from forebay.workers.config import WorkerConfig
from forebay.workers.hot.resolving import StepResolver
from forebay.workers.hot.telling import HotShape
from forebay.workers.prefix import GroupShape
from forebay.workers.ranks.client import LeadClient
from forebay.workers.ranks.copying import LeadCopier
from forebay.workers.ranks.crew import Crew
from forebay.workers.ranks.group import ProcessRanks, rendezvous
from forebay.workers.ranks.messages import Meet, Pools, Start
from forebay.workers.ranks.moving import rank_shard, slices_of, writers_of
from forebay.workers.ranks.network import ranks_interface, use_interface
from forebay.workers.ranks.pushing import SharedPusher
from forebay.workers.ranks.steps import move_batch, pack_step
from forebay.workers.transfer import Doors

log = logging.getLogger(__name__)


class LeadingModel(CausalLM):
    """A model that ranks share, to be used as if it were one. Its batches are made on the host, from where they go to
    the other ranks. Raises RankLost."""

    def __init__(self, model: CausalLM, crew: Crew) -> None:
        self.info, self.dtype, self.device = model.info, model.dtype, torch.device("cpu")
        self.narrow_kv = model.narrow_kv
        self._model, self._crew = model, crew

    def held_groups(self) -> tuple[KVGroup, ...]:
        """See `CausalLM`: those of rank 0, which has as much as every other one."""
        return self._model.held_groups()

    def new_pools(self, num_blocks: Mapping[str, int]) -> dict[str, Tensor]:
        """See `CausalLM`."""
        return self._model.new_pools(num_blocks)

    def forward(self, batch: Batch, kv: Mapping[str, Tensor]) -> Tensor:
        """See `CausalLM`. When it returns, this rank is through with the step; others may be in its last layer yet,
        unless rows were read in the store's pool: then all are."""
        step = pack_step(batch)
        self._crew.step(step)
        logits = self._model.forward(move_batch(batch, self._model.device), kv)
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        if step.hot is not None and isinstance(batch.resolver, StepResolver):
            batch.resolver.hear(self._crew.hot_done())
        self._crew.progress.advance()
        return logits


@dataclass(frozen=True, slots=True)
class Shared:
    """What a worker with several ranks is made of: rank 0's model, the weights' fingerprint, the other ranks, what each
    of them is, and what this one has sent."""

    model: LeadingModel
    weights: bytes
    crew: Crew
    parallel: Parallel
    traffic: Traffic

    def make_pools(
        self, namespace: Namespace, label: str, blocks: Mapping[str, int], hot: HotShape | None = None
    ) -> None:
        """Have the other ranks make their KV pools, and hot buffers. Blocks until they have. Raises RankLost."""
        self.crew.tell(Pools(encode_namespace(namespace), label, dict(blocks), hot))
        self.crew.until_loaded()

    def doors(
        self, address: str, namespace: Namespace, shapes: Sequence[GroupShape], pools: Mapping[str, Tensor]
    ) -> Doors:
        """How this worker's bytes come from the store and go there."""
        client, shard = LeadClient(address, self.crew), rank_shard(namespace, 0, self.parallel)
        copiers = [
            LeadCopier(self.crew, client, group, slices)
            for group, slices in enumerate(slices_of(namespace, pools, shard))
        ]
        assert len(copiers) == len(shapes)
        writers = writers_of(namespace, self.parallel)

        def pusher(*arguments: object) -> SharedPusher:
            made = SharedPusher(*arguments)  # type: ignore[arg-type]
            made.share(self.crew, client, copiers, writers)
            return made

        return Doors(client, copiers, pusher, shard)


@contextmanager
def shared_model(config: WorkerConfig, compute: ComputeThread, socket: Path) -> Iterator[Shared]:
    """Start the other ranks and load the model, each its part, at the same time. They end with the context.

    Call it on the main thread. Raises ForebayError with the remedy for whatever can't be split, found or started.
    """
    parallel = parallel_of(config)
    size = parallel.size
    use_interface(ranks_interface(config.trusted_network))
    found = compute.call(lambda: find_checkpoint(config))
    check_ranks(found.directory, parallel.tp, parallel.experts)
    check_parallel(read_info(found.directory), parallel)
    devices = _devices(found.device, size)
    crew, ranks = Crew(size, config.distributed_timeout_s), ProcessRanks(0, size, parallel)
    try:
        with rendezvous(socket) as folder:
            threads = compute.call(lambda: _divide_threads(config.threads, size))
            crew.start([_start(found, crew, rank, parallel, devices[rank], threads, folder) for rank in range(1, size)])
            mine = replace(found, device=devices[0])
            model = compute.call(lambda: load_found(mine, ranks))
            weights = compute.call(lambda: fingerprint(config))
            crew.until_loaded()
            crew.tell(Meet())
            compute.call(lambda: ranks.meet(folder, devices[0], crew.patience_s))
        log.info("%d ranks share %s: processes %s", size, config.model_label, ", ".join(map(str, crew.pids)))
        yield Shared(LeadingModel(model, crew), weights, crew, parallel, ranks.traffic)
    finally:
        crew.close()
        if not crew.lost:  # else a collective may hang: it ends with the process
            ranks.part()


def parallel_of(config: WorkerConfig) -> Parallel:
    """What its ranks are."""
    return Parallel(
        config.tensor_parallel_size, config.decode_context_parallel_size, config.prefill_context_parallel_size,
        config.cp_kv_cache_interleave_size, config.dcp_comm_backend, config.dcp_q_replicate, _experts(config),
    )  # fmt: skip


def _experts(config: WorkerConfig) -> ExpertSplit:
    if not config.enable_expert_parallel:
        return "inside"
    return "exchanged" if config.all2all_backend == "alltoall" else "gathered"


def _start(
    found: Checkpoint, crew: Crew, rank: int, parallel: Parallel, device: torch.device, threads: int, folder: Path
) -> Start:
    return Start(
        rank=rank, parallel=parallel, directory=str(found.directory), dtype=str(found.dtype).removeprefix("torch."),
        kv_dtype=None if found.kv_dtype is None else str(found.kv_dtype).removeprefix("torch."),
        device=str(device), threads=threads, rendezvous=str(folder), patience_s=crew.patience_s,
        index_keys=found.index_keys,
    )  # fmt: skip


def _devices(device: torch.device, size: int) -> list[torch.device]:
    """One for each rank."""
    if device.type != "cuda":
        return [device] * size
    if torch.cuda.device_count() < size:
        raise ConfigError(
            f"tensor_parallel_size {size} needs as many devices; torch finds {torch.cuda.device_count()} here"
        )
    return [torch.device("cuda", rank) for rank in range(size)]


def _divide_threads(threads: int, size: int) -> int:
    """Compute threads of each rank: as told, or an equal part of what one worker would use. Sets this thread's."""
    each = threads or max(1, torch.get_num_threads() // size)
    torch.set_num_threads(each)
    return each
