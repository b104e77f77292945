"""From GGUF's tokenizer metadata to a `tokenizer.json`.

Two kinds: "llama" is SentencePiece's BPE, with scores instead of merges and bytes as a last resort; "gpt2" is BPE
over bytes, with merges and a regular expression that splits text first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from forebay.models.errors import CheckpointBroken, UnsupportedArchitecture
from forebay.models.gguf_file import GGUFFile

SPACE = "▁"


class Kind(IntEnum):
    """GGUF's token types."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# How each pre-tokenizer splits text before BPE.
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    "llama-bpe": rf"{_LETTERS}|\p{{N}}{{1,3}}|{_REST}",
    "llama3": rf"{_LETTERS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_LETTERS}|\p{{N}}|{_REST}",
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    file: GGUFFile
    tokens: Sequence[str]
    kinds: Sequence[int]

    def entry(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"tokenizer.ggml.{key}", default)

    def token(self, key: str) -> str | None:
        """The text of the token that an entry such as bos_token_id names."""
        index = self.entry(key)
        return self.tokens[index] if isinstance(index, int) and 0 <= index < len(self.tokens) else None


def write_tokenizer(file: GGUFFile, directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`. Raises CheckpointBroken or UnsupportedArchitecture."""
    vocabulary = _read_vocabulary(file)
    model = file.metadata.get("tokenizer.ggml.model")
    if model == "llama":
        tokenizer = _sentencepiece(vocabulary)
    elif model == "gpt2":
        tokenizer = _byte_level(vocabulary)
    else:
        raise UnsupportedArchitecture(
            f"{file.path}: tokenizer type {model!r} is not supported; use a model with a SentencePiece or "
            "byte-level BPE tokenizer"
        )
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in _of_kind(vocabulary, Kind.CONTROL)]
    )
    tokenizer.add_tokens(
        [
            # These match the text as it is written, before spaces are replaced.
            AddedToken(text.replace(SPACE, " "), special=False, normalized=False)
            for text in _of_kind(vocabulary, Kind.USER_DEFINED)
        ]
    )
    bos = vocabulary.token("bos_token_id")
    adds_bos = bool(vocabulary.entry("add_bos_token", model == "llama"))
    if adds_bos and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, vocabulary.entry("bos_token_id"))],
        )
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    settings = {
        "add_bos_token": adds_bos,
        "bos_token": bos,
        "eos_token": vocabulary.token("eos_token_id"),
        "chat_template": file.metadata.get("tokenizer.chat_template"),
    }
    kept = {key: value for key, value in settings.items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(kept, indent=1))


def _read_vocabulary(file: GGUFFile) -> _Vocabulary:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise CheckpointBroken(f"{file.path} has no tokenizer; convert it again from its source")
    kinds = file.metadata.get("tokenizer.ggml.token_type", [Kind.NORMAL] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise CheckpointBroken(f"{file.path} has {len(tokens)} tokens and other than that many types")
    return _Vocabulary(file, tokens, kinds)


def _of_kind(vocabulary: _Vocabulary, kind: Kind) -> Iterator[str]:
    for text, found in zip(vocabulary.tokens, vocabulary.kinds, strict=True):
        if found == kind:
            yield text


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    ids = _ids(vocabulary)
    scores = vocabulary.entry("scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        raise CheckpointBroken(f"{vocabulary.file.path} has no scores for its tokens")
    tokenizer = Tokenizer(
        BPE(
            ids,
            _merges_from_scores(vocabulary, ids, scores),
            unk_token=vocabulary.token("unknown_token_id"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(vocabulary.entry("add_space_prefix", True))
    replace = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _ids(vocabulary: _Vocabulary) -> dict[str, int]:
    """Text -> id. A user-defined token stands under the text that it matches."""
    return {
        text.replace(SPACE, " ") if kind == Kind.USER_DEFINED else text: index
        for index, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
    }


def _merges_from_scores(vocabulary: _Vocabulary, ids: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the two neighbours whose union scores best; so a merge ranks by its result's score.

    Of several ways to the same result the one with the longer left part comes first: SentencePiece takes the
    leftmost pair, and that is the one that has grown.
    """
    ranked: list[tuple[float, int, str, str]] = []
    for index, (piece, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True)):
        if kind != Kind.NORMAL:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[index], -cut, left, right))
    ranked.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in ranked]


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    name = str(vocabulary.entry("pre", "gpt-2"))
    if name not in _SPLITS:
        raise UnsupportedArchitecture(
            f"{vocabulary.file.path}: pre-tokenizer {name!r} is not supported; use the model's safetensors "
            "directory, whose tokenizer.json says how it splits"
        )
    merges = vocabulary.entry("merges")
    if not isinstance(merges, list):
        raise CheckpointBroken(f"{vocabulary.file.path} has no merges for its tokens")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise CheckpointBroken(f"{vocabulary.file.path} has merges that aren't pairs")
    ids = {text: index for index, text in enumerate(vocabulary.tokens)}
    known = [pair for pair in pairs if pair[0] in ids and pair[1] in ids and "".join(pair) in ids]
    tokenizer = Tokenizer(BPE(ids, known, ignore_merges=name.startswith("llama")))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLITS[name]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
