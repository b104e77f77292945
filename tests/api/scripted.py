"""A worker that says what a script says, over the real protocol, in the test's own process.

Its output is a function of the prompt: the text after the prompt's last `|`, byte by byte, then the end of
sequence. So whoever goes on with a request can be seen to go on at the right place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from forebay.ipc.framing import FrameBuffer
from forebay.ipc.sockets import listen
from forebay.kvstore.identity import GroupGeometry, Namespace, encode_namespace, unpack_tokens
from forebay.workers.protocol import (
    FROM_WORKER,
    LEAVING,
    TO_WORKER,
    Alive,
    Cancel,
    Describe,
    Description,
    Drain,
    Finished,
    FinishReason,
    Generate,
    GetWorkerStats,
    Outputs,
    PromptScores,
    Started,
    TokenOut,
    TokenScore,
    ToWorker,
    WorkerStats,
)
from tests.api.codec import EOS, VOCAB

CONTEXT = 2000
NAMESPACE = Namespace(b"w" * 32, (GroupGeometry("full", "full", (0,), 1, 8, "float32"),), chunk_tokens=32)


def script_of(prompt: bytes) -> list[int]:
    """The whole answer to a prompt (u32 LE)."""
    tokens = list(unpack_tokens(prompt))
    bar = ord("|") + 2
    at = len(tokens) - 1 - tokens[::-1].index(bar) if bar in tokens else -1
    return [*tokens[at + 1 :], EOS]


@dataclass
class ScriptedWorker:
    """`pace_s` between tokens. `hold` stops after that many tokens of a first attempt. `refuse` answers every
    request at once with this error. `stalled_s` and `draining` are told with heartbeats. A `silent` one
    takes requests and says nothing of them."""

    path: Path
    pace_s: float = 0.0
    hold: int | None = None
    refuse: str = ""
    mute: bool = False
    asked: list[Generate] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    on_ask: Callable[[Generate], None] | None = None
    model: str = "scripted"
    weights: bytes = NAMESPACE.weights
    store: str = "connected"
    guided: bool = True
    stalled_s: float = 0.0
    draining: bool = False
    silent: bool = False
    moved: list[str] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)
    _tasks: dict[tuple[str, int], asyncio.Task[None]] = field(default_factory=dict)
    _server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, sock=listen(self.path))
        self._beating = asyncio.create_task(self._beat())

    async def die(self) -> None:
        """As SIGKILL: connections end, nothing is said."""
        assert self._server is not None
        self._server.close()
        self._beating.cancel()
        for task in self._tasks.values():
            task.cancel()
        self.hang_up()
        self.path.unlink(missing_ok=True)
        await asyncio.sleep(0)

    def hang_up(self) -> None:
        """End the connections; new ones are taken."""
        for writer in self._writers:
            writer.transport.abort()

    def say(self, message: object) -> None:
        for writer in self._writers:
            if not writer.is_closing():
                writer.write(FROM_WORKER.encode(message))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            if not self.mute:
                self.beat()

    def beat(self) -> None:
        self.say(Alive(boot=str(id(self)), step_s=0.0, stalled_s=self.stalled_s, draining=self.draining))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        buffer: FrameBuffer[ToWorker] = FrameBuffer(TO_WORKER)
        while data := await reader.read(1 << 16):
            for message in buffer.feed(data):
                self._take(message)

    def _take(self, message: ToWorker) -> None:
        match message:
            case Describe():
                if not self.mute:
                    self.say(self._description())
            case GetWorkerStats():
                self.say(WorkerStats(values={"cached.host": 7.0}, store=self.store))
            case Cancel():
                (self.moved if message.move else self.cancelled).append(message.id)
                task = self._tasks.pop((message.id, message.attempt), None)
                if task is not None:
                    task.cancel()
                    reason: FinishReason = "moved" if message.move else "cancelled"
                    self.say(Finished(id=message.id, attempt=message.attempt, reason=reason))
            case Drain():
                self.draining = message.on
                self.beat()
            case Generate():
                self.asked.append(message)
                if self.on_ask is not None:
                    self.on_ask(message)
                self._tasks[message.id, message.attempt] = asyncio.create_task(self._generate(message))

    def _description(self) -> Description:
        return Description(
            boot=str(id(self)), pid=1, model=self.model, vocab_size=VOCAB, max_context=CONTEXT, eos_ids=[EOS],
            namespace=encode_namespace(msgspec.structs.replace(NAMESPACE, weights=self.weights)), store=self.store,
            guided=self.guided,
        )  # fmt: skip

    async def _generate(self, ask: Generate) -> None:
        if self.silent:
            return
        if self.refuse or self.draining:
            self.say(Finished(id=ask.id, attempt=ask.attempt, reason="error", error=self.refuse or LEAVING))
            return
        cached = {"device": 16, "host": 32} if len(ask.prompt) // 4 > 48 else {}
        self.say(Started(id=ask.id, attempt=ask.attempt, cached_tokens=sum(cached.values()), cached=cached))
        self.begun.append(ask.id)
        if ask.sampling.prompt_logprobs is not None:
            self._say_scores(ask, ask.sampling.prompt_logprobs)
        script, done = script_of(ask.prompt), len(ask.emitted) // 4
        assert list(unpack_tokens(ask.emitted)) == script[:done]
        for index in range(done, min(len(script), ask.sampling.max_tokens)):
            if self.hold is not None and index >= self.hold:
                await asyncio.Event().wait()
            if self.pace_s:
                await asyncio.sleep(self.pace_s)
            self.say(Outputs(tokens=[self._out(ask, index, script[index])]))
            if script[index] == EOS and not ask.sampling.ignore_eos:
                self.say(Finished(id=ask.id, attempt=ask.attempt, reason="stop"))
                return
            if ask.hand_over:
                self.say(Finished(id=ask.id, attempt=ask.attempt, reason="moved"))
                return
        self.say(Finished(id=ask.id, attempt=ask.attempt, reason="length"))

    def _say_scores(self, ask: Generate, count: int) -> None:
        """Each token of the prompt, from the second on, is the second likeliest; told in two messages."""
        prompt = list(unpack_tokens(ask.prompt))
        scores = [TokenScore(-0.5, 2, [((token + 1) % VOCAB, -0.25)][:count]) for token in prompt[1:]]
        half = len(scores) // 2
        for start, some in ((1 + half, scores[half:]), (1, scores[:half])):
            self.say(PromptScores(id=ask.id, attempt=ask.attempt, start=start, scores=some))

    @staticmethod
    def _out(ask: Generate, index: int, token: int) -> TokenOut:
        if ask.sampling.logprobs is None:
            return TokenOut(ask.id, ask.attempt, index, token)
        logprob = -0.5 - ask.sampling.choice % 3
        top = [(token, -0.5), ((token + 1) % VOCAB, -1.5), ((token + 2) % VOCAB, -2.5)]
        return TokenOut(ask.id, ask.attempt, index, token, logprob, top[: ask.sampling.logprobs])
