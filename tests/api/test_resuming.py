"""Another front end may have begun an answer: this one goes on where that one ended, in the same words."""

from __future__ import annotations

import json
from typing import Any

from tests.api.serving import Front

TEXT = "the quick brown fox"


def streamed(front: Front, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = front.post(path, body | {"stream": True, "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def said(events: list[dict[str, Any]]) -> tuple[str, list[int], str | None]:
    choices = [choice for event in events for choice in event["choices"]]
    finish = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    ids = [token for choice in choices for token in choice["token_ids"]]
    return "".join(choice["text"] for choice in choices), ids, finish[0] if finish else None


def test_whatever_was_said_before_the_rest_is_said_once(front: Front) -> None:
    body = {"prompt": f"say|{TEXT} äöü", "max_tokens": 100, "stop": ["never"]}
    text, ids, finish = said(streamed(front, "/v1/completions", body))
    assert (text, finish) == (f"{TEXT} äöü", "stop")
    for done in range(len(ids) + 1):
        rest = said(streamed(front, "/v1/completions", body | {"resume_token_ids": [ids[:done]]}))
        assert rest[1:] == (ids[done:], finish)
        assert text.endswith(rest[0])


def test_a_stop_string_may_begin_before_the_break_and_end_after_it(front: Front) -> None:
    body = {"prompt": f"say|{TEXT}", "max_tokens": 100, "stop": ["brown"]}
    whole, ids, _ = said(streamed(front, "/v1/completions", body))
    at = len("the quick bro")
    said_before = "the quick "
    rest, more, finish = said(streamed(front, "/v1/completions", body | {"resume_token_ids": [ids[:at]]}))
    assert said_before + rest == whole and ids[:at] + more == ids and finish == "stop"


def test_usage_counts_all_tokens_and_a_chat_is_opened_once(front: Front) -> None:
    options = {"stream_options": {"include_usage": True}, "max_tokens": 100}
    body = {"messages": [{"role": "user", "content": "say|hello"}], **options}
    whole = streamed(front, "/v1/chat/completions", body)
    ids = [token for event in whole for choice in event["choices"] for token in choice.get("token_ids", ())]
    rest = streamed(front, "/v1/chat/completions", body | {"resume_token_ids": [ids[:3]]})
    assert rest[-1]["usage"] == whole[-1]["usage"]
    assert not any("role" in choice["delta"] for event in rest for choice in event["choices"])


def test_what_cannot_be_resumed_is_refused_by_name(front: Front) -> None:
    for more in (
        {"resume_token_ids": [[5]]},
        {"resume_token_ids": [[5], [5]], "stream": True},
        {"resume_token_ids": [[5] * 101], "stream": True},
        {"resume_token_ids": [["x"]], "stream": True},
        {"resume_token_ids": [[5, 258]], "stream": True},
    ):
        answer = front.complete("say|x", **more)
        assert answer.status_code == 400 and "resume_token_ids" in answer.json()["error"]["message"], answer.text


def test_a_worker_answers_what_routers_ask_of_workers(front: Front) -> None:
    for path in ("/model_info", "/get_model_info"):
        assert front.get(path).json()["model_path"] == "scripted"
    for path in ("/server_info", "/get_server_info"):
        assert front.get(path).json()["dp_size"] == 1
    assert front.get("/load").json() == {"server_load": 0}
    assert front.get("/health_generate").status_code == 200
