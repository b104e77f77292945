"""What the front end needs of a tokenizer and a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Decoder(Protocol):
    """Turns tokens into text as they come; what is no whole character yet is held back."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete."""

    def flush(self) -> str:
        """What is left at the end, damaged characters replaced."""


class Codec(Protocol):
    """A tokenizer. Its methods may be called from any thread."""

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Token ids of a text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones left out."""

    def decoder(self) -> Decoder:
        """A decoder for one answer."""

    def token(self, token_id: int) -> str:
        """One token as people see it, special ones by their name."""


class Chat(Protocol):
    """A chat template. `source` is its text."""

    source: str

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:  # fmt: skip
        """The prompt of a conversation. Raises ForebayError with a message for the client."""
