"""Greedy answers by transformers in fp64, without any cache of ours: the independent reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.ties import first_of_equals


@contextmanager
def one_thread() -> Iterator[None]:
    """Matrices this small are multiplied faster by one thread than by two that wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def greedy_reference(model: Path, prompts: list[list[int]], length: int) -> list[list[int]]:
    """`length` greedy tokens for each prompt, end-of-sequence ignored."""
    # Eager experts too: grouped products know no fp64.
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    loaded.eval()
    answers = []
    with one_thread(), torch.inference_mode(), first_of_equals():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            cache, answer = None, []
            for _ in range(length):
                out = loaded(input_ids=ids, cache=cache, use_cache=True)
                cache = out.past_key_values
                token = int(out.logits[0, -1].argmax())
                answer.append(token)
                ids = torch.tensor([[token]])
            answers.append(answer)
    return answers
