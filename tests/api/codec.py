"""A tokenizer of bytes: token 0 ends, 1 begins, byte b is token b + 2. Multi-byte characters span tokens."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

EOS, BOS, VOCAB = 0, 1, 258


class ByteDecoder:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(bytes(token - 2 for token in token_ids if token >= 2))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteCodec:
    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        return [BOS] * add_bos + [byte + 2 for byte in text.encode()]

    def decode(self, token_ids: Sequence[int]) -> str:
        decoder = ByteDecoder()
        return decoder.feed(token_ids) + decoder.flush()

    def decoder(self) -> ByteDecoder:
        return ByteDecoder()

    def token(self, token_id: int) -> str:
        return {EOS: "<end>", BOS: "<begin>"}.get(token_id) or bytes([token_id - 2]).decode("utf-8", "replace")


class LineChat:
    """`role: text` a line, after the names of the tools."""

    source = "{{ tools }} <tool_call>"

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:  # fmt: skip
        lines = [f"tool: {tool['function']['name']}" for tool in tools or ()]
        lines += [f"{message['role']}: {message['content']}" for message in messages]
        return "\n".join([*lines, "assistant:"] if add_generation_prompt else lines)
