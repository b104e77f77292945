"""Health, metrics, queues, and who may use what."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.errors import ConfigError
from forebay.kvstore.identity import root_key
from forebay.testing import web
from forebay.workers.api.frontend import FrontendConfig, run_frontend
from forebay.workers.api.keys import Keys, load_keys, open_to_all
from tests.api.scripted import NAMESPACE, ScriptedWorker
from tests.api.serving import Front

SECRET_KEY = "key-of-alice-0123456789"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "worker.sock"


def key_file(folder: Path, text: str, name: str = "keys") -> Path:
    file = folder / name
    file.write_text(text)
    file.chmod(0o600)
    return file


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return load_keys(key_file(tmp_path, f"{SECRET_KEY} alice\nkey-of-bob bob # him\n"), tmp_path / "state")


@pytest.fixture
def guarded(tmp_path: Path, path: Path, keys: Keys) -> Iterator[Front]:
    with Front(tmp_path, keys=keys, worker=ScriptedWorker(path)) as front:
        yield front


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# --- health and metrics ----------------------------------------------------------------------------------


def test_health_tells_worker_store_and_model(front: Front) -> None:
    answer = front.get("/health")
    assert answer.status_code == 200
    assert answer.json() == {"status": "ok", "model": "scripted", "worker": 1, "store": "connected"}


def test_health_follows_the_store(front: Front) -> None:
    assert front.worker is not None
    front.worker.store = "down"
    front.wait_until(lambda: front.fleet.store == "down")
    assert front.get("/health").json()["store"] == "down"


def test_without_a_worker_everything_says_so(tmp_path: Path) -> None:
    with Front(tmp_path) as front:
        assert front.get("/health").status_code == 503
        answer = front.complete("|x")
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert front.get("/v1/models").status_code == 503
        assert front.get("/metrics").status_code == 200


def test_metrics_show_requests_tokens_sources_and_the_worker(front: Front) -> None:
    front.complete("x" * 100 + "|hello")
    front.complete("|x", n=-1)
    text = front.get("/metrics").text
    for line in (
        'forebay_requests_total{endpoint="/v1/completions",status="200"} 1.0',
        'forebay_requests_total{endpoint="/v1/completions",status="400"} 1.0',
        "forebay_time_to_first_token_seconds_count 1.0",
        "forebay_output_tokens_total 6.0",
        'forebay_cached_tokens_total{source="host"} 32.0',
        "forebay_worker_cached_host 7.0",
        "forebay_worker_up 1.0",
        "forebay_calls 0.0",
    ):
        assert line in text.splitlines(), line


# --- queues ----------------------------------------------------------------------------------------------


def test_a_full_queue_is_told_when_to_come_again(tmp_path: Path, path: Path) -> None:
    with Front(tmp_path, max_calls=2, worker=ScriptedWorker(path, hold=1)) as front:
        body = {"prompt": "|xyz", "stream": True}
        with (
            web.stream("POST", f"{front.url}/v1/completions", json=body) as first,
            web.stream("POST", f"{front.url}/v1/completions", json=body) as second,
        ):
            assert (first.status_code, second.status_code) == (200, 200)
            answer = front.complete("|x")
            assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "queue_full"
        front.wait_until(lambda: not front.fleet.calls)


def test_a_request_with_more_choices_than_the_queue_leaves_nothing_behind(tmp_path: Path, path: Path) -> None:
    with Front(tmp_path, max_calls=2, worker=ScriptedWorker(path)) as front:
        assert front.complete("|x", n=3).status_code == 429
        assert not front.fleet.calls and front.complete("|x", n=2).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_worker_is_a_429_and_not_a_broken_stream(front: Front, stream: bool) -> None:
    assert front.worker is not None
    front.worker.refuse = "busy"
    answer = front.complete("|x", stream=stream)
    assert answer.status_code == 429 and answer.headers["retry-after"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_worker_refuses_is_told_in_its_words(front: Front, stream: bool) -> None:
    assert front.worker is not None
    front.worker.refuse = "the prompt has 3 tokens; this worker's block pool holds 2"
    answer = front.complete("|x", stream=stream)
    assert answer.status_code == 400 and "block pool" in answer.json()["error"]["message"]


# --- who may -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [{}, bearer("wrong"), {"Authorization": "Basic x"}, {"Authorization": SECRET_KEY}])
@pytest.mark.parametrize("route", ["/v1/models", "/metrics", "/forebay/namespace"])
def test_without_a_key_nothing_is_told(guarded: Front, route: str, header: dict[str, str]) -> None:
    answer = guarded.get(route, headers=header)
    assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert guarded.get(route, headers=bearer(SECRET_KEY)).status_code == 200


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_a_key_is_asked_before_the_body_is_read(guarded: Front, route: str) -> None:
    assert guarded.post(route, "not json").status_code == 401


def test_health_is_open_so_that_supervisors_need_no_key(guarded: Front) -> None:
    assert guarded.get("/health").status_code == 200


def test_tenants_and_their_salts_have_chains_of_their_own(guarded: Front) -> None:
    for key, salt in ((SECRET_KEY, None), (SECRET_KEY, "a"), ("key-of-bob", None), ("key-of-bob", "a")):
        body = {"prompt": "|x", "cache_salt": salt}
        assert guarded.post("/v1/completions", body, headers=bearer(key)).status_code == 200
    assert guarded.worker is not None
    asked = guarded.worker.asked
    assert [ask.tenant for ask in asked] == ["alice", "alice", "bob", "bob"]
    assert len({ask.salt for ask in asked}) == 4 and all(len(ask.salt) == 32 for ask in asked)


def test_an_open_server_salts_only_what_asks_for_it(front: Front) -> None:
    front.complete("|x")
    front.complete("|x", cache_salt="mine")
    assert front.worker is not None
    plain, salted = front.worker.asked
    assert plain.salt == b"" and len(salted.salt) == 32 and plain.tenant == ""


def test_a_tenant_is_told_where_its_own_chain_begins(guarded: Front) -> None:
    guarded.post("/v1/completions", {"prompt": "|x", "cache_salt": "a"}, headers=bearer(SECRET_KEY))
    told = guarded.get("/forebay/namespace?cache_salt=a", headers=bearer(SECRET_KEY)).json()
    assert guarded.worker is not None
    assert told["id"] == NAMESPACE.id.hex()
    assert told["root"] == root_key(NAMESPACE.id, guarded.worker.asked[0].salt).hex()


def test_salts_survive_a_restart_and_keys_are_never_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = key_file(tmp_path, f"{SECRET_KEY} alice\n")
    with caplog.at_level(logging.DEBUG):
        first, second = (load_keys(file, tmp_path / "state") for _ in range(2))
    tenant = first.who(f"Bearer {SECRET_KEY}")
    assert tenant.salt("x") == second.who(f"Bearer {SECRET_KEY}").salt("x")
    assert SECRET_KEY not in repr(first) + repr(tenant) + caplog.text
    assert (tmp_path / "state" / "server-secret").stat().st_mode & 0o777 == 0o600


def test_another_server_has_other_salts(tmp_path: Path) -> None:
    one, other = open_to_all(tmp_path / "one"), open_to_all(tmp_path / "other")
    assert one.who(None).salt("x") != other.who(None).salt("x") and one.who(None).salt("") == b""


def test_keys_may_be_a_toml_table(tmp_path: Path) -> None:
    keys = load_keys(key_file(tmp_path, '[keys]\n"k 1" = "alice"\n', "keys.toml"), tmp_path / "state")
    assert keys.who("Bearer k 1").id == "alice"


@pytest.mark.parametrize(
    "text", ["", "# nobody\n", "key\n", "key two tenants\n", "key a\nkey b\n", f"key {'x' * 200}\n"]
)
def test_a_file_that_holds_no_keys_is_refused_without_showing_any(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_keys(key_file(tmp_path, text), tmp_path / "state")
    assert "--api-keys" in str(caught.value)


def test_a_file_that_others_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = key_file(tmp_path, "key alice\n")
    file.chmod(0o644)
    load_keys(file, tmp_path / "state")
    assert "chmod 600" in caplog.text


def test_a_server_that_others_can_reach_needs_keys(tmp_path: Path) -> None:
    config = FrontendConfig([f"{tmp_path}/w.sock"], tmp_path, tmp_path / "state", host="192.0.2.1")
    with pytest.raises(ConfigError, match="--api-keys"):
        run_frontend(config)


def test_a_base_model_says_that_it_has_no_chat_template(tmp_path: Path, path: Path) -> None:
    with Front(tmp_path, chat=False, worker=ScriptedWorker(path)) as front:
        answer = front.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
        assert answer.status_code == 400 and "chat template" in answer.json()["error"]["message"]
