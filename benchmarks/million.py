"""A context of a million tokens on a device pool of 64 MiB: a tiny sparse model, its rows in the store's pool.

    python -m benchmarks.million DIRECTORY                      all of it: an hour; what it will take is said first
    python -m benchmarks.million DIRECTORY --tokens 131072      a minute

All that is computed goes to the store, whose files are in DIRECTORY: end it, or kill it, and the same command goes on
from there. The model has two layers, the second of which shares what the first one chooses: 64 positions of all; its
index has two heads of 32, keys in FP8, so 36 MiB of a million tokens.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.made import LETTERS, write_tokenizer
from forebay.testing.cluster import Cluster

TOP_K, CHUNK = 64, 1024
BESIDE = 4096
"""Tokens whose rows the device holds beside the region: of the chunks that are being computed and copied."""
PROBE = 32_768
"""Up to which a prompt is measured, and to twice and four times that, to say how long all of it takes."""
TOLD_S = 20.0


def make_model(folder: Path, longest: int) -> Path:
    """The checkpoint, made once. Needs the package transformers."""
    path = folder / "model"
    if (path / "tokenizer.json").is_file():
        return path
    import torch
    import transformers

    config = transformers.GlmMoeDsaConfig(
        vocab_size=LETTERS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, q_lora_rank=32, kv_lora_rank=48, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
        index_n_heads=2, index_head_dim=32, index_topk=TOP_K, indexer_types=["full", "shared"],
        mlp_layer_types=["dense", "dense"], max_position_embeddings=longest, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.GlmMoeDsaForCausalLM(config).save_pretrained(path)
    write_tokenizer(path)
    return path


class Run:
    """A store, a worker and its front end, and one long request."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self._prompt = prompt_of(args.tokens)
        self._cluster = Cluster(
            folder, make_model(folder, 2 * max(args.tokens, 1 << 20)), dtype=args.dtype, chunk_tokens=CHUNK,
            threads=args.threads, memory="2GiB", device_memory=args.device_memory,
        )  # fmt: skip
        self._cluster.start_store()
        self._cluster.start_worker(
            "worker",
            extra=(
                "--hot-buffers", "--hot-buffer-rows", str(args.rows), "--hot-buffer-pool-tokens",
                str(args.rows + BESIDE), "--index-cache-dtype", "fp8", "--max-num-batched-tokens",
                str(args.rows // TOP_K), "--max-num-seqs", "1", "--lookup-deadline", "600s",
            ),
        )  # fmt: skip
        self._cluster.start_frontend("front", "worker")
        self._answer: dict[str, Any] = {}
        self._peaks: dict[str, int] = {}

    def ask(self, tokens: int, count: int) -> float:
        """Ask with the first `tokens` of the prompt; seconds until the last of `count` answers."""
        body = Cluster.body(self._prompt[:tokens], count)
        began = time.monotonic()
        with httpx.Client(timeout=None, trust_env=False) as client:
            told = client.post(f"{self._cluster.url('front')}/v1/completions", json=body)
        told.raise_for_status()
        self._answer = told.json()
        return time.monotonic() - began

    def estimate(self) -> str:
        """From the beginning of the prompt, in three parts that go on from each other: what a token costs, and what it
        costs more for each that stands before it. Where they are stored there is nothing to measure."""
        whole, probe = len(self._prompt), min(PROBE, len(self._prompt) // 8)
        told: list[tuple[float, float]] = []
        spent = self.ask(probe, 1)
        for end in (2 * probe, 4 * probe):
            seconds, begin = self.ask(end, 1), self._cached()
            if end - begin < probe // 2:
                return "going on from what is stored"
            spent += seconds
            told.append(((begin + end) / 2, seconds / (end - begin)))
        (near, short), (far, long) = told
        growth = max(0.0, (long - short) / (far - near))
        fixed = max(0.0, short - growth * near)
        rest = fixed * (whole - end) + growth * (whole**2 - end**2) / 2
        minutes, gone = (spent + rest) / 60, spent / 60
        return f"estimated: {minutes:.0f} minutes for {whole:,} tokens, {gone:.1f} of which are over"

    def through(self, count: int) -> None:
        """The whole prompt and `count` tokens of answer, telling how it gets on."""
        asking = threading.Thread(target=self.ask, args=(len(self._prompt), count))
        asking.start()
        began = time.monotonic()
        while asking.is_alive():
            asking.join(TOLD_S)
            self._tell(time.monotonic() - began)
        choice = self._answer["choices"][0]
        print(f"answer: {choice['token_ids']}; {self._cached():,} tokens of the prompt were stored")
        print(f"took {time.monotonic() - began:,.0f} s; at most, in MiB of their own: {self._peaks}", flush=True)

    def _cached(self) -> int:
        """Tokens of the last prompt that were not computed."""
        return int((self._answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0))

    def _tell(self, seconds: float) -> None:
        cluster = self._cluster
        done = cluster.figure("front", "tokens.prefilled")
        missed, held = cluster.figure("front", "hot.misses"), cluster.figure("front", "hot.host_pages") * 16
        for name, process in cluster.processes.items():
            self._peaks[name] = max(self._peaks.get(name, 0), own_memory(process.pid) >> 20)
        print(
            f"{seconds:8.0f} s: {done:,.0f} tokens computed; {held:,.0f} read in the store's pool, {missed:,.0f} rows "
            f"copied from there; most MiB of their own {self._peaks}", flush=True,
        )  # fmt: skip

    def end(self) -> None:
        """End all processes."""
        self._cluster.stop()


def own_memory(pid: int) -> int:
    """Bytes of memory that a process has for itself, so without the store's pool; 0 if it has gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")), 0)


def prompt_of(tokens: int) -> list[int]:
    """The same for ever, and a shorter one is the beginning of a longer one."""
    rng = random.Random(20)
    return [rng.randrange(LETTERS) for _ in range(tokens)]


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the model, the store's files and the logs are kept")
    parser.add_argument("--tokens", type=int, default=1 << 20, help="of the prompt")
    parser.add_argument("--answer", type=int, default=32, help="tokens to decode")
    parser.add_argument("--device-memory", default="64MiB")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--rows", type=int, default=32_768,
        help=f"of the region; a step feeds one token for {TOP_K}: the more, the less often all keys are gone through",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=1, help="that compute; more are slower on cores that others use")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    run = Run(args.folder, args)
    try:
        if args.tokens > PROBE:
            print(run.estimate(), flush=True)
        run.through(args.answer)
    finally:
        run.end()


if __name__ == "__main__":
    main()
