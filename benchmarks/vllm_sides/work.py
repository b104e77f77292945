"""Work with a shape: conversations turn by turn, and a cut of a trace of agents."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.vllm_sides.client import Seen, ask
from benchmarks.vllm_sides.sides import Side


@dataclass(frozen=True)
class Turns:
    """Conversations whose turns come round robin, so that between two of one the others have used the device."""

    conversations: int = 8
    turns: int = 5
    system: int = 1024
    user: int = 384
    answer: int = 32
    clients: int = 2
    seed: int = 5


@dataclass(frozen=True)
class Ran:
    """What a run gave: its requests, its duration and its CPU seconds."""

    seen: tuple[Seen, ...]
    wall_s: float
    cpu_s: float

    @property
    def hit_share(self) -> float:
        """Of all prompt tokens, those that were found."""
        return sum(one.cached_tokens for one in self.seen) / sum(one.prompt_tokens for one in self.seen)

    @property
    def tokens_s(self) -> float:
        """Prompt and answer tokens a second."""
        return sum(one.prompt_tokens + len(one.token_ids) for one in self.seen) / self.wall_s

    def first_ms(self, share: float) -> float:
        """A quantile of the time to first token."""
        times = sorted(one.first_s for one in self.seen)
        return 1e3 * times[min(len(times) - 1, int(share * len(times)))]


def converse(side: Side, shape: Turns) -> Ran:
    """All turns; each goes on from the answer before it."""
    rng = random.Random(shape.seed)
    system = _some(rng, shape.system)
    histories = [[*system, *_some(rng, shape.user)] for _ in range(shape.conversations)]
    seen: list[Seen] = []
    start, cpu = time.perf_counter(), side.cpu_s()
    with ThreadPoolExecutor(shape.clients) as pool:
        for _ in range(shape.turns):
            answers = list(pool.map(lambda history: ask(side, history, shape.answer), histories))
            seen += answers
            for history, answer in zip(histories, answers, strict=True):
                history += [*answer.token_ids, *_some(rng, shape.user)]
    return Ran(tuple(seen), time.perf_counter() - start, side.cpu_s() - cpu)


def replay(side: Side, prompts: Sequence[Sequence[int]], tokens: int, clients: int) -> Ran:
    """Prompts in their order, so many clients at a time."""
    start, cpu = time.perf_counter(), side.cpu_s()
    with ThreadPoolExecutor(clients) as pool:
        seen = tuple(pool.map(lambda prompt: ask(side, prompt, tokens), prompts))
    return Ran(seen, time.perf_counter() - start, side.cpu_s() - cpu)


def agents(trace: Path, *, sessions: int, requests: int, shrink: int, longest: int) -> list[list[int]]:
    """The first requests of the first sessions of a trace, taking turns. A block of the trace becomes 64 / `shrink`
    tokens that its id alone determines, so that prompts share what they share there."""
    cut = [_prompts(session, requests, shrink, longest) for session in _sessions(trace, sessions)]
    return [prompts[turn] for turn in range(requests) for prompts in cut if turn < len(prompts)]


def _sessions(trace: Path, count: int) -> Iterator[dict[str, object]]:
    import zstandard

    with trace.open("rb") as file:
        reader = zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(file)
        text = b""
        while count and (part := reader.read(1 << 20)):
            text += part
            *lines, text = text.split(b"\n")
            for line in lines[:count]:
                count -= 1
                yield json.loads(line)


def _prompts(session: dict[str, object], requests: int, shrink: int, longest: int) -> list[list[int]]:
    found = []
    for request in list(session["requests"])[:requests]:  # type: ignore[call-overload]
        tokens: list[int] = []
        for block in request.get("hash_ids") or ():
            rng = random.Random(f"{session.get('id')} {block}")
            tokens += _some(rng, 64 // shrink)
        if tokens:
            found.append(tokens[:longest])
    return found


def _some(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 200_000) for _ in range(count)]
