"""A compute worker: loads a model, serves front ends, keeps its KV cache in a store.

example:
  forebay worker ./gemma-3-270m --listen unix:///run/forebay/w0.sock --store unix:///run/forebay/store.sock
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from forebay.config import Setting, add_settings, at_least, boolean, duration, one_of, path, resolve, size, text
from forebay.errors import ConfigError
from forebay.importing import nothing_collected

RANKS = (
    Setting("tensor_parallel_size", at_least(1), 1, "processes that share the model, each with a part of the weights"),
    Setting(
        "decode_context_parallel_size", at_least(1), 1, "of these, how many share out the tokens of the same KV heads"
    ),
    Setting("cp_kv_cache_interleave_size", at_least(1), 1, "neighbouring tokens that one of them has"),
    Setting(
        "dcp_comm_backend", one_of("ag_rs", "a2a"), "ag_rs",
        "how their parts come together: all-gather and reduce-scatter, or one all-to-all",
    ),
    Setting(
        "dcp_q_replicate", boolean, False, "have each compute all their queries, rather than send them", shown="no",
        switch=True,
    ),
    Setting(
        "enable_expert_parallel", boolean, False, "deal out experts to these whole, not a part of each to all",
        shown="no", switch=True,
    ),
    Setting(
        "all2all_backend", one_of("allgather_reducescatter", "alltoall"), "allgather_reducescatter",
        "how tokens come to their experts, and the outcome back",
    ),
    Setting("prefill_context_parallel_size", at_least(1), 1, "sets of processes that share out the tokens of prompts"),
    Setting("trusted_network", text, None, "interface that these may talk over", shown="loopback"),
    Setting("distributed_timeout", duration, 60.0, "how long these wait for one that is stopped or hangs", shown="60s"),
)
"""How many ranks a worker has, and how they talk: `forebay serve` passes them on."""

KV_CACHE_DTYPE = Setting(
    "kv_cache_dtype", one_of("auto", "fp8_e4m3", "fp8_e4m3fnuz"), "auto",
    "of KV, if not of arithmetic: the device's FP8, or that of older AMD devices",
)

HOT = (
    Setting(
        "hot_buffers", boolean, False, "let requests of sparse models read rows in the store's pool (docs/sparse.md)",
        shown="no", switch=True,
    ),
    Setting(
        "hot_buffer_rows", at_least(0), 0, "rows that such a request keeps on the device, in each layer",
        shown="twice what a step reads",
    ),
    Setting(
        "hot_buffer_pool_tokens", at_least(16), None, "tokens whose rows the device holds",
        shown="what device_memory leaves beside index keys",
    ),
    Setting("hot_buffer_host_tokens", at_least(16), 1 << 24, "tokens whose rows are read in the pool at a time"),
    Setting("hot_buffer_deadline", duration, 10.0, "how long a request may lack rows or room there", shown="10s"),
)
"""`forebay serve` passes them on."""

INDEX_KEYS = Setting(
    "index_cache_dtype", one_of("model", "fp8"), "model",
    "of sparse layers' index keys: what the model computes in, or FP8 with a scale each; a namespace of its own",
)

PREFIXES = Setting(
    "prefixes", one_of("cut", "load", "compute"), "cut",
    "what tiers have of a prompt: load what is worth it and compute the rest, load it, or compute it",
)

SETTINGS = (
    Setting("model", path, None, "safetensors directory or GGUF file", positional=True),
    Setting("listen", text, None, "unix socket for front ends, mode 0600"),
    Setting("store", text, None, "unix socket of the store; none: the cache ends with the process"),
    Setting("dtype", one_of("auto", "float32", "bfloat16", "float16", "float64"), "auto", "of weights, arithmetic, KV"),
    KV_CACHE_DTYPE,
    Setting("device", text, "cpu", "cpu, cuda or cuda:N"),
    Setting("chunk_tokens", at_least(16), 256, "tokens of a sealed chunk; workers that share a cache agree on it"),
    Setting("device_memory", size, 1 << 30, "bytes of the device block pool", shown="1GiB"),
    Setting("max_tokens", at_least(16), None, "tokens of the full-attention pool, instead of device_memory"),
    Setting("max_num_batched_tokens", at_least(1), 512, "tokens that one step feeds at most"),
    Setting("max_num_seqs", at_least(1), 16, "requests that hold blocks at once"),
    Setting("max_waiting", at_least(1), 256, "requests that may queue"),
    Setting(
        "long_prefill_token_threshold", at_least(0), 0, "tokens of one prompt that one step feeds at most; 0: no limit"
    ),
    Setting("max_model_len", at_least(2), None, "tokens of prompt and answer together", shown="the model's limit"),
    Setting("ageing", duration, 10.0, "waiting that is worth one step of priority", shown="10s"),
    Setting(
        "structured_outputs", boolean, False, "take JSON schemas and grammars; needs the extra `guided`",
        shown="no", switch=True,
    ),
    Setting("trace", path, None, "file for a Chrome trace of steps and requests, written at the end"),
    Setting("lookup_deadline", duration, 2.0, "how long a lookup may wait for the store's tiers", shown="2s"),
    INDEX_KEYS,
    PREFIXES,
    Setting("push_queue", size, 256 << 20, "bytes that may wait to be stored; more is dropped", shown="256MiB"),
    Setting("drain", duration, 5.0, "how long a stop waits for the last pushes", shown="5s"),
    Setting("events", text, None, "ZMQ endpoint of the device pool's KV events"),
    Setting("replay", text, None, "ZMQ endpoint of their replay"),
    Setting("event_keys", path, None, "directory of CURVE keys, for --events off loopback"),
    Setting("threads", at_least(0), 0, "compute threads; 0 leaves it to torch"),
    *RANKS,
    *HOT,
    Setting("label", text, "", "the model's name for people and topics", shown="last part of its path"),
)

SPINS = "10000"
"""How often a compute thread looks for work before it sleeps, some 30 us: libgomp's own 300,000 keep a core from the
very thread that is waited for wherever others use the machine too. Measured: docs/benchmarks.md."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_settings(parser, SETTINGS)


def run(flags: dict[str, Any]) -> int:
    """Run the worker until it is stopped."""
    values = resolve("worker", SETTINGS, flags)
    if values["model"] is None or values["listen"] is None:
        raise ConfigError("a worker needs MODEL and --listen, such as --listen unix:///run/forebay/w0.sock")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read once, when torch is imported
    with nothing_collected():
        from forebay.workers.config import WorkerConfig
        from forebay.workers.worker import run_worker

    values["ageing_s"] = values.pop("ageing")
    values["lookup_deadline_ms"] = int(1000 * values.pop("lookup_deadline"))
    values["push_queue_bytes"] = values.pop("push_queue")
    values["distributed_timeout_s"] = values.pop("distributed_timeout")
    values["drain_s"] = values.pop("drain")
    values["hot_buffer_deadline_s"] = values.pop("hot_buffer_deadline")
    values["events_replay"] = values.pop("replay")
    run_worker(WorkerConfig(**values))
    return 0
