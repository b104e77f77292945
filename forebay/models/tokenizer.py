"""Text to token ids and back, over the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer as Library

from forebay.models.errors import CheckpointBroken, ModelNotFound

TOKENIZER_FILE = "tokenizer.json"
REPLACEMENT = "�"
SPACE = "▁"
HELD_TOKENS_MAX = 32
"""An answer that is no valid UTF-8 for this many tokens never becomes so: it is let through, replaced."""


class Tokenizer:
    """A model's tokenizer. Its methods may be called from any thread."""

    def __init__(self, library: Library) -> None:
        self._library = library
        added = library.get_added_tokens_decoder()
        self._special = {index: token.content for index, token in added.items() if token.special}

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """The tokenizer of a checkpoint directory. Raises ModelNotFound or CheckpointBroken."""
        file = directory / TOKENIZER_FILE
        if not file.is_file():
            raise ModelNotFound(f"{directory} has no {TOKENIZER_FILE}; copy it from the model's source")
        try:
            return cls(Library.from_file(str(file)))
        except Exception as error:  # the library raises bare exceptions
            raise CheckpointBroken(f"{file} is no tokenizer ({error}); restore it from the model's source") from error

    @property
    def vocab_size(self) -> int:
        """How many token ids there are, added tokens included."""
        return self._library.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Token ids. With `add_bos` the model's own frame is put around (usually a beginning-of-sequence token);
        special tokens in the text are recognised either way."""
        return list(self._library.encode(text, add_special_tokens=add_bos).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones left out."""
        return str(self._library.decode(list(token_ids), skip_special_tokens=True))

    def decoder(self) -> IncrementalDecoder:
        """A decoder for one answer."""
        return IncrementalDecoder(self)

    def token(self, token_id: int) -> str:
        """One token as people see it, special ones by their name."""
        if token_id in self._special:
            return self._special[token_id]
        raw = self._library.id_to_token(token_id)
        if raw is None:
            return f"<{token_id}>"
        if SPACE in raw or raw.startswith("<0x"):
            return str(raw).replace(SPACE, " ")
        return str(self._library.decode([token_id], skip_special_tokens=False)) or str(raw)


@dataclass
class IncrementalDecoder:
    """Turns tokens into text as they come. What is no whole character yet is held back.

        ids      ... [ context | shown | new ]
                     ^_start   ^_shown          text(start..) begins with text(start..shown)

    A few shown tokens stay as context, since the first token after a cut may lose its space.
    """

    tokenizer: Tokenizer
    _ids: list[int] = field(default_factory=list)
    _start: int = 0
    _shown: int = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete."""
        self._ids.extend(token_ids)
        text = self._news()
        if text.endswith(REPLACEMENT) and len(self._ids) - self._shown < HELD_TOKENS_MAX:
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return text

    def flush(self) -> str:
        """What is left at the end, damaged characters replaced."""
        text = self._news()
        self._start = self._shown = len(self._ids)
        return text

    def _news(self) -> str:
        if self._shown == len(self._ids):
            return ""
        before = self.tokenizer.decode(self._ids[self._start : self._shown])
        return self.tokenizer.decode(self._ids[self._start :])[len(before) :]
