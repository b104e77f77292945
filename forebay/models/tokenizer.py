"""Text to token ids and back, over the `tokenizers` library.

Going back, a token stands for bytes, not for text: a character may be spread over several tokens. So answers are
put together as bytes, and text comes out when it is whole characters.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from forebay.models.errors import CheckpointBroken, ModelNotFound, UnsupportedArchitecture
from forebay.models.json_file import read_json

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
SPACE = "▁"


class Tokenizer:
    """A model's tokenizer. Its methods may be called from any thread.

    `bos` is put before every text where the library's own frame doesn't do it.
    """

    def __init__(self, library: Library, *, bos: int | None = None) -> None:
        self._library = library
        self._byte_level = _is_byte_level(library)
        added = library.get_added_tokens_decoder()
        self._added = {index: token.content for index, token in added.items()}
        self._special = frozenset(index for index, token in added.items() if token.special)
        framed = library.encode("", add_special_tokens=True).ids
        self._bos = bos if bos is not None and bos not in framed else None

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """The tokenizer of a checkpoint directory.

        Raises ModelNotFound, CheckpointBroken, UnsupportedArchitecture.
        """
        file = directory / TOKENIZER_FILE
        if not file.is_file():
            raise ModelNotFound(f"{directory} has no {TOKENIZER_FILE}; copy it from the model's source")
        try:
            library = Library.from_file(str(file))
        except Exception as error:  # the library raises bare exceptions
            raise CheckpointBroken(f"{file} is no tokenizer ({error}); restore it from the model's source") from error
        return cls(library, bos=_wanted_bos(directory, library))

    @property
    def vocab_size(self) -> int:
        """How many token ids there are, added tokens included."""
        return int(self._library.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Token ids. With `add_bos` the model's own frame is put around (usually a beginning-of-sequence token);
        special tokens in the text are recognised either way. Lone surrogates become U+FFFD."""
        clean = text.encode("utf-8", "replace").decode() if not text.isascii() else text
        ids = list(self._library.encode(clean, add_special_tokens=add_bos).ids)
        return [self._bos, *ids] if add_bos and self._bos is not None else ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """A whole text, special tokens left out: the space that SentencePiece puts before a text is gone again.
        What continues a text needs `decoder`."""
        known = [token for token in token_ids if 0 <= token < 2**32]
        return str(self._library.decode(known, skip_special_tokens=True))

    def decoder(self) -> IncrementalDecoder:
        """A decoder for one answer."""
        return IncrementalDecoder(self)

    def token(self, token_id: int) -> str:
        """One token as people see it, special ones by their name."""
        if token_id in self._special:
            return self._added[token_id]
        return self.token_bytes(token_id).decode("utf-8", "replace") or f"<{token_id}>"

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to an answer: nothing if it is special or not known."""
        if token_id in self._special:
            return b""
        if token_id in self._added:
            return self._added[token_id].encode("utf-8", "replace")
        piece = self._library.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if piece is None:
            return b""
        if self._byte_level:
            return bytes(_BYTES[character] for character in piece if character in _BYTES)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return str(piece).replace(SPACE, " ").encode("utf-8", "replace")


@dataclass
class IncrementalDecoder:
    """Turns tokens into text as they come. What is no whole character yet is held back: at most three bytes."""

    tokenizer: Tokenizer
    _utf8: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete."""
        return self._utf8.decode(b"".join(map(self.tokenizer.token_bytes, token_ids)))

    def flush(self) -> str:
        """What is left at the end, damaged characters replaced."""
        return self._utf8.decode(b"", final=True)


def _byte_table() -> dict[str, int]:
    """The characters by which byte-level BPE writes bytes: printable ones stand for themselves, the others for
    characters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    hidden = [byte for byte in range(256) if byte not in set(plain)]
    return table | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


_BYTES = _byte_table()


def _is_byte_level(library: Library) -> bool:
    """Whether pieces are written in bytes' characters, or as SentencePiece writes them. Raises
    UnsupportedArchitecture for what is neither."""
    decoder: dict[str, Any] = json.loads(library.decoder.__getstate__()) if library.decoder is not None else {}
    kinds = {str(part.get("type")) for part in decoder.get("decoders", [decoder])}
    if "ByteLevel" in kinds:
        return True
    if kinds & {"ByteFallback", "Metaspace"}:
        return False
    raise UnsupportedArchitecture(
        f"a tokenizer that decodes by {', '.join(sorted(kinds))} is not supported; use a model with a byte-level or "
        "SentencePiece tokenizer"
    )


def _wanted_bos(directory: Path, library: Library) -> int | None:
    """The token that the settings want before every text. Older checkpoints say so only there."""
    settings = read_json(directory / SETTINGS_FILE) if (directory / SETTINGS_FILE).is_file() else {}
    if settings.get("add_bos_token") is not True:
        return None
    bos = settings.get("bos_token")
    name = bos.get("content") if isinstance(bos, dict) else bos
    return library.token_to_id(name) if isinstance(name, str) else None
