"""Text becomes ids and ids become text, whole or as they come."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, normalizers
from tokenizers.models import BPE

from forebay.models.errors import CheckpointBroken, ModelNotFound, UnsupportedArchitecture
from forebay.models.tokenizer import Tokenizer
from tests import checkpoints

TEXTS = (
    "", "the rest, in order", "  two  spaces ", "\n\n\ttabs\r\n", "naïve café", "漢字テスト 한국어", "😀👩‍👩‍👧🏳️‍🌈",
    "def f(x):\n    return x**2", "<eos>a<bos>", "\x00\x7f\u200b",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    checkpoints.write_tokenizer(path, adds_bos=True)
    return path


@pytest.fixture(scope="module")
def byte_level(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """Bytes, a few pieces, and a space that is put before every text."""
    pieces = ["▁", "a", "b", "▁a", "ab", "é"]
    texts = ["<unk>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    library = Library(
        BPE(
            {text: index for index, text in enumerate(texts)},
            [("▁", "a"), ("a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<bos>"])
    return Tokenizer(library)


def in_pieces(tokenizer: Tokenizer, ids: list[int], size: int = 1) -> list[str]:
    decoder = tokenizer.decoder()
    return [*(decoder.feed(ids[i : i + size]) for i in range(0, len(ids), size)), decoder.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_transformers(text: str, folder: Path, byte_level: Tokenizer) -> None:
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    assert byte_level.encode(text) == reference(text).input_ids
    assert byte_level.encode(text, add_bos=False) == reference(text, add_special_tokens=False).input_ids


def test_special_tokens_in_the_text_are_recognised_and_left_out_of_answers(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<eos>a")
    assert ids[:2] == [checkpoints.BOS_ID, checkpoints.EOS_ID]
    assert byte_level.decode(ids) == "a"
    assert "".join(in_pieces(byte_level, ids)) == "a"
    assert byte_level.token(checkpoints.EOS_ID) == "<eos>"


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40), size=st.integers(1, 5))
def test_an_answer_in_pieces_is_the_text(text: str, size: int, byte_level: Tokenizer) -> None:
    ids = byte_level.encode(text, add_bos=False)
    assert "".join(in_pieces(byte_level, ids, size)) == byte_level.decode(ids)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(-5, checkpoints.VOCAB + 10), max_size=30), size=st.integers(1, 30))
def test_any_ids_decode_the_same_in_any_pieces(ids: list[int], size: int, byte_level: Tokenizer) -> None:
    whole = b"".join(map(byte_level.token_bytes, ids)).decode("utf-8", "replace")
    assert "".join(in_pieces(byte_level, ids, size)) == whole


def test_a_character_comes_when_it_is_whole(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a😀b", add_bos=False)
    assert in_pieces(byte_level, ids) == ["a", "", "", "", "😀", "b", ""]


def test_half_a_character_at_the_end_is_replaced(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a😀", add_bos=False)[:-1]
    assert in_pieces(byte_level, ids) == ["a", "", "", "", "\ufffd"]


def test_broken_bytes_do_not_hold_up_what_follows(byte_level: Tokenizer) -> None:
    half = byte_level.encode("😀", add_bos=False)[:2]
    rest = byte_level.encode("ok", add_bos=False)
    assert "".join(in_pieces(byte_level, half + rest)) == "\ufffdok"


def test_sentencepiece_bytes_and_spaces(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("a ab é😀 ", add_bos=False)
    assert in_pieces(sentencepiece, ids)[-6:] == ["", "", "", "😀", " ", ""]
    # What continues a text keeps the space that a whole text loses.
    assert "".join(in_pieces(sentencepiece, ids)) == " a ab é😀 "
    assert sentencepiece.decode(ids) == "a ab é😀 "


def test_tokens_by_name(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    (newline,) = byte_level.encode("\n", add_bos=False)
    assert byte_level.token(newline) == "\n"
    assert byte_level.token(byte_level.encode("😀", add_bos=False)[0]) == "\ufffd"
    assert sentencepiece.token(2 + 0x0A) == "\n"
    assert byte_level.token(9999) == "<9999>"


def test_lone_surrogates_do_not_fail(byte_level: Tokenizer) -> None:
    assert byte_level.decode(byte_level.encode("a\ud800b")) == "a?b"


def test_a_bos_that_only_the_settings_want(tmp_path: Path) -> None:
    checkpoints.write_tokenizer(tmp_path, adds_bos=False)
    assert Tokenizer.load(tmp_path).encode("a")[0] != checkpoints.BOS_ID
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True, "bos_token": "<bos>"}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("a")[0] == checkpoints.BOS_ID
    assert tokenizer.encode("a", add_bos=False) == tokenizer.encode("a")[1:]


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="copy it"):
        Tokenizer.load(tmp_path)
    for text in ("", "{}", '{"model": 5}', "\x00"):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(CheckpointBroken, match="restore it"):
            Tokenizer.load(tmp_path)


def test_a_tokenizer_that_decodes_in_another_way_is_refused(tmp_path: Path) -> None:
    library = Library(BPE({"a": 0}, []))
    library.decoder = decoders.WordPiece()
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedArchitecture, match="WordPiece"):
        Tokenizer.load(tmp_path)
