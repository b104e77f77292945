"""Texts that grew: only their end is tokenised, and comes out as if the whole had been."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from forebay.router.questions import chat_question, completion_question
from forebay.router.token_memory import PAGE_BYTES, TEXTS_A_PAGE_MAX, TokenMemory, leading, stitched
from forebay.scheduler.prefix_keys import as_tokens
from forebay.scheduler.routing import KNOWN_MAX, Prompt

WORDS = ["river", "rivers", "the", "water", "forebay", "über", "naïve", "水", "e", "Wasser", "12345", "0.5", "(a)", "…"]
GAPS = [" ", " ", " ", "  ", "\n", "\n\n", "\t", ", ", ". "]


def text_of(rng: random.Random, words: int) -> str:
    return "".join(rng.choice(WORDS) + rng.choice(GAPS) for _ in range(words))


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(made, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False))


def whole_lines() -> Tokenizer:
    """As Gemma's: spaces are a character, and pairs are merged across words."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.Replace(" ", "▁")
    return trained(made, trainers.BpeTrainer(vocab_size=400, show_progress=False))


def pieces() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    return trained(made, trainer)


def trained(made: Tokenizer, trainer: Any) -> Tokenizer:
    rng = random.Random(1)
    made.train_from_iterator([text_of(rng, 60) for _ in range(60)], trainer)
    return made


@pytest.mark.parametrize("make", [byte_level, whole_lines, pieces])
def test_the_end_alone_gives_the_tokens_that_the_whole_would_have(make: Callable[[], Tokenizer]) -> None:
    library = make()

    def encode(text: str) -> Any:
        return as_tokens(library.encode(text).ids)

    found = 0
    for seed in range(150):
        rng = random.Random(seed)
        old = text_of(rng, 120)
        old = old[: len(old) - rng.randrange(3)]  # also in the middle of a word
        new = old + text_of(rng, rng.randrange(1, 40))
        start = rng.randrange(len(old) // 2, len(old) - 150)
        tokens = stitched(encode(old), encode(old[start:]), encode(new[start:]))
        if tokens is not None:
            found += 1
            assert tokens.tolist() == encode(new).tolist(), seed
    assert found > 120, "else nothing is spared"


def test_ends_that_share_no_sure_run_are_not_joined() -> None:
    whole = as_tokens(range(100))
    end = as_tokens(range(60, 100))
    gone_on = as_tokens([*range(60, 100), 7, 8])
    assert stitched(whole, end, gone_on).tolist() == [*range(100), 7, 8]  # type: ignore[union-attr]
    assert stitched(whole, end, as_tokens([*range(60, 70), 7, 8])) is None, "the end was changed by what came"
    assert stitched(whole, as_tokens([*range(60, 99), 1]), gone_on) is None, "another text"
    started_otherwise = as_tokens([1, 2, *range(63, 100)])
    assert stitched(whole, started_otherwise, as_tokens([1, 2, *range(63, 100), 9])).tolist() == [*range(100), 9]  # type: ignore[union-attr]


def test_the_longest_text_that_a_new_one_goes_on_from_is_found() -> None:
    memory = TokenMemory()
    text = bytes(random.Random(2).randrange(97, 123) for _ in range(8 * PAGE_BYTES))
    ends = [PAGE_BYTES + 5, 3 * PAGE_BYTES + 1, 3 * PAGE_BYTES + 9, 5 * PAGE_BYTES]
    for size in ends:
        memory.put(text[:size], as_tokens(range(size // 64)))
    memory.put(text[: 6 * PAGE_BYTES] + b"another", as_tokens([1]))
    for at in (2 * PAGE_BYTES, 3 * PAGE_BYTES + 5, 4 * PAGE_BYTES, 8 * PAGE_BYTES):
        found = memory.longest(text[:at])
        assert found is not None and found.size == max(size for size in ends if size < at)
    assert memory.longest(text[:PAGE_BYTES]) is None and memory.longest(b"x" + text) is None


def test_memory_is_bounded_in_tokens_and_in_texts_of_a_page_and_forgets_wholly() -> None:
    memory = TokenMemory(most=100)
    for number in range(40):
        memory.put(bytes([number]) * 2 * PAGE_BYTES, np.zeros(30, np.uint32))
        assert memory.tokens <= 100 and len(memory) <= 3
    assert len(memory._pages) == len(memory) == 3
    memory.put(b"long", np.zeros(101, np.uint32))
    assert memory.get(b"long") is None and memory.get(bytes([39]) * 2 * PAGE_BYTES) is not None
    same = TokenMemory()
    for number in range(TEXTS_A_PAGE_MAX + 5):
        same.put(b"a" * PAGE_BYTES + bytes([number]), as_tokens([number]))
    assert len(same) == TEXTS_A_PAGE_MAX and same.tokens == TEXTS_A_PAGE_MAX
    assert same.get(b"a" * PAGE_BYTES + b"\x00") is None


def test_keys_of_a_text_that_grew_are_those_of_the_whole_and_begin_with_known_ones() -> None:
    memory, rng = TokenMemory(), random.Random(3)
    old = as_tokens([rng.randrange(1000) for _ in range(105)])
    new = np.concatenate([old[:101], as_tokens([rng.randrange(1000, 2000) for _ in range(60)])])
    known = memory.put(b"old", old)
    first = Prompt("m", old, old.size, 7, known=known.keys).keys(16)
    grown = memory.put(b"old and more", new, known)
    assert [keys.tolist() for keys in grown.begun.values()] == [first[:6].tolist()], "six whole blocks are alike"
    for extra, lora in ((7, None), (8, None), (7, "l")):
        prompt = Prompt("m", new, new.size, extra, lora, known=grown.keys, begun=grown.begun)
        assert prompt.keys(16).tolist() == Prompt("m", new, new.size, extra, lora).keys(16).tolist()
        again = Prompt("m", new, new.size, extra, lora, known=grown.keys)
        assert again.keys(16) is prompt.keys(16), "whoever sends it again finds them"
    for salt in range(20):
        Prompt("m", new, new.size, 100 + salt, known=grown.keys).keys(16)
    assert len(grown.keys) == KNOWN_MAX


def test_leading_is_what_two_have_in_common() -> None:
    assert leading(as_tokens([1, 2, 3]), as_tokens([1, 2])) == 2
    assert leading(as_tokens([1, 2, 3]), as_tokens([1, 5, 3])) == 1
    assert leading(as_tokens([]), as_tokens([1])) == 0


def test_all_that_changes_a_prompt_is_asked_with_and_what_our_front_ends_refuse_is_not() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {
        "messages": [{"role": "user", "content": "hi"}], "tools": tools, "temperature": 1, "reasoning_effort": "none",
        "chat_template_kwargs": {"style": 3}, "continue_final_message": True, "add_generation_prompt": False,
    }  # fmt: skip
    ours, theirs = chat_question(body, "m", ours=True), chat_question(body, "m", ours=False)
    assert ours is not None and ours.fields == {"model": "m", "tools": tools}
    assert theirs is not None and theirs.fields == {
        "model": "m", "tools": tools, "continue_final_message": True, "add_generation_prompt": False,
        "chat_template_kwargs": {"reasoning_effort": "none", "enable_thinking": False, "style": 3},
    }  # fmt: skip
    hidden = chat_question(body | {"tool_choice": "none"}, "m", ours=True)
    assert hidden is not None and hidden.fields == {"model": "m"}, "tools that may not be used aren't shown"
    assert chat_question({"messages": None}, "m", ours=True) is None
    plain = completion_question({"add_special_tokens": False}, "a", "m", ours=False)
    assert plain.fields == {"model": "m", "add_special_tokens": False}
    assert len({one.text(who) for one in (ours, theirs, hidden) for who in ("a", "b")}) == 6, "callers share nothing"


def test_a_text_is_cut_at_a_character_and_a_chat_before_a_users_message() -> None:
    old, new = (completion_question({}, "水" * count, "m", ours=True) for count in (3000, 3100))
    ends = new.ends("w", len(old.text("w")), 1000)
    one = "水".encode()
    assert ends is not None and b'"prompt":"' + one * 333 + b'"' in ends.old and ends.new.count(one) == 433
    assert new.ends("w", len(old.text("w")), 8000) is None, "it would be asked twice nearly whole"
    roles = ["system", *["user", "assistant"] * 20]
    messages = [{"role": role, "content": f"{number} " + "x" * 300} for number, role in enumerate(roles)]
    known = chat_question({"messages": messages[:-2]}, "m", ours=True)
    grown = chat_question({"messages": messages}, "m", ours=True)
    assert known is not None and grown is not None
    assert grown.text("w").startswith(known.text("w")) and not grown.text("v").startswith(known.text("w"))
    cut = grown.ends("w", len(known.text("w")), 1000)
    assert cut is not None and cut.old.count(b'"role"') == 4 and cut.new.count(b'"role"') == 6
    assert cut.new.index(b'"user"') < cut.new.index(b'"assistant"')
    agents = [{"role": "system", "content": "s" * 9000}, *({"role": "tool", "content": "t" * 900} for _ in range(9))]
    alone = chat_question({"messages": agents}, "m", ours=True)
    assert alone is not None and alone.ends("w", len(alone.text("w")) - 900, 1000) is None, "nowhere to cut"
