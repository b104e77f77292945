"""What a request may say about keeping what it computes, and what of it reaches the worker."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.serving import Front
from tests.api.test_requests import refusal


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 0), ({"retain_s": 90}, 90), ({"cache_control": {"type": "ephemeral"}}, 300),
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, 3600),
        ({"cache_control": {"type": "ephemeral", "ttl": "5m"}, "retain_s": 1000}, 1000),
    ],
)  # fmt: skip
def test_a_request_says_how_long_its_chunks_are_kept(front: Front, fields: dict[str, Any], seconds: float) -> None:
    assert front.complete("|x", **fields).status_code == 200
    assert front.worker.asked[-1].retain_s == seconds
    talk = {"messages": [{"role": "user", "content": "|x"}], "max_tokens": 5}
    assert front.post("/v1/chat/completions", talk | fields).status_code == 200
    assert front.worker.asked[-1].retain_s == seconds


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("retain_s", -1), ("retain_s", 1e9), ("retain_s", "long"), ("cache_control", {"type": "persistent"}),
        ("cache_control", {"type": "ephemeral", "ttl": "1d"}),
    ],
)  # fmt: skip
def test_what_is_no_such_time_is_refused_by_name(front: Front, field: str, value: Any) -> None:
    assert refusal(front.complete("|x", **{field: value}))["param"] == field
