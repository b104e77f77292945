"""A prefix key stands for all tokens before it, and for model, adapter and salt; however the chain is cut."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.scheduler.prefix_keys import as_tokens, extra_of, prefix_keys, root_of

pytestmark = pytest.mark.usefixtures("form")

ROOT = root_of("m", 16)


def keys_of(tokens: list[int], root: int = ROOT, salt: str | None = None) -> list[int]:
    return prefix_keys(root, as_tokens(tokens), 16, extras=[extra_of([salt] if salt else None)]).tolist()


@given(st.lists(st.integers(0, 300), max_size=200), st.integers(0, 12))
def test_a_chain_can_be_cut_and_continued_anywhere(tokens: list[int], cut: int) -> None:
    whole = keys_of(tokens)
    head = min(cut, len(whole))
    parent = whole[head - 1] if head else ROOT
    rest = prefix_keys(parent, as_tokens(tokens[16 * head :]), 16, depth=head)
    assert [*whole[:head], *rest.tolist()] == whole
    assert len(whole) == len(tokens) // 16


def test_keys_are_the_same_in_every_process_and_for_long_prompts() -> None:
    tokens = as_tokens([random.Random(1).randrange(1 << 17) for _ in range(16)] * 20_000)
    keys = prefix_keys(ROOT, tokens, 16)
    assert len(set(keys.tolist())) == 20_000, "equal blocks at other places are other prefixes"
    assert keys[:2].tolist() == [1872310654536115922, 8126022675315036018]
    parent = ROOT
    for number in (0, 1, 8191, 8192, 19_999):
        parent = int(keys[number - 1]) if number else ROOT
        assert prefix_keys(parent, tokens[16 * number : 16 * number + 16], 16, depth=number)[0] == keys[number]


@given(st.integers(0, 63))
def test_a_changed_token_changes_all_keys_from_its_block_on(place: int) -> None:
    tokens = list(range(64))
    changed = list(tokens)
    changed[place] += 1
    same = place // 16
    before, after = keys_of(tokens), keys_of(changed)
    assert before[:same] == after[:same]
    assert not set(before[same:]) & set(after[same:])


def test_model_adapter_salt_and_block_size_each_change_the_first_key() -> None:
    tokens = list(range(32))
    firsts = {
        keys_of(tokens)[0], keys_of(tokens, salt="a")[0], keys_of(tokens, salt="b")[0],
        keys_of(tokens, root_of("other", 16))[0], keys_of(tokens, root_of("m", 16, "adapter"))[0],
        keys_of(tokens, root_of("m", 16, 1))[0], int(prefix_keys(root_of("m", 32), as_tokens(tokens), 32)[0]),
    }  # fmt: skip
    assert len(firsts) == 7


def test_ten_thousand_random_prefixes_have_ten_thousand_keys() -> None:
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 4, (10_000, 32), np.uint32)  # few different tokens: the hard case for a weak hash
    found = {int(key) for row in tokens for key in prefix_keys(ROOT, row, 16)[-1:]}
    assert len(found) == len({row.tobytes() for row in tokens})
