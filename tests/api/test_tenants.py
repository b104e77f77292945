"""Over HTTP a tenant learns nothing of another's prompts: every route is asked, and there are no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.kvstore.identity import root_key
from forebay.workers.api.app import make_app
from forebay.workers.api.keys import Keys, load_keys
from forebay.workers.api.metrics import Metrics
from forebay.workers.api.service import ApiService
from tests.api.codec import ByteCodec
from tests.api.scripted import NAMESPACE, ScriptedWorker
from tests.api.serving import Front

ALICE, BOB = {"Authorization": "Bearer key-of-alice"}, {"Authorization": "Bearer key-of-bob"}
SECRET = "the secret of the river"
GETS = {
    "/v1/models", "/metrics", "/forebay/namespace", "/health", "/health_generate", "/model_info", "/get_model_info",
    "/server_info", "/get_server_info", "/load",
}  # fmt: skip
POSTS = {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"}


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    file = tmp_path / "keys"
    file.write_text("key-of-alice alice-and-sons\nkey-of-bob bob-and-daughters\n")
    file.chmod(0o600)
    return load_keys(file, tmp_path / "state")


@pytest.fixture
def front(tmp_path: Path, keys: Keys) -> Iterator[Front]:
    with Front(tmp_path, keys=keys, worker=ScriptedWorker(tmp_path / "worker.sock")) as front:
        yield front


def test_nothing_of_another_tenant_is_in_any_answer(front: Front, keys: Keys) -> None:
    body = {"prompt": SECRET + "|fine", "cache_salt": "alices own"}
    assert front.post("/v1/completions", body, headers=ALICE).status_code == 200
    alice = keys.who(ALICE["Authorization"])
    hidden = [SECRET, "alice-and-sons", "alices own", "key-of-alice"]
    hidden += [root_key(NAMESPACE.id, alice.salt(salt)).hex() for salt in (None, "", "alices own")]
    hidden += [alice.salt("alices own").hex()]
    answers = [front.get(path, headers=BOB) for path in sorted(GETS)]
    answers += [front.get("/forebay/namespace?cache_salt=alices%20own", headers=BOB)]
    answers += [front.post("/v1/completions", {"prompt": "|mine"}, headers=BOB)]
    answers += [front.post("/tokenize", {"prompt": "mine"}, headers=BOB)]
    for answer in answers:
        assert answer.status_code == 200
        assert not [secret for secret in hidden if secret in answer.text], answer.url


def test_a_new_route_has_to_be_looked_at_here_first(front: Front, keys: Keys) -> None:
    service = ApiService(front.fleet, ByteCodec(), None, Metrics(), "")
    routes = {getattr(route, "path", "") for route in make_app(service, keys).routes}
    assert routes == GETS | POSTS


def test_the_same_salt_of_two_tenants_is_two_chains(front: Front) -> None:
    for who in (ALICE, BOB):
        front.post("/v1/completions", {"prompt": "|x", "cache_salt": "common"}, headers=who)
    assert front.worker is not None
    first, second = front.worker.asked
    assert first.salt != second.salt and (first.tenant, second.tenant) == ("alice-and-sons", "bob-and-daughters")
