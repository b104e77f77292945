"""A conversation becomes the prompt that the model's template says, or a plain refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from forebay.models import chat
from forebay.models.chat import ChatTemplate
from forebay.models.errors import ChatTemplateError, CheckpointBroken, NoChatTemplate
from tests import checkpoints

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Wer ist da? 😀\n{{ 1 }}"},
    {"role": "assistant", "content": "I."},
    {"role": "user", "content": "<eos>"},
]

TURNS = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\\n' %}
{%- else %}{% set first = '' %}{% endif %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{% continue %}{% endif %}
<turn>{{ message['role'] }}
{{ first if loop.index0 == 1 }}{{ message['content'] | trim }}
    {%- if message.role == 'assistant' %}{% generation %} ~{% endgeneration %}{% endif %}<end>
{% endfor %}
{{ messages | tojson }}
{% if add_generation_prompt %}<turn>model
{% endif %}"""


def render(source: str, messages: list[dict[str, Any]] | None = None, **special: str) -> str:
    return ChatTemplate(source, special).render(messages or MESSAGES)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("template", [TURNS, checkpoints.CHAT_TEMPLATE])
def test_prompts_are_those_of_transformers(template: str, add_generation_prompt: bool, tmp_path: Path) -> None:
    checkpoints.write_tokenizer(tmp_path, adds_bos=True, chat_template=template)
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<bos>", eos_token="<eos>"
    )
    wanted = reference.apply_chat_template(
        MESSAGES, chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    found = ChatTemplate.load(tmp_path).render(MESSAGES, add_generation_prompt=add_generation_prompt)
    assert found == wanted
    assert found.startswith("<bos>")


def test_a_base_model_has_none_and_says_so(tmp_path: Path) -> None:
    checkpoints.write_tokenizer(tmp_path, adds_bos=True)
    with pytest.raises(NoChatTemplate, match=r"base model.*/v1/completions"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(NoChatTemplate):
        ChatTemplate.load(tmp_path)


def test_a_file_of_its_own_comes_first(tmp_path: Path) -> None:
    checkpoints.write_tokenizer(tmp_path, adds_bos=True, chat_template="from the settings")
    (tmp_path / "chat_template.jinja").write_text("from the file {{ bos_token }}")
    assert ChatTemplate.load(tmp_path).render(MESSAGES) == "from the file <bos>"


def test_of_several_named_ones_the_default_is_used(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.load(tmp_path).render(MESSAGES) == "yes"


def test_special_tokens_may_be_tables(tmp_path: Path) -> None:
    settings = {"chat_template": "{{ bos_token }}", "bos_token": {"content": "<s>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert ChatTemplate.load(tmp_path).render(MESSAGES) == "<s>"


def test_messages_are_data_not_templates() -> None:
    assert render("{{ messages[1].content }}") == MESSAGES[1]["content"]


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ x", "{% for a in b %}", "{{ 1 | no_such_filter }}", "{% include 'x' %}"]
)
def test_a_broken_template_is_named(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


def test_the_templates_own_refusal_reaches_the_client() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content.x.y }}",
        "{{ 1 / 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_is_no_crash(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ ('%s' | attr('__class__')) }}",
        "{{ messages.append(1) }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ lipsum.__globals__['os'] }}",
    ],
)
def test_nothing_leads_out_of_the_sandbox(source: str) -> None:
    try:
        text = render(source)
    except ChatTemplateError:
        return
    assert text.strip() == ""


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10 ** 9 }}",
        "{{ 10 ** 9 * 'x' }}",
        "{{ [0] * 1000000000 }}",
        "{{ 9 ** 999999999 }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% for i in range(10000) %}{{ 'x' * 100000 }}{% endfor %}",
    ],
)
def test_nothing_huge_is_made(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "PROMPT_CHARACTERS_MAX", 1 << 20)
    with pytest.raises(ChatTemplateError):
        render(source)


def test_a_template_file_that_is_no_template_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointBroken, match="chat_template"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"x" * (chat.TEMPLATE_BYTES_MAX + 1))
    with pytest.raises(CheckpointBroken, match="over"):
        ChatTemplate.load(tmp_path)
