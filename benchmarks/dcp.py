"""How much context ranks hold at a time: tensor parallel alone, and with positions shared out, in the same memory.

    python -m benchmarks.dcp [--long] [--ranks 4] [--prompt 480] [--output 32] [--memory 3MiB] [--model PATH]

Real workers by the public command, each of as many ranks, each rank with the same `--device-memory`. The model has one
KV head (or give --model one with latents), so tensor parallelism copies the cache to every rank. Prompts of random
tokens come so many at a time, more and more of them, until some have to wait for room or lose theirs (a preemption).
What was held before that is what counts: it doesn't depend on how fast this machine is. Target: 3.5 times the tokens.

What a decode sends is read from the counters of rank 0, for each layer and token, and compared with what
`forebay.models.traffic` works out, to the byte. How fast it would be on devices, by a model of cost:
`python -m benchmarks.simulate.context`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.report import Measure, Report, parser
from forebay.config import size
from forebay.errors import StoreUnavailable
from forebay.ipc.framing import FrameBuffer
from forebay.ipc.sockets import connect
from forebay.kvstore.identity import pack_tokens
from forebay.models.base import ModelInfo
from forebay.models.loading import read_info
from forebay.models.traffic import Exchange
from forebay.workers.protocol import (
    FROM_WORKER,
    TO_WORKER,
    Finished,
    FromWorker,
    Generate,
    GetWorkerStats,
    Outputs,
    Sampling,
    WorkerStats,
)

WANTED = 3.5
LAYERS, HIDDEN, HEADS, DIM, FFN, VOCAB = 4, 128, 8, 32, 256, 1024
START_S, ANSWER_S = 180.0, 600.0


def write_model(folder: Path) -> Path:
    """A llama of random weights with one KV head."""
    rng = torch.Generator().manual_seed(1)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}self_attn.q_proj.weight": (HEADS * DIM, HIDDEN), f"{at}self_attn.k_proj.weight": (DIM, HIDDEN),
            f"{at}self_attn.v_proj.weight": (DIM, HIDDEN), f"{at}self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
            f"{at}mlp.gate_proj.weight": (FFN, HIDDEN), f"{at}mlp.up_proj.weight": (FFN, HIDDEN),
            f"{at}mlp.down_proj.weight": (HIDDEN, FFN),
        }  # fmt: skip
    tensors = {name: torch.randn(shape, generator=rng) * 0.05 for name, shape in shapes.items()}
    norms = [f"model.layers.{n}.{x}_layernorm.weight" for n in range(LAYERS) for x in ("input", "post_attention")]
    tensors |= {name: torch.ones(HIDDEN) for name in [*norms, "model.norm.weight"]}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "head_dim": DIM,
        "num_key_value_heads": 1, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Line:
    """A connection to a worker."""

    connection: socket.socket
    finished: set[str] = field(default_factory=set)
    stats: list[dict[str, float]] = field(default_factory=list)
    _buffer: FrameBuffer[FromWorker] = field(default_factory=lambda: FrameBuffer(FROM_WORKER))

    def ask(self, name: str, prompt: list[int], output: int) -> None:
        """Begin a request."""
        sampling = Sampling(max_tokens=output, temperature=0, ignore_eos=True)
        message = Generate(id=name, attempt=1, prompt=pack_tokens(prompt), sampling=sampling)
        self.connection.sendall(TO_WORKER.encode(message))

    def figures(self) -> dict[str, float]:
        """The worker's figures now."""
        self.connection.sendall(TO_WORKER.encode(GetWorkerStats()))
        while not self.stats:
            self._receive()
        return self.stats.pop()

    def _receive(self) -> None:
        data = self.connection.recv(1 << 16)
        if not data:
            raise ConnectionError("the worker has ended; what it said is above")
        for message in self._buffer.feed(data):
            match message:
                case Finished():
                    if message.reason != "length":
                        raise RuntimeError(f"{message.id} ended with {message.reason}: {message.error}")
                    self.finished.add(message.id)
                case WorkerStats():
                    self.stats.append(message.values)
                case Outputs():
                    pass


@contextmanager
def worker(model: Path, folder: Path, memory: int, flags: Sequence[str]) -> Iterator[Line]:
    """A worker without a store, and a connection to it."""
    listen = folder / "worker.sock"
    command = [
        sys.executable, "-m", "forebay", "worker", str(model), "--listen", str(listen), "--device-memory", str(memory),
        "--max-num-seqs", "128", "--max-num-batched-tokens", "512", "--threads", "1", *flags,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "FOREBAY_LOG": "WARNING"}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    try:
        yield Line(_connected(listen, process))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _connected(listen: Path, process: subprocess.Popen[bytes]) -> socket.socket:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            return connect(listen, ANSWER_S)
        except StoreUnavailable:
            time.sleep(0.05)
    raise RuntimeError("the worker doesn't start; what it said is above")


@dataclass(frozen=True)
class Load:
    """How long prompts and answers are."""

    prompt: int
    output: int

    @property
    def tokens(self) -> int:
        """Of one request, at its end."""
        return self.prompt + self.output


@dataclass(frozen=True)
class Held:
    """What one kind of worker held: most requests at a time without a wait or a preemption, and its pool's tokens."""

    requests: int
    pool: int


class Rising:
    """More and more requests at a time."""

    def __init__(self, line: Line, load: Load, vocab: int) -> None:
        self._line, self._load, self._vocab = line, load, vocab
        self._rng, self._count = random.Random(3), 0

    def held(self) -> Held:
        """Rise until it doesn't hold, in steps of an eighth of what the pool should take; then by ones below that."""
        values = self._line.figures()
        pool = int(sum(v for k, v in values.items() if k in ("blocks.full.total", "blocks.latent.total"))) * 16
        most = pool // self._load.tokens
        step, good, bad = max(1, most // 8), 0, most + most // 4 + 2
        for count in range(step, bad + step, step):
            if not self._holds(count):
                bad = count
                break
            good = count
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if self._holds(middle) else (good, middle)
        return Held(good, pool)

    def _holds(self, count: int) -> bool:
        """Are so many under way at one moment, and does none lose its room until all have ended?"""
        before, together = self._line.figures().get("preemptions", 0.0), 0.0
        names = [self.begin() for _ in range(count)]
        while not set(names) <= self._line.finished:
            together = max(together, self._line.figures()["requests.running"])
            time.sleep(0.005)
        lost = self._line.figures().get("preemptions", 0.0) - before
        holds = together == count and not lost
        print(f"  {count} at a time: {int(together)} together, {int(lost)} preempted", file=sys.stderr, flush=True)
        return holds

    def begin(self) -> str:
        """One request of tokens that nobody has seen."""
        self._count += 1
        name = f"r{self._count}"
        prompt = [self._rng.randrange(16, self._vocab) for _ in range(self._load.prompt)]
        self._line.ask(name, prompt, self._load.output)
        return name


def sent(line: Line, rising: Rising, load: Load, layers: int) -> dict[str, float]:
    """Bytes and collectives of one decode, for a layer and token: a prompt in one piece sends none of these."""
    before = line.figures()
    name = rising.begin()
    while name not in line.finished:
        line.figures()
        time.sleep(0.01)
    after = line.figures()
    tokens = load.output - 1
    return {
        f"{kind}.{what}": (after[f"ranks.{kind}.{what}"] - before[f"ranks.{kind}.{what}"]) / tokens / layers
        for kind in ("query", "lse", "out", "context") for what in ("bytes", "calls")
    }  # fmt: skip


def exchange(info: ModelInfo, config: Path, ranks: int, backend: str) -> Exchange:
    """What one layer's decode should send."""
    (group,) = info.kv_groups
    values = json.loads((config / "config.json").read_text())
    item = {"bfloat16": 2, "float64": 8}.get(values.get("dtype", values.get("torch_dtype", "")), 4)
    value = values["kv_lora_rank"] if group.kind == "latent" else group.head_dim
    heads = values["num_attention_heads"] // ranks
    return Exchange(ranks, heads, group.head_dim, value, item, max(item, 4), backend)  # type: ignore[arg-type]


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code: 1 if a target was missed."""
    made = parser(__doc__ or "")
    made.add_argument("--long", action="store_true", help="prompts of 1,920 tokens, four times the memory")
    made.add_argument("--ranks", type=int, default=4, help="of each worker")
    made.add_argument("--prompt", type=int, default=480, help="tokens")
    made.add_argument("--output", type=int, default=32, help="tokens")
    made.add_argument("--memory", type=size, default=3 << 20, help="of each rank's pool")
    made.add_argument("--model", type=Path, help="a checkpoint with one group: of latents, or of one KV head")
    given = made.parse_args(argv)
    load, memory = Load(given.prompt, given.output), given.memory
    if given.long:
        load, memory = Load(4 * given.prompt, given.output), 4 * memory
    report = Report(f"Context on {given.ranks} ranks with {memory >> 10} KiB of KV each; {load.prompt} tokens a prompt")
    shared = ("--decode-context-parallel-size", str(given.ranks))
    sides = {"plain": (), "ag_rs": shared, "a2a": (*shared, "--dcp-comm-backend", "a2a")}
    found: dict[str, Held] = {}
    with tempfile.TemporaryDirectory(prefix="forebay-dcp") as room:
        model = given.model or write_model(Path(room) / "model")
        info = read_info(model)
        for name, flags in sides.items():
            folder = Path(room) / name
            folder.mkdir()
            with worker(model, folder, memory, ("--tensor-parallel-size", str(given.ranks), *flags)) as line:
                rising = Rising(line, load, info.vocab_size)
                if name != "plain":
                    counted = sent(line, rising, Load(load.prompt, load.output), info.num_layers)
                    _tell_sent(report, name, counted, exchange(info, model, given.ranks, name))
                if name != "a2a":  # it holds what the other one holds
                    found[name] = rising.held()
    _tell_held(report, found, load)
    return report.print(given.json)


def _tell_held(report: Report, found: dict[str, Held], load: Load) -> None:
    plain, shared = found["plain"], found["ag_rs"]
    for name, held in found.items():
        title = "tensor parallel" if name == "plain" else "positions shared out"
        report.add(Measure(f"{title}: pool", held.pool, "tokens", peer=plain.pool, ratio=held.pool / plain.pool))
        report.add(Measure(f"{title}: requests together", held.requests, "", peer=plain.requests))
    held_tokens = [held.requests * load.tokens for held in (plain, shared)]
    ratio = held_tokens[1] / max(held_tokens[0], 1)
    report.add(Measure(
        "tokens together before a wait or preemption", held_tokens[1], "tokens", peer=held_tokens[0], ratio=ratio,
        target=f">= {WANTED}", ok=ratio >= WANTED,
    ))  # fmt: skip


def _tell_sent(report: Report, name: str, counted: dict[str, float], wanted: Exchange) -> None:
    for kind, expected in wanted.sent.items():
        found = counted[f"{kind}.bytes"]
        report.add(Measure(
            f"{name}: {kind}, a layer and token", found, "bytes", peer=expected, target="as worked out",
            ok=found == expected,
        ))  # fmt: skip
    calls = sum(value for key, value in counted.items() if key.endswith(".calls"))
    report.add(Measure(
        f"{name}: collectives, a layer and step", calls, "", peer=wanted.collectives, target="as worked out",
        ok=calls == wanted.collectives,
    ))  # fmt: skip
    report.add(Measure(
        f"{name}: cached keys sent in a decode", counted["context.bytes"], "bytes", target="0",
        ok=counted["context.bytes"] == 0,
    ))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
