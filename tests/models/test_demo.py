"""The demo model: Gemma 3 270M answers in fp32 as its published text says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forebay.kernels.batch import pack_batch
from forebay.models import demo
from forebay.models.base import CausalLM
from forebay.models.chat import ChatTemplate
from forebay.models.demo import demo_available, demo_path, terms_notice
from forebay.models.errors import DemoUnavailable, NoChatTemplate
from forebay.models.loading import checkpoint_directory, load_model, read_info
from forebay.models.tokenizer import Tokenizer

PROMPT = "The capital of France is"
ANSWER = " the capital of the country of France. It is the largest city in France and the second largest city"

needs_demo = pytest.mark.skipif(not demo_available(), reason="the demo package isn't installed")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def file(cache: Path) -> Path:
    return demo_path(cache)


@pytest.fixture(scope="module")
def tokenizer(file: Path, cache: Path) -> Tokenizer:
    return Tokenizer.load(checkpoint_directory(file, cache_dir=cache))


def greedy(model: CausalLM, ids: list[int], count: int) -> list[int]:
    """Continue with the best token each time, in blocks out of order."""
    pools = model.new_pools(dict.fromkeys(("full", "window"), 8))
    tables = {"full": [[6, 1, 3]], "window": [[0, 7, 2]]}
    answer: list[int] = []
    new, context = ids, 0
    while len(answer) < count:
        logits = model.forward(pack_batch([(new, context)], tables), pools)
        context += len(new)
        new = [int(logits[0].argmax())]
        answer += new
    return answer


@needs_demo
def test_fp32_greedy_gives_the_published_text(file: Path, cache: Path, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    assert ids == [2, 818, 5279, 529, 7001, 563]
    model = load_model(file, dtype=torch.float32, device=torch.device("cpu"), cache_dir=cache)
    answer = greedy(model, ids, 20)
    assert tokenizer.decode(answer) == ANSWER
    decoder = tokenizer.decoder()
    assert "".join(decoder.feed([token]) for token in answer) + decoder.flush() == ANSWER


@needs_demo
def test_its_facts(file: Path) -> None:
    info = read_info(file)
    full, window = info.kv_groups
    assert (full.layers, full.kv_heads, full.head_dim) == ((5, 11, 17), 1, 256)
    assert (len(window.layers), window.window) == (15, 512)
    assert (full.granule_bytes(torch.bfloat16), window.granule_bytes(torch.bfloat16)) == (49152, 245760)
    assert (info.max_context, info.bos_id, info.eos_ids) == (32768, 2, (1,))


# What SentencePiece itself gives for these texts, by the reference implementation of this file format.
TOKENS = {
    "Hello  world\n\n\nfoo": ["Hello", "  ", "world", "\n\n\n", "foo"],
    "<start_of_turn>user": ["<start_of_turn>", "user"],
    "x" + " " * 41 + "y": ["x", " " * 31, " " * 10, "y"],
    "héllo 😀": ["h", "él", "lo", " 😀"],
    "𐎀": ["�", "�", "�", "�"],
}


@needs_demo
@pytest.mark.parametrize("text", TOKENS)
def test_text_is_cut_as_sentencepiece_cuts_it(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text, add_bos=False)
    assert [tokenizer.token(token) for token in ids] == TOKENS[text]
    decoder = tokenizer.decoder()
    whole = "".join(decoder.feed([token]) for token in ids) + decoder.flush()
    assert whole == tokenizer.decode(ids) == text.removeprefix("<start_of_turn>")


@needs_demo
def test_it_is_assembled_once_and_whole(tmp_path: Path) -> None:
    cache, file = tmp_path / "cache", demo_path(tmp_path / "cache")
    assert file.stat().st_size == 253_113_024
    before = file.stat().st_mtime_ns
    assert demo_path(cache).stat().st_mtime_ns == before
    with file.open("r+b") as damaged:
        damaged.truncate(1000)
    steps: list[tuple[str, int, int]] = []
    assert demo_path(cache, lambda *step: steps.append(step)).stat().st_size == 253_113_024
    assert steps[-1][1] == steps[-1][2] == 253_113_024


@needs_demo
def test_it_is_a_base_model(file: Path, cache: Path) -> None:
    with pytest.raises(NoChatTemplate):
        ChatTemplate.load(checkpoint_directory(file, cache_dir=cache))


@needs_demo
def test_the_notice_names_the_terms_and_where_they_are() -> None:
    notice = terms_notice()
    assert "Gemma Terms of Use" in notice
    assert Path(notice.split()[-1]).is_file()


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "PACKAGE", "no_such_package")
    assert not demo_available()
    with pytest.raises(DemoUnavailable, match=r"pip install 'forebay\[demo\]'"):
        demo_path(tmp_path)


def test_a_damaged_package_is_not_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes(b"not the model")
    package = SimpleNamespace(chunk_paths=lambda: [part], EXPECTED_SHA256="0" * 64)
    monkeypatch.setattr(demo, "_package", lambda: package)
    with pytest.raises(DemoUnavailable, match="damaged"):
        demo_path(tmp_path / "cache")
    assert not (tmp_path / "cache" / demo.NAME).exists()
