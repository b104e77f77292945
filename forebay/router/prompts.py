"""From a request's body to what is routed: token ids and what beside them makes the first block.

Texts are tokenised once, by a worker that serves the model; what a text came to is remembered (bounded, a caller's
own), and a completion's text is sent on as the ids, so that nobody does it again. Of a text that goes on from a
known one only the end is asked for (`token_memory`): of a conversation, too, by its last messages. A template that
shows earlier messages otherwise as soon as more come is found out at the end of the known text; one that does so
further up would cost hits, and nothing else, for a chat's ids stay here.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import xxhash

from forebay.kvstore.identity import KEY_BYTES, root_key
from forebay.router.client import BackendFailed, ask
from forebay.router.questions import Ends, Question, chat_question, completion_question
from forebay.router.settings import RouterConfig
from forebay.router.token_memory import Remembered, TokenMemory, stitched
from forebay.router.upstream import Upstream, Upstreams
from forebay.scheduler.prefix_keys import Tokens, as_tokens, extra_of
from forebay.scheduler.routing import Prompt

REMEMBERED_SALTS_MAX = 1 << 12
CHARACTERS_A_TOKEN = 4
GROWN_BYTES_MIN = 1 << 14
"""Texts shorter than this are tokenised as a whole: a question costs more than they do."""
END_BYTES = 1 << 11
"""How much of a known text's end is tokenised again with what came."""
PASSED_ON = ("authorization",)
SESSION_HEADERS = ("x-session-id", "x-dynamo-session-id", "x-session-token")


class _Tokenised(msgspec.Struct):
    tokens: list[int]


class _Namespace(msgspec.Struct):
    id: str
    root: str


@dataclass(frozen=True, slots=True)
class Asked:
    """A request's prompt, and whether `tokens` may stand for its text in the body."""

    prompt: Prompt
    replaces: bool


class Prompts:
    """Reads prompts. Its questions to workers are bounded in time; without an answer a prompt is routed by load."""

    def __init__(self, config: RouterConfig, upstreams: Upstreams) -> None:
        self._config, self._upstreams = config, upstreams
        self.memory = TokenMemory()
        self.grown_bytes_min = GROWN_BYTES_MIN
        self.questions = self.asked_bytes = self.failures = 0
        self._salts: OrderedDict[tuple[str, str], int] = OrderedDict()

    async def read(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str], any_of: Upstream) -> Asked:
        """The prompt of a request that `any_of` could take. Never fails: what can't be read is just long."""
        model = str(body.get("model") or next(iter(any_of.models), ""))
        parent = any_of.models.get(model)
        session = next((_digest(headers[name]) for name in SESSION_HEADERS if name in headers), None)
        known, replaces = await self._tokens(path, body, headers, any_of)
        extra = await self._extra(body, headers, any_of)
        lora = None if parent is None else model
        if known is None:
            return Asked(Prompt(parent or model, None, max(1, _length(body)), extra, lora, session), False)
        prompt = Prompt(
            parent or model, known.tokens, known.tokens.size, extra, lora, session, known.keys, known.begun
        )
        return Asked(prompt, replaces)

    def statistics(self) -> dict[str, int]:
        """Gauges (`remembered_...`, with their caps) and counters."""
        memory = self.memory
        return {
            "remembered_texts": len(memory), "remembered_tokens": memory.tokens, "remembered_tokens_max": memory.most,
            "remembered_salts": len(self._salts), "remembered_salts_max": REMEMBERED_SALTS_MAX,
            "texts_known": memory.hits, "texts_new": memory.misses, "texts_grown": memory.grown,
            "tokenise_questions": self.questions, "tokenise_bytes": self.asked_bytes,
            "tokenise_failures": self.failures,
        }  # fmt: skip

    async def _tokens(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str], upstream: Upstream
    ) -> tuple[Remembered | None, bool]:
        model, ours = next(iter(upstream.models), ""), upstream.ours
        if path.endswith("/chat/completions"):
            question = chat_question(body, model, ours=ours)
            return (None if question is None else await self._tokenised(question, headers, upstream)), False
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
            prompt = prompt[0]  # of several, the first one counts
        if isinstance(prompt, list):
            ids = _ids(prompt)
            return (None if ids is None else Remembered(0, b"", ids)), False
        if not isinstance(prompt, str):
            return None, False
        known = await self._tokenised(completion_question(body, prompt, model, ours=ours), headers, upstream)
        return known, known is not None and isinstance(body.get("prompt"), str) and not body.get("echo")

    async def _tokenised(
        self, question: Question, headers: Mapping[str, str], upstream: Upstream
    ) -> Remembered | None:
        who = _digest(headers.get("authorization", ""))
        text = question.text(who)
        known = self.memory.get(text)
        if known is not None:
            return known
        before = self.memory.longest(text) if len(text) >= self.grown_bytes_min else None
        tokens = None
        if before is not None:
            ends = question.ends(who, before.size, END_BYTES)
            tokens = None if ends is None else await self._gone_on(before.tokens, ends, headers, upstream)
            self.memory.grown += tokens is not None
        if tokens is None:
            tokens = await self._ask(question.body, headers, upstream)
        if tokens is None:
            self.failures += 1
            return None
        return self.memory.put(text, tokens, before)

    async def _gone_on(
        self, whole: Tokens, ends: Ends, headers: Mapping[str, str], upstream: Upstream
    ) -> Tokens | None:
        old, new = await asyncio.gather(*(self._ask(end, headers, upstream) for end in ends))
        return None if old is None or new is None else stitched(whole, old, new)

    async def _ask(self, body: bytes, headers: Mapping[str, str], upstream: Upstream) -> Tokens | None:
        self.questions += 1
        self.asked_bytes += len(body)
        answer = await self._post(upstream, "/tokenize", body, headers)
        try:
            return None if answer is None else _ids(msgspec.json.decode(answer, type=_Tokenised).tokens)
        except msgspec.MsgspecError:
            return None

    async def _extra(self, body: Mapping[str, Any], headers: Mapping[str, str], upstream: Upstream) -> int:
        """What this caller's blocks begin with, as the events name it."""
        salt, who = str(body.get("cache_salt") or ""), headers.get("authorization", "")
        if not upstream.ours:
            return extra_of([salt] if salt else None)
        name = (_digest(who), _digest(salt))
        if name not in self._salts:
            found = await self._root(salt, headers, upstream)
            if found is None:
                return 0
            self._salts[name] = found
            if len(self._salts) > REMEMBERED_SALTS_MAX:
                self._salts.popitem(last=False)
        return self._salts[name]

    async def _root(self, salt: str, headers: Mapping[str, str], upstream: Upstream) -> int | None:
        query = f"?cache_salt={_quoted(salt)}" if salt else ""
        try:
            status, data = await self._upstreams.get(upstream, f"/forebay/namespace{query}", passed_on(headers))
            if status != 200:
                return None
            told = msgspec.json.decode(data, type=_Namespace)
            namespace = bytes.fromhex(told.id)
        except (BackendFailed, msgspec.MsgspecError, ValueError):
            return None
        if len(namespace) != KEY_BYTES:
            return None
        return 0 if told.root == root_key(namespace).hex() else extra_of([f"salt:{told.root[:16]}"])

    async def _post(self, upstream: Upstream, path: str, data: bytes, headers: Mapping[str, str]) -> bytes | None:
        backend = upstream.backend
        sent = passed_on(headers) | {"content-type": "application/json"}
        try:
            async with asyncio.timeout(self._config.connect_s * 2):
                answer = await ask(
                    backend.host, backend.port, "POST", path, body=data, headers=sent, connect_s=self._config.connect_s
                )
                async with answer:
                    whole = await answer.whole()
                    return whole if answer.status == 200 else None
        except (BackendFailed, TimeoutError):
            return None


def _digest(text: str) -> str:
    """What stands for a text that a caller gave, in what is remembered: of bounded size."""
    return xxhash.xxh3_128_hexdigest(text.encode())


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that go on to a worker with a request."""
    return {name: headers[name] for name in PASSED_ON if name in headers}


def _ids(given: list[Any]) -> Tokens | None:
    if not given or not all(type(token) is int and 0 <= token < 1 << 32 for token in given):
        return None
    return np.array(given, np.uint32) if len(given) else as_tokens([])


def _length(body: Mapping[str, Any]) -> int:
    """About how many tokens a prompt has that nobody could tokenise."""
    return len(msgspec.json.encode(body.get("messages") or body.get("prompt"))) // CHARACTERS_A_TOKEN


def _quoted(text: str) -> str:
    from urllib.parse import quote

    return quote(text, safe="")
