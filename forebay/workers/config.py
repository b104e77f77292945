"""What a worker process is told at its start. The command line fills it in; nothing else is read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forebay.errors import ConfigError
from forebay.kvstore.identity import MATCH_UNIT
from forebay.kvstore.protocol import WRITERS_MAX

DTypeName = Literal["auto", "float32", "bfloat16", "float16", "float64"]

KVDTypeName = Literal["auto", "fp8_e4m3", "fp8_e4m3fnuz"]

Prefixes = Literal["cut", "load", "compute"]
"""What is done with a stored prefix that host memory doesn't have: load what is worth it and compute the rest, load all
of it, or compute all of it."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of one worker. Sizes are bytes, times are what their names say. `check` says what is wrong."""

    model: Path
    """A directory with safetensors files and config.json, or a GGUF file."""
    listen: str
    """Unix socket for front ends: a path, or unix:///path. Its mode is 0600."""
    store: str | None = None
    """Unix socket of the store; None works without one. It may come later, and go."""
    dtype: DTypeName = "auto"
    """Of weights, arithmetic and KV. `auto` is what the checkpoint has."""
    kv_cache_dtype: KVDTypeName = "auto"
    """Of KV: `auto` is that of arithmetic; `fp8_e4m3` the FP8 of the device, `fp8_e4m3fnuz` that of older AMD ones."""
    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:N`."""
    chunk_tokens: int = 256
    """Tokens of a sealed chunk; part of the namespace, so workers that share a cache agree on it."""
    device_memory: int = 1 << 30
    """Bytes for the block pool of all groups together, on each rank. Ignored if `max_tokens` is given."""
    max_tokens: int | None = None
    """Tokens that the full-attention pool holds; the window pools follow."""
    max_num_batched_tokens: int = 512
    """What one step feeds at most, decodes and prefills together."""
    max_num_seqs: int = 16
    """Requests that hold blocks at once."""
    max_waiting: int = 256
    """Requests that may queue; the next one is answered `busy`."""
    long_prefill_token_threshold: int = 0
    """What one step feeds of one prompt at most; 0 sets no such limit."""
    max_model_len: int | None = None
    """Tokens of prompt and answer together; None takes the model's own limit."""
    ageing_s: float = 10.0
    """How long a request waits until that is worth one step of priority."""
    structured_outputs: bool = False
    """Take requests with grammars; the vocabulary is prepared at the start, and needs the extra `guided`."""
    trace: Path | None = None
    """Where the Chrome trace is written when the worker stops; None traces nothing."""
    lookup_deadline_ms: int = 2000
    """How long a lookup may wait for the store's tiers; then what is there is used."""
    index_cache_dtype: Literal["model", "fp8"] = "model"
    """Of sparse layers' index keys: what the model computes in, or FP8 with a scale a key. Part of the namespace."""
    prefixes: Prefixes = "cut"
    """What becomes of a prefix that tiers have: `cut`, `load` or `compute`; see docs/worker.md."""
    push_queue_bytes: int = 256 << 20
    """What may wait to be stored; chunks beyond it are dropped and counted."""
    drain_s: float = 5.0
    """How long SIGTERM waits for the last pushes."""
    events: str | None = None
    """Endpoint of the device pool's KV events (tcp://127.0.0.1:0, ipc://...); None publishes none."""
    events_replay: str | None = None
    """Endpoint of their replay socket."""
    event_keys: Path | None = None
    """Directory of CURVE keys, which an endpoint off loopback needs."""
    threads: int = 0
    """Compute threads of each rank; 0 leaves it to torch, or divides what it would use among the ranks."""
    tensor_parallel_size: int = 1
    """Processes that share the model: each has a part of the weights and of the KV heads. On CUDA each has a device."""
    decode_context_parallel_size: int = 1
    """How many of those processes that would have the same KV share out its positions instead."""
    cp_kv_cache_interleave_size: int = 1
    """Neighbouring positions that one of them has."""
    dcp_comm_backend: Literal["ag_rs", "a2a"] = "ag_rs"
    """How what they find comes together: all-gather and reduce-scatter, or one all-to-all."""
    dcp_q_replicate: bool = False
    """Have each compute the queries of all of them, rather than send them."""
    prefill_context_parallel_size: int = 1
    """Sets of such processes that share out the tokens of prompts; each set has everything else."""
    enable_expert_parallel: bool = False
    """Deal out experts to the processes whole, instead of a part of each to all."""
    all2all_backend: Literal["allgather_reducescatter", "alltoall"] = "allgather_reducescatter"
    """How tokens come to their experts, and what these give comes back."""
    trusted_network: str | None = None
    """Interface that ranks may talk over, if not loopback. What they send is neither encrypted nor authenticated."""
    distributed_timeout_s: float = 60.0
    """How long ranks wait for one another. After that the worker ends, with all of them: one is stopped, or hangs."""
    hot_buffers: bool = False
    """Let requests of sparse models that don't fit on the device read their rows in the store's pool; see
    docs/sparse.md."""
    hot_buffer_rows: int = 0
    """Rows that such a request keeps on the device, in every layer; 0: twice what a step reads."""
    hot_buffer_pool_tokens: int | None = None
    """Tokens whose rows the device holds, pages and hot buffers together, where index keys of more are there."""
    hot_buffer_host_tokens: int = 1 << 24
    """Tokens whose rows are read in the store's pool at a time, at most."""
    hot_buffer_deadline_s: float = 10.0
    """How long a request may lack what it reads there; then it alone is computed anew."""
    label: str = ""
    """The model's name for people, topics and the store's listings; by default the path's last part."""
    cache_dir: Path | None = None
    """Where converted checkpoints and fingerprints of weights are kept; None: forebay's cache directory."""

    @property
    def model_label(self) -> str:
        return self.label or self.model.name

    @property
    def ranks(self) -> int:
        """Processes in all."""
        return self.tensor_parallel_size * self.prefill_context_parallel_size

    def check(self) -> None:
        """Raises ConfigError that names the setting."""
        if self.chunk_tokens < MATCH_UNIT or self.chunk_tokens % MATCH_UNIT:
            raise ConfigError(f"chunk_tokens is {self.chunk_tokens}; it must be a multiple of {MATCH_UNIT}")
        if not 1 <= self.max_num_seqs <= self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_seqs is {self.max_num_seqs}; it must lie between 1 and max_num_batched_tokens "
                f"({self.max_num_batched_tokens}), so that every request can go on in every step"
            )
        if self.long_prefill_token_threshold < 0 or self.ageing_s < 0:
            raise ConfigError("long_prefill_token_threshold and ageing can't be negative")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len is {self.max_model_len}; it must be at least 2: a prompt and an answer")
        if self.max_waiting < 1:
            raise ConfigError(f"max_waiting is {self.max_waiting}; it must be at least 1")
        if self.lookup_deadline_ms < 0 or self.drain_s < 0 or self.threads < 0 or self.push_queue_bytes < 0:
            raise ConfigError("lookup_deadline_ms, drain_s, threads and push_queue_bytes can't be negative")
        if self.device != "cpu" and not self.device.startswith("cuda"):
            raise ConfigError(f"device is {self.device!r}; use cpu, cuda or cuda:N")
        self._check_ranks()
        self._check_hot()
        if self.trace is not None and not os.access(self.trace.parent, os.W_OK | os.X_OK):
            raise ConfigError(f"trace is {self.trace}: there is no directory {self.trace.parent} to write it to")
        if self.events_replay is not None and self.events is None:
            raise ConfigError("events_replay needs events: there is nothing to replay without a publisher")

    def _check_hot(self) -> None:
        if not self.hot_buffers:
            return
        if self.store is None:
            raise ConfigError("hot_buffers need a store: rows that aren't on the device are read in its pool")
        if self.device != "cpu":
            raise ConfigError("hot_buffers are for the CPU today: leave device at cpu")
        if self.prefill_context_parallel_size > 1:
            raise ConfigError(
                "hot_buffers need every rank to compute every token: leave prefill_context_parallel_size at 1"
            )
        if self.hot_buffer_rows < 0 or self.hot_buffer_host_tokens < MATCH_UNIT or self.hot_buffer_deadline_s <= 0:
            raise ConfigError(
                "hot_buffer_rows can't be negative, hot_buffer_host_tokens must be at least 16, and "
                "hot_buffer_deadline more than 0"
            )

    def _check_ranks(self) -> None:
        if not 1 <= self.tensor_parallel_size <= WRITERS_MAX:
            raise ConfigError(f"tensor_parallel_size is {self.tensor_parallel_size}; use 1 to {WRITERS_MAX}")
        sizes = (self.decode_context_parallel_size, self.cp_kv_cache_interleave_size)
        if min(*sizes, self.prefill_context_parallel_size) < 1:
            raise ConfigError(
                "decode_context_parallel_size, cp_kv_cache_interleave_size and prefill_context_parallel_size "
                "must be at least 1"
            )
        if self.ranks > WRITERS_MAX:
            raise ConfigError(
                f"tensor_parallel_size {self.tensor_parallel_size} times prefill_context_parallel_size "
                f"{self.prefill_context_parallel_size} are more ranks than {WRITERS_MAX}"
            )
        if self.tensor_parallel_size % self.decode_context_parallel_size:
            raise ConfigError(
                f"decode_context_parallel_size {self.decode_context_parallel_size} must divide tensor_parallel_size "
                f"{self.tensor_parallel_size}: it takes these ranks, and adds none"
            )
        if self.decode_context_parallel_size == 1 and (self.cp_kv_cache_interleave_size > 1 or self.dcp_q_replicate):
            raise ConfigError(
                "cp_kv_cache_interleave_size and dcp_q_replicate are for decode_context_parallel_size > 1: "
                "raise that, or leave them out"
            )
        if self.enable_expert_parallel and (self.tensor_parallel_size == 1 or self.prefill_context_parallel_size > 1):
            raise ConfigError(
                "enable_expert_parallel deals out experts to tensor parallel ranks: raise tensor_parallel_size to 2 or "
                "more, with prefill_context_parallel_size 1, or leave it out"
            )
        if self.distributed_timeout_s <= 0:
            raise ConfigError("distributed_timeout must be more than 0")
        if self.ranks > 1 and ":" in self.device:
            raise ConfigError(f"device is {self.device!r}, which is one; with tensor_parallel_size > 1 say cuda")
