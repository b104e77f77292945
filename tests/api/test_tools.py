"""Calls of tools: found in every family's way, at every cut of the text; shown to clients as OpenAI shows them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cli.frontend import TOOL_CALL_PARSER
from forebay.workers.api.tool_formats import FORMATS, ToolCall, format_of, written
from forebay.workers.api.tools import ForcedFinder, ToolFinder, ToolUse
from tests.api.scripted import ScriptedWorker
from tests.api.serving import Front
from tests.api.test_requests import refusal

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {"type": "object", "properties": {}},
}
D = "<\uff5ctool\u2581{}\uff5c>"
BEGIN, END, SEP = D.format("call\u2581begin"), D.format("call\u2581end"), D.format("sep")
WEATHER, NOW = ToolCall("weather", written({"city": "Zürich 8", "days": 3})), ToolCall("now", "{}")

# What models of each family write, as their templates and model cards show it: text before, and two calls.
SAMPLES = {
    "hermes": 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 8", "days": 3}}\n'
    '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "weather", "parameters": {"city": "Zürich 8", "days": 3}}; '
    '{"name": "now", "parameters": {}}',
    "glm45": "Let me see.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich 8</arg_value>\n<arg_key>days"
    "</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    "minimax_m2": 'Let me see.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Zürich 8'
    '</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
    '</minimax:tool_call>',
    "deepseek_v3": f'Let me see.{D.format("calls▁begin")}{BEGIN}function{SEP}weather\n```json\n'
    f'{{"city": "Zürich 8", "days": 3}}\n```{END}\n{BEGIN}now{SEP}{{}}{END}{D.format("calls▁end")}',
    "openai": "<|channel|>final<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.weather <|constrain|>json<|message|>{"city": "Zürich 8", "days": 3}<|call|><|start|>assistant'
    "<|channel|>commentary to=functions.now<|message|>{}",
}


def found(name: str, pieces: list[str], **more: Any) -> tuple[str, list[ToolCall]]:
    finder = ToolFinder(FORMATS[name], ToolUse(SCHEMAS, shown=True, **more))
    text, calls = "", list[ToolCall]()
    for got in (*map(finder.feed, pieces), finder.flush()):
        text += got.text
        calls += got.calls
    return text, calls


def cut(text: str, at: list[int]) -> list[str]:
    marks = [0, *sorted(min(a, len(text)) for a in at), len(text)]
    return [text[a:b] for a, b in pairwise(marks)]


@pytest.mark.parametrize("name", SAMPLES)
@given(at=st.lists(st.integers(0, 300), max_size=12))
def test_calls_are_found_wherever_tokens_end(name: str, at: list[int]) -> None:
    text, calls = found(name, cut(SAMPLES[name], at))
    assert calls == [WEATHER, NOW]
    assert text.strip() == ("" if name == "llama3_json" else "Let me see.")


@pytest.mark.parametrize("name", SAMPLES)
def test_letter_by_letter_and_only_the_first_if_one_is_wanted(name: str) -> None:
    assert found(name, list(SAMPLES[name]))[1] == [WEATHER, NOW]
    assert found(name, list(SAMPLES[name]), several=False)[1] == [WEATHER]


@pytest.mark.parametrize("name", FORMATS)
@given(text=st.text(alphabet='ab <>{}":/_call', max_size=60), at=st.lists(st.integers(0, 60), max_size=6))
def test_text_without_calls_is_left_as_it_is(name: str, text: str, at: list[int]) -> None:
    told, calls = found(name, cut("a" + text, at))
    assert not calls and told == "a" + text


@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>\nnot json\n</tool_call>", '<tool_call>{"name": "weather"', "<tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', '<tool_call>[1]</tool_call>',
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
    ],
)  # fmt: skip
def test_what_is_no_call_of_a_function_that_there_is_stays_text(broken: str) -> None:
    text, calls = found("hermes", list("before " + broken))
    assert not calls and text == "before " + broken


def test_a_call_that_the_end_of_the_answer_closes_counts() -> None:
    text, calls = found("hermes", ['<tool_call>{"name": "now", "arguments": {}}'])
    assert calls == [NOW] and not text


def test_a_value_is_what_its_schema_says_it_is() -> None:
    pairs = "".join(f"<arg_key>{key}</arg_key><arg_value>8</arg_value>" for key in ("city", "days"))
    sample = f"<tool_call>weather{pairs}</tool_call>"
    _, (call,) = found("glm45", [sample])
    assert json.loads(call.arguments) == {"city": "8", "days": 8}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>{{ t }}</tool_call>", "hermes"), ("{% if tools %}<tool_call>..<arg_key>", "glm45"),
        ("{% if tools %}<minimax:tool_call>", "minimax_m2"), (f"{{% if tools %}}{BEGIN}", "deepseek_v3"),
        ('{% if tools %}{"name": .., "parameters": ..}', "llama3_json"), ("{% if tools %}<|channel|>", "openai"),
        ("{{ messages }}", None), ("{% if tools %}{{ tools }}", None),
    ],
)  # fmt: skip
def test_a_template_tells_its_models_way(template: str, name: str | None) -> None:
    way = format_of(template)
    assert (way.name if way is not None else None) == name


def test_the_command_line_names_every_format() -> None:
    assert set(TOOL_CALL_PARSER.parse.takes.split("|")) == {"auto", *FORMATS}


def test_an_answer_that_must_be_a_call_is_one_from_end_to_end_or_text() -> None:
    one = ForcedFinder(ToolUse(SCHEMAS, shown=True, forced={}, only="now"))
    assert not one.feed("{ }").calls and one.flush().calls == (NOW,)
    some = ForcedFinder(ToolUse(SCHEMAS, shown=True, forced={}))
    some.feed('[{"name": "now", "parameters": {}}]')
    assert some.flush().calls == (NOW,)
    torn = ForcedFinder(ToolUse(SCHEMAS, shown=True, forced={}))
    torn.feed('[{"name": "no')
    assert torn.flush().text == '[{"name": "no' and not torn.calls
    other = ForcedFinder(ToolUse(SCHEMAS, shown=True, forced={}))
    other.feed('{"name": "now"}')
    assert other.flush().text == '{"name": "now"}' and not other.calls


# --- as clients see it -----------------------------------------------------------------------------------------

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    with Front(tmp_path, worker=ScriptedWorker(tmp_path / "worker.sock")) as front:
        yield front


@pytest.fixture
def client(front: Front) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def asked(text: str, **more: Any) -> dict[str, Any]:
    return {
        "model": "scripted", "messages": [{"role": "user", "content": f"|{text}"}], "tools": TOOLS, "max_tokens": 400,
        "stop": ["\nassistant:"], **more,
    }  # fmt: skip


def test_calls_are_told_as_openai_tells_them(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(**asked(SAMPLES["hermes"])).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see.\n"
    assert choice.message.tool_calls is not None
    functions = [call.function for call in choice.message.tool_calls]  # type: ignore[union-attr]
    assert [(f.name, f.arguments) for f in functions] == [(c.name, c.arguments) for c in (WEATHER, NOW)]
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_streamed_calls_are_numbered_and_add_up(client: openai.OpenAI) -> None:
    calls: dict[int, tuple[str, str]] = {}
    text, finish = "", None
    for chunk in client.chat.completions.create(**asked(SAMPLES["hermes"]), stream=True):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        finish = chunk.choices[0].finish_reason or finish
        for call in delta.tool_calls or ():
            assert call.function is not None and call.id
            calls[call.index] = str(call.function.name), str(call.function.arguments)
    assert calls == {0: (WEATHER.name, WEATHER.arguments), 1: (NOW.name, NOW.arguments)}
    assert finish == "tool_calls" and text == "Let me see.\n"


def test_an_answer_without_calls_is_an_answer(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(**asked("Sunny. 1 < 2.")).choices[0]
    assert choice.finish_reason == "stop" and not choice.message.tool_calls
    assert choice.message.content == "Sunny. 1 < 2."


def test_tools_reach_the_template_unless_none_may_be_called(front: Front, client: openai.OpenAI) -> None:
    client.chat.completions.create(**asked("x"))
    client.chat.completions.create(**asked("x", tool_choice="none"))
    assert front.worker is not None
    first, second = (bytes(b - 2 for b in ask.prompt[::4]).decode() for ask in front.worker.asked)
    assert first.startswith("tool: weather\ntool: now\n") and "tool:" not in second


def test_a_tools_answer_goes_back_into_the_conversation(client: openai.OpenAI, front: Front) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages: list[Any] = [
        {"role": "user", "content": "when?"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"}, {"role": "user", "content": "|ok"},
    ]  # fmt: skip
    answer = client.chat.completions.create(**asked("", messages=messages))
    assert answer.choices[0].message.content == "ok"
    call["function"]["arguments"] = "no json"  # type: ignore[index]
    error = refusal(front.post("/v1/chat/completions", asked("", messages=messages)))
    assert error["param"] == "messages" and "arguments" in error["message"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_must_be_made_is_a_grammar_for_the_worker(front: Front, choice: Any) -> None:
    pytest.importorskip("llguidance", reason="the extra `guided` isn't installed")
    arguments = {"city": "Bern", "days": 1}
    said = json.dumps(arguments if isinstance(choice, dict) else [{"name": "weather", "parameters": arguments}])
    answer = front.post("/v1/chat/completions", asked(said, tool_choice=choice)).json()["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "weather" and json.loads(call["function"]["arguments"]) == arguments
    assert answer["finish_reason"] == "tool_calls"
    assert front.worker is not None and "json_schema" in front.worker.asked[0].sampling.grammar


def test_a_model_that_knows_no_tools_says_so(tmp_path: Path) -> None:
    with Front(tmp_path, worker=ScriptedWorker(tmp_path / "worker.sock"), tools="") as front:
        error = refusal(front.post("/v1/chat/completions", asked("x")))
        assert error["param"] == "tools" and "--tool-call-parser" in error["message"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"), ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ],
)  # fmt: skip
def test_what_can_not_be_called_is_refused_by_name(front: Front, more: dict[str, Any], param: str) -> None:
    assert refusal(front.post("/v1/chat/completions", asked("x", **more)))["param"] == param


def test_a_stream_that_is_resumed_tells_no_call_twice(front: Front) -> None:
    body = asked(SAMPLES["hermes"], stream=True, return_token_ids=True)
    whole = front.post("/v1/chat/completions", body).text
    events = [json.loads(line[6:]) for line in whole.splitlines() if line.startswith("data: {")]
    ids = [token for event in events for choice in event["choices"] for token in choice.get("token_ids", ())]
    after_first = next(
        i for i, e in enumerate(events) if any(c["delta"].get("tool_calls") for c in e["choices"])
    )
    done = sum(len(choice.get("token_ids", ())) for e in events[: after_first + 1] for choice in e["choices"])
    rest = front.post("/v1/chat/completions", body | {"resume_token_ids": [ids[:done]]}).text
    told = [
        call for line in rest.splitlines() if line.startswith("data: {")
        for choice in json.loads(line[6:])["choices"] for call in choice["delta"].get("tool_calls", ())
    ]  # fmt: skip
    assert [(call["index"], call["function"]["name"]) for call in told] == [(1, "now")]
