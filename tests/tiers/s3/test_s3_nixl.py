"""Own objects by NIXL's OBJ engine: right bytes or none, in time, and boto3 for whatever it can't do."""

from __future__ import annotations

import importlib.util
import time
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.errors import ConfigError
from forebay.testing.buckets import Server
from forebay.tiers.s3 import objects
from forebay.tiers.s3.objects import NixlObjects
from forebay.tiers.s3.options import s3_options
from tests.tiers.s3.conftest import MakeRig
from tests.tiers.support import make_chunk, numbered

needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu12") is None, reason="takes NIXL: pip install forebay[p2p]"
)
BIG = make_chunk(granule=1 << 18)
NIXL: dict[str, Any] = {"engine": "nixl", "pack_below_bytes": 0}


@needs_nixl
@pytest.mark.parametrize("kind", ["seaweed", "moto"])
def test_objects_go_and_come_by_nixl(kind: str, make_rig: MakeRig, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(kind)
    rig = make_rig(server, **NIXL)
    assert rig.tier.statistics().info["engine"] == "nixl"
    before = {name: rig.value(f"nixl_{name}") for name in ("writes", "reads")}
    assert rig.store(BIG).ok
    assert rig.get(rig.name(BIG)) == BIG.block + BIG.payload
    assert rig.serves(BIG)
    assert rig.value("nixl_writes") == before["writes"] + 1 and rig.value("nixl_reads") == before["reads"] + 1
    assert rig.value("nixl_stuck_bytes") == 0 == rig.value("nixl_failures")
    assert rig.again(engine="boto3").serves(BIG), "they are the objects that everybody stores"


@needs_nixl
def test_what_is_cut_damaged_or_gone_is_noticed(make_rig: MakeRig, seaweed: Server) -> None:
    rig = make_rig(seaweed, **NIXL)
    whole = BIG.block + BIG.payload
    for spoil, reason in ((lambda: rig.delete(rig.name(BIG)), "missing"),
                          (lambda: rig.put(rig.name(BIG), whole[:-1] + bytes([whole[-1] ^ 1])), "corrupt"),
                          (lambda: rig.put(rig.name(BIG), whole[:-1000]), "corrupt")):  # fmt: skip
        assert rig.store(BIG).ok and rig.serves(BIG)
        spoil()
        assert rig.load(BIG).result.reason == reason
        rig.until(lambda: not rig.objects("chunks/"), "it to be removed")


@needs_nixl
def test_a_server_that_stands_still_costs_a_load_its_deadline_and_nothing_is_written_afterwards(
    make_rig: MakeRig, seaweed: Server
) -> None:
    rig = make_rig(seaweed, **NIXL, timeout_s=0.5)
    assert rig.store(BIG).ok
    job = rig.load_job(BIG, deadline_s=1.0)
    seaweed.stop_it()
    try:
        began = time.monotonic()
        rig.engine.begin([job])
        result = rig.results_of([job])[job.id]
        assert not result.ok and time.monotonic() - began < 20
        at = job.payload_offset
        rig.pool.memory[at : at + job.capacity] = b"\x11" * job.capacity  # the slot is another's now
        assert rig.value("nixl_given_up") == 1 and rig.value("nixl_stuck_bytes") > 0
    finally:
        seaweed.continue_it()
    rig.until(lambda: rig.serves(BIG), "it to be served again")
    rig.until(lambda: rig.serves(BIG) and rig.value("nixl_stuck_bytes") == 0, "the late answer")
    assert set(rig.pool.memory[at : at + job.capacity]) == {0x11}


# --- with an engine that does what a test likes ------------------------------------------------------------


class FakeAgent:
    """Transfers end when the test says so."""

    def __init__(self, *_: Any) -> None:
        self.state, self.released = "PROC", 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_: name

    def transfer(self, handle: object) -> str:
        return self.state

    check_xfer_state = transfer

    def release_xfer_handle(self, handle: object) -> None:
        self.released += 1


def engine(agent: type = FakeAgent) -> NixlObjects:
    api = SimpleNamespace(nixl_agent=agent, nixl_agent_config=lambda **_: None)
    return NixlObjects(s3_options("t", {"bucket": "bucket"}), api=api)


def test_transfers_that_never_end_are_given_up_and_take_a_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "STUCK_BYTES_MAX", 250)
    made = engine()
    for _ in range(3):
        assert made.get("name", 0, 100, time.monotonic() + 0.01) is None
    assert made.put("name", b"x" * 100, time.monotonic() + 60) is False, "not even tried"
    figures = made.figures()
    assert (figures["nixl_stuck_bytes"], figures["nixl_given_up"], figures["nixl_passed_over"]) == (300, 3, 1)
    made._agent.state = "DONE"
    assert made.put("name", b"x" * 100, time.monotonic() + 60) is True
    assert made.figures()["nixl_stuck_bytes"] == 0 and made._agent.released == 4


def test_a_put_whose_end_is_not_seen_is_neither_done_nor_not_done() -> None:
    assert engine().put("name", b"x", time.monotonic()) is None


def test_what_nixl_says_no_to_is_left_to_boto3(make_rig: MakeRig, seaweed: Server, monkeypatch: Any) -> None:
    class Broken(FakeAgent):
        def create_backend(self, *_: Any) -> None:
            raise RuntimeError("unsupported backend 'OBJ'")

    api = SimpleNamespace(nixl_agent=Broken, nixl_agent_config=lambda **_: None)
    monkeypatch.setattr(objects, "_api", lambda: api)
    rig = make_rig(seaweed, **NIXL)
    assert rig.tier.statistics().info["engine"] == "boto3"
    chunk = numbered(7)
    assert rig.store(chunk).ok and rig.serves(chunk)


def test_an_engine_that_brings_something_else_is_not_used(make_rig: MakeRig, seaweed: Server, monkeypatch: Any) -> None:
    class Liar(FakeAgent):
        def __init__(self, *_: Any) -> None:
            super().__init__()
            self.state = "DONE"

    monkeypatch.setattr(
        objects, "_api", lambda: SimpleNamespace(nixl_agent=Liar, nixl_agent_config=lambda **_: None)
    )
    assert make_rig(seaweed, **NIXL).tier.statistics().info["engine"] == "boto3"


def test_without_the_package_and_with_options_that_it_cannot_keep_the_start_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(objects, "MODULES", ("no_such_module",))
    with pytest.raises(ConfigError, match=r"forebay\[p2p\]"):
        NixlObjects(s3_options("t", {"bucket": "bucket"}))
    for option in ({"profile": "p"}, {"verify_tls": False}):
        with pytest.raises(ConfigError, match="AWS_PROFILE"):
            s3_options("t", {"bucket": "bucket", "engine": "nixl", **option})
