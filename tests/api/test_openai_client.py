"""The official client works against it unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.api.serving import Front


@pytest.fixture
def client(front: Front) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["scripted"]


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt="say|hello", max_tokens=50, temperature=0)
    assert answer.choices[0].text == "hello" and answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens == len("say|hello") + 1
    assert answer.usage.completion_tokens == len("hello") + 1
    assert answer.usage.prompt_tokens_details is not None and answer.usage.prompt_tokens_details.cached_tokens == 0


def test_a_completion_says_how_much_of_its_prompt_was_cached(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt="x" * 100 + "|hello")
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 48


def test_a_streamed_completion_ends_with_its_usage(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="scripted", prompt="say|grüße", max_tokens=50, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "grüße"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len("grüße".encode()) + 1


def test_a_chat_completion(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "say|hello"}], max_completion_tokens=50
    )
    assert answer.choices[0].message.content == "hello\nassistant:" and answer.choices[0].message.role == "assistant"


def test_a_streamed_chat_completion_opens_with_its_role(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "say|"}, {"type": "text", "text": "hi"}]
    stream = client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": parts}], stream=True, stop="\n"  # type: ignore[list-item]
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hi"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "|ab"}], logprobs=True, top_logprobs=2, max_tokens=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["a", "b"] and logprobs.content[0].logprob == -0.5
    assert [other.token for other in logprobs.content[0].top_logprobs] == ["a", "b"]


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt="|abc", logprobs=2, max_tokens=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", "c"] and logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs == [{"a": -0.5, "b": -1.5}, {"b": -0.5, "c": -1.5}, {"c": -0.5, "d": -1.5}]


def test_several_prompts_and_several_choices(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt=["|one", "|two"], n=2, max_tokens=50)
    told = [(choice.index, choice.text) for choice in answer.choices]
    assert told == [(0, "one"), (1, "one"), (2, "two"), (3, "two")]
    assert answer.usage is not None and answer.usage.prompt_tokens == 2 * len("|one") + 2


def test_prompts_as_token_ids(client: openai.OpenAI) -> None:
    ids = [ord(letter) + 2 for letter in "|hey"]
    assert client.completions.create(model="scripted", prompt=ids).choices[0].text == "hey"
    both = client.completions.create(model="scripted", prompt=[ids, ids[:-1]])
    assert [choice.text for choice in both.choices] == ["hey", "he"]


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="x")
    assert caught.value.code == "model_not_found" and "scripted" in str(caught.value)


def test_a_wrong_value_is_a_bad_request_that_names_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="scripted", prompt="x", temperature=-1)
    assert caught.value.param == "temperature"
