"""GGUF files compute what the checkpoints they were made from compute; damaged ones are refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch

from forebay.models.config import Config, read_config
from forebay.models.errors import CheckpointBroken, ModelError, UnsupportedArchitecture
from forebay.models.gguf_config import gguf_config
from forebay.models.gguf_file import read_gguf
from forebay.models.loading import checkpoint_directory, load_model, read_info
from forebay.models.rope import Rope, YarnScaling, yarn_magnitude
from forebay.models.rope_config import read_rope
from forebay.models.tokenizer import Tokenizer
from tests import checkpoints
from tests.models.gguf_files import write_gguf
from tests.parity.reference import Runner

CPU = torch.device("cpu")
MAKERS: dict[str, Callable[[Path], Path]] = {
    "gemma3": lambda path: checkpoints.tiny_gemma3(path, query_pre_attn_scalar=24),
    "qwen3": checkpoints.tiny_qwen3,
    "qwen2": checkpoints.tiny_qwen2,
    "llama": checkpoints.tiny_llama,
}


def logits(path: Path, cache_dir: Path) -> torch.Tensor:
    model = load_model(path, dtype=torch.float64, device=CPU, cache_dir=cache_dir)
    return Runner(model).step({0: list(range(4, 94))})


@pytest.mark.parametrize("name", MAKERS)
def test_an_unquantised_file_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    checkpoint = MAKERS[name](tmp_path / "hf")
    file = write_gguf(checkpoint, tmp_path / "model.gguf")
    found, wanted = logits(file, tmp_path / "cache"), logits(checkpoint, tmp_path / "cache")
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)  # the file keeps eps and norms in fp32


@pytest.mark.parametrize("name", MAKERS)
def test_facts_are_the_same_with_and_without_conversion(name: str, tmp_path: Path) -> None:
    checkpoint = MAKERS[name](tmp_path / "hf")
    file = write_gguf(checkpoint, tmp_path / "model.gguf")
    before = read_info(file)
    directory = checkpoint_directory(file, cache_dir=tmp_path / "cache")
    assert before == read_info(directory)
    converted, original = read_config(directory), read_config(checkpoint)
    assert converted.get("architectures") == original.get("architectures"), "what other engines choose its class by"
    wanted = read_info(checkpoint)
    assert before.kv_groups == wanted.kv_groups
    assert before.rope == wanted.rope
    assert (before.vocab_size, before.max_context) == (wanted.vocab_size, wanted.max_context)


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q5_0])
def test_a_quantised_file_stays_near(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    checkpoint = checkpoints.tiny_qwen3(tmp_path / "hf", head_dim=32)
    file = write_gguf(checkpoint, tmp_path / "model.gguf", kind=kind)
    found, wanted = logits(file, tmp_path / "cache"), logits(checkpoint, tmp_path / "cache")
    assert torch.corrcoef(torch.stack((found.flatten(), wanted.flatten())))[0, 1] > 0.9


def test_rope_factors_divide_the_frequencies(tmp_path: Path) -> None:
    checkpoint = checkpoints.tiny_llama(tmp_path / "hf")
    plain = write_gguf(checkpoint, tmp_path / "plain.gguf")
    ones = write_gguf(checkpoint, tmp_path / "ones.gguf", rope_factors=[1.0] * 10)
    four = write_gguf(checkpoint, tmp_path / "four.gguf", rope_factors=[4.0] * 10)
    linear = checkpoints.tiny_llama(
        tmp_path / "linear", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    )
    cache = tmp_path / "cache"
    assert torch.equal(logits(ones, cache), logits(plain, cache))
    torch.testing.assert_close(logits(four, cache), logits(linear, cache), rtol=0, atol=1e-6)
    assert read_info(four).rope != read_info(plain).rope


def test_yarn_is_read(tmp_path: Path) -> None:
    file = read_gguf(write_gguf(checkpoints.tiny_qwen3(tmp_path / "hf"), tmp_path / "model.gguf"))
    entries = {"type": "yarn", "factor": 4.0, "original_context_length": 1024}
    stretched = replace(file, metadata=file.metadata | {f"qwen3.rope.scaling.{k}": v for k, v in entries.items()})
    rope = read_rope(Config(gguf_config(stretched), file.path), 24, theta=1e4)
    wanted = YarnScaling(factor=4.0, original_context=1024, magnitude=yarn_magnitude(4.0))
    assert rope == Rope(10_000.0, 24, yarn=wanted)
    with pytest.raises(CheckpointBroken, match=r"rope\.scaling\.factor"):
        gguf_config(replace(file, metadata=file.metadata | {"qwen3.rope.scaling.type": "yarn"}))


def test_the_byte_level_tokenizer_is_kept(tmp_path: Path) -> None:
    checkpoint = checkpoints.tiny_llama(tmp_path / "hf")
    file = write_gguf(checkpoint, tmp_path / "model.gguf")
    found = Tokenizer.load(checkpoint_directory(file, cache_dir=tmp_path / "cache"))
    wanted = Tokenizer.load(checkpoint)
    for text in ("the rest, in order", " 漢字 😀\n\n x", "<eos>a<bos>", ""):
        assert found.encode(text) == wanted.encode(text)
        assert found.decode(found.encode(text)) == wanted.decode(wanted.encode(text))


def test_the_sentencepiece_tokenizer_merges_by_score(tmp_path: Path) -> None:
    file = write_gguf(MAKERS["gemma3"](tmp_path / "hf"), tmp_path / "model.gguf")
    tokenizer = Tokenizer.load(checkpoint_directory(file, cache_dir=tmp_path / "cache"))
    pieces = [tokenizer.token(token) for token in tokenizer.encode("abc aab", add_bos=False)]
    # " a" scores better than "aa" and "ab", "ab" better than "abc".
    assert pieces == ["abc", " a", "ab"]
    assert tokenizer.encode("a")[0] == 2
    # What is in no piece is spelled in bytes.
    assert tokenizer.encode("é", add_bos=False) == [4 + 0xC3, 4 + 0xA9]
    # A user-defined token is matched before anything is merged.
    assert [tokenizer.token(token) for token in tokenizer.encode("a  a", add_bos=False)] == ["a", "  ", "a"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole")
    return write_gguf(checkpoints.tiny_qwen3(folder / "hf"), folder / "model.gguf").read_bytes()


def test_a_file_cut_anywhere_is_refused(whole: bytes, tmp_path: Path) -> None:
    header = min(tensor.offset for tensor in _tensors(whole, tmp_path))
    cuts = [*range(0, 200), *range(200, header, 97), *range(header, len(whole), len(whole) // 40), len(whole) - 1]
    path = tmp_path / "cut.gguf"
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointBroken, match=r"download it again|not a GGUF"):
            checkpoint_directory(path, cache_dir=tmp_path / "cache")


def test_a_file_damaged_anywhere_in_its_header_raises_nothing_but_model_errors(whole: bytes, tmp_path: Path) -> None:
    header = min(tensor.offset for tensor in _tensors(whole, tmp_path))
    path, rng = tmp_path / "damaged.gguf", random.Random(5)
    refused = 0
    for round_number in range(300):
        damaged = bytearray(whole)
        # The dense part, with counts and types, at the front, and then anywhere.
        damaged[rng.randrange(4, 600 if round_number < 150 else header)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            read_info(path)
        except ModelError:
            refused += 1
    assert refused > 20


def _tensors(data: bytes, folder: Path) -> list:
    path = folder / "whole.gguf"
    path.write_bytes(data)
    return list(read_gguf(path).tensors.values())


def test_another_format_is_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointBroken, match="not a GGUF file"):
        read_info(path)


@pytest.mark.parametrize("value", ["many", [4, 4], 0, -3, 2.5])
def test_a_setting_of_the_wrong_kind_is_refused(value: object, tmp_path: Path) -> None:
    file = read_gguf(write_gguf(checkpoints.tiny_qwen3(tmp_path / "hf"), tmp_path / "model.gguf"))
    for key in ("attention.head_count", "embedding_length", "block_count", "attention.key_length"):
        damaged = replace(file, metadata={**file.metadata, f"qwen3.{key}": value})
        with pytest.raises(CheckpointBroken, match=key):
            gguf_config(damaged)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedArchitecture, match="mamba"):
        read_info(tmp_path / "model.gguf")
