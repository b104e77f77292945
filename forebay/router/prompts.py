"""From a request's body to what is routed: token ids and what beside them makes the first block.

Texts are tokenised once, by a worker that serves the model; what a text came to is remembered (bounded), and a
completion's text is sent on as the ids, so that nobody does it again.
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

from forebay.kvstore.identity import root_key
from forebay.router.client import BackendFailed, ask
from forebay.router.settings import RouterConfig
from forebay.router.upstream import Upstream, Upstreams
from forebay.scheduler.prefix_keys import Tokens, as_tokens, extra_of
from forebay.scheduler.routing import Prompt

REMEMBERED_TOKENS_MAX = 1 << 22
REMEMBERED_SALTS_MAX = 1 << 12
CHARACTERS_A_TOKEN = 4
PASSED_ON = ("authorization",)
SESSION_HEADERS = ("x-session-id", "x-dynamo-session-id", "x-session-token")


class _Tokenised(msgspec.Struct):
    tokens: list[int]


class _Namespace(msgspec.Struct):
    id: str
    root: str


class TokenMemory:
    """Token ids of texts, by a hash of the text; the least recently used go first."""

    def __init__(self, most: int = REMEMBERED_TOKENS_MAX) -> None:
        self.most, self.tokens = most, 0
        self.hits = self.misses = 0
        self._known: OrderedDict[bytes, Tokens] = OrderedDict()

    def get(self, name: bytes) -> Tokens | None:
        """What it came to."""
        found = self._known.get(name)
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        self._known.move_to_end(name)
        return found

    def put(self, name: bytes, tokens: Tokens) -> None:
        """Remember it."""
        if tokens.size > self.most or name in self._known:
            return
        self._known[name] = tokens
        self.tokens += tokens.size
        while self.tokens > self.most:
            self.tokens -= self._known.popitem(last=False)[1].size


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
        self.failures = 0
        self._salts: OrderedDict[tuple[str, str], int] = OrderedDict()

    async def read(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str], any_of: Upstream) -> Asked:
        """The prompt of a request that `any_of` could take. Never fails: what can't be read is just long."""
        model = str(body.get("model") or next(iter(any_of.models), ""))
        parent = any_of.models.get(model)
        session = next((headers[name] for name in SESSION_HEADERS if name in headers), None)
        tokens, replaces = await self._tokens(path, body, headers, any_of)
        extra = await self._extra(body, headers, any_of)
        length = _length(body) if tokens is None else int(tokens.size)
        lora = None if parent is None else model
        return Asked(Prompt(parent or model, tokens, max(1, length), extra, lora, session), replaces)

    async def _tokens(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str], upstream: Upstream
    ) -> tuple[Tokens | None, bool]:
        if path.endswith("/chat/completions"):
            return await self._tokenised({"messages": body.get("messages")}, headers, upstream), False
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
            prompt = prompt[0]  # of several, the first one counts
        if isinstance(prompt, list):
            return _ids(prompt), False
        if not isinstance(prompt, str):
            return None, False
        tokens = await self._tokenised({"prompt": prompt}, headers, upstream)
        return tokens, tokens is not None and isinstance(body.get("prompt"), str) and not body.get("echo")

    async def _tokenised(
        self, question: dict[str, Any], headers: Mapping[str, str], upstream: Upstream
    ) -> Tokens | None:
        data = msgspec.json.encode(question | {"model": next(iter(upstream.models), None)})
        name = xxhash.xxh3_128_digest(data)
        known = self.memory.get(name)
        if known is not None:
            return known
        answer = await self._post(upstream, "/tokenize", data, headers)
        try:
            tokens = None if answer is None else _ids(msgspec.json.decode(answer, type=_Tokenised).tokens)
        except msgspec.MsgspecError:
            tokens = None
        if tokens is None:
            self.failures += 1
        else:
            self.memory.put(name, tokens)
        return tokens

    async def _extra(self, body: Mapping[str, Any], headers: Mapping[str, str], upstream: Upstream) -> int:
        """What this caller's blocks begin with, as the events name it."""
        salt, who = str(body.get("cache_salt") or ""), headers.get("authorization", "")
        if not upstream.ours:
            return extra_of([salt] if salt else None)
        name = (xxhash.xxh3_128_hexdigest(who.encode()), salt)
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
            plain = root_key(bytes.fromhex(told.id)).hex()
        except (BackendFailed, msgspec.MsgspecError, ValueError):
            return None
        return 0 if told.root == plain else extra_of([f"salt:{told.root[:16]}"])

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
